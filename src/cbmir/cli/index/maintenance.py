"""`cbmir index info`, `verify`, `rebuild`, `compact`, `export` and `merge`: what looks after galleries."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.choices import INDEX_SETTINGS
from cbmir.cli.options import (
    PATH,
    STAYS_CLEAR,
    command,
    json_option,
    log,
    option,
    print_answer,
    print_json,
    pseudonyms_option,
    resumable,
)

if TYPE_CHECKING:
    from cbmir.runtime.gallery.entry import Added
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

_PATIENT_DATA = (
    "A gallery is patient data: its images, reports and embeddings identify patients. Keep it as safe as the images."
)


@command("cbmir index info gallery --json")
@click.argument("gallery", type=click.Path())
@json_option
def info(gallery: str, as_json: bool) -> None:
    """Say what a gallery holds, of which model it is, and how it is searched."""
    from cbmir.runtime.gallery.build.folder import GalleryFolder
    from cbmir.runtime.gallery.protocol import is_milvus, open_gallery

    with open_gallery(gallery) as opened:
        facts = opened.info()
    if not is_milvus(gallery):
        facts["unfinished"] = [str(folder) for folder in GalleryFolder(gallery).unfinished()]
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name or '(none)':<26} {count:>8}" for name, count in value.items())]
        else:
            text = ", ".join(str(one) for one in value if one != "") or "none" if isinstance(value, list) else value
            lines.append(f"{key + ':':<14} {text}")
    print_answer(as_json, facts, "\n".join(lines))
    log.warning(_PATIENT_DATA)
    if facts.get("pseudonyms"):
        log.warning(STAYS_CLEAR)


@command("cbmir index verify gallery")
@click.argument("gallery", type=PATH)
@json_option
def verify(gallery: Path, as_json: bool) -> None:
    """Read all of GALLERY and say what is damaged, which images that affects, and what to do.

    The exit code is 2 where anything is damaged.
    """
    from cbmir.runtime.gallery.maintenance import verify as look_through

    problems = look_through(gallery)
    lines = []
    for problem in problems:
        affected = f" Affected: {', '.join(problem.affected)}." if problem.affected else ""
        lines.append(f"{problem.what}.{affected} What to do: {problem.remedy}.")
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "nothing is damaged"
    print_answer(as_json, [asdict(problem) for problem in problems], "\n".join([*lines, f"{gallery}: {count}"]))
    if problems:
        sys.exit(2)


@command("cbmir index rebuild gallery --index int8")
@click.argument("gallery", type=PATH)
@option("--index", "setting", type=click.Choice(INDEX_SETTINGS), help="How it is searched from now on.")
@json_option
def rebuild(gallery: Path, setting: str | None, as_json: bool) -> None:
    """Make anew what searches need, from the gallery's database alone; others may search meanwhile.

    Never necessary: what is damaged or out of date is noticed, and made again when it is needed.
    """
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        opened.rebuild(setting)
        facts = opened.info()
    print_answer(as_json, facts, f"{gallery}: {facts['images']} images, search: {facts['search']}")


@command("cbmir index compact gallery")
@click.argument("gallery", type=PATH)
@json_option
def compact(gallery: Path, as_json: bool) -> None:
    """Write GALLERY's database anew, without the room of what was removed, and nothing left of it on the disk."""
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        before = _size(gallery)
        opened.compact()
    after = _size(gallery)
    value = {"gallery": gallery, "bytes_before": before, "bytes_after": after}
    print_answer(as_json, value, f"{gallery}: {before:,} bytes before, {after:,} now")


@command("cbmir index export gallery -o backup", "cbmir index export gallery -o shared --deidentified")
@click.argument("gallery", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="A new or empty folder.")
@option("--deidentified", is_flag=True,
        help="Only embeddings, labels, views and splits, under new ids and in another order.")  # fmt: skip
@json_option
def export(gallery: Path, output: Path, deidentified: bool, as_json: bool) -> None:
    """Copy GALLERY as it is at this moment, while others use it.

    De-identified is not anonymous: an embedding still lies near other images of the same patient, so that who has one
    of these can find the patient. Do not make such a copy public.
    """
    from cbmir.runtime.gallery import Gallery, maintenance

    with Gallery.open(gallery) as opened:
        (maintenance.export_deidentified if deidentified else maintenance.export)(opened, output)
    with Gallery.open(output) as made:
        images = len(made)
    print_answer(as_json, {"gallery": output, "images": images}, f"{output}: {images} images")
    log.warning(_PATIENT_DATA if not deidentified else "De-identified is not anonymous: do not make it public.")


@command("cbmir index merge gallery other_gallery third_gallery", "cbmir index merge gallery shard1 shard2 shard3")
@click.argument("gallery", type=PATH)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=PATH)
@pseudonyms_option
@json_option
def merge(gallery: Path, others: tuple[Path, ...], pseudonyms: Pseudonyms | None, as_json: bool) -> None:
    """Add the images of OTHER galleries of the same model to GALLERY, each at once. The others stay as they are.

    Where there is no GALLERY it is made, and is there once all are in it; the same command goes on after a stop. Of
    shards ('cbmir index build --shard') all must be given: they make the gallery that one build of the manifest makes.
    """
    from cbmir.runtime.gallery.build import merge_galleries

    merged: list[dict[str, Any]] = []

    def tell(other: Path, added: Added) -> None:
        there = len(added.duplicates)
        merged.append({"other": other, "added": len(added.ids), "there": there, "renamed": dict(added.renamed)})
        if not as_json:
            click.echo(f"{gallery}: {len(added.ids)} images of {other} added, {there} were there")
            for old, new in added.renamed:
                click.echo(f"added as {new}, since another image has its id: {old}")

    try:
        with resumable():
            merge_galleries(gallery, others, pseudonyms=pseudonyms, merged=tell)
    finally:  # also what was merged before one failed
        if as_json:
            print_json({"gallery": gallery, "merged": merged})


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
