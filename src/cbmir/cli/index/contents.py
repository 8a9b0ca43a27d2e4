"""`cbmir index add`, `update`, `remove` and `merge`: change the content of a gallery."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.cli.index.build import finish, source_options
from cbmir.cli.options import (
    PATH,
    command,
    gallery_argument,
    json_option,
    log,
    model_argument,
    option,
    print_answer,
    print_json,
    pseudonyms_option,
    resumable,
)  # fmt: skip
from cbmir.errors import GalleryError
from cbmir.manifest import read_manifest

if TYPE_CHECKING:
    from cbmir.runtime.gallery.entry import Added
    from cbmir.runtime.gallery.protocol import EditableGallery
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms


@command("cbmir index add gallery model.onnx new.csv", "cbmir index add gallery model.onnx manifest.csv --split all")
@gallery_argument
@model_argument
@click.argument("manifest", type=PATH)
@source_options
@json_option
def add(gallery: str, model: Path, manifest: Path, engine: str, as_json: bool, **how: Any) -> None:
    """Embed those images of MANIFEST that GALLERY does not have, and add them.

    Images that are already there stay as they are ('cbmir index update' updates labels and reports). Searches continue
    meanwhile. Each batch of images is added completely or not at all; after an interruption the same command
    continues. The exit code is 2 if images cannot be read, or have changed since they were added (changed.csv). Lists
    of earlier runs keep their rows for other images.
    """
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import add_to_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = add_to_gallery(opened, table, gallery, **how)
    finish(gallery, report, f"{gallery}: {report.images} images added, {report.there} were already there", as_json)


@command("cbmir index update gallery corrected.csv")
@click.argument("gallery", type=click.Path())
@click.argument("manifest", type=PATH)
@option("--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True, default=["all"],
        help="Split whose rows of the manifest to use; may be repeated.")  # fmt: skip
@pseudonyms_option
@json_option
def update(gallery: str, manifest: Path, splits: tuple[str, ...], pseudonyms: Pseudonyms | None, as_json: bool) -> None:
    """Update labels, boxes, reports, patients, studies, views, sources, dates and splits of GALLERY from MANIFEST.

    The update is one transaction, and no image is embedded again. A row matches the image of the same path, or else of
    the same content (after a move). Values without a column in MANIFEST stay. An empty study, view, source or date in a
    row keeps the old value; an empty report, split or boxes cell clears it. Rows whose image is not in GALLERY are
    listed; the exit code is then 2.
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


@command("cbmir index remove gallery --patient-id 0001234", "cbmir index remove gallery --id image_07 --id image_08")
@click.argument("gallery", type=click.Path())
@option("--id", "ids", multiple=True, help="An image's id in the gallery; may be repeated.")
@option("--patient-id", "patient_ids", multiple=True, help="All images of a patient; may be repeated.")
@option("--study-id", "study_ids", multiple=True, help="Images of a study; with --patient-id, of that patient.")
@pseudonyms_option
@json_option
def remove(gallery: str, pseudonyms: Pseudonyms | None, as_json: bool, **wanted: tuple[str, ...]) -> None:
    """Remove images from GALLERY with report, thumbnail and embedding. This cannot be undone.

    Their bytes are overwritten in the gallery's files and in unfinished builds in its folder; 'cbmir index compact'
    then frees the space. Delete earlier copies, shards and exports yourself. Also remove the rows from the manifest, or
    the next 'add' or 'build' brings the images back. The exit code is 2 if a given id is not in the gallery, or if
    that cannot be determined.
    """
    from cbmir.runtime.gallery.build.folder import GalleryFolder
    from cbmir.runtime.gallery.protocol import is_milvus, open_gallery

    if not any(wanted.values()):
        raise click.UsageError("expected what to remove: --id, --patient-id or --study-id")
    with open_gallery(gallery, pseudonyms=pseudonyms) as opened:
        unknown = _unknown(opened, wanted["patient_ids"], wanted["study_ids"], pseudonyms)
        removed = opened.remove(**wanted)
    print_answer(as_json, {"gallery": gallery, "removed": removed}, f"{gallery}: {len(removed)} images removed")
    if missing := [name for name in wanted["ids"] if name not in removed]:
        unknown.append(f"not in the gallery: {', '.join(missing)}")
    if not is_milvus(gallery):
        unknown += GalleryFolder(gallery).remove_from_unfinished(pseudonyms, **wanted)
    for line in unknown:
        log.error("%s", line)
    if unknown or not removed:
        sys.exit(2)


def _unknown(
    opened: EditableGallery, patients: Sequence[str], studies: Sequence[str], pseudonyms: Pseudonyms | None
) -> list[str]:
    """Return lines about ids that the gallery lacks. Damage to it is a line too: it must not prevent a removal."""
    if not (patients or studies):
        return []
    try:
        ids = {(entry.patient_id, entry.study_id) for entry in opened.every_entry()}
    except GalleryError as error:
        return [f"cannot check whether all given ids were in the gallery ({error})"]
    if pseudonyms is not None:
        patients, studies = list(map(pseudonyms.patient, patients)), list(map(pseudonyms.study, studies))
    kinds = ("patient", patients, {patient for patient, _ in ids}), ("study", studies, {study for _, study in ids})
    return [
        f"{count} of {len(given)} {kind} ids are not in the gallery"
        for kind, given, there in kinds
        if (count := sum(key not in there for key in given))
    ]


@command("cbmir index merge gallery other_gallery third_gallery", "cbmir index merge gallery shard1 shard2 shard3")
@click.argument("gallery", type=click.Path())
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=PATH)
@pseudonyms_option
@json_option
def merge(gallery: str, others: tuple[Path, ...], pseudonyms: Pseudonyms | None, as_json: bool) -> None:
    """Add the images of OTHER galleries of the same model to GALLERY. The others stay as they are.

    A new GALLERY appears once it is complete; after an interruption the same command continues. Give all shards of a
    build ('cbmir index build --shard'): together they give the same gallery as one build of the manifest. GALLERY
    may be a milvus: address, which is filled in batches; an interruption leaves the batches that were finished.
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
    finally:  # also after a failure: print what was merged
        if as_json:
            print_json({"gallery": gallery, "merged": merged})
