"""`cbmir evaluate`: how good a run or an exported model is."""

from __future__ import annotations

from pathlib import Path

import click

from cbmir.cli.options import PATH, command, json_option, option, print_answer
from cbmir.errors import require


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
