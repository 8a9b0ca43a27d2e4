"""An image of a gallery, and what a search and an addition answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Entry:
    """An image of the gallery. `image` is an absolute path; `labels` are 1, 0, -1 (uncertain) or None (unknown).

    `date` is the study's, YYYY-MM-DD or empty. Where the image came from a PACS, `sop_instance_uid` names it there and
    `study_id` is the Study Instance UID.
    """

    id: str
    image: str
    patient_id: str
    study_id: str = ""
    sop_instance_uid: str = ""
    view: str = ""
    date: str = ""
    split: str = ""
    report: str = ""
    labels: dict[str, int | None] | None = None
    sha256: str = ""

    @property
    def positive(self) -> tuple[str, ...]:
        """Labels that are positive or uncertain: what counts in retrieval (METHOD, "Loss")."""
        return tuple(name for name, value in (self.labels or {}).items() if value in (1, -1))


@dataclass(frozen=True)
class Hit:
    """A neighbour: `distance` is Euclidean between unit vectors, in [0, 2]; `cosine` in [-1, 1]."""

    entry: Entry
    distance: float
    cosine: float


@dataclass(frozen=True)
class SearchResult:
    """A search's answer: neighbours, nearest first, as of one generation of the gallery, and how they were found.
    Where an index proposed them, those of equal distance are in the order of their ids among those that it found.

    vectors: float32 [n, D], unit norm: the hits' own embeddings, and after them those of the next nearest, where more
    vectors than hits were asked for.
    """

    generation: int
    hits: tuple[Hit, ...]
    method: str
    vectors: NDArray[np.float32] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Added:
    """Ids that went in, and (id, id of the entry there with the same content) of each that did not.

    `renamed`: (id, its id now) of those that went in under a longer id, since theirs was another image's.
    """

    ids: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
