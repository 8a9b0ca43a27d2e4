"""Evidence maps: which cells of an image make a finding likely, or a neighbour similar. Exact, without a gradient.

The embedding is the mean f of the feature map over its n cells, divided by its norm. Its cosine to a vector v is hence
a sum over the cells:  cos(e, v) = sum_cells  F[:, cell] . v / (n |f| |v|).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard


def evidence_map(feature_map: NDArray[np.float32], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Share of each cell in the cosine between the image's embedding and a vector.

    feature_map: float32 [D, h, w]; vector: float32 [D] of any norm. Returns float32 [h, w], which sums to the cosine;
    negative cells speak against. All zeros where the feature map's mean or the vector is zero.
    """
    cells = feature_map.astype(np.float64)
    direction = vector.astype(np.float64)
    _, h, w = cells.shape
    norm = h * w * np.linalg.norm(cells.mean(axis=(1, 2))) * np.linalg.norm(direction)
    if norm == 0:
        return np.zeros((h, w), np.float32)
    shares: NDArray[np.float64] = np.einsum("dhw,d->hw", cells, direction) / norm
    return shares.astype(np.float32)


def finding_vectors(
    card: ModelCard, head: NDArray[np.float32], embedding: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """The vector [D] whose evidence map explains each finding of an image with this embedding [D].

    For a proxy head it is the class's best proxy, the one that gave the score (METHOD "Scores": the maximum). For a
    linear head it is the class's weight row: the map then sums to the cosine between embedding and weights, which the
    logit follows but for the row's norm and the bias.
    """
    names = card.labels.names
    if card.head == "linear":
        return dict(zip(names, head, strict=True))
    ends = np.cumsum(card.proxies_per_class)
    proxies = np.split(head, ends[:-1])[: len(names)]  # the negative class is last, and has no finding
    return {name: own[int(np.argmax(_cosines(own, embedding)))] for name, own in zip(names, proxies, strict=True)}


def _cosines(rows: NDArray[np.float32], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    cosines: NDArray[np.float32] = rows @ vector / np.maximum(np.linalg.norm(rows, axis=1), np.finfo(np.float32).tiny)
    return cosines
