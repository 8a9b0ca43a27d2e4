"""Compare two models' answers to the same images by what users see: the neighbours, how well they fit, and how well
findings are separated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import UserError
from cbmir.runtime.engines.base import Outputs
from cbmir.training import metrics

NEIGHBOURS = 10
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ParityLimits:
    """A file's limits; None means no limit.

    Attributes:
        cosine: Minimum cosine between the two embeddings of an image.
        overlap: Minimum share of unchanged neighbours in the file's own gallery.
        cross: The same in the source's gallery.
        score: Maximum difference of a score.
        ndcg: Maximum absolute difference of nDCG.
        auc: The same for AUC.
    """

    cosine: float | None = None
    score: float | None = None
    overlap: float | None = None
    cross: float | None = None
    ndcg: float | None = None
    auc: float | None = None

    def changed(self, *settings: str) -> ParityLimits:
        """Return a copy with the limits in `settings` (`NAME=NUMBER`) changed. Raises UserError for any other text."""
        changes, names = {}, [field.name for field in fields(self)]
        for setting in settings:
            name, _, number = setting.partition("=")
            try:
                changes[name] = float(number)
            except ValueError:
                changes[name] = math.nan
            if name not in names or not changes[name] >= 0:
                raise UserError(f"expected a tolerance NAME=NUMBER, NAME one of {', '.join(names)}; found {setting!r}")
        return replace(self, **changes)

    def for_images(self, card: ModelCard, cases: Cases) -> ParityLimits:
        """Return the limits that apply: none on scores and AUC without findings, none on nDCG without known labels."""
        if card.has_findings:
            return self
        unlabelled = bool(np.isnan(cases.labels).all())
        return replace(self, score=None, auc=None, ndcg=None if unlabelled else self.ndcg)


#: Limits by precision of the file, finest first. Half precision shares a gallery with the float32 file, so `cross` has
#: a limit; an int8 file has its own gallery.
LIMITS = {
    "float32": ParityLimits(cosine=0.999999, score=1e-5),
    "float16": ParityLimits(overlap=0.97, cross=0.95, ndcg=0.002, auc=0.002),
    "bfloat16": ParityLimits(overlap=0.97, cross=0.95, ndcg=0.002, auc=0.002),
    "int8": ParityLimits(overlap=0.90, ndcg=0.005, auc=0.005),
}


@dataclass(frozen=True, eq=False)
class Cases:
    """Labels and patients of M images. The first `queries` of them search the images of all other patients.

    labels: float32 [M, C] in {1, 0, -1, NaN}; patients: M names; thresholds: C scores, NaN if a label has none.
    """

    queries: int
    labels: NDArray[np.float32]
    patients: Sequence[str]
    thresholds: Sequence[float]

    @property
    def asking(self) -> set[str]:
        return set(self.patients[: self.queries])


@dataclass(frozen=True)
class Estimate:
    """A mean over queries with its 95% bootstrap interval over patients."""

    value: float
    low: float
    high: float

    def share(self) -> str:
        """Format a share in [0, 1]."""
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def __str__(self) -> str:
        """Format a difference, with its sign."""
        if math.isnan(self.value):
            return "not defined"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


@dataclass(frozen=True)
class Parity:
    """The differences between a file and its source.

    Attributes:
        score_difference: Maximum difference of a score, in [0, 1]; NaN without findings.
        decisions: Share of findings for which the thresholds decide the same; NaN without thresholds.
        overlap: Share of a query's ten nearest neighbours that both find, each among its own embeddings.
        cross_overlap: The same, but the file's queries search the source's embeddings.
        ndcg: nDCG of the file minus that of the source, over queries with a positive label.
        ndcg_all: The same over all queries, with the negative class as a label.
        auc: Mean AUC over labels of the file minus that of the source, on the queries.
    """

    images: int
    queries: int
    cosine_min: float
    cosine_mean: float
    score_difference: float
    decisions: float
    overlap: Estimate
    cross_overlap: Estimate
    ndcg: Estimate
    ndcg_all: Estimate
    auc: Estimate
    limits: ParityLimits

    @property
    def failures(self) -> tuple[str, ...]:
        """A description of each figure that misses its limit (as NaN does). Empty if the file may be used."""
        limits, k = self.limits, NEIGHBOURS
        own, cross = self.overlap, self.cross_overlap
        bounds = [
            ("cosine of the embeddings at least", limits.cosine, self.cosine_min, f"{self.cosine_min:.7f}"),
            (f"unchanged top-{k} neighbours at least", limits.overlap, own.value, own.share()),
            (f"unchanged top-{k} neighbours across at least", limits.cross, cross.value, cross.share()),
            ("difference of scores at most", limits.score, self.score_difference, f"{self.score_difference:.2g}"),
            (f"difference of nDCG@{k} at most", limits.ndcg, *_size(self.ndcg)),
            (f"difference of nDCG@{k} of all queries at most", limits.ndcg, *_size(self.ndcg_all)),
            ("difference of AUC at most", limits.auc, *_size(self.auc)),
        ]
        return tuple(
            f"{what} {limit}, found {found}"
            for what, limit, value, found in bounds
            if limit is not None and not (value >= limit if what.endswith("least") else value <= limit)
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON types; None for NaN."""
        return {name: _json(value) for name, value in asdict(self).items()}

    def table(self) -> str:
        """Format the figures as text, one per line, followed by the limits that are missed."""
        k = NEIGHBOURS
        rows = {
            "images": f"{self.images}, of which {self.queries} are queries",
            "cosine of the embeddings": f"{self.cosine_min:.7f} at least, {self.cosine_mean:.7f} on average",
            "difference of scores": f"{self.score_difference:.2g} at most",
            "findings with the same decision": f"{self.decisions:.2%}",
            f"unchanged top-{k} neighbours": f"{self.overlap.share()}; across: {self.cross_overlap.value:.4f}",
            f"difference of nDCG@{k}": str(self.ndcg),
            f"difference of nDCG@{k}, all queries": str(self.ndcg_all),
            "difference of AUC": str(self.auc),
        }  # fmt: skip
        if math.isnan(self.score_difference):  # no findings
            for name in ("difference of scores", "findings with the same decision", "difference of AUC"):
                del rows[name]
        lines = [f"{name + ':':<38} {text}" for name, text in rows.items()]
        return "\n".join([*lines, *(f"Beyond its limit: {text}." for text in self.failures)])

    def __str__(self) -> str:
        scores = f"score difference max {self.score_difference:.1e}, {self.decisions:.2%} of decisions the same; "
        return (
            f"on {self.images} images, {self.queries} of them queries: cosine min {self.cosine_min:.7f}, mean "
            f"{self.cosine_mean:.7f}; {'' if math.isnan(self.score_difference) else scores}"
            f"top-{NEIGHBOURS} neighbours unchanged {self.overlap.value:.1%}, across "
            f"{self.cross_overlap.value:.1%}; difference of nDCG {self.ndcg}, of all queries {self.ndcg_all}, of AUC "
            f"{self.auc}"
        )


