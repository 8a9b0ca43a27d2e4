"""Label agreement: what the neighbours say of each label, counted and weighed.

A neighbour at distance d weighs exp(-d^2 / (2 sigma^2)): the Gaussian similarity that the model was trained with
(METHOD, "Loss"), with its own sigma. So a neighbour weighs as much as a proxy of the same distance does in a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbmir.runtime.gallery.entry import Hit


@dataclass(frozen=True)
class LabelAgreement:
    """How many of the neighbours have a label as 1, 0, -1 or not at all; together, all of them.

    `share` in [0, 1] is the weight of the positive and uncertain ones (uncertain counts as positive in retrieval) in
    that of all for which the label is known; None where it is known for none.
    """

    label: str
    positive: int
    negative: int
    uncertain: int
    unknown: int
    share: float | None


def agreement(hits: Sequence[Hit], labels: Sequence[str], sigma: float) -> tuple[LabelAgreement, ...]:
    """One LabelAgreement a label, in the order of `labels`; empty where there are no neighbours.

    `sigma` > 0 is the model card's.
    """
    if not hits:
        return ()
    weights = [math.exp(-(hit.distance**2) / (2 * sigma**2)) for hit in hits]
    own = [hit.entry.labels or {} for hit in hits]
    return tuple(_of_label(name, [labels.get(name) for labels in own], weights) for name in labels)


def _of_label(label: str, values: Sequence[int | None], weights: Sequence[float]) -> LabelAgreement:
    known = sum(weight for value, weight in zip(values, weights, strict=True) if value is not None)
    present = sum(weight for value, weight in zip(values, weights, strict=True) if value in (1, -1))
    return LabelAgreement(
        label=label,
        positive=values.count(1),
        negative=values.count(0),
        uncertain=values.count(-1),
        unknown=values.count(None),
        share=present / known if known else None,
    )
