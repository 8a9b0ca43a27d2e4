"""Make the model that comes with cbmir from the folds of a benchmark.

    python benchmarks/imagenet_weights.py lite0.pt
    cbmir benchmark table nih.csv -o report --recipe fitted --methods fitted --folds 5 --seeds 1 \
        --tuned docs/benchmark/nih/tuned.json --encoder timm:tf_efficientnet_lite0 --weights lite0.pt --image-size 128
    python benchmarks/starter.py report -o starter

`nih.csv` is the table of all images. The final model is trained with seed 0, exported and compared with PyTorch, and
written into the package; `starter` keeps the run and parity.json. The loss of other precisions is measured on the run
of a fold, which has held-out images: `cbmir export report/cells/seed0-fold1/fitted/run -o files/ --fp16 --int8`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from cbmir.card import INTENDED_USE
from cbmir.export import export_run
from cbmir.files import replacing, write_json
from cbmir.runtime.models.catalog import model_file
from cbmir.training.comparison.final import train_final

WHAT = (
    "It is a small model to start with, trained on a small public set that was chosen so that findings are frequent. "
    "Its figures come from a cross-validation on that set, and say little about images of another hospital. Cite "
    "X. Wang et al., ChestX-ray8, CVPR 2017, for the images, and Y. Xing et al., Multimorbidity Content-Based Medical "
    "Image Retrieval Using Proxies, IEEE Access 2023, for the task."
)


@click.command()
@click.argument("report", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="For the run.")
@click.option("--method", default="fitted", show_default=True)
def main(report: Path, output: Path, method: str) -> None:
    """Train, export and install the starter."""
    run = train_final(report, output / "run", method, resume=True)
    card = run.read_card().with_(licence="Apache-2.0", intended_use=f"{INTENDED_USE} {WHAT}")
    write_json(run.card, card.to_json())
    export_run(run.path, output / "starter.onnx")
    with replacing(model_file("starter")) as temporary:
        shutil.copyfile(output / "starter.onnx", temporary)


if __name__ == "__main__":
    main()
