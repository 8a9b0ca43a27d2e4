"""Products of vectors: many with many by BLAS, one with many by the thread that asks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def products(queries: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [M, n] of float32 [M, D] and [n, D].

    One query is multiplied by this thread alone: those of BLAS are slow to wake on a busy machine, and go on spinning
    for some 30 ms after it, which takes the processors from the model's next image.
    """
    found: NDArray[np.float32] = queries @ rows.T if len(queries) != 1 else np.vecdot(rows, queries[0])[None]
    return found
