"""Splits by patient. A patient is never in two splits, and the same seed gives the same splits on every machine."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from cbmir.errors import RunError, SplitError
from cbmir.manifest import Manifest, Row

#: The value of `fold` with which every image trains.
EVERY_IMAGE = "all"


def shuffle_patients(patients: Iterable[str], *, seed: int | str) -> list[str]:
    """Sort the distinct patients by SHA-256("seed:patient"): random, but independent of Python's random generator."""
    return sorted(set(patients), key=lambda patient: hashlib.sha256(f"{seed}:{patient}".encode()).digest())


def assign_splits(
    patients: Sequence[str], *, seed: int, fractions: tuple[float, float, float] = (0.7, 0.1, 0.2)
) -> list[str]:
    """Assign each image to `train`, `val` or `test` by its patient.

    `patients` has one entry per image; `fractions` are of the patients, not of the images. Each split gets at least one
    patient. Raises SplitError for fewer than three patients, or fractions that are not above 0 or do not sum to 1.
    """
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise SplitError(f"expected three fractions above 0 that sum to 1, found {fractions}")
    order = shuffle_patients(patients, seed=seed)
    count = len(order)
    if count < 3:
        raise SplitError(
            f"expected at least 3 patients, one for each of train, val and test; found {count}; assign splits yourself"
        )
    train_end = min(max(round(count * fractions[0]), 1), count - 2)
    val_end = min(max(round(count * (fractions[0] + fractions[1])), train_end + 1), count - 1)
    split_of = {p: "train" if i < train_end else "val" if i < val_end else "test" for i, p in enumerate(order)}
    return [split_of[patient] for patient in patients]


def fold_splits(
    patients: Sequence[str], *, fold: int, folds: int, seed: int = 0, val_fraction: float = 0.125
) -> list[str]:
    """Return the splits of one fold of a cross-validation by patient: each patient is in `test` in exactly one fold.

    `fold` counts from 1. `val_fraction` of the fold's other patients, at least one, are `val`; they are drawn again for
    each fold. Raises SplitError for a fold outside 1..folds, or too few patients.
    """
    if folds < 2 or not 1 <= fold <= folds:
        raise SplitError(f"expected a fold from 1 to the number of folds (2 or more), found {fold}/{folds}")
    if not 0 < val_fraction < 1:
        raise SplitError(f"expected a validation fraction between 0 and 1, found {val_fraction}")
    order = shuffle_patients(patients, seed=seed)
    test = set(order[fold - 1 :: folds])
    rest = shuffle_patients(set(order) - test, seed=f"{seed}:{fold}")
    if not test or len(rest) < 2:
        raise SplitError(f"expected at least {max(folds, 3)} patients for {folds} folds, found {len(order)}")
    val = set(rest[: min(max(round(len(rest) * val_fraction), 1), len(rest) - 1)])
    return ["test" if p in test else "val" if p in val else "train" for p in patients]


def patients_in_two_splits(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Return the patients with images in more than one split, and these splits. Rows without a split do not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.split:
            found[row.patient_id].add(row.split)
    return {patient: tuple(sorted(splits)) for patient, splits in sorted(found.items()) if len(splits) > 1}


def check_splits(manifest: Manifest) -> None:
    """Raise SplitError if a patient is in two splits."""
    leaks = patients_in_two_splits(manifest)
    if leaks:
        named = ", ".join(f"{patient} ({' and '.join(splits)})" for patient, splits in list(leaks.items())[:3])
        more = f" and {len(leaks) - 3} more" if len(leaks) > 3 else ""
        raise SplitError(
            f"expected each patient in one split, found {len(leaks)} in two or more: {named}{more}; "
            f"split by patient, or leave the splits out to have them assigned"
        )


def with_fold(manifest: Manifest, fold: str) -> Manifest:
    """Return the manifest with the splits of fold "i/n" or EVERY_IMAGE, or unchanged for an empty string. Raises
    RunError for a fold of another form, SplitError as in `fold_splits` or for a patient in two splits."""
    if fold == EVERY_IMAGE:
        return manifest.with_splits(["train"] * len(manifest))
    if fold:
        number, _, folds = fold.partition("/")
        if not (number.isdigit() and folds.isdigit()):
            raise RunError(f"expected a fold such as 1/5, found {fold!r}")
        patients = [row.patient_id for row in manifest]
        manifest = manifest.with_splits(fold_splits(patients, fold=int(number), folds=int(folds)))
    check_splits(manifest)
    return manifest
