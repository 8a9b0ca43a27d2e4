"""Compact codes of the cells of a gallery's images, which a search by region uses to rerank its first candidates.

A cell's vector is projected onto the principal components of the gallery's cells and stored as int8: an image of 8x8
cells takes 2 kB. Codes are linear in the cells, so the code of a window's mean is the mean of its codes.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery.hnsw import PcaInt8Codec

DIMS = 32  # dimensions of a code
#: Number of images whose cells a codec is fitted to.
SAMPLE = 128

Maps = NDArray[np.float32]
Codes = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class CellCodec:
    """A codec that turns feature maps [N, D, h, w] of one grid (h, w) into int8 codes [N, h, w, d].

    A map is first divided by the norm of its mean, so that the mean of its cells is the image's embedding.
    """

    grid: tuple[int, int]
    pca: PcaInt8Codec

    @classmethod
    def fitted(cls, maps: Maps) -> Self:
        """Fit a codec to the feature maps of a sample of images."""
        cells = _cells(maps)
        return cls(cells.shape[1:3], PcaInt8Codec.of_size(cells.reshape(-1, cells.shape[-1]), DIMS))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image's codes: (h, w, d)."""
        return *self.grid, self.pca.dim

    def codes(self, maps: Maps) -> Codes:
        """Encode feature maps. Raises GalleryError for maps of another shape."""
        if maps.ndim != 4 or maps.shape[1:] != (len(self.pca.mean), *self.grid):
            raise GalleryError(f"expected feature maps float32 [N, {len(self.pca.mean)}, {self.grid[0]}, "
                               f"{self.grid[1]}], found {list(maps.shape)}")  # fmt: skip
        cells = _cells(maps)
        return self.pca.codes(cells.reshape(-1, cells.shape[-1])).reshape(len(maps), *self.shape)

    def recoded(self, codes: Codes, codec: CellCodec) -> Codes:
        """Convert codes of another codec for the same model to codes of this one."""
        if codec is self or codec.dumps() == self.dumps():
            return codes
        own = codec.pca.decoded(codes.reshape(-1, codec.pca.dim))
        return self.pca.codes(own).reshape(len(codes), *self.shape)

    def places(
        self, query: NDArray[np.float32], codes: Codes, window: tuple[int, int]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Find, in each of N images, the window of (rows, columns) cells whose mean is nearest to a unit vector [D].

        Returns:
            Its cosine to the query, approximated from codes, float64 [N]; and its top and left cell, int64 [N, 2].
        """
        rows, columns = window
        sums = np.pad(codes.astype(np.float64).cumsum(axis=1).cumsum(axis=2), ((0, 0), (1, 0), (1, 0), (0, 0)))
        means = sums[:, rows:, columns:] - sums[:, :-rows, columns:] - sums[:, rows:, :-columns]
        means = (means + sums[:, :-rows, :-columns]) / (rows * columns * self.pca.scale)
        along, offset = self.pca.projected(query), self.pca.projected(self.pca.mean)
        products = query.astype(np.float64) @ self.pca.mean + means @ along
        squares = np.square(self.pca.mean, dtype=np.float64).sum() + 2 * means @ offset + np.square(means).sum(axis=-1)
        cosines = products / np.sqrt(np.maximum(squares, 1e-12))
        flat = cosines.reshape(len(codes), -1)
        best = flat.argmax(axis=1)
        corners = np.stack(np.unravel_index(best, cosines.shape[1:]), axis=1)
        return flat[np.arange(len(codes)), best].clip(-1, 1), corners

    def dumps(self) -> str:
        stream = BytesIO()
        self.pca.write(stream)
        return json.dumps({"grid": self.grid, "pca": b64encode(stream.getvalue()).decode("ascii")})

    @classmethod
    def loads(cls, text: str) -> Self:
        """Load a codec from the text of `dumps`. Raises ValueError or KeyError for other text."""
        found = json.loads(text)
        return cls(tuple(found["grid"]), PcaInt8Codec.read(BytesIO(b64decode(found["pca"], validate=True))))


def coded(codec: CellCodec | None, maps: Maps) -> Codes:
    """Encode feature maps for a gallery. Raises GalleryError if it has no codec, and so stores no cells."""
    if codec is None:
        raise GalleryError("expected no cells for a gallery that keeps none, found feature maps; build one with "
                           "'cbmir index build --cells'")  # fmt: skip
    return codec.codes(maps)


def _cells(maps: Maps) -> Maps:
    """Return the cells, float32 [N, h, w, D], scaled so that their mean has norm 1."""
    norms = np.linalg.norm(maps.astype(np.float64).mean(axis=(2, 3)), axis=1)
    cells = np.moveaxis(maps / np.maximum(norms, 1e-12).astype(np.float32)[:, None, None, None], 1, -1)
    return np.ascontiguousarray(cells)
