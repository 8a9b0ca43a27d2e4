"""A query without an image: the direction in embedding space that stands for one or several findings.

Training draws images towards the proxies of the findings that they show (METHOD, "Loss"), so an image that shows
several lies between their proxies. The direction of a combination is that of the mean of its findings' own directions;
each of these is the mean of the finding's proxies, or the weight row of a linear head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import UserError


def combination_vector(card: ModelCard, head: NDArray[np.float32], labels: Sequence[str]) -> NDArray[np.float32]:
    """float32 [D] of unit norm for one or several of the model's labels, all of equal weight.

    Raises UserError for no label, for one that is given twice, and for labels whose directions cancel out;
    ManifestError for one that the model does not have.
    """
    rows = sorted(card.labels.index(label) for label in labels)
    if not rows or len(set(rows)) < len(rows):
        raise UserError(f"expected one or several findings, each once, found {', '.join(labels) or 'none'}")
    if card.head == "linear":
        directions = [head[row] for row in rows]
    else:
        proxies = np.split(head, np.cumsum(card.proxies_per_class)[:-1])
        directions = [proxies[row].mean(axis=0) for row in rows]
    mean = np.mean([_unit(direction) for direction in directions], axis=0)
    if np.linalg.norm(mean) < 1e-6:
        raise UserError(f"expected findings that can go together, found {', '.join(labels)}, which cancel out")
    return _unit(mean).astype(np.float32)


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = vector.astype(np.float64)
    unit: NDArray[np.float64] = exact / max(float(np.linalg.norm(exact)), 1e-12)
    return unit
