"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

#: As `cbmir.runtime.engine` has them, which is not imported here: `--help` must be quick.
ENGINES = ("auto", "onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "tensorrt")
MODES = ("auto", "latency", "throughput")

engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What runs the model: auto takes CUDA or the CPU for a file, and of a folder the fastest file that runs here; "
    "one that is named and is not here is an error.",
)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `cbmir train` that `cbmir benchmark` shares: encoder, schedule, proxies, precision, devices."""
    for option in reversed(_TRAINING):
        command = option(command)
    return command


_TRAINING = (
    click.option(
        "--encoder", default="densenet121", show_default=True,
        help="A torchvision classification model (densenet121, resnet18 …), or timm:NAME.",
    ),
    click.option(
        "--weights", default="none", show_default=True,
        help="Where the encoder starts: none (random), imagenet (downloaded by torchvision or timm), or a state dict "
        "file.",
    ),
    click.option("--epochs", default=50, show_default=True, help="At most so many; the best epoch by nDCG is kept."),
    click.option("--patience", default=10, show_default=True, help="Stop after so many epochs without a better nDCG."),
    click.option("--batch-size", default=48, show_default=True, help="Images a step, of all devices together."),
    click.option("--lr", default=1e-4, show_default=True, help="Learning rate of Adam."),
    click.option("--weight-decay", default=0.0, show_default=True),
    click.option("--sigma", default=0.7, show_default=True, help="Width of the Gaussian similarity."),
    click.option(
        "--proxies-per-class", default="2", show_default=True,
        help="A number, or auto: more for common findings, fewer for rare ones.",
    ),
    click.option(
        "--class-weights/--no-class-weights", default=None,
        help="Whether rare findings count as much as common ones.  [default: with loss proxy, as in the paper]",
    ),
    click.option(
        "--image-size", default=224, show_default=True, help="Crop in pixels; resized to 270/224 of it before."
    ),
    click.option(
        "--precision", type=click.Choice(["auto", "32", "bf16-mixed", "16-mixed"]), default="auto", show_default=True,
        help="auto: bf16 or fp16 on CUDA, 32 on a CPU.",
    ),
    click.option(
        "--devices", default="auto", show_default=True,
        help="How many GPUs, or CPU processes; in a benchmark auto is 1 for each cell.",
    ),
)  # fmt: skip
