"""`cbmir query`: show an image's findings, and its nearest neighbours in a gallery."""

from __future__ import annotations

import re
import shutil
import sys
from calendar import monthrange
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import NOT_A_DEVICE
from cbmir.choices import RANKS, Rank
from cbmir.cli.options import (
    PATH,
    command,
    finder_options,
    gallery_argument,
    json_option,
    log,
    model_argument,
    option,
    print_json,
)
from cbmir.errors import GalleryError, ImageError
from cbmir.files import replacing
from cbmir.labels import spelled
from cbmir.manifest import Row

if TYPE_CHECKING:
    from cbmir.demo.uploads import Upload
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.gallery.filters import Filter
    from cbmir.runtime.gallery.protocol import SearchableGallery
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


def _parse_day(ctx: click.Context, option: click.Parameter, text: str) -> str:
    """Parse a day, month or year: --since takes the first day of it, --until the last."""
    if not text:
        return text
    from cbmir.runtime.gallery.filters import parse_day

    given = text
    is_first = option.name == "since"
    if re.fullmatch(r"\d{4}", text):
        text += "-01" if is_first else "-12"
    if re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text) and text >= "0001":
        text += f"-{1 if is_first else monthrange(*map(int, text.split('-')))[1]:02}"
    try:
        parse_day(text)
    except GalleryError:
        raise click.BadParameter(f"expected YYYY, YYYY-MM or YYYY-MM-DD, found {given!r}") from None
    return text


@command(
    "cbmir query starter gallery chest.png                   # with the model that comes with cbmir",
    "cbmir query model.onnx gallery chest.png -k 5",
    "cbmir query model.onnx gallery chest.png --report chest.html --evidence pictures/",
    "cbmir query model.onnx gallery a.dcm b.dcm --json > answers.json",
    "cbmir query model.onnx gallery chest.png --region 0.1,0.5,0.45,0.9",
    "cbmir query model.onnx gallery chest.png --unlike image_07 --towards Effusion=0.5",
    "cbmir query model.onnx gallery chest.png --where 'Effusion and not Pneumothorax' --view PA --since 2020-01-01",
)
@model_argument
@gallery_argument
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@option("-k", type=click.IntRange(0), default=10, help="How many neighbours to show.")
@json_option
@option("--report", type=PATH, metavar="FILE.html", help="Also write a page about one IMAGE, to keep or "
        "print: the image, its evidence, findings and neighbours. It names no file and no patient.")  # fmt: skip
@option("--evidence", type=PATH, metavar="DIR", help="Also draw the evidence as PNG files: for each predicted finding "
        "(or else the most probable one), and for each neighbour, on both images side by side.")  # fmt: skip
@option("--patient-id", help="The patient's id of these images, as in the gallery.")
@option("--exclude-same-patient/--include-same-patient", default=True,
        help="Whether to leave out the same patient's images.")  # fmt: skip
@option("--where", default="", metavar="LABELS",
        help="Only neighbours with these findings: names, and, or, not, parentheses; quote names with spaces. "
        "An uncertain finding counts as present; 'not' takes only images known to be without it.")  # fmt: skip
@option("--view", type=click.Choice(["PA", "AP", "LATERAL"], case_sensitive=False),
        help="Only neighbours of this view.")  # fmt: skip
@option("--source", default="", help="Only neighbours of this hospital or data set, as the manifest names it.")
@option("--since", default="", callback=_parse_day, metavar="YYYY[-MM[-DD]]",
        help="Only neighbours from this date or later.")  # fmt: skip
@option("--until", default="", callback=_parse_day, metavar="YYYY[-MM[-DD]]",
        help="Only neighbours from this date or earlier.")  # fmt: skip
@option("--exact", is_flag=True, help="Compare every image of the gallery instead of using its index.")
@option("--rank", type=click.Choice(RANKS), default="nearness",
        help="The order of the neighbours. nearness: the most similar images first. findings: first those whose known "
        "labels agree most with this image's probabilities; this compares every image.")  # fmt: skip
@option("--region", callback=_parse_region, metavar="X0,Y0,X1,Y1",
        help="Search by only this part of the image: fractions of its width and height, from its upper left "
        "corner.")  # fmt: skip
