"""Other patients' entries under opaque names: what an answer may say of a gallery's images."""

from __future__ import annotations

from collections.abc import Sequence

from cbmir.errors import GalleryError
from cbmir.runtime.dicom_output.uids import case_id
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.result import Neighbour
from cbmir.runtime.serving.case_index import CaseIndex
from cbmir.runtime.serving.problems import Problem
from cbmir.runtime.serving.schemas import Case
from cbmir.runtime.serving.state import GalleryState


def of_neighbours(gallery: AnyGallery | None, neighbours: Sequence[Neighbour], *, reports: bool) -> list[Case]:
    """Neighbours of an analysis or a search; reports where they may be shown."""
    return [] if gallery is None else [
        Case(
            id=case_id(gallery, one.id), distance=one.distance, cosine=one.cosine, labels=list(one.labels),
            shared=list(one.shared), uncertain=list(one.uncertain), report=one.report if reports else None,
        )
        for one in neighbours
    ]  # fmt: skip


def find_entry(gallery: AnyGallery, index: CaseIndex, case: str) -> Entry:
    """Raises Problem 404 for a case that the gallery does not have: not any more, or never."""
    found = index.id_of(gallery, case)
    try:
        if found is not None:
            return gallery.entry(found)
    except GalleryError:
        GalleryState.of(gallery)  # raises where it is the gallery that is not there, rather than the entry
    raise Problem(404, "no-case", "The gallery has no such case (any more); search again.")
