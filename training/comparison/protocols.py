"""Selection of the images for training, validation and queries: the paper's two protocols, and your own table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cbmir.errors import SplitError
from cbmir.labels import CHEXPERT_9, NIH_13
from cbmir.manifest import Manifest, Row
from cbmir.training.readers.common import keep_labels
from cbmir.training.splits import shuffle_patients, with_fold

#: Number of images that determine epoch, thresholds and calibration (the paper has none).
VALIDATION = 1_000


@dataclass(frozen=True)
class Protocol:
    """The set-up of a comparison. `labels` is empty for the manifest's own. `sizes` are the training-set sizes of a
    sweep, `size` is the one without a sweep; a table has neither. With `negatives`, images without a finding take part.
    `queries` is the number of queries."""

    name: str
    title: str
    k: int
    negatives: bool
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    size: int = 0
    queries: int = 0


NIH = Protocol(
    "nih", "NIH ChestX-ray14, the paper's Table 1", k=100, negatives=False, labels=NIH_13,
    sizes=(1_024, 2_048, 4_096, 8_192, 12_000), size=12_000, queries=1_000,
)  # fmt: skip
CHEXPERT = Protocol(
    "chexpert", "CheXpert, the paper's Table 2", k=10, negatives=True, labels=CHEXPERT_9,
    sizes=(1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536), size=4_096, queries=1_000,
)  # fmt: skip
TABLE = Protocol("table", "your own table", k=10, negatives=True)
PROTOCOLS = {protocol.name: protocol for protocol in (NIH, CHEXPERT, TABLE)}


def select(protocol: Protocol, manifest: Manifest, seed: int, fold: int, folds: int, size: int) -> Manifest:
    """Select the images of one part of the benchmark, by patient and `seed`.

    From NIH and CheXpert, `size` training images are drawn for each seed; the published splits are ignored, and NIH
    images without a finding are left out. A table keeps its splits, or is divided into `folds` (0 for none), which are
    the same for every seed, with `fold` as the queries; all of its training images are kept. Splits share no patients.
    Raises SplitError if there are too few images or a split is empty, ManifestError if a label is missing.
    """
    if protocol.labels:
        manifest = keep_labels(manifest, protocol.labels)
        wanted = {"test": protocol.queries, "val": VALIDATION, "train": size}
        return draw(manifest, wanted, seed=seed, eligible=lambda row: protocol.negatives or 1 in row.labels)
    manifest = with_fold(manifest, f"{fold}/{folds}" if folds else "")
    empty = [name for name in ("train", "val", "test") if not manifest.split(name).rows]
    if empty:
        raise SplitError(
            f"expected images in the splits train, val and test, found none in {' and '.join(empty)}; use --folds 5"
        )
    return manifest


def draw(manifest: Manifest, wanted: dict[str, int], *, seed: int, eligible: Callable[[Row], bool]) -> Manifest:
    """Draw `wanted` eligible images for each split, in the order of `wanted`, patient by patient.

    A patient's images beyond the wanted number are left out. Raises SplitError if there are too few images.
    """
    split_of: dict[int, str] = {}
    patients = iter(_images_by_patient(manifest, eligible, seed))
    for split, count in wanted.items():
        left = count
        while left > 0:
            images = next(patients, None)
            if images is None:
                asked = ", ".join(f"{number:,} for {name}" for name, number in wanted.items())
                raise SplitError(
                    f"expected images of different patients ({asked}), ran out {left:,} short of the {count:,} for "
                    f"{split}; the protocol needs the whole data set, 'cbmir benchmark table' takes any"
                )
            split_of.update(dict.fromkeys(images[:left], split))
            left -= len(images[:left])
    rows = tuple(replace(row, split=split_of[i]) for i, row in enumerate(manifest) if i in split_of)
    return replace(manifest, rows=rows, about=manifest.about | {"selection": {"seed": seed, **wanted}})


def keep_training(manifest: Manifest, size: int, *, seed: int) -> Manifest:
    """Keep only `size` training images, patient by patient: with the same seed, a subset of every larger set, as in
    `draw`. Raises SplitError if there are too few."""
    images = _images_by_patient(manifest, lambda row: row.split == "train", seed)
    order = [position for positions in images for position in positions]
    if len(order) < size:
        raise SplitError(f"expected {size:,} training images, found {len(order):,}; take smaller sizes")
    dropped = set(order[size:])
    return replace(manifest, rows=tuple(row for i, row in enumerate(manifest) if i not in dropped))


def sweep_sizes(protocol: Protocol, selections: Sequence[Manifest]) -> tuple[int, ...]:
    """Return the training-set sizes of a sweep: the protocol's, or an eighth, a quarter, half and all (0) images.

    Raises SplitError if an eighth is less than two images.
    """
    if protocol.sizes:
        return protocol.sizes
    least = min(len(selection.split("train")) for selection in selections)
    if least < 16:
        raise SplitError(f"expected 16 training images or more for a sweep over their number, found {least}")
    return (least // 8, least // 4, least // 2, 0)


def _images_by_patient(manifest: Manifest, eligible: Callable[[Row], bool], seed: int) -> list[list[int]]:
    """Return the positions of the eligible rows of each patient, in this seed's order of patients."""
    images_of: dict[str, list[int]] = {}
    for position, row in enumerate(manifest):
        if eligible(row):
            images_of.setdefault(row.patient_id, []).append(position)
    return [images_of[patient] for patient in shuffle_patients(images_of, seed=seed)]
