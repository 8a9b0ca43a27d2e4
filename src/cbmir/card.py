"""The model card, which describes a model and is stored inside the model file.

In an ONNX file it is the `metadata_props` entry `cbmir.card`. The entry `cbmir.head` beside it has the proxies (or the
classifier's weights) that evidence maps need. Files without a card, or with a card of another schema, are refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, TypedDict

from cbmir.errors import CardError, ManifestError, UserError
from cbmir.fields import Within, from_json
from cbmir.input_file import parse_json
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec

SCHEMA = 2
CARD_KEY = "cbmir.card"
HEAD_KEY = "cbmir.head"
INTENDED_USE = (
    "Decision support for research: finds similar chest radiographs and scores findings on frontal ones. It is not a "
    "medical device and must not be used for diagnosis or treatment."
)
INTENDED_USE_WITHOUT_FINDINGS = (
    "Decision support for research: finds similar chest radiographs. It scores no findings, since it was not trained "
    "on labels of this data. It is not a medical device and must not be used for diagnosis or treatment."
)
BALANCED = "balanced"  # the default operating point
#: The warning of embedding models, so that an answer without findings is not mistaken for a healthy image.
WITHOUT_FINDINGS = "This model scores no findings: it only finds similar images."
#: The warning of models that were trained on drawings.
OF_PHANTOMS = "This model was trained on drawings (phantoms): its answers about real images mean nothing."
NOT_A_DEVICE = "Research use only. Not a medical device, not for diagnosis."


Share = Annotated[float, Within(0, 1)]
Count = Annotated[int, Within(0)]
_Dimension = Annotated[int, Within(1, 65_536)]


class _Figure(TypedDict, total=False):
    value: float | None
    low: float | None
    high: float | None


class _OwnGreyRange(TypedDict):
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Counts(TypedDict, total=False):
    positive: Count
    negative: Count


class _Training(TypedDict, total=False):
    """The fields of a card's `training` that cbmir reads; others are allowed."""

    source: str
    loss: str
    weights: str
    weights_fingerprint: str
    manifest_fingerprint: str
    fold: str
    epochs: Count
    best_epoch: Count
    patients: Count
    seconds: float
    linear_fit: bool
    images: dict[str, Count]
    labels: dict[str, _Counts]
    grey_range: _OwnGreyRange | None


def _check_figures(value: dict[str, Any], where: str) -> None:
    """Raise ValueError for a metric that is not a number, or has half an interval; metrics may be grouped."""
    for name, one in value.items():
        if isinstance(one, dict) and "value" in one:
            figure = from_json(_Figure, one, f"{where}.{name}")
            if (figure.get("low") is None) != (figure.get("high") is None):
                raise ValueError(f"{where}.{name}: expected both ends of an interval or neither, found one")
        elif isinstance(one, dict):
            _check_figures(one, f"{where}.{name}")