@option("--alike", multiple=True, metavar="ID", help="Search nearer to this gallery image. May be "
        "repeated.")  # fmt: skip
@option("--unlike", multiple=True, metavar="ID", help="Search away from this gallery image. May be "
        "repeated.")  # fmt: skip
@option("--towards", multiple=True, callback=_parse_weights, metavar="FINDING=WEIGHT",
        help="Search nearer to a finding by a weight of up to 1, or away from it down to -1. May be "
        "repeated.")  # fmt: skip
@finder_options
def query(
    model: Path, gallery: str, images: tuple[str, ...], k: int, as_json: bool, report: Path | None,
    evidence: Path | None, patient_id: str | None, exclude_same_patient: bool, where: str, view: str | None,
    source: str, since: str, until: str, exact: bool, rank: Rank, region: tuple[float, float, float, float] | None,
    alike: tuple[str, ...], unlike: tuple[str, ...], towards: dict[str, float], **opening: Any,
) -> None:  # fmt: skip
    """Show each IMAGE's findings by MODEL, and its neighbours in GALLERY.

    Filters narrow the neighbours down; -k of them are shown if the gallery has as many. An image that cannot be
    read gets an error line and the others are still answered; the exit code is then 2.

    Research use only. Not a medical device, not for diagnosis.
    """
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.gallery.entry import entry_ids
    from cbmir.runtime.gallery.filters import Filter

    if report is not None and len(images) > 1:
        raise click.UsageError(f"--report takes one IMAGE, found {len(images)}; run the command once per image.")
    refining = bool(alike or unlike or towards)
    if refining and rank != "nearness":
        raise click.UsageError(f"--alike, --unlike and --towards rank by nearness, found --rank {rank}; leave one out.")
    # Name each image by its file, with as many parent folders as make it unique.
    files = {one: Path(one).resolve() for one in images} if evidence else {}
    distinct = list(dict.fromkeys(files.values()))
    ids = dict(zip(distinct, entry_ids([Row(one, "", ()) for one in distinct]), strict=True))
    answers: list[dict[str, Any]] = []
    failed = False
    wanted = Filter(where=where, view=view or "", source=source, since=since, until=until)
    without: Analysis | None = None
    with Finder.open(model, gallery, **opening) as finder:
        for image in images:
            try:
                radiograph = finder.read(image)
                analysis = finder.analyze(
                    radiograph, k, patient_id=patient_id, exclude_same_patient=exclude_same_patient, filter=wanted,
                    exact=exact or None, rank=rank, region=region,
                )  # fmt: skip
                if refining:
                    analysis = finder.refine(
                        analysis, alike=alike, unlike=unlike, findings=towards, k=k, filter=wanted,
                        exclude_same_patient=exclude_same_patient, exact=exact or None,
                    )  # fmt: skip
            except ImageError as error:
                log.error("Error: %s", _printable(str(error)))
                failed = True
                answers.append({"image": image, "error": {"type": type(error).__name__, "message": str(error)}})
                continue
            if not analysis.neighbours and k:
                without = analysis
            if as_json:
                answers.append(analysis.to_json())
            else:
                click.echo(_text(analysis))
            if report is not None or evidence is not None:
                from cbmir.demo.uploads import Upload

                upload = Upload.of(radiograph, finder.card.preprocess)
                if report is not None:
                    _write_report(report, finder, upload, analysis, wanted)
                if evidence is not None:
                    _draw(evidence / ids[files[image]], finder, upload, analysis)
        if without is not None and finder.gallery is not None:
            patients = without.patients if exclude_same_patient else frozenset()
            for line in _why_none(finder.gallery, wanted, patients):
                log.warning("%s", line)
    if as_json:
        print_json(answers)
    else:
        click.echo(NOT_A_DEVICE)
    if failed:
        sys.exit(2)


