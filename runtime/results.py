"""The answer for an image: plain values, and the data for evidence maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import BALANCED, ModelCard
from cbmir.choices import Rank
from cbmir.errors import UserError
from cbmir.labels import canonical
from cbmir.manifest import Box
from cbmir.runtime.evidence import Region, evidence_map, unit_vector
from cbmir.runtime.gallery.entry import Hit
from cbmir.runtime.novelty import Novelty


@dataclass(frozen=True)
class Finding:
    """A label's score in [0, 1]. The calibrated `probability`, `threshold` and `predicted` (score > threshold) are None
    if the model's validation data did not suffice."""

    label: str
    score: float
    probability: float | None
    predicted: bool | None
    threshold: float | None


def most_probable_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings for people: on the command line, in the demo, and in DICOM and FHIR results.

    Findings with a calibrated probability come first, by probability, then by score. The others follow by score, which
    cannot be compared with a probability. Ties are sorted by label.
    """
    return tuple(sorted(findings, key=lambda f: (f.probability is None, -(f.probability or 0), -f.score, f.label)))


#: Below this probability, neighbours count as having a label more often than by chance.
CHANCE = 0.05
#: Weights of the images that are alike and unlike in a refined search. The query has weight 1.
ALIKE, UNLIKE = 0.75, -0.15


@dataclass(frozen=True)
class LabelAgreement:
    """The numbers of neighbours for which a label is 1 (positive), 0 (negative), -1 (uncertain) or unknown.

    `share` in [0, 1] is the weight of the positive and uncertain neighbours divided by the weight of all neighbours
    whose label is known. `gallery` is the same share of the gallery's images, with equal weights. Each is None if the
    label is unknown for all of these; `gallery` is also None if the gallery does not state it.

    `above_chance`: fewer than 5% of random draws from the gallery would have this many or more positive or uncertain
    neighbours (exact binomial test, one-sided, for each label separately).
    """

    label: str
    positive: int
    negative: int
    uncertain: int
    unknown: int
    share: float | None
    gallery: float | None = None
    above_chance: bool = False


def agreement(hits: Sequence[Hit], shares: Mapping[str, float | None], sigma: float) -> tuple[LabelAgreement, ...]:
    """Return how far the neighbours agree on each label. `shares` are the gallery's. Empty without hits.

    A neighbour at distance d has the weight exp(-d^2 / (2 sigma^2)), like a proxy in a score (docs/method.md). `sigma`
    is from the model card.
    """
    weights = [math.exp(-(hit.distance**2) / (2 * sigma**2)) for hit in hits]
    found = []
    for label, of_gallery in shares.items() if hits else ():
        values = [(hit.entry.labels or {}).get(label) for hit in hits]
        known = sum(weight for value, weight in zip(values, weights, strict=True) if value is not None)
        present = sum(weight for value, weight in zip(values, weights, strict=True) if value in (1, -1))
        positive, negative, uncertain, unknown = (values.count(value) for value in (1, 0, -1, None))
        share = present / known if known else None
        above = of_gallery is not None and chance(positive + uncertain, len(hits) - unknown, of_gallery) < CHANCE
        found.append(LabelAgreement(label, positive, negative, uncertain, unknown, share, of_gallery, above))
    return tuple(found)


def chance(count: int, of: int, share: float) -> float:
    """Return the probability that at least `count` of `of` independent draws hit, each with probability `share`."""
    if count == 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    # In logarithms, because the coefficients overflow if there are many draws.
    hit, missed, every = math.log(share), math.log1p(-share), math.lgamma(of + 1)
    return math.fsum(
        math.exp(every - math.lgamma(n + 1) - math.lgamma(of - n + 1) + n * hit + (of - n) * missed)
        for n in range(count, of + 1)
    )


@dataclass(frozen=True)
class Refinement:
    """The refinement of a search: ids of images that are `alike` and `unlike`, and how far to move towards each of some
    `findings`, from -1 (away from it) to 1.

    Raises UserError if all three are empty, an id is in both lists, or a weight is outside [-1, 1].
    """

    alike: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    findings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.alike or self.unlike or self.findings):
            raise UserError("expected similar or dissimilar images, or findings, to refine by; found none")
        if both := set(self.alike) & set(self.unlike):
            raise UserError(f"expected each image as either alike or unlike, found as both: {', '.join(sorted(both))}")
        for name, weight in self.findings.items():
            if not -1 <= weight <= 1:  # also refuses NaN
                raise UserError(f"expected a weight from -1 to 1 for {name}, found {weight:g}")

    def vector(
        self, query: NDArray[np.float32], alike: Sequence[NDArray[np.float32]], unlike: Sequence[NDArray[np.float32]],
        directions: Mapping[str, NDArray[np.float32]],
    ) -> NDArray[np.float32]:  # fmt: skip
        """Return unit(query + 0.75 mean(alike) - 0.15 mean(unlike) + sum of weight * unit(direction)), float32 [D].

        This is Rocchio's rule with its usual weights (Manning, Raghavan and Schuetze, Introduction to Information
        Retrieval, 9.1.1) on the unit sphere, plus a direction for each of `findings`.

        Raises UserError if the sum is zero.
        """
        total = query.astype(np.float64)
        for weight, vectors in ((ALIKE, alike), (UNLIKE, unlike)):
            if vectors:
                total = total + weight * np.mean(vectors, axis=0, dtype=np.float64)
        for name, weight in self.findings.items():
            total = total + weight * unit_vector(directions[name])
        if np.linalg.norm(total) < 1e-6:
            raise UserError("expected something to search for, found images and findings that cancel out")
        return unit_vector(total).astype(np.float32)


@dataclass(frozen=True)
class Neighbour:
    """An image of the gallery. `distance` is Euclidean between unit vectors, in [0, 2]. `labels` are its positive and
    uncertain labels, `uncertain` the uncertain ones, and `shared` those that the query has too. `boxes`, drawn by
    people, show where some of its findings are. `place` is the part that matches a searched region best. `view`,
    `source` (hospital or data set) and `date` (YYYY-MM-DD) are empty if unknown."""

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
    place: Region | None = None
    view: str = ""
    source: str = ""
    date: str = ""


@dataclass(frozen=True, eq=False)
class Analysis:
    """The answer for one image. It stays usable after the finder that made it is closed.

    Attributes:
        findings: In the model's order; `most_probable_first` gives the order for people. Empty for an embedding model.
        neighbours: In the order that `rank` names.
        warnings: Sentences that every reader must see.
        embedding: float32 [D], unit norm.
        feature_map: float32 [D, h, w].
        agreement: One per label of the gallery; empty without neighbours, or if they were chosen by labels or findings
            (`where`, `rank`, a refinement towards findings).
        novelty: None without a gallery, or with a small one.
        query_labels: The image's known labels if it is in the gallery, else the predicted ones.
        known: Ids of the gallery's entries that were made from the same file.
        patients: Ids of the patients that the image may belong to. Not in `to_json`.
        operating_point: The operating point whose thresholds were used.
        finding_vectors: Label -> float32 [D], of any length: the vector of its map (`evidence.finding_vectors`).
        query: float32 [D], unit norm: the vector that was searched for. It is the embedding, unless the search was for
            a region or refined.
        region: The part of the image that was searched for; None for the whole image.
        refinement: How the search was refined (`Finder.refine`); None if it was not.
        is_steered: Whether the query was moved towards findings, in this refinement or an earlier one.
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
    query: NDArray[np.float32] = field(repr=False)
    agreement: tuple[LabelAgreement, ...] = ()
    novelty: Novelty | None = None
    query_labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    patients: frozenset[str] = field(default=frozenset(), repr=False)
    operating_point: str = BALANCED
    rank: Rank = "nearness"
    region: Region | None = None
    refinement: Refinement | None = None
    is_steered: bool = False

    @property
    def labels_known(self) -> bool:
        """Whether `query_labels` is known. It is unknown for a new image if the model scores no findings."""
        return bool(self.known or self.findings)

    def at(self, card: ModelCard, operating_point: str) -> Analysis:
        """Return a copy with the thresholds of another operating point in the model's card, without running the model.

        `query_labels` and the neighbours' `shared` change too, unless the image's labels are known.

        Raises:
            UserError: The card has no such operating point.
        """
        thresholds = dict(zip(card.labels.names, card.at(operating_point).thresholds, strict=True))
        findings = tuple(
            replace(one, threshold=threshold, predicted=None if threshold is None else one.score > threshold)
            for one in self.findings
            for threshold in (thresholds[one.label],)
        )
        changed = replace(self, findings=findings, operating_point=operating_point)
        if self.known:
            return changed
        labels = tuple(sorted(one.label for one in findings if one.predicted))
        names = {canonical(label) for label in labels}
        neighbours = tuple(
            replace(one, shared=tuple(name for name in one.labels if canonical(name) in names))
            for one in self.neighbours
        )
        return replace(changed, query_labels=labels, neighbours=neighbours)

    def evidence_for_finding(self, label: str) -> NDArray[np.float32]:
        """Return each cell's share in the cosine between the image and the finding's vector (`finding_vectors`),
        float32 [h, w]. Raises UserError for an unknown label."""
        return evidence_map(self.feature_map, self.finding_vectors[_known(self.finding_vectors, label, "finding")])

    def evidence_for_neighbour(self, id: str) -> NDArray[np.float32]:
        """Return each cell's share in the cosine between the whole image and this neighbour, float32 [h, w], even if a
        region was searched for. Raises UserError for an unknown id."""
        return evidence_map(self.feature_map, self.neighbour_vectors[_known(self.neighbour_vectors, id, "neighbour")])

    def to_json(self) -> dict[str, Any]:
        """Return plain Python values, without the arrays."""
        return {
            "image": self.image,
            "known": list(self.known),
            "operating_point": self.operating_point,
            "findings": [asdict(finding) for finding in self.findings],
            "rank": self.rank,
            "region": None if self.region is None else list(self.region),
            "refinement": None if self.refinement is None else asdict(self.refinement),
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
