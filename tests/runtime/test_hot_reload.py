"""A finder that is replaced while it is in use."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import EngineError, GalleryReplacedError, ModelError, NotReadyError
from cbmir.runtime import Finder
from cbmir.runtime.hot_reload import ReloadableFinder

Xray = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def gallery(tiny_gallery: Path, tmp_path: Path) -> Path:
    """A gallery that tests may replace."""
    return Path(shutil.copytree(tiny_gallery, tmp_path / "gallery"))


@pytest.fixture
def live(tiny_model: Path, gallery: Path) -> Iterator[ReloadableFinder]:
    with ReloadableFinder(lambda: Finder.open(tiny_model, gallery, threads=1)) as live:
        yield live


def is_closed(finder: Finder) -> bool:
    try:
        finder.engine.warm_up()
    except EngineError as error:
        return "closed" in str(error)
    return False


def test_it_opens_immediately(live: ReloadableFinder, make_xray: Xray) -> None:
    assert (live.ready, live.generation) == (True, 1)
    with live.use() as finder:
        assert len(finder.analyze(make_xray(1), 3).neighbours) == 3


def test_it_opens_later_on_request(tiny_model: Path) -> None:
    with ReloadableFinder(lambda: Finder.open(tiny_model, threads=1), at_once=False) as live:
        assert (live.ready, live.generation) == (False, 0)
        with pytest.raises(NotReadyError), live.use():
            pass
        live.reload()
        assert (live.ready, live.generation) == (True, 1)


def test_a_new_finder_is_warm_before_it_is_used(tiny_model: Path) -> None:
    opened: list[Finder] = []
    analysed: list[bool] = []

    class Watched(Finder):
        def analyze(self, *arguments: object, **more: object) -> object:  # type: ignore[override]
            analysed.append(live.ready)
            return super().analyze(*arguments, **more)  # type: ignore[arg-type]

    live = ReloadableFinder(lambda: opened.append(Watched.open(tiny_model, threads=1)) or opened[-1], at_once=False)
    live.reload()
    assert analysed == [False]
    live.close()


def test_a_user_keeps_the_old_finder_during_a_reload(live: ReloadableFinder, make_xray: Xray) -> None:
    with live.use() as old:
        live.reload()
        with live.use() as new:
            assert new is not old
        assert live.generation == 2
        assert old.analyze(make_xray(1), 1).neighbours
        assert not is_closed(old)
    assert is_closed(old)
    assert not is_closed(new)


def test_an_unused_finder_is_closed_immediately(live: ReloadableFinder) -> None:
    with live.use() as old:
        pass
    live.reload()
    assert is_closed(old)


def test_the_last_of_several_users_closes_the_finder(live: ReloadableFinder) -> None:
    with live.use() as old:
        with live.use():
            live.reload()
        assert not is_closed(old)
    assert is_closed(old)


def test_a_failed_reload_keeps_the_old_finder(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(tiny_model, tmp_path / "model.onnx"))
    with ReloadableFinder(lambda: Finder.open(model, threads=1)) as live:
        model.unlink()
        with pytest.raises(ModelError, match="no such model file"):
            live.reload()
        assert (live.ready, live.generation) == (True, 1)
        with live.use() as finder:
            assert not is_closed(finder)


def test_a_finder_that_fails_to_warm_up_is_closed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Finder] = []

    def refuse(*_: object, **__: object) -> None:
        raise EngineError("it overflows")

    def open_broken() -> Finder:
        opened.append(Finder.open(tiny_model, threads=1))
        monkeypatch.setattr(opened[-1], "analyze", refuse)
        return opened[-1]

    with pytest.raises(EngineError, match="overflows"):
        ReloadableFinder(open_broken)
    assert is_closed(opened[0])


def test_a_finder_that_fails_to_close_does_not_fail_a_reload(
    live: ReloadableFinder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Finder) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(Finder, "close", refuse)
        live.reload()
        with live.use():
            live.reload()
    assert live.generation == 3
    (first, second) = caplog.records
    assert first.fields["error"] == second.fields["error"] == "OSError"  # type: ignore[attr-defined]
    assert "disk" not in caplog.text


def test_nothing_is_opened_after_close(live: ReloadableFinder) -> None:
    with live.use() as finder:
        live.close()
        assert not is_closed(finder)
    assert is_closed(finder)
    live.close()
    assert not live.ready
    with pytest.raises(NotReadyError):
        live.reload()
    with pytest.raises(NotReadyError), live.use():
        pass


def test_a_replaced_gallery_is_reported_until_a_reload(live: ReloadableFinder, gallery: Path, make_xray: Xray) -> None:
    shutil.copytree(gallery, gallery.with_name("new"))
    shutil.rmtree(gallery)
    gallery.with_name("new").rename(gallery)
    with live.use() as finder, pytest.raises(GalleryReplacedError, match="open it again"):
        finder.analyze(make_xray(1), 1)
    live.reload()
    with live.use() as finder:
        assert finder.analyze(make_xray(1), 1).neighbours


def test_many_threads_use_it_during_reloads(live: ReloadableFinder, make_xray: Xray) -> None:
    xray, stop = make_xray(3), threading.Event()
    with live.use() as finder:
        expected = [one.id for one in finder.analyze(xray, 5).neighbours]

    def use() -> int:
        count = 0
        while not stop.is_set():
            with live.use() as finder:
                assert [one.id for one in finder.analyze(xray, 5).neighbours] == expected
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        users = [pool.submit(use) for _ in range(4)]
        try:
            for _ in range(5):
                live.reload()
        finally:
            stop.set()
        assert all(user.result() for user in users)
    assert live.generation == 6
