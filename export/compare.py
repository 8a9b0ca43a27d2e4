"""`cbmir parity`: compare the answers of two models (runs or exported files) on real images."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.card import OF_PHANTOMS, ModelCard
from cbmir.errors import ManifestError, RunError, UserError
from cbmir.export.parity import LIMITS, NEIGHBOURS, Cases, Parity, ParityLimits, measure_parity
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engines.base import Outputs
from cbmir.training.config import TrainConfig
from cbmir.training.dataset import cached_images, evaluation_batches
from cbmir.training.evaluate import Embedder, labels_of, opened_model, splits_of
from cbmir.training.run import training_manifest
from cbmir.training.splits import EVERY_IMAGE

log = logging.getLogger("cbmir")

#: Maximum number of images to compare: queries from val and test, and training images that they search.
QUERIES, GALLERY = 600, 1400
_BATCH = 32


@dataclass(frozen=True, eq=False)
class Sample:
    """Real images, uint8 [M, 1, S, S], and their labels and patients."""

    pixels: NDArray[np.uint8]
    cases: Cases

    def answers(self, embedder: Embedder, what: str) -> Outputs:
        """Return the model's embeddings and scores for the images, with a progress bar."""
        starts = tqdm(range(0, len(self.pixels), _BATCH), desc=what, unit="batch", disable=None)
        return Outputs(*embedder(self.pixels[start : start + _BATCH] for start in starts))


def run_sample(config: TrainConfig, card: ModelCard, images: Path | None) -> Sample:
    """Read the held-out and training images of the run, or those of the manifest `images`.

    Raises RunError if the run's images are missing or changed, ManifestError or SplitError for the manifest.
    """
    with _explained(images, "An exported file is compared with PyTorch on real images", "--images"):
        if images:
            return sample_from(images, card)
        _warn_if_seen(card)
        return sample_of(training_manifest(config), card)


def sample_from(images: Path, card: ModelCard) -> Sample:
    """Read the images of a manifest file, with the splits of the model's fold. Raises ManifestError, SplitError."""
    table = read_manifest(images)
    if table.fingerprint == card.training.get("manifest_fingerprint"):
        _warn_if_seen(card)
    return sample_of(splits_of(card, table), card)


def _warn_if_seen(card: ModelCard) -> None:
    if card.training.get("fold") == EVERY_IMAGE:
        log.warning("No image was held out of the model's training: files are compared on images that it was trained "
                    "on, which lie further apart than new ones. Give others with --images.")  # fmt: skip


@contextmanager
def _explained(given: Path | None, why: str, option: str) -> Iterator[None]:
    """Add to an error about the run's images why they are needed, and which option replaces them."""
    try:
        yield
    except (ManifestError, RunError) as error:
        if given:
            raise
        raise RunError(
            f"{error}. {why}, by default those of the run: restore them, or give others with {option} manifest.csv"
        ) from error


def sample_of(manifest: Manifest, card: ModelCard) -> Sample:
    """Read the images of a manifest to compare a model on. Raises ManifestError."""
    if OF_PHANTOMS in card.notes:
        log.warning(OF_PHANTOMS)
    chosen, queries = choose(manifest)
    labels = labels_of(card, chosen)
    thresholds = [np.nan if threshold is None else threshold for threshold in card.thresholds]
    cases = Cases(queries, labels, [row.patient_id for row in chosen], thresholds)
    return Sample(read_pixels(chosen, card.preprocess), cases)


def choose(manifest: Manifest) -> tuple[Manifest, int]:
    """Return the images to compare, queries first, and the number of queries. Raises ManifestError for too few.

    Queries come from val and test (or from all rows if these splits are empty), the others from train; both are evenly
    spread.
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


def calibration_pixels(
    config: TrainConfig, card: ModelCard, manifest: Path | None, count: int, queries: Collection[str]
) -> NDArray[np.uint8]:
    """Return `calibration_of` the run's images, or of a manifest.

    Raises RunError if the run's images are missing or changed, ManifestError for the manifest.
    """
    with _explained(manifest, "int8 is calibrated on real images", "--calibrate"):
        table = read_manifest(manifest) if manifest else training_manifest(config)
        return calibration_of(table, card, count, queries)


def calibration_of(table: Manifest, card: ModelCard, count: int, queries: Collection[str]) -> NDArray[np.uint8]:
    """Read at most `count` images of a manifest to calibrate int8 on, uint8 [M, 1, S, S], evenly spread.

    They are training images (or all images if there is no train split), without the patients in `queries`, whose images
    test int8. Raises ManifestError.
    """
    rows = table.split("train").rows or table.rows
    others = tuple(row for row in rows if row.patient_id not in queries)
    if not others:
        log.warning("int8 is calibrated and checked on the same patients, since there are no others: it may do worse "
                    "on new ones.")  # fmt: skip
    return read_pixels(Manifest(table.labels, evenly(others or rows, count)), card.preprocess)


def evenly(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """Return at most `most` rows, evenly spread."""
    return rows if len(rows) <= most else tuple(rows[i * len(rows) // most] for i in range(most))


def read_pixels(manifest: Manifest, spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Read every image of a manifest, preprocessed: uint8 [M, 1, S, S]."""
    with TemporaryDirectory() as folder:
        squares = cached_images(manifest, spec, Path(folder))
        return np.concatenate(list(evaluation_batches(squares, range(len(manifest)), spec)))


def compare_models(a: Path, b: Path, manifest: Path, tolerances: Sequence[str] = ()) -> Parity:
    """Compare the answers of model `b` with those of `a` on the images of a manifest.

    Queries are its val and test images, or all images if it has neither. If `a` was trained on a fold of this manifest,
    the fold's splits apply. The queries and the training images are searched.

    Args:
        tolerances: Limits as NAME=NUMBER, for `ParityLimits.changed`. They change the limits of the coarser precision
            for two files of one model; for two different models they are the only limits.

    Raises:
        ManifestError, SplitError, ModelError: See the message.
        UserError: The models cannot be compared.
    """
    with opened_model(a) as (card, embedder):
        sample = sample_from(manifest, card)
        reference = sample.answers(embedder, a.name)
    with opened_model(b) as (other, embedder):
        if card.labels.names != other.labels.names:
            names = [", ".join(one.labels.names) for one in (card, other)]
            raise UserError(f"expected two models of the same labels, found {names[0]} and {names[1]}")
        if card.preprocess != other.preprocess:
            raise UserError(
                f"expected two models that preprocess images in the same way, found {card.preprocess} and "
                f"{other.preprocess}"
            )
        found = sample.answers(embedder, b.name)
    limits = limits_of(card, other).for_images(card, sample.cases)
    return measure_parity(reference, found, sample.cases, limits.changed(*tolerances))


def limits_of(a: ModelCard, b: ModelCard) -> ParityLimits:
    """Return the limits for two files of one model. Different models have none, even with one embedding space."""
    if a.weights != b.weights:
        log.warning("These two models have different embedding spaces, %s and %s.", a.fingerprint, b.fingerprint)
        return ParityLimits()
    return LIMITS[max(a.precision, b.precision, key=list(LIMITS).index)]
