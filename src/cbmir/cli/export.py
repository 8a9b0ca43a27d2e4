"""`cbmir export`: a finished run as model files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cbmir.cli.options import PATH, command, json_option, option, print_answer, tolerance_option
from cbmir.errors import require

#: Options that say how to make a file, and what asks for such a file.
_NEEDS = dict.fromkeys(("target", "max_batch"), "--tensorrt") | dict.fromkeys(
    ("calibrate", "calibration_images", "percentile"), "--int8 or --openvino int8"
)


@command(
    "cbmir export run -o model.onnx                          float32, for any machine",
    "cbmir export run -o models/ --fp16                      and models/model.fp16.onnx, for GPUs",
    "cbmir export run -o models/ --openvino bf16 --int8      the fastest on recent CPUs, and int8",
    "cbmir export run -o models/ --fp16 --tensorrt --target sm86,sm89",
    "cbmir export run -o model.onnx --images nih.csv         the run's own images are elsewhere now",
)
@click.argument("run", type=PATH)
@option("-o", "--output", required=True, type=click.Path(),
        help="File to write (.onnx), or a folder for model.onnx; other files stand beside it.")  # fmt: skip
@option("--fp16", is_flag=True, help="Also NAME.fp16.onnx, its encoder in half precision: for GPUs.")
@option("--int8", is_flag=True, help="Also NAME.int8.onnx, for ONNX Runtime on a CPU.")
@option("--openvino", multiple=True, type=click.Choice(["bf16", "int8"]),
        help="Also NAME.openvino-bf16.xml or -int8.xml, for OpenVINO on a CPU. May be repeated.")  # fmt: skip
@option("--tensorrt", is_flag=True, help="Also a TensorRT plan for each --target, of the fp16 file with --fp16.")
@option("--target", default="current", metavar="SM,…",
        help="GPUs of the plans by compute capability (sm86, sm89 …); current is the one that is here.")  # fmt: skip
@option("--max-batch", default=32, type=click.IntRange(1), help="Largest batch of the plans.")
@option("--calibrate", type=PATH, metavar="MANIFEST",
        help="Images that set the ranges of int8.  [default: the run's training images]")  # fmt: skip
@option("--calibration-images", default=96, type=click.IntRange(1), help="At most so many of them.")
@option("--calibration-percentile", "percentile", type=click.FloatRange(50, 100, min_open=True),
        help="Let the ranges hold so many percent of the values.  [default: all]")  # fmt: skip
@option("--images", type=PATH, metavar="MANIFEST",
        help="Compare with PyTorch on these images, where those of the run are gone.")  # fmt: skip
@tolerance_option
@option("--accept-parity-loss", is_flag=True, help="Write files beyond their limits too, and say so beside them.")
@json_option
@click.pass_context
def export(
    ctx: click.Context, /, run: Path, output: str, tensorrt: bool, target: str, as_json: bool, **options: Any
) -> None:
    """Export the best model of a finished RUN as one graph, from uint8 image to scores.

    Each file is compared with PyTorch on held-out images (parity.json beside it) and is not written when it finds other
    neighbours or tells findings apart less well: fp16 and bf16 must keep 97% of the ten nearest, 95% in a gallery of
    the float32 file, and nDCG and AUC within 0.002; int8 90% and 0.005.
    """
    int8 = options["int8"] or "int8" in options["openvino"]
    wanted = {"--tensorrt": tensorrt, "--int8 or --openvino int8": int8}
    for name, need in _NEEDS.items():
        if not wanted[need] and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            (flag,) = next(option.opts for option in ctx.command.params if option.name == name)
            raise click.UsageError(f"{flag} is for {need}.")
    require("torch", "train")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "export")
    from cbmir.export import ExportOptions, export_run
    from cbmir.export.export import REPORT, read_report

    targets = tuple(dict.fromkeys(word.strip() for word in target.split(","))) if tensorrt else ()
    written = export_run(run, output, ExportOptions(targets=targets, **options))
    value = [{"file": path, **read_report(path.with_name(REPORT))[path.name]} for path in written]
    print_answer(as_json, value, "\n".join(map(str, written)))