def _why_none(gallery: SearchableGallery, wanted: Filter, patients: frozenset[str]) -> Iterator[str]:
    """Yield lines that say how many images match each filter alone, and the range of dates in the gallery."""
    from cbmir.runtime.gallery.filters import TEXTS, Filter

    left = {name: gallery.count(Filter(**{name: text})) for name in TEXTS if (text := getattr(wanted, name))}
    yield f"No neighbours: the gallery has {_images(len(gallery))}{'; each filter by itself leaves' if left else ''}"
    for name, count in left.items():
        yield f"  --{name} {getattr(wanted, name)}: {_images(count)}"
    if wanted.since or wanted.until:
        dates = [entry.date for entry in gallery.every_entry()]
        if days := set(dates) - {""}:
            without = f"; {_images(count)} without a date" if (count := dates.count("")) else ""
            yield f"The gallery's dates go from {min(days)} to {max(days)}{without}."
        else:
            yield "No image of the gallery has a date."
    if patients:
        yield "The same patient's images were left out too; --include-same-patient keeps them."


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


def _write_report(file: Path, finder: Finder, upload: Upload, analysis: Analysis, wanted: Filter) -> None:
    from cbmir.demo.report import report_html
    from cbmir.runtime.gallery.filters import TEXTS

    asked = [f"{name} {text}" for name in TEXTS if (text := getattr(wanted, name))]
    asked += [] if analysis.region is None else [f"by the region {_fractions(analysis.region)}"]
    asked += [] if analysis.refinement is None else ["refined"]
    assert finder.gallery is not None
    html = report_html(finder.card, finder.gallery, upload, analysis, "; ".join(asked) or "the whole gallery")
    with replacing(file, private=True) as part:
        part.write_text(html, encoding="utf-8")
    log.info("%s: the report", file)


def _draw(stem: Path, finder: Finder, upload: Upload, analysis: Analysis) -> None:
    """Write evidence maps to `stem`.FINDING.png and `stem`.neighbour-1.png …, readable by their owner only."""
    import numpy as np
    from PIL import Image

    from cbmir.demo.uploads import picture_of
    from cbmir.runtime.evidence import overlay
    from cbmir.runtime.results import most_probable_first

    def drawn(picture: Any, evidence: Any) -> Image.Image:
        return Image.fromarray(overlay(picture, evidence, finder.card.preprocess, 0.6))

    stem.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    findings = most_probable_first(analysis.findings)
    pictures = {
        re.sub(r"[^\w-]+", "_", one.label): drawn(upload.picture, analysis.evidence_for_finding(one.label))
        for one in [finding for finding in findings if finding.predicted] or findings[:1]
    }
    for rank, neighbour in enumerate(analysis.neighbours, 1):
        left = drawn(upload.picture, analysis.evidence_for_neighbour(neighbour.id))
        try:
            other = finder.read(neighbour.image)
        except ImageError as error:
            log.warning("Neighbour %d is not drawn: %s", rank, _printable(str(error)))
            continue
        right = drawn(picture_of(other.pixels), finder.evidence_towards(other, analysis.embedding))
        right = right.resize((round(right.width * left.height / right.height), left.height))
        pictures[f"neighbour-{rank}"] = Image.fromarray(np.hstack([np.asarray(left), np.asarray(right)]))
    for name, picture in pictures.items():
        with replacing(stem.with_name(f"{stem.name}.{name}.png"), private=True) as part:
            picture.save(part, "PNG")
    log.info("%s.*.png: %d pictures", stem, len(pictures))


_ORDERS = {"nearness": "nearest", "findings": "greatest expected agreement with these findings"}


def _text(analysis: Analysis) -> str:
    from cbmir.runtime.results import most_probable_first

    lines = [_printable(analysis.image)]
    if analysis.known:
        lines += _wrapped(f"  In the gallery as {', '.join(analysis.known)}", 4)
    for warning in analysis.warnings:
        lines += _wrapped(f"  Warning: {warning}", 4)
    labels = [*(of.label for of in analysis.findings), *(of.label for of in analysis.agreement)]
    wide = max([20, *map(len, labels)])
    if analysis.findings:
        bar = f" {'':<{_BAR}}" if sys.stdout.isatty() else ""
        header = f"{'finding':<{wide}} {'probability':>11}{bar} {'score':>7} {'threshold':>9}"
        lines += ["", f"  {header}  ({analysis.operating_point})"]
    for f in most_probable_first(analysis.findings):
        verdict = {True: "  predicted", False: "", None: "  no threshold"}[f.predicted]
        number = f"{_number(f.probability):>11}{_bar(f.probability)}"
        lines.append(f"  {spelled(f.label):<{wide}} {number} {f.score:>7.3f} {_number(f.threshold):>9}{verdict}")
    lines += ["", *_neighbours(analysis), *_agreement(analysis, wide)]
    if analysis.novelty is not None:
        lines += ["", *_wrapped(f"  Distance to the gallery: {analysis.novelty.distance:.3f}, more than that of "
                                f"{analysis.novelty.percentile:.1f}% of its own images", 4)]  # fmt: skip
    return "\n".join([*map(_printable, lines), ""])


