"""The real images on which files are compared and quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.card import ModelCard
from cbmir.errors import ManifestError, RunError
from cbmir.export.parity import NEIGHBOURS, Cases
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engine import Outputs
from cbmir.training.config import TrainConfig
from cbmir.training.data import cached_images, evaluation_batches
from cbmir.training.report import Embedder, labels_of
from cbmir.training.run import training_manifest

#: At most so many images are compared: queries from val and test, and training images for them to find.
QUERIES, GALLERY = 600, 1400
_BATCH = 32


@dataclass(frozen=True, eq=False)
class Sample:
    """Real images, uint8 [M, 1, S, S], and what is known of them."""

    pixels: NDArray[np.uint8]
    cases: Cases

    def answers(self, embedder: Embedder, what: str) -> Outputs:
        """The embeddings and scores that a model gives to them, with a progress bar."""
        return Outputs(*embedder(_batches(self.pixels, what)))


def _batches(pixels: NDArray[np.uint8], what: str) -> Iterator[NDArray[np.uint8]]:
    """uint8 [M, 1, S, S] in pieces, with a progress bar."""
    for start in tqdm(range(0, len(pixels), _BATCH), desc=what, unit="batch", disable=None):
        yield pixels[start : start + _BATCH]


def run_sample(config: TrainConfig, card: ModelCard, images: Path | None) -> Sample:
    """The run's own held-out and training images, or those of the manifest `images`.

    Raises RunError when the run's own table is gone or changed, ManifestError for too few images or other labels.
    """
    if images is not None:
        return sample_of(read_manifest(images), card)
    try:
        return sample_of(training_manifest(config), card)
    except (ManifestError, RunError) as error:
        raise _images_gone(error) from error


def sample_of(manifest: Manifest, card: ModelCard) -> Sample:
    """The images of a manifest to compare answers of a model on. Raises ManifestError."""
    chosen, queries = choose(manifest)
    labels = labels_of(card, chosen)
    thresholds = [np.nan if threshold is None else threshold for threshold in card.thresholds]
    cases = Cases(queries, labels, [row.patient_id for row in chosen], thresholds)
    return Sample(read_pixels(chosen, card.preprocess), cases)


def choose(manifest: Manifest) -> tuple[Manifest, int]:
    """The images to compare on, and how many of them, at the front, are queries.

    Queries come from val and test (from every row where the table has neither), the rest from train; both evenly
    spread. Raises ManifestError for too few images.
    """
    queries, gallery = manifest.split("val", "test").rows, manifest.split("train").rows
    if not queries:
        queries, gallery = manifest.rows, ()
    queries, gallery = evenly(queries, QUERIES), evenly(gallery, GALLERY)
    if len(queries) + len(gallery) <= NEIGHBOURS:
        raise ManifestError(
            f"expected more than {NEIGHBOURS} images to compare answers on, found {len(queries) + len(gallery)}; "
            f"give a manifest with more"
        )
    return Manifest(manifest.labels, queries + gallery), len(queries)


def calibration_pixels(config: TrainConfig, card: ModelCard, manifest: Path | None, count: int) -> NDArray[np.uint8]:
    """At most `count` training images to quantise by, uint8 [M, 1, S, S]: the run's own, or those of a manifest."""
    table = read_manifest(manifest) if manifest is not None else training_manifest(config)
    rows = table.split("train").rows or table.rows
    return read_pixels(Manifest(table.labels, evenly(rows, count)), card.preprocess)


def evenly(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """At most so many rows, spread over all of them."""
    return rows if len(rows) <= most else tuple(rows[i * len(rows) // most] for i in range(most))


def read_pixels(manifest: Manifest, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Every image of a manifest, preprocessed: uint8 [M, 1, S, S]."""
    with TemporaryDirectory() as folder:
        squares = cached_images(manifest, spec, Path(folder))
        return np.concatenate(list(evaluation_batches(squares, range(len(manifest)), spec)))


def _images_gone(error: Exception) -> RunError:
    return RunError(
        f"{error}. An exported file is compared with PyTorch on real images, at first those of the run: "
        f"bring them back, or give others by --images manifest.csv"
    )
