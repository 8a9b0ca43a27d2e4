"""`cbmir index` and `cbmir query`: build a gallery, and find an image's findings and neighbours."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import NOT_A_DEVICE
from cbmir.cli.options import engine_option
from cbmir.errors import ImageError

if TYPE_CHECKING:
    from cbmir.runtime.result import Analysis

log = logging.getLogger("cbmir")


@click.group(
    epilog="\b\nExample:\n"
    "  cbmir index build model.onnx manifest.csv -o gallery\n"
    "  cbmir index info gallery"
)  # fmt: skip
def index() -> None:
    """Build and inspect a gallery: the labelled images among which neighbours are found."""


@index.command(
    epilog="\b\nExample:\n"
    "  cbmir index build model.onnx manifest.csv -o gallery\n"
    "  cbmir index build model.onnx manifest.csv -o gallery --split train --split val"
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The gallery's folder.")
@click.option(
    "--split",
    "splits",
    type=click.Choice(["train", "val", "test", "all"]),
    multiple=True,
    default=["train"],
    show_default=True,
    help="Which of the manifest's images go in; may be repeated.",
)
@click.option("--workers", type=click.IntRange(0), help="Processes that decode images.  [default: one a processor]")
@click.option(
    "--reduced-jpeg2000", is_flag=True,
    help="Decode large JPEG 2000 images at a lower resolution: faster, within one grey level but for a few pixels.",
)  # fmt: skip
@engine_option
@click.pass_context
def build(
    ctx: click.Context,
    model: Path,
    manifest: Path,
    output: Path,
    splits: tuple[str, ...],
    workers: int | None,
    reduced_jpeg2000: bool,
    engine: str,
) -> None:
    """Embed the images of MANIFEST with MODEL into a gallery; one that is there already is replaced at the end.

    Images that cannot be read are left out and listed in the gallery's unreadable.csv; the exit code is then 2.
    A gallery is patient data: keep it as safe as the images.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.indexing import build_gallery
    from cbmir.runtime.opening import open_engine

    table = read_manifest(manifest)
    with open_engine(model, engine=engine) as opened:
        report = build_gallery(opened, table, output, splits=splits, workers=workers, reduced_jpeg2000=reduced_jpeg2000)
    click.echo(f"{output}: {report.images} images")
    if report.unreadable:
        log.error(
            "%d images could not be read and were left out: see %s/unreadable.csv", len(report.unreadable), output
        )
        ctx.exit(2)


@index.command(epilog="\b\nExample:\n  cbmir index info gallery --json")
@click.argument("gallery", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(gallery: Path, as_json: bool) -> None:
    """Say what a gallery holds, and of which model it is."""
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        facts = opened.info()
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    for key, value in facts.items():
        if isinstance(value, dict):
            click.echo(f"{key}:")
            for name, count in value.items():
                click.echo(f"  {name or '(none)':<26} {count:>8}")
        else:
            click.echo(f"{key + ':':<14} {value}")


@click.command(
    epilog="\b\nExample:\n"
    "  cbmir query model.onnx gallery chest.png -k 5\n"
    "  cbmir query model.onnx gallery a.dcm b.dcm --json > answers.json"
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("gallery", type=click.Path(path_type=Path))
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@click.option("-k", type=click.IntRange(0), default=10, show_default=True, help="How many neighbours.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an element an image.")
@click.option("--patient-id", help="The patient of these images, as the gallery names patients.")
@click.option(
    "--exclude-same-patient/--include-same-patient",
    default=True,
    show_default=True,
    help="Leave the same patient's images out of the neighbours.",
)
@engine_option
@click.pass_context
def query(
    ctx: click.Context,
    model: Path,
    gallery: Path,
    images: tuple[str, ...],
    k: int,
    as_json: bool,
    patient_id: str | None,
    exclude_same_patient: bool,
    engine: str,
) -> None:
    """Show each IMAGE's findings by MODEL, and its nearest neighbours in GALLERY.

    An image that cannot be read gets an error line, the others are answered all the same; the exit code is then 2.

    Research use only. Not a medical device, not for diagnosis.
    """
    from cbmir.runtime.finder import Finder

    answers: list[dict[str, Any]] = []
    failed = False
    with Finder.open(model, gallery, engine=engine) as finder:
        for image in images:
            try:
                analysis = finder.analyze(image, k, patient_id=patient_id, exclude_same_patient=exclude_same_patient)
            except ImageError as error:
                log.error("Error: %s", _printable(str(error)))
                failed = True
                answers.append({"image": image, "error": {"type": type(error).__name__, "message": str(error)}})
                continue
            if as_json:
                answers.append(analysis.to_json())
            else:
                click.echo(_text(analysis))
    if as_json:
        click.echo(json.dumps(answers, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(NOT_A_DEVICE)
    if failed:
        ctx.exit(2)


def _text(analysis: Analysis) -> str:
    lines = [analysis.image]
    lines += [f"  Warning: {warning}" for warning in analysis.warnings]
    lines += ["", f"  {'finding':<28} {'probability':>11} {'score':>7} {'threshold':>9}"]
    for f in sorted(analysis.findings, key=lambda f: (-(f.score if f.probability is None else f.probability), f.label)):
        verdict = {True: "  predicted", False: "", None: "  no threshold"}[f.predicted]
        lines.append(f"  {f.label:<28} {_number(f.probability):>11} {f.score:>7.3f} {_number(f.threshold):>9}{verdict}")
    lines += ["", f"  {'neighbour':<28} {'distance':>11}   labels (* shared), report"]
    for n in analysis.neighbours:
        labels = ", ".join(f"{name}*" if name in n.shared else name for name in n.labels) or "-"
        lines.append(f"  {n.id:<28} {n.distance:>11.3f}   {labels}")
        if n.report.strip():
            lines.append(f"  {'':<40}   {n.report.strip().splitlines()[0]}")
    if not analysis.neighbours:
        lines.append("  none")
    return "\n".join(map(_printable, [*lines, ""]))


def _printable(line: str) -> str:
    """One line without what a terminal would obey: names and reports come from elsewhere."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
