"""Damaged RUN folders: errors name the file and what was expected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbmir.errors import RunError
from cbmir.training.harness import _stopped_early
from cbmir.training.run import COLUMNS, RunFolder

HEADER = ",".join(COLUMNS)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "checkpoints").mkdir()
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"a,b\n1,2\n", b"\xff\xfe", f"{HEADER}\n1,2\n".encode(), f"{HEADER}\nx,1,1,1,1,1,1\n".encode(),
     f"{HEADER}\n1,1,1,1,1,1,x\n".encode(), f"{HEADER}\n1,1,1,1,1,1,1,1\n".encode()],
)  # fmt: skip
def test_unreadable_epochs(run: RunFolder, text: bytes) -> None:
    run.metrics.write_bytes(text)
    with pytest.raises(RunError, match=r"metrics\.csv: expected the epochs of a run, found"):
        run.read_epochs()


def test_a_pipe_of_epochs_is_refused(run: RunFolder) -> None:
    os.mkfifo(run.metrics)
    with pytest.raises(RunError, match="a device or pipe"):
        run.read_epochs()


def test_missing_values_of_epochs(run: RunFolder) -> None:
    run.append_epoch(dict.fromkeys(COLUMNS, 1) | {"val_auc": "", "val_choice": float("nan")})
    (row,) = run.read_epochs()
    assert (row["epoch"], row["val_auc"]) == ("1", "")


def test_a_damaged_checkpoint_is_named(run: RunFolder) -> None:
    run.last.write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match=r"last\.ckpt: expected a checkpoint"):
        _stopped_early(run.last)
