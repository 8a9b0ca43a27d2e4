"""The answer for an image: plain values, and what is needed to explain them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import BALANCED
from cbmir.choices import Rank
from cbmir.errors import UserError
from cbmir.manifest import Box
from cbmir.runtime.evidence import contrast_map, evidence_map
from cbmir.runtime.gallery.entry import Hit
from cbmir.runtime.novelty import Novelty


@dataclass(frozen=True)
class Finding:
    """A label's score in [0, 1]. The calibrated `probability`, `threshold` and `predicted` (score > threshold) are None
    where the model's validation data could not give them."""

    label: str
    score: float
    probability: float | None
    predicted: bool | None
    threshold: float | None


def most_probable_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The one order in which people read findings: on the command line, in the demo and in DICOM and FHIR results.

    By calibrated probability. Findings without one follow, by score, which can't be compared with a probability. Equal
    ones are in the order of their labels.
    """
    return tuple(sorted(findings, key=lambda f: (f.probability is None, -(f.probability or 0), -f.score, f.label)))


@dataclass(frozen=True)
class LabelAgreement:
    """How many of the neighbours have a label as 1, 0, -1 or not at all.

    `share` in [0, 1] is the weight of the positive and uncertain ones, divided by the weight of all for which the label
    is known; None where it is known for none.
    """

    label: str
    positive: int
    negative: int
    uncertain: int
    unknown: int
    share: float | None


def agreement(hits: Sequence[Hit], labels: Sequence[str], sigma: float) -> tuple[LabelAgreement, ...]:
    """How far the neighbours agree on each of `labels`; empty without hits.

    A neighbour at distance d weighs exp(-d^2 / (2 sigma^2)), as a proxy does in a score (METHOD, "Loss"), with `sigma`
    of the model card.
    """
    weights = [math.exp(-(hit.distance**2) / (2 * sigma**2)) for hit in hits]
    found = []
    for label in labels if hits else ():
        values = [(hit.entry.labels or {}).get(label) for hit in hits]
        known = sum(weight for value, weight in zip(values, weights, strict=True) if value is not None)
        present = sum(weight for value, weight in zip(values, weights, strict=True) if value in (1, -1))
        positive, negative, uncertain, unknown = (values.count(value) for value in (1, 0, -1, None))
        share = present / known if known else None
        found.append(LabelAgreement(label, positive, negative, uncertain, unknown, share))
    return tuple(found)


@dataclass(frozen=True)
class Neighbour:
    """An image of the gallery. `distance` is Euclidean between unit vectors, in [0, 2]; of its positive or uncertain
    `labels`, `shared` are those that the query has, and `uncertain` those not known to be positive. `boxes` are where
    some of its findings are, as drawn by people, where the gallery has them."""

    id: str
    image: str
    patient_id: str
    distance: float
    cosine: float
    labels: tuple[str, ...]
    shared: tuple[str, ...]
    report: str
    uncertain: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, eq=False)
class Analysis:
    """The answer for one image. It stands on its own: it remains usable once the finder that made it is closed.

    Attributes:
        findings: In the model's order; `most_probable_first` gives the order for people. Empty of an embedding model.
        neighbours: In the order that `rank` names.
        warnings: Sentences that a reader must see.
        embedding: float32 [D], unit norm.
        feature_map: float32 [D, h, w].
        agreement: One per label of the gallery; empty without neighbours.
        novelty: None without a gallery, and with a small one.
        query_labels: Those known of the image, where it is in the gallery, or else predicted.
        known: Ids of the gallery's entries that were made from the same file.
        operating_point: Whose thresholds the findings have.
        rank: `nearness`: nearest first; `findings`: the greatest expected agreement first (`Finder.analyze`).
    """

    image: str
    findings: tuple[Finding, ...]
    neighbours: tuple[Neighbour, ...]
    warnings: tuple[str, ...]
    embedding: NDArray[np.float32] = field(repr=False)
    feature_map: NDArray[np.float32] = field(repr=False)
    finding_vectors: Mapping[str, NDArray[np.float32]] = field(repr=False)
    neighbour_vectors: Mapping[str, NDArray[np.float32]] = field(repr=False)
    agreement: tuple[LabelAgreement, ...] = ()
    novelty: Novelty | None = None
    query_labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    operating_point: str = BALANCED
    rank: Rank = "nearness"

    @property
    def labels_known(self) -> bool:
        """Whether `query_labels` says anything: not of a new image where the model scores no findings."""
        return bool(self.known or self.findings)

    def evidence_for_finding(self, label: str) -> NDArray[np.float32]:
        """float32 [h, w]: each cell's share in what sets the finding apart from the others (`contrast_map`). Raises
        UserError for another label."""
        return contrast_map(self.feature_map, self.finding_vectors, _known(self.finding_vectors, label, "finding"))

    def evidence_for_neighbour(self, id: str) -> NDArray[np.float32]:
        """float32 [h, w]: each cell's share in the cosine to this neighbour. Raises UserError for another id."""
        return evidence_map(self.feature_map, self.neighbour_vectors[_known(self.neighbour_vectors, id, "neighbour")])

    def to_json(self) -> dict[str, Any]:
        """Plain Python values, without the arrays."""
        return {
            "image": self.image,
            "known": list(self.known),
            "operating_point": self.operating_point,
            "findings": [asdict(finding) for finding in self.findings],
            "rank": self.rank,
            "neighbours": [_plain(one) for one in self.neighbours],
            "agreement": [asdict(of_label) for of_label in self.agreement],
            "novelty": None if self.novelty is None else asdict(self.novelty),
            "warnings": list(self.warnings),
        }


def _known(vectors: Mapping[str, NDArray[np.float32]], key: str, what: str) -> str:
    if key not in vectors:
        known = ", ".join(vectors) or "it has none"
        raise UserError(f"expected a {what} of this analysis ({known}), found {key!r}")
    return key


def _plain(neighbour: Neighbour) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(neighbour).items()}
