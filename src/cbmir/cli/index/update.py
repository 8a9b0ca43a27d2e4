"""`cbmir index update`: update labels, reports and other columns of the manifest for images that are in a gallery."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cbmir.cli.options import PATH, command, json_option, log, option, print_answer, pseudonyms_option
from cbmir.manifest import read_manifest

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms


@command("cbmir index update gallery corrected.csv")
@click.argument("gallery", type=click.Path())
@click.argument("manifest", type=PATH)
@option("--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True, default=["all"],
        help="Split whose rows of the manifest to use; may be repeated.")  # fmt: skip
@pseudonyms_option
@json_option
def update(gallery: str, manifest: Path, splits: tuple[str, ...], pseudonyms: Pseudonyms | None, as_json: bool) -> None:
    """Update labels, boxes, reports, patients, studies, views, dates and splits of GALLERY's images from MANIFEST.

    The update is one transaction, and no image is embedded again. A row matches the image of the same path, or else of
    the same content (after a move). Values without a column in MANIFEST stay. An empty study, view or date in a row
    keeps the old value; an empty report, split or boxes cell clears it. Rows whose image is not in GALLERY are listed;
    the exit code is then 2.
    """
    from cbmir.runtime.gallery.maintenance import update_gallery
    from cbmir.runtime.gallery.protocol import open_gallery

    table = read_manifest(manifest)
    with open_gallery(gallery, pseudonyms=pseudonyms) as opened:
        report = update_gallery(opened, table, splits=splits)
    lines = [f"{gallery}: {report.changed} of {report.found} images changed"]
    lines += [f"not in the gallery: {path}" for path in report.absent]
    value = {"gallery": gallery, "found": report.found, "changed": report.changed, "absent": report.absent}
    print_answer(as_json, value, "\n".join(lines))
    if report.absent:
        log.error("%d rows name images that are not in the gallery", len(report.absent))
        sys.exit(2)
