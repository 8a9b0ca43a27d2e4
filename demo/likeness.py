"""Similarity in words: a cosine means little by itself, so it is told by how common it is among the gallery's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.gallery.protocol import AnyGallery

_SAMPLE = 400
#: Share of the gallery's pairs that are less alike, and what is said from there on.
_WORDS = ((0.999, "Nearly the same"), (0.99, "Very alike"), (0.95, "Alike"), (0.8, "Somewhat alike"))
_LEAST = "Little alike"


@dataclass(frozen=True, eq=False)
class Likeness:
    """`cosines` are those between pairs of a sample of the gallery, float32, sorted; empty where it has no pair."""

    cosines: NDArray[np.float32]

    @classmethod
    def of(cls, gallery: AnyGallery | None) -> Self:
        ids = [] if gallery is None else gallery.ids()
        if gallery is None or len(ids) < 2:
            return cls(np.empty(0, np.float32))
        rows = np.random.default_rng(0).choice(len(ids), min(_SAMPLE, len(ids)), replace=False)
        vectors = np.stack([gallery.vector(ids[row]) for row in rows])
        return cls(np.sort((vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]))

    def share(self, cosine: float) -> float:
        """Share of the gallery's pairs that are less alike than this."""
        return float(np.searchsorted(self.cosines, cosine)) / max(1, len(self.cosines))

    def words(self, cosine: float) -> str:
        share = self.share(cosine)
        return next((word for least, word in _WORDS if share >= least), _LEAST)
