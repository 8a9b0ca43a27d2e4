"""The options of a training run: RUN/config.json, written before the first epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cbmir.errors import RunError
from cbmir.fields import from_json
from cbmir.preprocessing import PreprocessSpec
from cbmir.training.losses import HASHING_LOSSES, WEIGHTED_LOSSES

Precision = Literal["auto", "32", "bf16-mixed", "16-mixed"]
Schedule = Literal["constant", "cosine"]
Augment = Literal["crop", "full"]

#: Options that may change when a run is resumed. Manifest and teacher may have moved, but not their fingerprints.
RESUMABLE_CHANGES = ("devices", "manifest", "distill")

#: Losses that can have class weights.
BALANCEABLE = (*WEIGHTED_LOSSES, "bce")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. The defaults here are the recipe `paper`, from the paper's section "Implementation".

    Attributes:
        grey_range: The values for black and white that the encoder's weights expect (`encoders.grey_range_of`).
        batch_size: Images per step, summed over all devices.
        proxies_per_class: A number, or `auto`.
        class_weights: Whether the loss weights its classes. None follows the paper: yes for the proxy loss, no for BCE.
            Most other losses have no class weights.
        code_bits: Length of the codes of hashing losses.
        fold: "1/5" to "5/5" for cross-validation by patient, the same for every seed; empty for the manifest's splits;
            `all` to train on every image, which only `comparison.final` does.
        stop_after: Stop after this many epochs of the schedule; 0 means all.
        patience: Stop after this many epochs without a better `choice` (`validation.Validation`).
        schedule: Constant learning rate, or warm-up followed by cosine decay.
        average: Decay of the moving average of the weights that is evaluated and kept; 0 keeps the weights themselves.
        augment: Random crops only, or also random rotation, scale and exposure.
        head_rate: Learning rate of projection, head and loss, as a multiple of the encoder's.
        linear_fit: At the end, fit linear maps from the features to embedding and scores (`linear_fit`).
        projection: Dimensions of the embedding of a linear fit.
        distill: The teacher's RUN folder, or empty.
        teacher_fingerprint: Fingerprint of the teacher's weights, or empty.
    """

    manifest: str
    manifest_fingerprint: str
    labels: tuple[str, ...]
    encoder: str = "densenet121"
    weights: str = "none"
    grey_range: str = "auto"
    loss: str = "proxy"
    epochs: int = 50
    batch_size: int = 48
    lr: float = 1e-4
    weight_decay: float = 0.0
    sigma: float = 0.7
    proxies_per_class: str = "2"
    negative_proxies: bool = True
    class_weights: bool | None = None
    code_bits: int = 64
    image_size: int = 224
    intensity: str = "header"
    precision: Precision = "auto"
    devices: str = "auto"
    seed: int = 0
    fold: str = ""
    stop_after: int = 0
    patience: int = 10
    schedule: Schedule = "constant"
    average: float = 0.0
    augment: Augment = "crop"
    head_rate: float = 1.0
    linear_fit: bool = False
    projection: int = 256
    distill: str = ""
    teacher_fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr", "sigma", "patience", "code_bits", "head_rate", "projection"):
            if not getattr(self, name) > 0:
                raise RunError(f"expected {name} above 0, found {getattr(self, name)}")
        for name in ("weight_decay", "seed", "stop_after"):
            if not getattr(self, name) >= 0:
                raise RunError(f"expected {name} of 0 or more, found {getattr(self, name)}")
        if self.linear_fit and (self.distill or self.loss in HASHING_LOSSES):
            raise RunError("expected no linear fit for a student (it has its teacher's embedding) or for binary codes")
        least = 2 * len(self.labels) + 2
        if self.linear_fit and self.projection < least:
            raise RunError(f"expected a projection to {least} dimensions or more, two more than twice the number "
                           f"of findings; found {self.projection}")  # fmt: skip
        for name, choices in (("schedule", Schedule), ("augment", Augment)):
            if getattr(self, name) not in get_args(choices):
                known = " or ".join(get_args(choices))
                raise RunError(f"expected {name} {known}, found {getattr(self, name)!r}")
        if not 0 <= self.average < 1:
            raise RunError(f"expected average, a decay, of 0 or more and below 1, found {self.average}")
        for name in ("proxies_per_class", "devices"):
            value = getattr(self, name)
            if value != "auto" and not (value.isdigit() and int(value) > 0):
                raise RunError(f"expected {name.replace('_', '-')} 'auto' or a number from 1, found {value!r}")
        if self.class_weights is not None and self.loss not in BALANCEABLE:
            raise RunError(f"expected no choice of class weights with loss {self.loss}, which has none")

    @property
    def balanced(self) -> bool:
        """Whether the loss has class weights."""
        return self.loss in WEIGHTED_LOSSES if self.class_weights is None else self.class_weights

    @property
    def preprocess(self) -> PreprocessSpec:
        return PreprocessSpec.for_image_size(self.image_size, self.intensity)

    @classmethod
    def from_json(cls, data: Any) -> TrainConfig:
        """Build from config.json. Raises ValueError for a value of the wrong type, RunError for one out of range."""
        if not isinstance(data, dict):
            raise ValueError("no object of options")
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            raise RunError(f"config.json: unknown {', '.join(unknown)}; it was written by a newer version of cbmir")
        return from_json(cls, data)

    def differences(self, other: TrainConfig) -> list[str]:
        """Return the options that make `other` a different run, as "name: value here -> value there"."""
        return [
            f"{field.name}: {getattr(self, field.name)} -> {getattr(other, field.name)}"
            for field in fields(self)
            if field.name not in RESUMABLE_CHANGES and getattr(self, field.name) != getattr(other, field.name)
        ]


def proxy_counts(asked: str, targets: Tensor) -> tuple[int, ...]:
    """Return the number of proxies per class (columns of `targets` [N, K] in {0, 1, NaN}), for a number or `auto`.

    `auto` goes beyond the paper, which names it as future work: one proxy for a rare finding, and one more for each
    doubling of its positive images from 64 on, at most 8.
    """
    if asked != "auto":
        return (int(asked),) * targets.shape[1]
    counts: Sequence[int] = (targets == 1).sum(dim=0).tolist()
    return tuple(min(8, 1 + int(math.log2(max(n, 32) / 32))) for n in counts)


def resolve_precision(precision: Precision) -> Literal["32-true", "bf16-mixed", "16-mixed"]:
    """Resolve `auto` to bf16 or fp16 on CUDA, and to float32 on a CPU, where bf16 slows some encoders down.

    Raises RunError for fp16 without CUDA: Lightning would use bf16 instead.
    """
    if precision == "16-mixed" and not torch.cuda.is_available():
        raise RunError("precision 16-mixed needs a CUDA GPU, found none; take 32 or bf16-mixed")
    if precision == "auto":
        if not torch.cuda.is_available():
            return "32-true"
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "16-mixed"
    return "32-true" if precision == "32" else precision
