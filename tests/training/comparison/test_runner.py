"""Cells as processes: failures, resuming, stopping, and concurrency."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cbmir.training.comparison import runner
from cbmir.training.comparison.cells import FACTS, FAILED, LOG, cell_folder
from cbmir.training.comparison.plan import Cell, Part, Plan
from cbmir.training.comparison.runner import environment, on_this_machine, run_cells

PLAN = Plan("table", "m.csv", "0" * 64, ("bce", "proxy", "itq"), seeds=1)
FINISH = "from pathlib import Path; Path(r'{folder}', 'cell.json').write_text('{{}}')"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Method -> the Python program that its cells run instead of training."""
    found = dict.fromkeys(("bce", "proxy", "itq"), FINISH)

    def command(report: Path, cell: Cell) -> list[str]:
        return [sys.executable, "-c", found[cell.method].format(folder=cell_folder(report, cell))]

    monkeypatch.setattr(runner, "command", command)
    return found


def test_every_cell_runs_once(programs: dict[str, str], tmp_path: Path) -> None:
    assert run_cells(tmp_path, PLAN, jobs=2) == 0
    assert all((tmp_path / "cells" / cell.name / FACTS).exists() for cell in PLAN.cells())
    programs["proxy"] = "raise SystemExit(3)"
    assert run_cells(tmp_path, PLAN) == 0, "finished cells are not run again"


def test_a_failed_cell_keeps_its_error_does_not_stop_the_rest_and_is_retried(
    programs: dict[str, str], tmp_path: Path
) -> None:
    programs["proxy"] = "import sys; print('Error: the loss became nan', file=sys.stderr); sys.exit(1)"
    assert run_cells(tmp_path, PLAN) == 1
    failed = json.loads((tmp_path / "cells/seed0/proxy-m2" / FAILED).read_text())
    assert failed == {"error": "the loss became nan", "exit": 1, "log": "seed0/proxy-m2/log.txt"}
    assert (tmp_path / "cells/seed0/itq" / FACTS).exists()
    programs["proxy"] = FINISH
    assert run_cells(tmp_path, PLAN) == 0
    assert not (tmp_path / "cells/seed0/proxy-m2" / FAILED).exists()


def test_a_killed_cell_is_reported(programs: dict[str, str], tmp_path: Path) -> None:
    programs["proxy"] = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_cells(tmp_path, PLAN) == 1
    assert "SIGKILL" in json.loads((tmp_path / "cells/seed0/proxy-m2" / FAILED).read_text())["error"]


def test_a_cell_that_exits_without_answers_has_failed(programs: dict[str, str], tmp_path: Path) -> None:
    programs["proxy"] = "print('nothing done')"
    assert run_cells(tmp_path, PLAN) == 1
    assert json.loads((tmp_path / "cells/seed0/proxy-m2" / FAILED).read_text())["error"] == "nothing done"


def test_methods_that_need_bce_wait_for_it(programs: dict[str, str], tmp_path: Path) -> None:
    programs["itq"] = (
        "from pathlib import Path; assert Path(r'{folder}').parent.joinpath('bce/cell.json').exists();" + FINISH
    )
    assert run_cells(tmp_path, PLAN, jobs=3) == 0


def test_stopping_ends_running_cells_and_starts_no_more(programs: dict[str, str], tmp_path: Path) -> None:
    """The second cell waits for a signal that only stopping sends; the third is never started."""
    programs["proxy"] = "import signal; signal.pause()"
    cells = [Cell(Part(0, 0, 0), name) for name in ("bce", "proxy", "itq")]
    run = on_this_machine(1)(tmp_path, cells)
    assert next(run) == (cells[0], 0)
    run.close()
    assert not (tmp_path / "cells/seed0/itq" / LOG).exists()
    assert not (tmp_path / "cells/seed0/proxy-m2" / FACTS).exists()


def test_no_signal_is_sent_to_a_finished_process(
    programs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have its id by now."""
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(group))
    assert run_cells(tmp_path, PLAN, jobs=2) == 0
    assert sent == []


def test_processes_side_by_side_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [environment(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "6", "4"]
    assert environment(0, 2)["OMP_NUM_THREADS"] == "4"
    alone = environment(0, 1)
    assert alone["CUDA_VISIBLE_DEVICES"] == "4,6" and "OMP_NUM_THREADS" not in alone
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(0, 2)["OMP_NUM_THREADS"] == "7"
