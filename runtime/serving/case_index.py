"""From case ids back to the entries that they stand for, without trying every id of the gallery each time."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.dicom_output.uids import case_id
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.serving.state import GalleryState

_AGAIN = 60.0  # seconds until a gallery without generations is read again


class CaseIndex:
    """The case ids of a gallery: made when one is first asked for, and again when one is not found and the gallery has
    changed since. A gallery without generations (Milvus) may have changed at any time: for one that is not found it is
    read again, at most once a minute. It takes some 90 bytes an image. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uuid = ""
        self._state: GalleryState | None = None  # as of which the rest is
        self._time = 0.0  # when it was read
        self._codes: NDArray[np.uint64] = np.empty(0, np.uint64)  # sorted
        self._ids: list[str] = []  # in the order of the codes

    def id_of(self, gallery: AnyGallery, case: str) -> str | None:
        """The id of an entry, which may be gone by now; None where there is none. Raises GalleryError."""
        with self._lock:
            if self._uuid != gallery.uuid:
                self._read(gallery, GalleryState.of(gallery))
            found = self._look_up(case)
            if found is None and self._is_stale(state := GalleryState.of(gallery)):
                self._read(gallery, state)
                found = self._look_up(case)
            return found

    def _is_stale(self, state: GalleryState) -> bool:
        return state != self._state or (state.generation is None and monotonic() - self._time >= _AGAIN)

    def _read(self, gallery: AnyGallery, state: GalleryState) -> None:
        ids = gallery.ids()
        codes = np.fromiter((_code(case_id(gallery, one)) for one in ids), np.uint64, len(ids))
        order = codes.argsort()
        self._codes, self._ids = codes[order], [ids[number] for number in order]
        self._uuid, self._state, self._time = gallery.uuid, state, monotonic()

    def _look_up(self, case: str) -> str | None:
        code = np.uint64(_code(case))
        position = int(self._codes.searchsorted(code))
        return self._ids[position] if position < len(self._ids) and self._codes[position] == code else None


def _code(case: str) -> int:
    return int(case.removeprefix("case-"), 16)
