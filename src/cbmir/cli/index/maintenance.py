"""`cbmir index info`, `verify`, `rebuild` and `compact`: maintenance of a gallery."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from cbmir.choices import INDEX_SETTINGS
from cbmir.cli.options import PATH, PATIENT_DATA, STAYS_CLEAR, command, json_option, log, option, print_answer
from cbmir.files import folder_size


@command("cbmir index info gallery --json")
@click.argument("gallery", type=click.Path())
@json_option
def info(gallery: str, as_json: bool) -> None:
    """Show what GALLERY holds, which model it belongs to, and how it is searched."""
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
    log.warning(PATIENT_DATA)
    if facts.get("pseudonyms"):
        log.warning(STAYS_CLEAR)


@command("cbmir index verify gallery")
@click.argument("gallery", type=PATH)
@json_option
def verify(gallery: Path, as_json: bool) -> None:
    """Read all of GALLERY and report damage: which images it affects, and what to do.

    The exit code is 2 if anything is damaged.
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
@option("--index", "setting", type=click.Choice(INDEX_SETTINGS), help="How to search from now on.")
@json_option
def rebuild(gallery: Path, setting: str | None, as_json: bool) -> None:
    """Rebuild the search files from the gallery's database. Searches continue meanwhile.

    It is never required: damaged or outdated files are detected and rebuilt when they are needed.
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
    """Rewrite GALLERY's database to free the space of removed images, and to erase what is left of them."""
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        before = folder_size(gallery)
        opened.compact()
    after = folder_size(gallery)
    value = {"gallery": gallery, "bytes_before": before, "bytes_after": after}
    print_answer(as_json, value, f"{gallery}: {before:,} bytes before, {after:,} now")
