"""`cbmir index remove`: remove images from a gallery."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cbmir.cli.options import command, json_option, log, option, print_answer, pseudonyms_option
from cbmir.errors import GalleryError

if TYPE_CHECKING:
    from cbmir.runtime.gallery.protocol import EditableGallery
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms


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
    the next 'add' or 'build' brings the images back. The exit code is 2 if something given is not in the gallery, or if
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
    """Lines that say how many of these the gallery does not have. Damage must not prevent a removal."""
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
