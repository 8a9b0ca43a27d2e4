"""A finder that can be replaced while it is in use: how a service takes a new model or gallery without a stop.

>>> live = ReloadableFinder(lambda: Finder.open("model.onnx", "gallery/"))        # doctest: +SKIP
>>> with live.use() as finder:                                              # doctest: +SKIP
...     finder.analyze("chest.png")
>>> live.reload()           # whoever is in `use` ends with the old one     # doctest: +SKIP

A gallery that was replaced on the disk is refused by whoever had it open (GalleryReplacedError) until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cbmir.errors import NotReadyError
from cbmir.process import Closing
from cbmir.runtime.finder import Finder
from cbmir.runtime.logs import log, told


@dataclass(eq=False)
class _Held:
    """A finder, how many use it, and whether the last of them is to close it."""

    finder: Finder
    users: int = 0
    retired: bool = False


class ReloadableFinder(Closing):
    """A Finder that can be replaced while it is in use: who has begun with the old one ends with it.

    All of it is safe from many threads.
    """

    def __init__(self, open: Callable[[], Finder], *, at_once: bool = True) -> None:  # noqa: A002 - what it does
        """Opens a finder and warms it up, unless `at_once` is False: then the first `reload` does.

        Raises whatever `open` does, and what a first analysis may.
        """
        self._open = open
        self._held: _Held | None = None
        self._generation = 0
        self._closed = False
        self._lock = threading.Lock()  # of the fields above, for moments only
        self._reloading = threading.Lock()
        if at_once:
            self.reload()

    @contextmanager
    def use(self) -> Iterator[Finder]:
        """The finder of now, which stays open until the block ends. Raises NotReadyError where none is open."""
        with self._lock:
            held = self._held
            if held is None:
                raise NotReadyError("expected an open model, found none: it is being opened, or was closed; try again")
            held.users += 1
        try:
            yield held.finder
        finally:
            with self._lock:
                held.users -= 1
                is_last = held.retired and not held.users
            if is_last:
                _close(held.finder)

    def reload(self) -> None:
        """Open and warm up a finder, then put it in the old one's place, which closes with its last user.

        Until it is warm the old one answers. Raises what `open` and a first analysis raise, and keeps the old one then.
        One reload waits for another. Raises NotReadyError once closed.
        """
        with self._reloading:
            with self._lock:
                self._check_open()
            finder = self._open()
            try:
                warm_up(finder)
                with self._lock:
                    self._check_open()
                    old, self._held = self._held, _Held(finder)
                    self._generation += 1
            except BaseException:
                finder.close()
                raise
            self._retire(old)

    @property
    def generation(self) -> int:
        """How many finders have been opened: 1 for the first, 0 where there has been none."""
        return self._generation

    @property
    def ready(self) -> bool:
        """Whether a finder is open and warm."""
        return self._held is not None

    def close(self) -> None:
        """Close the finder once its last user is done; nothing can be used from now on. May be called again."""
        with self._lock:
            self._closed = True
            old, self._held = self._held, None
        self._retire(old)

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("expected a service that goes on, found it closed")

    def _retire(self, held: _Held | None) -> None:
        if held is None:
            return
        with self._lock:
            held.retired = True
            is_unused = not held.users
        if is_unused:
            _close(held.finder)


def _close(finder: Finder) -> None:
    """A failure is told and goes no further: who used it has an answer, and what took its place works."""
    try:
        finder.close()
    except Exception as error:  # noqa: BLE001 - told
        log.error("a model that is no longer used could not be closed", extra={"fields": told(error)})


def warm_up(finder: Finder) -> None:
    """Analyse a grey ramp, so that the first request does not wait for what is set up lazily: graphs, the gallery's
    vectors, what is usual in it. Raises what an analysis raises."""
    side = max(finder.card.preprocess.crop, 64)
    ramp = np.linspace(0, 255, side * side).astype(np.uint8).reshape(side, side)
    finder.analyze(ramp, 1, exclude_same_patient=False)
