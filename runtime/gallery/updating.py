"""Bring what a gallery says of its images up to date with a manifest; images and embeddings stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cbmir.errors import GalleryError
from cbmir.manifest import Manifest, Row
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.picture import file_digest


@dataclass(frozen=True)
class UpdateReport:
    """How many entries the manifest speaks of, how many of these changed, and images that the gallery does not have."""

    found: int
    changed: int
    absent: tuple[Path, ...]


def update_gallery(gallery: AnyGallery, manifest: Manifest, *, splits: Sequence[str] = ("all",)) -> UpdateReport:
    """Take over patient, study, view, date, split, report, labels and path of the manifest's rows of `splits`.

    A row is for the entry of the same image path; where there is none, as after a move of the images, for the entry
    made from a file of the same content, never for one that just bears the same name. What a row leaves empty of study,
    view and date stays as it is, for it may be what the DICOM file says; a split or report that it leaves empty is
    emptied. What the manifest has no column for stays. All in one transaction. Raises GalleryError where two rows are
    for one entry, ManifestError for labels that the gallery does not have.
    """
    names = [gallery.labels.names[gallery.labels.index(name)] for name in manifest.labels.names]
    by_image = {entry.image: entry for entry in gallery.every_entry()}
    updated: dict[str, Entry] = {}
    absent: list[Path] = []
    for row in manifest:
        if "all" not in splits and row.split not in splits:
            continue
        entry = by_image.get(str(row.image)) or next(iter(gallery.find(file_digest(row.image))), None)
        if entry is None:
            absent.append(row.image)
        elif entry.id in updated:
            raise GalleryError(f"expected a row for each entry, found two for {entry.id!r}: {updated[entry.id].image} "
                               f"and {row.image}; nothing was changed")  # fmt: skip
        else:
            updated[entry.id] = _updated(entry, row, names, manifest.absent)
    changed = gallery.update(list(updated.values())) if updated else 0
    return UpdateReport(len(updated), changed, tuple(absent))


def _updated(entry: Entry, row: Row, names: Sequence[str], absent: Collection[str]) -> Entry:
    return replace(
        entry,
        image=str(row.image),
        patient_id=row.patient_id,
        study_id=row.study_id or entry.study_id,
        view=row.view or entry.view,
        date=row.date or entry.date,
        split=entry.split if "split" in absent else row.split,
        report=entry.report if "report" in absent else row.report,
        labels=(entry.labels or {}) | dict(zip(names, row.labels, strict=True)),
    )
