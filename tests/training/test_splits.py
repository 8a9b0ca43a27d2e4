from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from cbmir.errors import SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.splits import assign_splits, check_splits, fold_splits, patients_in_two_splits

PATIENTS = [f"p{i % 100}" for i in range(250)]


def _splits_of(patients: list[str], splits: list[str]) -> dict[str, set[str]]:
    found = defaultdict(set)
    for patient, split in zip(patients, splits, strict=True):
        found[patient].add(split)
    return found


def test_fractions_are_of_patients_and_no_patient_is_in_two() -> None:
    found = _splits_of(PATIENTS, assign_splits(PATIENTS, seed=0))
    assert all(len(splits) == 1 for splits in found.values())
    assert Counter(split for splits in found.values() for split in splits) == {"train": 70, "val": 10, "test": 20}


def test_splits_depend_on_the_seed_and_not_on_the_order_of_rows() -> None:
    forward = assign_splits(PATIENTS, seed=3)
    assert assign_splits(PATIENTS[::-1], seed=3) == forward[::-1]
    assert assign_splits(PATIENTS, seed=4) != forward


def test_splits_are_the_same_on_every_machine() -> None:
    # sha256sum of "0:d" starts with 7d, "0:a" 9d, "0:c" be, "0:b" e0: two for train, then one each
    assert assign_splits(["a", "b", "c", "d"], seed=0) == ["train", "test", "val", "train"]


def test_three_patients_fill_three_splits() -> None:
    assert sorted(assign_splits(["a", "b", "c"], seed=0)) == ["test", "train", "val"]


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (1.0, 0.0, 0.0)])
def test_bad_fractions_are_refused(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(SplitError, match="three fractions"):
        assign_splits(PATIENTS, seed=0, fractions=fractions)


def test_two_patients_are_too_few() -> None:
    with pytest.raises(SplitError, match="at least 3 patients"):
        assign_splits(["a", "a", "b"], seed=0)


def test_each_patient_is_tested_in_exactly_one_fold() -> None:
    tested: Counter[str] = Counter()
    validated = []
    for fold in range(1, 6):
        found = _splits_of(PATIENTS, fold_splits(PATIENTS, fold=fold, folds=5))
        assert all(len(splits) == 1 for splits in found.values())
        tested.update(patient for patient, splits in found.items() if splits == {"test"})
        validated.append({patient for patient, splits in found.items() if splits == {"val"}})
    assert tested == Counter(dict.fromkeys(PATIENTS, 1))
    assert [len(patients) for patients in validated] == [10] * 5
    assert len(set.union(*validated)) > 20  # drawn again for each fold


@pytest.mark.parametrize(("fold", "folds"), [(0, 5), (6, 5), (1, 1)])
def test_a_fold_out_of_range_is_refused(fold: int, folds: int) -> None:
    with pytest.raises(SplitError, match="fold from 1"):
        fold_splits(PATIENTS, fold=fold, folds=folds)


def test_too_few_patients_for_the_folds() -> None:
    with pytest.raises(SplitError, match="at least 5 patients"):
        fold_splits(["a", "b"], fold=5, folds=5)
    with pytest.raises(SplitError, match="validation fraction"):
        fold_splits(PATIENTS, fold=1, folds=5, val_fraction=1.0)


def _manifest(*places: tuple[str, str]) -> Manifest:
    rows = tuple(Row(Path(f"/{i}.png"), patient, (1,), split=split) for i, (patient, split) in enumerate(places))
    return Manifest(LabelSet(("Mass",)), rows)


def test_a_patient_in_two_splits_is_named() -> None:
    leaking = _manifest(("a", "train"), ("a", "test"), ("b", "val"), ("b", ""), ("c", "test"))
    assert patients_in_two_splits(leaking) == {"a": ("test", "train")}
    with pytest.raises(SplitError, match=r"a \(test and train\)"):
        check_splits(leaking)


def test_rows_without_a_split_are_ignored() -> None:
    check_splits(_manifest(("a", "train"), ("a", ""), ("b", "test")))
