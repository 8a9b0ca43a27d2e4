"""`cbmir query`: an image's findings, and its nearest neighbours in a gallery."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import NOT_A_DEVICE
from cbmir.choices import RANKS, Rank
from cbmir.cli.options import PATH, command, finder_options, json_option, log, option, print_json
from cbmir.errors import ImageError

if TYPE_CHECKING:
    from cbmir.runtime.results import Analysis


def _parse_region(
    ctx: click.Context, option: click.Parameter, text: str | None
) -> tuple[float, float, float, float] | None:
    if text is None:
        return None
    from cbmir.runtime.evidence import parse_region

    return parse_region(text)


def _parse_weights(ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    try:
        return {name: float(weight) for name, _, weight in (text.rpartition("=") for text in texts)}
    except ValueError:
        raise click.BadParameter(f"expected a finding and a weight such as Effusion=0.5; found {texts}") from None


@command(
    "cbmir query model.onnx gallery chest.png -k 5",
    "cbmir query model.onnx gallery a.dcm b.dcm --json > answers.json",
    "cbmir query model.onnx gallery chest.png --region 0.1,0.5,0.45,0.9",
    "cbmir query model.onnx gallery chest.png --unlike image_07 --towards Effusion=0.5",
    "cbmir query model.onnx gallery chest.png --where 'Effusion and not Pneumothorax' --view PA --since 2020-01-01",
)
@click.argument("model", type=PATH)
@click.argument("gallery", type=click.Path())
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@option("-k", type=click.IntRange(0), default=10, help="How many neighbours.")
@json_option
@option("--patient-id", help="The patient of these images, as the gallery names patients.")
@option("--exclude-same-patient/--include-same-patient", default=True,
        help="Leave the same patient's images out of the neighbours.")  # fmt: skip
@option("--where", default="", metavar="LABELS",
        help="Only neighbours with these findings: names, and, or, not, parentheses; a name with blanks in quotes. A "
        "finding that is uncertain counts as there; 'not' takes only those known to be without it.")  # fmt: skip
@option("--view", type=click.Choice(["PA", "AP", "LATERAL"], case_sensitive=False),
        help="Only neighbours of this view.")  # fmt: skip
@option("--since", default="", metavar="YYYY-MM-DD", help="Only neighbours of this day or later.")
@option("--until", default="", metavar="YYYY-MM-DD", help="Only neighbours of this day or earlier.")
@option("--exact", is_flag=True, help="Compare every image of the gallery, rather than ask its index.")
@option("--rank", type=click.Choice(RANKS), default="nearness",
        help="The order of the neighbours: nearness, what looks alike first; findings, another question: whose known "
        "labels agree most with this image's probabilities. It compares every image.")  # fmt: skip
@option("--region", callback=_parse_region, metavar="X0,Y0,X1,Y1",
        help="Search by this part of the image alone: fractions of its width and height, from its upper left "
        "corner.")  # fmt: skip
@option("--alike", multiple=True, metavar="ID", help="An image of the gallery that is like this one: search nearer to "
        "it; may be repeated.")  # fmt: skip
@option("--unlike", multiple=True, metavar="ID", help="One that is not: search farther from it; may be repeated.")
@option("--towards", multiple=True, callback=_parse_weights, metavar="FINDING=WEIGHT",
        help="Search nearer to a finding, by a weight up to 1, or down to -1 away from it; may be "
        "repeated.")  # fmt: skip
@finder_options
def query(
    model: Path, gallery: str, images: tuple[str, ...], k: int, as_json: bool, patient_id: str | None,
    exclude_same_patient: bool, where: str, view: str | None, since: str, until: str, exact: bool, rank: Rank,
    region: tuple[float, float, float, float] | None, alike: tuple[str, ...], unlike: tuple[str, ...],
    towards: dict[str, float], **opening: Any,
) -> None:  # fmt: skip
    """Show each IMAGE's findings by MODEL, and its neighbours in GALLERY.

    Neighbours may be narrowed down; as many as -k asks for come back wherever the gallery has them. An image that
    cannot be read gets an error line, the others are answered all the same; the exit code is then 2.

    Research use only. Not a medical device, not for diagnosis.
    """
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.gallery.filters import Filter

    answers: list[dict[str, Any]] = []
    failed = without = False
    wanted = Filter(where=where, view=view or "", since=since, until=until)
    with Finder.open(model, gallery, **opening) as finder:
        for image in images:
            try:
                analysis = finder.analyze(
                    image, k, patient_id=patient_id, exclude_same_patient=exclude_same_patient, filter=wanted,
                    exact=exact or None, rank=rank, region=region,
                )  # fmt: skip
                if alike or unlike or towards:
                    analysis = finder.refine(
                        analysis, alike=alike, unlike=unlike, findings=towards, k=k, filter=wanted,
                        exclude_same_patient=exclude_same_patient,
                    )  # fmt: skip
            except ImageError as error:
                log.error("Error: %s", _printable(str(error)))
                failed = True
                answers.append({"image": image, "error": {"type": type(error).__name__, "message": str(error)}})
                continue
            without = without or not analysis.neighbours
            if as_json:
                answers.append(analysis.to_json())
            else:
                click.echo(_text(analysis))
        if without and (since or until) and finder.gallery and not any(e.date for e in finder.gallery.every_entry()):
            log.warning("No image of the gallery has a date, so --since and --until leave none.")
    if as_json:
        print_json(answers)
    else:
        click.echo(NOT_A_DEVICE)
    if failed:
        sys.exit(2)


_ORDERS = {"nearness": "nearest", "findings": "greatest expected agreement with these findings"}


def _text(analysis: Analysis) -> str:
    from cbmir.runtime.results import most_probable_first

    lines = [analysis.image]
    if analysis.known:
        lines.append(f"  In the gallery as {', '.join(analysis.known)}")
    lines += [f"  Warning: {warning}" for warning in analysis.warnings]
    if analysis.findings:
        header = f"{'finding':<28} {'probability':>11} {'score':>7} {'threshold':>9}"
        lines += ["", f"  {header}  ({analysis.operating_point})"]
    for f in most_probable_first(analysis.findings):
        verdict = {True: "  predicted", False: "", None: "  no threshold"}[f.predicted]
        lines.append(f"  {f.label:<28} {_number(f.probability):>11} {f.score:>7.3f} {_number(f.threshold):>9}{verdict}")
    by = "" if analysis.region is None else f" to the region {_fractions(analysis.region)}"
    refined = "" if analysis.refinement is None else ", refined"
    lines += ["", f"  Neighbours, {_ORDERS[analysis.rank]}{by} first{refined}"]
    lines += [f"  {'neighbour':<28} {'distance':>11}   labels (* shared), report"]
    for n in analysis.neighbours:
        labels = ", ".join(f"{name}*" if name in n.shared else name for name in n.labels) or "-"
        lines.append(f"  {n.id:<28} {n.distance:>11.3f}   {labels}")
        if n.report.strip():
            lines.append(_cut(f"  {'':<40}   {n.report.strip().splitlines()[0]}"))
    if not analysis.neighbours:
        lines.append("  none")
    lines += _agreement(analysis)
    if analysis.novelty is not None:
        lines += ["", f"  Distance to the gallery: {analysis.novelty.distance:.3f}, more than that of "
                      f"{analysis.novelty.percentile:.1f}% of its own images"]  # fmt: skip
    return "\n".join(map(_printable, [*lines, ""]))


def _agreement(analysis: Analysis) -> list[str]:
    """A line for each label that some neighbour has, the most agreed on first."""
    seen = [of for of in analysis.agreement if of.positive + of.uncertain]
    header = (
        f"  {'label of neighbours':<28} {'share':>11} {'gallery':>8} {'yes':>7} {'no':>5} {'uncertain':>10} "
        f"{'unknown':>8}"
    )
    lines = ["", header] if seen else []
    for of in sorted(seen, key=lambda of: (-(of.share or 0), of.label)):
        counts = f"{of.positive:>7} {of.negative:>5} {of.uncertain:>10} {of.unknown:>8}"
        above = "  above chance" if of.above_chance else ""
        lines.append(f"  {of.label:<28} {_number(of.share):>11} {_number(of.gallery):>8} {counts}{above}")
    return lines


def _printable(line: str) -> str:
    """One line without what a terminal would obey: names and reports come from elsewhere."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)


def _cut(line: str) -> str:
    """A line that may be cut off where a terminal ends: nothing of the answer itself. Whole for another program."""
    columns = shutil.get_terminal_size().columns
    return line if not sys.stdout.isatty() or len(line) <= columns else f"{line[: columns - 1]}…"


def _fractions(region: tuple[float, ...]) -> str:
    return ",".join(f"{value:.2f}" for value in region)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
