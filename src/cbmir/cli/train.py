"""`cbmir train` trains a model on a manifest; `cbmir evaluate` measures one."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from cbmir.choices import TRAINING_LOSSES
from cbmir.cli.options import PATH, command, json_option, option, print_answer, recipe_option, training_options
from cbmir.errors import require
from cbmir.manifest import read_manifest

# Options that a student takes from its teacher.
_TEACHERS = ("loss", "sigma", "proxies_per_class", "negative_proxies", "class_weights", "linear_fit", "projection")


@command(
    "cbmir train nih.csv -o run --weights imagenet            # DenseNet121 at 224 pixels",
    "cbmir train nih.csv -o run --weights imagenet --resume   # continue after an interruption",
    "cbmir train nih.csv -o run --weights imagenet --recipe paper   # the paper's method",
    "cbmir train nih.csv -o fold1 --fold 1/5                  # cross-validation by patient",
    "cbmir train nih.csv -o light --distill run --encoder efficientnet_b0 --weights imagenet",
    "cbmir train phantoms/manifest.csv -o run --encoder resnet18 --image-size 64 --epochs 10",
)
@click.argument("manifest", type=PATH)
@option("-o", "--output", "run", required=True, type=PATH, help="RUN folder to create.")
@recipe_option("--loss", type=click.Choice(list(TRAINING_LOSSES)),
               help="proxy is the paper's loss (its method: --recipe paper), bce cross-entropy, ml-proxy-nca a "
               "baseline; the others are extensions.")  # fmt: skip
@recipe_option("--linear-fit/--no-linear-fit", help="At the end, replace the trained head by linear maps that are "
               "fitted from the features to embedding and scores.")  # fmt: skip
@option("--projection", default=256, help="Dimensions of the embedding of a linear fit.")
@option("--negative-proxies/--no-negative-proxies", default=True,
        help="Whether images without a finding are a class of their own.")  # fmt: skip
@training_options
@option("--grey-range", default="auto", metavar="own|signed|MEAN,STD", help="Input values for black and white: own, as "
        "the encoder's weights were published; signed, -1 and 1; or mean and standard deviation of grey in 0 to 1. "
        "auto is own for xrv:NAME and rad-dino, else signed.")  # fmt: skip
@option("--seed", default=0, help="Seed of the training run.")
@option("--fold", default="", metavar="I/N", help="Use fold I of N by patient instead of the manifest's splits.")
@option("--distill", "teacher", type=PATH, metavar="RUN", help="Train a light encoder that answers as the finished "
        "RUN does, in the same embedding space: it can query galleries that RUN's model has indexed.")  # fmt: skip
@option("--resume", is_flag=True, help="Continue the run in -o from its last complete epoch.")
@json_option
@click.pass_context
def train(
    context: click.Context, /, manifest: Path, run: Path, resume: bool, teacher: Path | None, as_json: bool,
    **options: object,
) -> None:  # fmt: skip
    """Train a model on the train split of MANIFEST; the val split chooses epoch, thresholds and calibration.

    Writes a RUN folder: card.json, checkpoints/, metrics.csv, curves.png, config.json.
    """
    given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    choice = "--distill" if teacher else f"--loss {options['loss']}{'' if 'loss' in given else ' of this recipe'}"
    idle = _TEACHERS if teacher else TRAINING_LOSSES[str(options["loss"])]
    for name in idle if teacher or options["linear_fit"] else (*idle, "projection"):
        if name in given:  # refused rather than ignored
            without = "--no-linear-fit" if name == "projection" and not teacher else choice
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with {without}.")
    require("lightning", "train")
    from cbmir.training.config import TrainConfig
    from cbmir.training.harness import first_process
    from cbmir.training.harness import train as run_training

    table = read_manifest(manifest)
    if teacher is not None:
        from cbmir.training.distillation import teacher_options

        taken = teacher_options(teacher, table.fingerprint)
        options |= {name: value for name, value in taken.items() if name not in given}
    config = TrainConfig(str(manifest.resolve()), table.fingerprint, table.labels.names, **options)  # type: ignore[arg-type]
    finished = run_training(config, run, resume=resume)
    if not first_process():
        return
    card = finished.read_card()
    value = {"run": finished.path, "fingerprint": card.fingerprint, "metrics": card.metrics}
    print_answer(as_json, value, str(finished.path))


@command(
    "cbmir evaluate run manifest.csv -k 10",
    "cbmir evaluate model.onnx manifest.csv -k 100 -o report/ --json",
    "cbmir evaluate light manifest.csv --gallery-model run    # a distilled model queries its teacher's gallery",
)
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@option("-k", default=10, help="Neighbours per query.")
@option("--queries", type=click.Choice(["test", "val"]), default="test",
        help="Split whose images are the queries; the train split is the gallery.")  # fmt: skip
@option("--gallery-model", type=PATH, metavar="MODEL", help="Another model (a RUN or an exported file) to "
        "embed the gallery: the teacher of a distilled MODEL.")  # fmt: skip
@option("-o", "--output", type=PATH, help="Folder for metrics.json, report.md and per_query.csv.")
@json_option
def evaluate(
    model: Path, manifest: Path, k: int, queries: str, gallery_model: Path | None, output: Path | None, as_json: bool
) -> None:
    """Measure a RUN or an exported MODEL on MANIFEST: AUC, nDCG, ACG and precision, and nDCG corrected for chance.

    Figures have 95% bootstrap intervals over patients and are shown beside rankings that ignore the query. Images of a
    query's own patient are left out. Also reports sensitivity and specificity at the model's thresholds, and how well
    its probabilities are calibrated.
    """
    require("torch", "train")
    from cbmir.training.evaluate import evaluate_model
    from cbmir.training.evaluation_report import text_report, write_report

    evaluation = evaluate_model(model, manifest, k=k, queries=queries, gallery_model=gallery_model)
    summary, title = evaluation.summary(), f"{model.name} on {manifest.name}"
    if gallery_model is not None:
        title += f", gallery by {gallery_model.name}"
    if output is not None:
        write_report(evaluation, summary, output, title)
    print_answer(as_json, summary, text_report(summary, title))
