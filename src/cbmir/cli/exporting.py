"""`cbmir export`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    epilog="\b\nExamples:\n"
    "  cbmir export run -o model.onnx                     float32\n"
    "  cbmir export run -o models/ --fp16                 models/model.onnx and models/model.fp16.onnx\n"
    "  cbmir export run -o model.onnx --images nih.csv    the run's own images are elsewhere now"
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(),
    help="File to write (.onnx), or a folder for model.onnx.",
)  # fmt: skip
@click.option("--fp16", is_flag=True, help="Also NAME.fp16.onnx, its encoder in half precision: for GPUs.")
@click.option(
    "--images", type=click.Path(path_type=Path), metavar="MANIFEST",
    help="Compare with PyTorch on these images, where those of the run are gone.",
)  # fmt: skip
def export(run: Path, output: str, fp16: bool, images: Path | None) -> None:
    """Export the best model of a finished RUN as one ONNX graph, from uint8 image to scores.

    Each file is compared with PyTorch on real images (parity.json beside it) and is not written when it answers
    differently.
    """
    from cbmir.errors import require

    require("torch", "train")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "export")
    from cbmir.export import export_run

    for path in export_run(run, output, fp16=fp16, images=images):
        click.echo(path)
