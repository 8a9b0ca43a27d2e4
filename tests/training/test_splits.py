from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from cbmir.errors import SplitError
from cbmir.labels import NIH_13, NIH_14, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.protocols import nih_protocol
from cbmir.training.readers.nih import read_entries
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
    assert len(set.union(*validated)) > 20  # drawn anew for each fold


@pytest.mark.parametrize(("fold", "folds"), [(0, 5), (6, 5), (1, 1)])
def test_a_fold_that_is_not_there_is_refused(fold: int, folds: int) -> None:
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


def test_rows_without_a_split_leak_nothing() -> None:
    check_splits(_manifest(("a", "train"), ("a", ""), ("b", "test")))


def _nih(patients: int, images: int) -> Manifest:
    """Every third image of a patient shows nothing, every third Hernia alone, the others Mass."""
    mass, hernia = (tuple(int(name == shown) for name in NIH_14) for shown in ("Mass", "Hernia"))
    kinds = (mass, hernia, tuple(0 for _ in NIH_14))
    rows = [Row(Path(f"{p}_{i}.png"), str(p), kinds[i % 3]) for p in range(patients) for i in range(images)]
    return Manifest(LabelSet(NIH_14), tuple(rows))


def test_protocol_takes_exactly_what_it_says_and_only_images_with_one_of_the_13() -> None:
    selected = nih_protocol(_nih(100, 9), seed=1, training=50, queries=20, validation=10)
    assert Counter(row.split for row in selected) == {"train": 50, "test": 20, "val": 10}
    assert selected.labels.names == NIH_13
    assert all(1 in row.labels for row in selected)
    check_splits(selected)
    assert selected.about["protocol"]["seed"] == 1
    assert nih_protocol(_nih(100, 9), seed=1, training=50, queries=20, validation=10) == selected
    assert nih_protocol(_nih(100, 9), seed=2, training=50, queries=20, validation=10) != selected


def test_protocol_says_how_many_images_are_missing() -> None:
    with pytest.raises(SplitError, match="ran out 50 short of the 80 for train"):  # 10 patients x 6 - 20 - 10 = 30
        nih_protocol(_nih(10, 15), training=80, queries=10, validation=10)


def test_protocol_on_the_official_table(shared: Path) -> None:
    table = read_entries(shared / "nih" / "Data_Entry_2017_v2020.full.csv.gz")
    selected = nih_protocol(table, seed=0)
    assert Counter(row.split for row in selected) == {"train": 12_000, "test": 1_000, "val": 1_000}
    assert all(1 in row.labels for row in selected)
    assert len(selected.labels) == 13
    assert patients_in_two_splits(selected) == {}
