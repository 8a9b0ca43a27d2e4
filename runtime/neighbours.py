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

#: How many of a region's nearest images are ranked again by the cells that the gallery keeps (k if that is more).
RERANKED = 200
#: The warning if `Novelty.flagged` is true.
NOTHING_ALIKE = (
    "Nothing in the gallery looks like this image: it may not be a chest X-ray, or may be inverted or rotated. Do not "
    "rely on its findings and neighbours."
)
#: The warning if `Analysis.known` has ids.
IN_GALLERY = "This image is in the gallery."
#: The warnings if the same patient's images cannot be left out, because the patient is unknown or has none.
PATIENT_UNKNOWN = (
    "The patient of this image is not known, so neighbours may be images of the same patient; give the patient's id to "
    "leave them out."
)
PATIENT_NOT_FOUND = "No image of this patient id is in the gallery: nothing was left out."


def known_of(
    gallery: SearchableGallery, image: Radiograph, patient_id: str, exclude: bool
) -> tuple[tuple[Entry, ...], frozenset[str], list[str]]:
    """Return the gallery's entries made from the same file, the image's possible patients, and warnings."""
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
    """A search for the k neighbours of a vector float32 [D], nearest first, among the entries that pass a filter.

    `exact` is as in `SearchableGallery.search`. With `expected` probabilities, the entries whose labels agree most with
    them come first (`SearchableGallery.search_by_agreement`). `cells` are those of the region that the vector is from:
    if the gallery keeps cells, the first `RERANKED` entries are ranked again by their best window of the same size.
    """

    vector: NDArray[np.float32]
    k: int
    filter: Filter
    exact: bool | None = None
    expected: Mapping[str, float] | None = None
    cells: RegionCells | None = None

    def search(self, gallery: SearchableGallery) -> SearchResult:
        """Search a gallery. Raises GalleryError as the gallery's searches do."""
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
        """Return the neighbours, and how unusual an image with this embedding is among the gallery's images, without
        `known` and the images of `patients`. The novelty is None if the gallery is too small."""
        reference = gallery.reference_distances
        if not len(reference):
            return self.search(gallery), None
        others = Filter(exclude_patients=patients)
        itself = sum(not entry.patient_id for entry in known)  # filters cannot leave these out; they are the nearest
        queries, filters, k, found = [self.vector], [self.filter], self.k, None
        if self.expected is not None or self._is_by_place(gallery):  # the search below is only for novelty
            queries, filters, k, found = [embedding], [others], 0, self.search(gallery)
        elif self.filter != others or self.vector is not embedding:
            queries, filters = [*queries, embedding], [*filters, others]
        many = gallery.search_many(
            np.stack(queries), k, filters=filters, exact=self.exact, vectors=NEAREST + itself
        )  # in one snapshot
        novelty = score_novelty(embedding, many[-1].vectors[itself:], reference)
        return found or many[0], novelty

    def _is_by_place(self, gallery: SearchableGallery) -> bool:
        return self.cells is not None and gallery.cell_codec is not None and self.k > 0

    def _by_place(self, gallery: SearchableGallery, found: SearchResult) -> SearchResult:
        """Rank the hits by their best-matching places and return the first k with these. Ties keep their order."""
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
    """Return the probabilities of the labels that the model and the gallery share, by the gallery's label names.

    Raises UserError if there are no such labels.
    """
    known = {canonical(f.label): f.probability for f in findings if f.probability is not None}
    expected = {name: known[canonical(name)] for name in gallery.labels.names if canonical(name) in known}
    if not expected:
        raise UserError("expected a calibrated probability for a label of the gallery to rank by findings, found none; "
                        "rank by nearness")  # fmt: skip
    return expected


def neighbour_of(hit: Hit, wanted: Collection[str]) -> Neighbour:
    """Turn a hit into a Neighbour. `wanted` are the canonical names of the query's labels."""
    entry = hit.entry
    return Neighbour(
        id=entry.id, image=entry.image, patient_id=entry.patient_id, distance=hit.distance, cosine=hit.cosine,
        labels=entry.positive, shared=tuple(name for name in entry.positive if canonical(name) in wanted),
        report=entry.report, uncertain=tuple(name for name in entry.positive if (entry.labels or {})[name] == -1),
        boxes=entry.boxes, place=hit.place, view=entry.view, source=entry.source, date=entry.date,
    )  # fmt: skip
