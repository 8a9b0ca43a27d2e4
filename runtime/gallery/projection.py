"""A map of a gallery: each image is a point in the plane, with similar images near each other.

`cbmir index map` makes it and stores it in the gallery's folder. Distances on a map only roughly reflect those in the
embedding space: use it to explore, not to measure. The coordinates come from a layout, a function from embeddings to
the plane. `principal_plane` needs no extra package; the command line adds t-SNE if scikit-learn is installed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.input_file import open_input
from cbmir.runtime.gallery.gallery import MAP
from cbmir.runtime.gallery.protocol import SearchableGallery

#: Maximum number of images: more than a screen can distinguish, and as many as t-SNE lays out in a minute.
MOST = 5_000
#: Number of neighbours that place an image that is not on the map.
NEAREST = 5

Layout = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class GalleryProjection:
    """A map with one point, float32 [N, 2] within 0..1, for each of `ids`; `method` names the layout for people."""

    ids: tuple[str, ...]
    points: NDArray[np.float32]
    method: str
    fingerprint: str

    @classmethod
    def make(cls, gallery: SearchableGallery, layout: Layout, method: str, *, most: int = MOST, seed: int = 0) -> Self:
        """Lay out a random sample of at most `most` entries. Raises GalleryError for fewer than three."""
        ids = gallery.ids()
        if len(ids) < 3:
            raise GalleryError(f"expected at least 3 images to make a map of, found {len(ids)}")
        rows = np.sort(np.random.default_rng(seed).choice(len(ids), min(most, len(ids)), replace=False))
        chosen = [ids[row] for row in rows]
        points = layout(np.stack([gallery.vector(name) for name in chosen]))
        low, high = points.min(axis=0), points.max(axis=0)
        even = (points - (low + high) / 2) / max(float((high - low).max()), 1e-12) + 0.5  # one scale for both axes
        return cls(tuple(chosen), even.astype(np.float32), method, gallery.card.fingerprint)

    def place(self, neighbours: Sequence[tuple[str, float]]) -> tuple[float, float] | None:
        """Place an image whose nearest entries are given as (id, distance), nearest first: at the mean of the first
        `NEAREST` that are on the map, weighted by 1 / distance. Return None if the map has none of them."""
        where = {name: row for row, name in enumerate(self.ids)}
        near = [(where[name], distance) for name, distance in neighbours if name in where][:NEAREST]
        if not near:
            return None
        weights = np.array([1 / (distance + 1e-6) for _, distance in near])
        x, y = np.average(self.points[[row for row, _ in near]], axis=0, weights=weights)
        return float(x), float(y)

    def save(self, folder: Path) -> None:
        """Save the map in the gallery's folder, completely or not at all. Only its owner can read it."""
        part = folder / f".{MAP}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            np.savez_compressed(
                stream, ids=np.array(self.ids), points=self.points, about=np.array([self.method, self.fingerprint])
            )
        part.replace(folder / MAP)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Load the map in a gallery's folder, or return None. Raises GalleryError for a damaged one."""
        path = folder / MAP
        try:
            with open_input(path) as stream, np.load(stream, allow_pickle=False) as stored:
                ids, points, about = stored["ids"], stored["points"], stored["about"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise GalleryError(
                f"{path}: expected a map of a gallery, found {error}; make it again with 'cbmir index map'"
            ) from error
        if points.shape != (len(ids), 2) or about.shape != (2,) or not np.isfinite(points).all():
            raise GalleryError(f"{path}: expected a point for every id; make it again with 'cbmir index map'")
        return cls(tuple(ids.tolist()), points.astype(np.float32), *about.tolist())


def principal_plane(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Project embeddings [N, D] onto their first two principal components: float32 [N, 2]."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    axes = np.linalg.eigh(centred.T @ centred)[1][:, -1:-3:-1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])  # the sign of an eigenvector is arbitrary
    points: NDArray[np.float32] = (centred @ axes).astype(np.float32)
    return points
