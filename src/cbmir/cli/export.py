"""`cbmir export` writes runs, encoders and converted model files; `cbmir parity` compares the answers of two models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cbmir.cli.options import PATH, command, json_option, option, print_answer, tolerance_option
from cbmir.errors import require
from cbmir.preprocessing import INTENSITIES

_OF_ENCODER = ("weights", "image_size", "grey_range", "intensity")
#: Options that only matter for one kind of file, and the option that requests it.
_NEEDS = (
    dict.fromkeys(("target", "max_batch"), "--tensorrt")
    | dict.fromkeys(("calibrate", "calibration_images", "percentile"), "--int8 or --openvino int8")
    | dict.fromkeys(_OF_ENCODER, "--encoder")
)


@command(
    "cbmir export run -o model.onnx                          # float32, for any machine",
    "cbmir export run -o models/ --fp16                      # and models/model.fp16.onnx, for GPUs",
    "cbmir export run -o models/ --openvino bf16 --int8      # the fastest on recent CPUs, and int8",
    "cbmir export run -o models/ --fp16 --tensorrt --target sm86,sm89",
    "cbmir export run -o model.onnx --images nih.csv         # the run's own images have moved",
    "cbmir export starter -o models/ --images nih.csv --openvino bf16 --int8   # other files of a float32 file",
    "cbmir export --encoder xrv:densenet121 --weights densenet121-res224-all.pt --images nih.csv -o model.onnx",
)
@click.argument("model", metavar="[RUN|FILE]", type=PATH, required=False)
@option("-o", "--output", required=True, type=click.Path(),
        help="File to write (.onnx), or a folder for model.onnx; other files are written beside it.")  # fmt: skip
@option("--fp16", is_flag=True, help="Also NAME.fp16.onnx, its encoder in half precision: for GPUs.")
@option("--int8", is_flag=True, help="Also NAME.int8.onnx, for ONNX Runtime on a CPU.")
@option("--openvino", multiple=True, type=click.Choice(["bf16", "int8"]),
        help="Also NAME.openvino-bf16.xml or -int8.xml, for OpenVINO on a CPU. May be repeated.")  # fmt: skip
@option("--tensorrt", is_flag=True, help="Also a TensorRT plan for each --target; with --fp16, of the fp16 file.")
@option("--target", default="current", metavar="SM,…",
        help="GPUs of the plans by compute capability (sm86, sm89 …); current: the one of this machine.")  # fmt: skip
@option("--max-batch", default=32, type=click.IntRange(1), help="Largest batch of the plans.")
@option("--calibrate", type=PATH, metavar="MANIFEST",
        help="Images that set the ranges of int8.  [default: training images of the run, or --images]")  # fmt: skip
@option("--calibration-images", default=96, type=click.IntRange(1), help="Maximum number of images for calibration.")
@option("--calibration-percentile", "percentile", type=click.FloatRange(50, 100, min_open=True),
        help="Percentage of the values that the ranges cover.  [default: all]")  # fmt: skip
@option("--images", type=PATH, metavar="MANIFEST",
        help="Images for the comparison, if the run's own are gone, or with FILE or --encoder.")  # fmt: skip
@option("--encoder", help="Export this encoder with published --weights instead of a RUN. Nothing is trained: the "
        "model finds similar images and scores no findings.")  # fmt: skip
@option("--weights", default="none", show_default=False,
        help="Its weights: a file, or imagenet (downloaded by torchvision or timm).")  # fmt: skip
@option("--image-size", type=click.IntRange(32),
        help="Side of the square that the whole image becomes.  [default: that of the published weights]")  # fmt: skip
@option("--grey-range", default="own", metavar="own|signed|MEAN,STD",
        help="Input values for black and white: own, as the weights were published; signed, -1 and 1; or mean and "
        "standard deviation of grey in 0 to 1.")  # fmt: skip
@option("--intensity", type=click.Choice(INTENSITIES), default="header", help="How stored values become grey.")
@tolerance_option
@option("--accept-parity-loss", is_flag=True,
        help="Also write files that miss their limits, and record that in parity.json.")  # fmt: skip
@json_option
@click.pass_context
def export(
    ctx: click.Context, /, model: Path | None, output: str, tensorrt: bool, target: str, as_json: bool,
    encoder: str | None, weights: str, image_size: int | None, grey_range: str, intensity: str, **options: Any,
) -> None:  # fmt: skip
    """Export the best model of a finished RUN, or an --encoder, as one graph, from uint8 image to embedding and scores;
    or convert FILE, a float32 .onnx file or `starter`.

    Each file is compared with PyTorch (or FILE) on held-out images (parity.json beside it). It is not written if its
    neighbours or scores differ too much: fp16 and bf16 must keep 97% of the ten nearest, 95% in a gallery of the
    float32 file, and nDCG and AUC within 0.002; int8 must keep 90%, and 0.005. If bf16 or int8 miss this, the first
    2, 4, 8, 16 or 32 convolutions stay in float.
    """
    int8 = options["int8"] or "int8" in options["openvino"]
    wanted = {"--tensorrt": tensorrt, "--int8 or --openvino int8": int8, "--encoder": encoder}
    if (model is None) == (encoder is None):
        raise click.UsageError("Give a RUN or FILE, or an --encoder, and not both.")
    for name, need in _NEEDS.items():
        if not wanted[need] and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            (flag,) = next(option.opts for option in ctx.command.params if option.name == name)
            raise click.UsageError(f"{flag} is for {need}.")
    require("torch", "train")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "export")
    from cbmir.export import ExportOptions, export_encoder, export_file, export_run
    from cbmir.export.export import REPORT, read_report
    from cbmir.runtime.engines.registry import model_files
    from cbmir.runtime.models.catalog import find_model

    targets = tuple(dict.fromkeys(word.strip() for word in target.split(","))) if tensorrt else ()
    chosen = ExportOptions(targets=targets, **options)
    if encoder is not None:
        written = export_encoder(
            encoder, weights, output, chosen, image_size=image_size, grey_range=grey_range, intensity=intensity
        )
    else:
        assert model is not None
        source = find_model(model)
        if source.is_dir() and model_files(source):
            raise click.UsageError(f"{model}: expected a RUN or FILE, found a folder of model files; name one.")
        if source.suffix and not source.exists():
            raise click.UsageError(f"{model}: no such file.")
        written = (export_file if source.is_file() else export_run)(source, output, chosen)
    value = [{"file": path, **read_report(path.with_name(REPORT))[path.name]} for path in written]
    print_answer(as_json, value, "\n".join(map(str, written)))


@command(
    "cbmir parity run model.int8.onnx manifest.csv",
    "cbmir parity model.onnx model.openvino-bf16.xml manifest.csv --json",
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.argument("manifest", type=PATH)
@tolerance_option
@json_option
def parity(a: Path, b: Path, manifest: Path, tolerances: tuple[str, ...], as_json: bool) -> None:
    """Compare the answers of two models, each a RUN or an exported file, on the images of MANIFEST.

    Compares embeddings, scores, top 10 neighbours, nDCG and AUC of B with those of A, with 95% intervals over patients.
    For two files of one model the exit code is 1 if B misses the limits of its precision.
    """
    require("torch", "train")
    from cbmir.export.compare import compare_models

    found = compare_models(a, b, manifest, tolerances)
    print_answer(as_json, found.to_json() | {"failures": found.failures}, found.table())
    if found.failures:
        sys.exit(1)
