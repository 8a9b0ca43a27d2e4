"""`cbmir evaluate`: how good a run or an exported model is."""

from __future__ import annotations

from pathlib import Path

import click

from cbmir.cli.options import PATH, json_option, print_json


@click.command(
    epilog="\b\nExamples:\n"
    "  cbmir evaluate run manifest.csv -k 10\n"
    "  cbmir evaluate model.onnx manifest.csv -k 100 -o report/ --json\n"
    "  cbmir evaluate light manifest.csv --gallery-model run    a distilled model queries its teacher's gallery"
)
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@click.option("-k", default=10, show_default=True, help="Neighbours per query.")
@click.option(
    "--queries", type=click.Choice(["test", "val"]), default="test", show_default=True,
    help="Split that asks; the train split is the gallery.",
)  # fmt: skip
@click.option(
    "--gallery-model", type=PATH, metavar="MODEL",
    help="What embeds the gallery instead: the teacher of a distilled MODEL, a RUN or an exported file.",
)  # fmt: skip
@click.option("-o", "--output", type=PATH, help="Folder for metrics.json, report.md and per_query.csv.")
@json_option
def evaluate(
    model: Path, manifest: Path, k: int, queries: str, gallery_model: Path | None, output: Path | None, as_json: bool
) -> None:
    """Measure a RUN or an exported MODEL on MANIFEST: AUC, nDCG, ACG and precision.

    With 95% bootstrap intervals over patients, and a random ranking beside them. A query's own patient never counts.
    """
    from cbmir.errors import require

    require("torch", "train")
    from cbmir.training.evaluate import evaluate_model, text_report, write_report

    evaluation = evaluate_model(model, manifest, k=k, queries=queries, gallery_model=gallery_model)
    summary, title = evaluation.summary(), f"{model.name} on {manifest.name}"
    if gallery_model is not None:
        title += f", gallery by {gallery_model.name}"
    if output is not None:
        write_report(evaluation, summary, output, title)
    if as_json:
        print_json(summary)
    else:
        click.echo(text_report(summary, title))
