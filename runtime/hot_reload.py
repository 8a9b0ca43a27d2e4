"""A finder that can be replaced while it is in use, so that a service gets a new model or gallery without interruption.

>>> live = ReloadableFinder(lambda: Finder.open("model.onnx", "gallery/"))        # doctest: +SKIP
>>> with live.use() as finder:                                              # doctest: +SKIP
...     finder.analyze("chest.png")
>>> live.reload()           # a running `use` block keeps the old one       # doctest: +SKIP
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
from cbmir.runtime.logs import error_fields, fields, log


@dataclass(eq=False)
class _SharedFinder:
    """A finder and its number of users: the running `use` blocks, and the ReloadableFinder if it is the current one."""

    finder: Finder
    holders: int = 1


class ReloadableFinder(Closing):
    """A thread-safe Finder that can be replaced while in use. A `use` block keeps the finder that it began with."""

    def __init__(self, open: Callable[[], Finder], *, at_once: bool = True) -> None:  # noqa: A002 - what it does
        """Open a finder and warm it up; if `at_once` is False, the first `reload` does this. Raises as `reload`."""
        self._open = open
        self._current: _SharedFinder | None = None
        self.generation = 0  # how many finders have been opened
        self._closed = False
        self._lock = threading.Lock()  # guards the fields above, and is only held briefly
        self._reloading = threading.Lock()
        if at_once:
            self.reload()

    @contextmanager
    def use(self) -> Iterator[Finder]:
        """Yield the current finder, which stays open until the block ends. Raises NotReadyError without one."""
        with self._lock:
            shared = self._current
            if shared is None:
                raise NotReadyError("expected an open model, found none: it is being opened, or was closed; try again")
            shared.holders += 1
        try:
            yield shared.finder
        finally:
            self._let_go(shared)

    def reload(self) -> None:
        """Open and warm up a finder, then replace the old one, which closes with its last user.

        Raises:
            NotReadyError: This ReloadableFinder is closed.
            Exception: Anything that `open` or the first analysis raises. The old finder then stays.
        """
        with self._reloading:
            with self._lock:
                self._check_open()
            finder = self._open()
            try:
                warm_up(finder)
                with self._lock:
                    self._check_open()
                    old, self._current = self._current, _SharedFinder(finder)
                    self.generation += 1
            except BaseException:
                finder.close()
                raise
            self._let_go(old)

    @property
    def ready(self) -> bool:
        """Whether a finder is open and warm."""
        return self._current is not None

    def close(self) -> None:
        """Close the finder once its last user is done; it cannot be used after this. May be called again."""
        with self._lock:
            self._closed = True
            old, self._current = self._current, None
        self._let_go(old)

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("expected a running service, found it closed")

    def _let_go(self, shared: _SharedFinder | None) -> None:
        """Release a finder; its last holder closes it. Errors are only logged, because the users have their answers."""
        if shared is None:
            return
        with self._lock:
            shared.holders -= 1
            if shared.holders:
                return
        try:
            shared.finder.close()
        except Exception as error:  # noqa: BLE001 - logged
            log.error("a model that is no longer used could not be closed", extra=fields(**error_fields(error)))


def warm_up(finder: Finder) -> None:
    """Analyse a grey ramp, so that graphs, vectors and reference distances are loaded before the first request."""
    side = max(finder.card.preprocess.crop, 64)
    ramp = np.linspace(0, 255, side * side).astype(np.uint8).reshape(side, side)
    finder.analyze(ramp, 1, exclude_same_patient=False)
