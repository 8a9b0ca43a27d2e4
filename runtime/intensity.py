"""Grey by the values that an image has, whatever its header or its type says: `minmax` and `percentile`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.preprocessing import PERCENTILES

_AT_ONCE = 2**18  # values counted at a time: NumPy makes them 8 bytes long


def counted(stored: NDArray[Any], patterns: int) -> NDArray[np.int64]:
    """How many pixels of uint8 or uint16 [H,W] have each of the values 0 to `patterns` - 1, int64 [patterns]."""
    counts = np.zeros(patterns, np.int64)
    flat = stored.ravel()
    for start in range(0, flat.size, _AT_ONCE):
        counts += np.bincount(flat[start : start + _AT_ONCE], minlength=patterns)
    return counts


def spread(values: NDArray[np.float64], counts: NDArray[np.int64], intensity: str) -> NDArray[np.float64]:
    """Grey 0..1 of `values` [n], of which each occurs `counts` [n] times (one of them at least once).

    By `percentile` the ends are nearest ranks: the lowest value that 1% (99%) of the pixels do not exceed. Every other
    policy that comes here runs from the lowest to the highest value. An image of one value is black.
    """
    present = np.flatnonzero(counts)
    order = present[np.argsort(values[present], kind="stable")]
    low, high = values[order[0]], values[order[-1]]
    if intensity == "percentile":
        below = np.cumsum(counts[order])
        low, high = (values[order[np.searchsorted(below, below[-1] * percent / 100)]] for percent in PERCENTILES)
    grey: NDArray[np.float64] = np.clip((values - low) / (high - low or 1.0), 0, 1)
    return grey


def greys_of(stored: NDArray[Any], intensity: str) -> NDArray[np.uint8]:
    """What each value of uint8 or uint16 [H,W] looks like by `minmax` or `percentile`, uint8 [256] or [65536]."""
    patterns = 2 ** (8 * stored.dtype.itemsize)
    grey = spread(np.arange(patterns, dtype=np.float64), counted(stored, patterns), intensity)
    return np.rint(grey * 255).astype(np.uint8)
