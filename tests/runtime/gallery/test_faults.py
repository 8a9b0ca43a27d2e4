"""Kill writers of a gallery at random times, and damage its files at random places.

After a kill, acknowledged writes are there, and unfinished ones completely or not at all. With damage, the process does
not crash, and every answer is correct or an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cbmir.runtime.gallery import search
from gallery_faults import Server, damage_files, kill_builders, kill_writers, make_undamaged
from gallery_process import let_the_index_propose_all


@pytest.fixture(autouse=True)
def exact_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AND", "_AND_RANKED"):
        monkeypatch.setattr(search, name, getattr(search, name))  # restored at the end
    let_the_index_propose_all()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.mark.slow
def test_a_killed_writer_loses_nothing(server: Server, tmp_path: Path) -> None:
    assert len(list(kill_writers(server, tmp_path / "g", 20))) == 20


@pytest.mark.release
def test_a_writer_killed_at_300_moments_loses_nothing(server: Server, tmp_path: Path) -> None:
    assert len(list(kill_writers(server, tmp_path / "g", 300))) == 300


@pytest.mark.slow
def test_a_killed_build_is_complete_or_absent(server: Server, tmp_path: Path) -> None:
    assert len(list(kill_builders(server, tmp_path, 10))) == 10


@pytest.mark.release
def test_a_build_killed_at_60_moments_is_complete_or_absent(server: Server, tmp_path: Path) -> None:
    assert len(list(kill_builders(server, tmp_path, 60))) == 60


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery as a killed process leaves it: with older derived files, and a log with the latest writes."""
    folder = tmp_path_factory.mktemp("faults") / "undamaged"
    make_undamaged(folder)
    assert list(folder.glob("derived-*/index.usearch"))
    return folder


@pytest.mark.slow
def test_damage_never_gives_a_wrong_answer(server: Server, undamaged: Path, tmp_path: Path) -> None:
    assert len(list(damage_files(server, undamaged, tmp_path, 40))) == 40


@pytest.mark.release
def test_200_cases_of_damage_never_give_a_wrong_answer(server: Server, undamaged: Path, tmp_path: Path) -> None:
    assert len(list(damage_files(server, undamaged, tmp_path, 200))) == 200
