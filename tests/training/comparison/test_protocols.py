"""The images that each protocol selects: counts, patients, nesting, the official table."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cbmir.errors import ManifestError, SplitError
from cbmir.labels import CHEXPERT_9, NIH_13, NIH_14, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.comparison import protocols
from cbmir.training.comparison.protocols import CHEXPERT, NIH, TABLE, draw, keep_training, select, sweep_sizes
from cbmir.training.readers.nih import read_entries
from cbmir.training.splits import check_splits, patients_in_two_splits

SMALL_NIH = replace(NIH, queries=20)
SMALL_CHEXPERT = replace(CHEXPERT, queries=20)


@pytest.fixture(autouse=True)
def _few_validation_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "VALIDATION", 10)


def _nih(patients: int, images: int) -> Manifest:
    """A manifest in which a third of each patient's images shows no finding, a third only Hernia, the others Mass."""
    mass, hernia = (tuple(int(name == shown) for name in NIH_14) for shown in ("Mass", "Hernia"))
    kinds = (mass, hernia, tuple(0 for _ in NIH_14))
    rows = [Row(Path(f"{p}_{i}.png"), str(p), kinds[i % 3]) for p in range(patients) for i in range(images)]
    return Manifest(LabelSet(NIH_14), tuple(rows))


def _table(patients: int) -> Manifest:
    splits = ("train", "train", "train", "val", "test")
    rows = tuple(
        Row(Path(f"{p}_{i}.png"), str(p), (p % 2,), split=splits[p % 5]) for p in range(patients) for i in (0, 1)
    )
    return Manifest(LabelSet(("Mass",)), rows)


def counts(manifest: Manifest) -> dict[str, int]:
    return dict(Counter(row.split for row in manifest))


def test_nih_takes_exact_counts_of_images_with_one_of_the_13() -> None:
    selected = select(SMALL_NIH, _nih(100, 9), 1, 0, 0, 50)
    assert counts(selected) == {"train": 50, "test": 20, "val": 10}
    assert selected.labels.names == NIH_13
    assert all(1 in row.labels for row in selected)
    check_splits(selected)
    assert selected.about["selection"]["seed"] == 1
    assert select(SMALL_NIH, _nih(100, 9), 1, 0, 0, 50) == selected
    assert select(SMALL_NIH, _nih(100, 9), 2, 0, 0, 50) != selected


def test_chexpert_includes_images_without_findings_and_uncertain_ones() -> None:
    kinds = [(0,) * 9, (-1,) + (0,) * 8, (1,) * 9]
    rows = tuple(Row(Path(f"{p}.png"), str(p), kinds[p % 3]) for p in range(90))
    selected = select(SMALL_CHEXPERT, Manifest(LabelSet(CHEXPERT_9), rows), 0, 0, 0, 60)
    assert counts(selected) == {"train": 60, "test": 20, "val": 10}
    assert {row.labels for row in selected} == set(kinds)


def test_too_few_images_are_reported_with_the_number_missing() -> None:
    # Ten patients have six images with Mass each: four patients are for queries, two for val, four for train.
    with pytest.raises(SplitError, match="ran out 56 short of the 80 for train"):
        select(SMALL_NIH, _nih(10, 18), 0, 0, 0, 80)
    with pytest.raises(ManifestError, match="Atelectasis"):
        select(NIH, _table(10), 0, 0, 0, 80)


def test_smaller_training_sets_are_part_of_larger_ones_and_equal_a_direct_draw() -> None:
    whole = select(SMALL_NIH, _nih(100, 9), 3, 0, 0, 64)
    before: set[Path] = set()
    for size in (8, 16, 64):
        kept = keep_training(whole, size, seed=3)
        own = {row.image for row in kept.split("train")}
        assert len(own) == size and before <= own
        assert kept.rows == select(SMALL_NIH, _nih(100, 9), 3, 0, 0, size).rows
        before = own
    with pytest.raises(SplitError, match="expected 65 training images, found 64"):
        keep_training(whole, 65, seed=3)


def test_a_table_keeps_its_splits_or_has_the_same_folds_for_every_seed() -> None:
    table = _table(50)
    assert select(TABLE, table, 0, 0, 0, 0) == table
    folds = [select(TABLE, table, seed, 2, 5, 0) for seed in (0, 1)]
    assert folds[0] == folds[1]
    assert counts(folds[0])["test"] == 20
    leaking = table.with_splits(["train", "test"] * 50)
    with pytest.raises(SplitError, match="each patient in one split"):
        select(TABLE, leaking, 0, 0, 0, 0)
    with pytest.raises(SplitError, match="none in val and test; use --folds"):
        select(TABLE, table.split("train"), 0, 0, 0, 0)


def test_draw_takes_part_of_the_last_patient_and_shares_none() -> None:
    rows = tuple(Row(Path(f"{i}.png"), str(i // 4), (1,)) for i in range(40))
    drawn = draw(Manifest(LabelSet(("Mass",)), rows), {"test": 5, "train": 10}, seed=0, eligible=lambda row: True)
    assert counts(drawn) == {"test": 5, "train": 10}
    check_splits(drawn)


def test_sizes_of_a_sweep() -> None:
    assert sweep_sizes(CHEXPERT, []) == (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
    assert NIH.size == NIH.sizes[-1] == 12_000 and CHEXPERT.size == 4_096
    assert sweep_sizes(TABLE, [_table(100), _table(50)]) == (7, 15, 30, 0)  # 60 of its images are for train


@pytest.mark.slow
def test_nih_on_the_official_table(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    table = read_entries(shared / "nih" / "Data_Entry_2017_v2020.full.csv.gz")
    selected = select(NIH, table, 0, 0, 0, NIH.size)
    assert counts(selected) == {"train": 12_000, "test": 1_000, "val": 1_000}
    assert all(1 in row.labels for row in selected)
    assert len(selected.labels) == 13
    assert patients_in_two_splits(selected) == {}