def _neighbours(analysis: Analysis) -> Iterator[str]:
    by = "" if analysis.region is None else f" to the region {_fractions(analysis.region)}"
    refined = "" if analysis.refinement is None else ", refined"
    yield f"  Neighbours, {_ORDERS[analysis.rank]}{by} first{refined}"
    found = analysis.neighbours
    wide = max([20, *(len(_printable(n.id)) for n in found)])
    columns = [[f"  {'neighbour':<{wide}} {'distance':>8}",
                *(f"  {_printable(n.id):<{wide}} {n.distance:>8.3f}" for n in found)]]  # fmt: skip
    # Columns that no neighbour has a value for are left out. `place` is the place that matches the region.
    texts = [(n.view, _printable(n.source), n.date, _fractions(n.place or ())) for n in found]
    for column in zip(("view", "source", "date", "place"), *texts, strict=True):
        columns += [[f"  {text:<{max(map(len, column))}}" for text in column]] if any(column[1:]) else []
    header, *starts = map("".join, zip(*columns, strict=True))
    yield f"{header}   labels (* shared), report"
    for n, start in zip(found, starts, strict=True):
        labels = ", ".join(f"{spelled(name)}*" if name in n.shared else spelled(name) for name in n.labels) or "-"
        yield from _wrapped(f"{start}   {labels}", len(start) + 3)
        if n.report.strip():
            yield _cut(n.report.strip().splitlines()[0], len(start) + 3)
    if not found:
        yield "  none"


def _agreement(analysis: Analysis, wide: int) -> list[str]:
    """Return one line per label of the neighbours, highest agreement first."""
    seen = [of for of in analysis.agreement if of.positive + of.uncertain]
    header = (
        f"  {'label of neighbours':<{wide}} {'share':>7} {'gallery':>7} {'yes':>4} {'no':>4} {'uncertain':>9} "
        f"{'unknown':>7}"
    )
    lines = ["", header] if seen else []
    for of in sorted(seen, key=lambda of: (-(of.share or 0), of.label)):
        counts = f"{of.positive:>4} {of.negative:>4} {of.uncertain:>9} {of.unknown:>7}"
        above = "  above chance" if of.above_chance else ""
        lines.append(f"  {spelled(of.label):<{wide}} {_number(of.share):>7} {_number(of.gallery):>7} {counts}{above}")
    return lines


_BAR = 10  # characters


def _bar(share: float | None) -> str:
    """Draw a probability as a bar; empty if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return ""
    full, empty = ("█", "·") if (sys.stdout.encoding or "").lower().startswith("utf") else ("#", ".")
    count = round(_BAR * (share or 0))
    return f" {full * count}{empty * (_BAR - count)}"


def _wrapped(line: str, indent: int) -> list[str]:
    """Wrap a line between words to the width of the terminal; unchanged if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return [line]
    wide = max(shutil.get_terminal_size().columns, indent + 20)
    return wrap(
        _printable(line), wide, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _printable(line: str) -> str:
    """Replace control characters and line breaks: names and reports are untrusted."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)


def _cut(text: str, indent: int) -> str:
    """Cut a report's text to one line of the terminal; unchanged if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return f"{'':<{indent}}{text}"
    room = max(shutil.get_terminal_size().columns - indent, 20)
    return f"{'':<{indent}}{shorten(_printable(text), room, placeholder=' …', break_on_hyphens=False)}"


def _fractions(region: tuple[float, ...]) -> str:
    return ",".join(f"{value:.2f}" for value in region)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
