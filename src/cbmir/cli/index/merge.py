"""`cbmir index merge`: several galleries into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.cli.options import PATH, command, json_option, print_json, pseudonyms_option, resumable

if TYPE_CHECKING:
    from cbmir.runtime.gallery.entry import Added
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms


@command("cbmir index merge gallery other_gallery third_gallery", "cbmir index merge gallery shard1 shard2 shard3")
@click.argument("gallery", type=click.Path())
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=PATH)
@pseudonyms_option
@json_option
def merge(gallery: str, others: tuple[Path, ...], pseudonyms: Pseudonyms | None, as_json: bool) -> None:
    """Add the images of OTHER galleries of the same model to GALLERY. The others stay as they are.

    A new GALLERY appears once it is complete; after an interruption the same command continues. Give all shards of a
    build ('cbmir index build --shard'): together they give the same gallery as one build of the manifest. GALLERY
    may be a milvus: place, which is filled in batches; an interruption leaves the batches that were finished.
    """
    from cbmir.runtime.gallery.build import merge_galleries

    merged: list[dict[str, Any]] = []

    def tell(other: Path, added: Added) -> None:
        there = len(added.duplicates)
        merged.append({"other": other, "added": len(added.ids), "there": there, "renamed": dict(added.renamed)})
        if not as_json:
            click.echo(f"{gallery}: {len(added.ids)} images of {other} added, {there} were already there")
            for old, new in added.renamed:
                click.echo(f"{old} was added as {new}, since another image has that id")

    try:
        with resumable():
            merge_galleries(gallery, others, pseudonyms=pseudonyms, merged=tell)
    finally:  # also what was merged before one failed
        if as_json:
            print_json({"gallery": gallery, "merged": merged})
