"""`cbmir parity`: do two models answer alike? Any two of a run and exported files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cbmir.card import ModelCard
from cbmir.errors import UserError
from cbmir.export.parity import LIMITS, Limits, Parity, compare
from cbmir.export.samples import sample_of
from cbmir.manifest import read_manifest
from cbmir.training.report import opened_model, splits_of

log = logging.getLogger("cbmir")

#: From the finest to the coarsest: two files are held to the limits of the coarser.
_PRECISIONS = ("float32", "float16", "bfloat16", "int8")


def compare_models(a: Path, b: Path, manifest: Path, tolerances: Sequence[str] = ()) -> Parity:
    """How far the answers of model `b` are from those of `a`, on images of a manifest.

    Queries are its val and test images (all, where it has neither), those of `a`'s fold where it was trained on this
    manifest; they search those and the training images. The limits are those of the coarser precision, for files of one
    model; for two models there are none but `tolerances`. Raises ManifestError, SplitError, ModelError, and UserError
    for models that cannot be compared.
    """
    table = read_manifest(manifest)
    with opened_model(a) as (card, embedder):
        sample = sample_of(splits_of(card, table), card)
        reference = sample.answers(embedder, a.name)
    with opened_model(b) as (other, embedder):
        _check_comparable(card, other)
        found = sample.answers(embedder, b.name)
    return compare(reference, found, sample.cases, limits_of(card, other).changed(*tolerances))


def limits_of(a: ModelCard, b: ModelCard) -> Limits:
    """The limits for two files of one model; none for two models, also where they share an embedding space."""
    if a.weights != b.weights:
        log.warning("These are two models, of the embedding spaces %s and %s.", a.fingerprint, b.fingerprint)
        return Limits()
    return LIMITS[max(a.precision, b.precision, key=_PRECISIONS.index)]


def _check_comparable(a: ModelCard, b: ModelCard) -> None:
    if a.labels.names != b.labels.names:
        raise UserError(f"expected two models of the same labels, found {', '.join(a.labels.names)} and "
                        f"{', '.join(b.labels.names)}")  # fmt: skip
    if a.preprocess != b.preprocess:
        raise UserError(f"expected two models that take images alike, found {a.preprocess} and {b.preprocess}")
