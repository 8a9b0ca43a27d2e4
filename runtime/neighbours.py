"""The neighbours in an answer: the search, the images left out of it, and the warnings."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import UserError
from cbmir.labels import canonical
from cbmir.runtime.evidence import RegionCells
from cbmir.runtime.gallery.entry import Entry, Hit, SearchResult
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.novelty import NEAREST, Novelty, score_novelty
from cbmir.runtime.results import Finding, Neighbour

#: So many of the nearest to a region are ranked again by the cells that the gallery keeps, or k where k is more.
RERANKED = 200
#: The warning where `Novelty.flagged` is true.
NOTHING_ALIKE = (
    "Nothing in the gallery looks like this image: it may not be a chest X-ray, or may be inverted or rotated. Do not "
    "rely on its findings and neighbours."
)
#: The warning where `Analysis.known` has ids.
IN_GALLERY = "This image is in the gallery."
#: The warnings where the same patient's images are to be left out, and the patient is not known or has none.
PATIENT_UNKNOWN = (
    "The patient of this image is not known, so neighbours may be images of the same patient; give the patient's id to "
    "leave them out."
)
PATIENT_NOT_FOUND = "No image of this patient id is in the gallery: nothing was left out."


def known_of(
    gallery: SearchableGallery, image: Radiograph, patient_id: str, exclude: bool
) -> tuple[tuple[Entry, ...], frozenset[str], list[str]]:
    """The gallery's entries made from the same file, the patients that the image may be of, and warnings."""
    known = tuple(gallery.find(image.sha256))
    warnings = [IN_GALLERY] if known else []
    of_file = image.patient_id.strip()
    patients = {patient_id.strip(), *(entry.patient_id for entry in known)}
    patients = (patients | {of_file} if gallery.finds_patients else patients) - {""}
    if exclude and not patients and of_file:
        warnings.append("The gallery keeps pseudonyms of its patients and was opened without their key, so neighbours "
                        "may be images of this file's patient.")  # fmt: skip
    elif exclude and not patients:
        warnings.append(PATIENT_UNKNOWN)
    elif exclude and not any(gallery.has_patient(patient) for patient in patients):
        warnings.append(PATIENT_NOT_FOUND)
    return known, frozenset(patients), warnings


@dataclass(frozen=True, eq=False)
class Query:
    """What is searched for: the k neighbours of a vector float32 [D], nearest first, among those that pass a filter.

    `exact` is as `SearchableGallery.search` has it. With `expected` probabilities, those come first whose labels agree
    most with these (`SearchableGallery.search_by_agreement`). With `cells`, those of a region whose vector this is, the
    first `RERANKED` are ranked again by the best-matching window of as many cells, where the gallery keeps cells.
    """

    vector: NDArray[np.float32]
    k: int
    filter: Filter
    exact: bool | None = None
    expected: Mapping[str, float] | None = None
    cells: RegionCells | None = None

    def search(self, gallery: SearchableGallery) -> SearchResult:
        """Raises GalleryError as the gallery's searches do."""
        if self.expected is not None:
            return gallery.search_by_agreement(self.vector, self.expected, self.k, filter=self.filter)
        if not self._is_by_place(gallery):
            return gallery.search(self.vector, self.k, filter=self.filter, exact=self.exact)
        k = max(self.k, RERANKED)
        return self._by_place(gallery, gallery.search(self.vector, k, filter=self.filter, exact=self.exact, cells=True))

    def search_with_novelty(
        self, gallery: SearchableGallery, embedding: NDArray[np.float32], known: Collection[Entry],
        patients: frozenset[str],
    ) -> tuple[SearchResult, Novelty | None]:  # fmt: skip
        """The neighbours, and how unusual an image of this embedding is among the gallery's images but itself and its
        own patients'; None where the gallery is too small to say."""
        reference = gallery.reference_distances
        if not len(reference):
            return self.search(gallery), None
        others = Filter(exclude_patients=patients)
        itself = sum(not entry.patient_id for entry in known)  # no filter leaves these out; they are the nearest
        queries, filters, k, found = [self.vector], [self.filter], self.k, None
        if self.expected is not None or self._is_by_place(gallery):  # what is searched below is for novelty alone
            queries, filters, k, found = [embedding], [others], 0, self.search(gallery)
        elif self.filter != others or self.vector is not embedding:
            queries, filters = [*queries, embedding], [*filters, others]
        many = gallery.search_many(
            np.stack(queries), k, filters=filters, exact=self.exact, vectors=NEAREST + itself
        )  # of one moment
        novelty = score_novelty(embedding, many[-1].vectors[itself:], reference)
        return found or many[0], novelty

    def _is_by_place(self, gallery: SearchableGallery) -> bool:
        return self.cells is not None and gallery.cell_codec is not None and self.k > 0

    def _by_place(self, gallery: SearchableGallery, found: SearchResult) -> SearchResult:
        """The first k by the places that match best, with these; equal ones in the order in which they were found."""
        codec = gallery.cell_codec
        if self.cells is None or codec is None or found.cells is None or not found.hits:
            return found
        cosines, corners = codec.places(self.vector, found.cells, self.cells.window)
        order = np.argsort(-cosines, kind="stable")[: self.k].tolist()
        hits = tuple(
            Hit(found.hits[at].entry, math.sqrt(max(0.0, 2 - 2 * float(cosines[at]))), float(cosines[at]),
                self.cells.place((int(corners[at][0]), int(corners[at][1]))))
            for at in order
        )  # fmt: skip
        return replace(found, hits=hits, vectors=found.vectors[order], cells=None)


def expected_labels(gallery: SearchableGallery, findings: Iterable[Finding]) -> dict[str, float]:
    """Probabilities by the gallery's names of the labels, without those that the model or the gallery lacks.

    Raises UserError where that leaves none.
    """
    known = {canonical(f.label): f.probability for f in findings if f.probability is not None}
    expected = {name: known[canonical(name)] for name in gallery.labels.names if canonical(name) in known}
    if not expected:
        raise UserError("expected a calibrated probability for a label of the gallery to rank by findings, found none; "
                        "rank by nearness")  # fmt: skip
    return expected


def neighbour_of(hit: Hit, wanted: Collection[str]) -> Neighbour:
    """A hit as an answer shows it. `wanted`: canonical names of the labels that the query has."""
    entry = hit.entry
    return Neighbour(
        id=entry.id,
        image=entry.image,
        patient_id=entry.patient_id,
        distance=hit.distance,
        cosine=hit.cosine,
        labels=entry.positive,
        shared=tuple(name for name in entry.positive if canonical(name) in wanted),
        report=entry.report,
        uncertain=tuple(name for name in entry.positive if (entry.labels or {})[name] == -1),
        boxes=entry.boxes,
        place=hit.place,
        view=entry.view,
        source=entry.source,
        date=entry.date,
    )