def measure_parity(reference: Outputs, found: Outputs, cases: Cases, limits: ParityLimits) -> Parity:
    """Compare a file's answers to M images (embeddings float32 [M, D], scores float32 [M, C]) with the source's.

    Cosines are computed in float64, since the limits are finer than float32 rounding.

    Raises:
        UserError: The answers differ in dimensions or labels.
    """
    own, theirs = _unit(reference.embedding), _unit(found.embedding)
    if own.shape != theirs.shape or reference.scores.shape != found.scores.shape:
        raise UserError(
            f"expected two models of one embedding dimension and one set of labels, found {own.shape[1]} and "
            f"{theirs.shape[1]} dimensions, {reference.scores.shape[1]} and {found.scores.shape[1]} labels"
        )
    cosines = (own * theirs).sum(axis=1)
    queries, thresholds = cases.queries, np.asarray(cases.thresholds, np.float64)
    weights = metrics.patient_weights(cases.patients[:queries])
    nearest = _nearest(own[:queries], own, cases)
    alike = (reference.scores > thresholds) == (found.scores > thresholds)
    ndcgs = [
        _ndcg(theirs, cases, labels) - _ndcg(own, cases, labels)
        for labels in (metrics.positives(cases.labels), metrics.add_negative_class(cases.labels))
    ]
    return Parity(
        images=len(own),
        queries=queries,
        cosine_min=float(cosines.min()),
        cosine_mean=float(cosines.mean()),
        score_difference=float(np.abs(reference.scores.astype(np.float64) - found.scores).max(initial=0))
        if found.scores.shape[1]
        else math.nan,
        decisions=float(alike[:, ~np.isnan(thresholds)].mean()) if not np.isnan(thresholds).all() else math.nan,
        overlap=_estimate(_shared(nearest, _nearest(theirs[:queries], theirs, cases)), weights),
        cross_overlap=_estimate(_shared(nearest, _nearest(theirs[:queries], own, cases)), weights),
        ndcg=_estimate(ndcgs[0], weights),
        ndcg_all=_estimate(ndcgs[1], weights),
        auc=_auc_difference(reference.scores[:queries], found.scores[:queries], cases.labels[:queries], weights),
        limits=limits,
    )