@dataclass(frozen=True)
class Calibration:
    """Platt scaling of a score s: probability = 1 / (1 + exp(-(slope * s + intercept))), with slope >= 0."""

    slope: Annotated[float, Within(0)]
    intercept: float

    def probability(self, score: float) -> float:
        """Return the probability in [0, 1] of a score."""
        x = self.slope * score + self.intercept
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold for one label, and the shares in [0, 1] that it gives on the validation split.

    The positive (negative) predictive value is None if no image (every image) was predicted to have the label.
    """

    threshold: float
    sensitivity: Share
    specificity: Share
    positive_predictive_value: Share | None
    negative_predictive_value: Share | None


@dataclass(frozen=True)
class ModelCard:
    """The metadata of a model file.

    Attributes:
        head: `proxy` (score = maximum over the class's proxies of the Gaussian similarity, docs/method.md), `linear`
            (score = sigmoid of the classifier's logit), `hash` (binary codes, only in benchmarks), or `none` for an
            embedding model, which has no labels or scores.
        proxies_per_class: In label order, the negative class last if there is one; empty for a linear head.
        thresholds: One per label, of the operating point `balanced` unless `at` chose another. None if the validation
            split lacks positive or negative images: such a finding is not decided.
        calibration: One per label, or None for the same reason.
        fingerprint: The name of the embedding space: only vectors with the same fingerprint can be compared.
        metrics: Name -> {"value", "low", "high"} (95% bootstrap interval over patients).
        operating_points: Name (`cbmir.choices.OPERATING_POINTS`) -> a point per label, or None for the same reason.
            Empty if the model has no scores.
    """

    labels: LabelSet
    preprocess: PreprocessSpec
    encoder: str
    embedding_dim: _Dimension
    head: str
    sigma: Annotated[float, Within(1e-6, 1e6)]
    proxies_per_class: tuple[_Dimension, ...]
    negative_proxies: bool
    thresholds: tuple[float | None, ...]
    calibration: tuple[Calibration | None, ...]
    fingerprint: str
    precision: str = "float32"
    training: Annotated[dict[str, Any], _Training] = field(default_factory=dict)
    metrics: Annotated[dict[str, Any], _check_figures] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    operating_points: dict[str, tuple[OperatingPoint | None, ...]] = field(default_factory=dict)
    licence: str = "not stated"
    intended_use: str = INTENDED_USE
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.head not in ("proxy", "linear", "hash", "none"):
            raise CardError(f"model card: expected head 'proxy', 'linear', 'hash' or 'none', found {self.head!r}")
        if self.has_findings == (self.head == "none"):
            raise CardError(f"model card: expected labels with every head but 'none', found {len(self.labels)} labels "
                            f"with head {self.head!r}")  # fmt: skip
        if unnamed := [name for name in (*self.labels.names, self.fingerprint) if not name.strip()]:
            raise CardError(f"model card: expected a name of each label and a fingerprint, found {unnamed[0]!r}")
        columns = {"thresholds": self.thresholds, "calibration": self.calibration} | self.operating_points
        for name, values in columns.items():
            if len(values) != len(self.labels):
                raise CardError(f"model card: expected {len(self.labels)} {name}, one per label, found {len(values)}")
        classes = len(self.labels) + self.negative_proxies
        if self.head == "proxy" and len(self.proxies_per_class) != classes:
            raise CardError(
                f"model card: expected proxies_per_class for {classes} classes, found {len(self.proxies_per_class)}"
            )

    @property
    def has_findings(self) -> bool:
        """Whether the model scores findings; with the head `none` it only returns embeddings."""
        return len(self.labels) > 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings that every answer of this model must include."""
        found = {OF_PHANTOMS: self.training.get("source") == "phantom", WITHOUT_FINDINGS: not self.has_findings}
        return tuple(note for note, holds in found.items() if holds)

    @property
    def weights(self) -> str:
        """The fingerprint of the weights, the same in every file of a model. `fingerprint` differs from it in distilled
        models (it is the teacher's) and int8 files."""
        return str(self.training.get("weights_fingerprint") or self.fingerprint.split("-int8-")[0])

    def at(self, operating_point: str) -> ModelCard:
        """Return a copy with the thresholds of an operating point.

        Raises:
            UserError: The model does not have this operating point. Every model has `balanced`.
        """
        if operating_point not in self.operating_points:
            if operating_point == BALANCED:
                return self
            known = ", ".join(dict.fromkeys((BALANCED, *self.operating_points)))
            raise UserError(f"expected an operating point of this model ({known}), found {operating_point!r}")
        points = self.operating_points[operating_point]
        return self.with_(thresholds=tuple(None if point is None else point.threshold for point in points))

    def with_(self, **changes: Any) -> ModelCard:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"labels": self.labels.to_json()}

    def dumps(self) -> str:
        return json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def loads(cls, text: str, source: str = "model card") -> ModelCard:
        """Parse a card. `source` is its name in messages.

        Raises:
            CardError: Damaged JSON, missing or unknown fields, another schema, or an unexpected value; the message
                names the field.
        """
        try:
            data = parse_json(text)
            schema = data["schema"]
        except (ValueError, TypeError, KeyError) as error:
            raise CardError(
                f"{source}: expected a cbmir model card in JSON, found {type(error).__name__}: {error}"
            ) from error
        if schema != SCHEMA:
            raise CardError(
                f"{source}: this cbmir reads model cards of schema {SCHEMA}, found schema {schema!r:.40}; "
                f"a newer schema needs a newer cbmir, an older one a new export"
            )
        known = {f.name for f in fields(cls)}
        if known != set(data):
            raise CardError(
                f"{source}: model card fields differ from schema {SCHEMA}: "
                f"missing {sorted(known - set(data))}, unknown {sorted(set(data) - known)}"
            )
        try:
            names = from_json(tuple[str, ...], data["labels"], "labels")
            return from_json(cls, data | {"labels": {"names": list(names)}})
        except (ValueError, ManifestError, CardError) as error:
            raise CardError(f"{source}: damaged model card: {error}") from error