def _unit(embedding: NDArray[np.float32]) -> Floats:
    wide = embedding.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # a zero vector becomes NaN, which fails
        return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


def _nearest(queries: Floats, gallery: Floats, cases: Cases) -> list[set[int]]:
    """Return the positions of the ten nearest images of each query, excluding those of its patient."""
    own, others = metrics.patient_codes(cases.patients[: cases.queries], cases.patients)
    found = []
    for patient, cosines in zip(own, queries @ gallery.T, strict=True):
        allowed = np.flatnonzero(others != patient)
        order = np.argsort(-cosines[allowed], kind="stable")[:NEIGHBOURS]
        found.append(set(allowed[order].tolist()))
    return found


def _shared(one: list[set[int]], other: list[set[int]]) -> Floats:
    return np.array([len(a & b) / len(a) if a else math.nan for a, b in zip(one, other, strict=True)])


def _ndcg(embedding: Floats, cases: Cases, positive: NDArray[np.float32]) -> Floats:
    """Return nDCG@10 of each query [Q]; NaN if it is undefined or the embeddings are not finite."""
    queries = cases.queries
    if not np.isfinite(embedding).all():
        return np.full(queries, math.nan)
    similarity = metrics.inner_products(embedding[:queries], embedding)
    sides = positive[:queries], positive, cases.patients[:queries], cases.patients
    return metrics.retrieval_values(similarity, *sides, k=NEIGHBOURS).ndcg


def _auc_difference(
    reference: NDArray[np.float32], found: NDArray[np.float32], labels: NDArray[np.float32], weights: Floats
) -> Estimate:
    if not found.shape[1]:
        return Estimate(math.nan, math.nan, math.nan)
    values = metrics.class_aucs(found, labels) - metrics.class_aucs(reference, labels)
    samples, others = (metrics.resampled_class_aucs(scores, labels, weights) for scores in (found, reference))
    means = metrics.nanmean((samples - others)[:, ~np.isnan(values)], axis=1)
    return Estimate(metrics.mean_of_known(values), *metrics.interval(means))


def _estimate(values: Floats, weights: Floats) -> Estimate:
    return Estimate(metrics.mean_of_known(values), *metrics.interval(metrics.weighted_means(values, weights)))


def _size(difference: Estimate) -> tuple[float, str]:
    """Return the absolute value, and text: the value with its interval, or why it is undefined."""
    lacking = "none: not defined on these images; give labelled ones (cbmir export: with --images)"
    return abs(difference.value), lacking if math.isnan(difference.value) else str(difference)


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
