"""Typed access to the tags of a DICOM dataset, with messages that never name a patient.

pydicom's own messages are not passed on, since they quote whatever value they trip over.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbmir.errors import DicomImageError

if TYPE_CHECKING:
    from pydicom import Dataset


LARGE = 2**20  # bytes: nothing that is read here but pixels has so many
_UNDEFINED = 2**32 - 1  # length of a sequence that says where it ends

_LIBRARIES = ("pydicom", "highdicom", "pylibjpeg", "libjpeg", "openjpeg", "rle")
_HERE = threading.local()


def _is_heard(_: logging.LogRecord) -> bool:
    return not getattr(_HERE, "unlogged", False)


@contextmanager
def pydicom_unlogged() -> Iterator[None]:
    """Keep what pydicom and its codecs log in this thread out of the logs: they quote the values of a patient's tags.

    A logger's filter does not see what its children log, so each has one. It stays there: to take it away while another
    thread logs could let a record through.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.split(".", 1)[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_is_heard)
    before = getattr(_HERE, "unlogged", False)
    _HERE.unlogged = True
    try:
        yield
    finally:
        _HERE.unlogged = before


def read_errors() -> tuple[type[Exception], ...]:
    """All that pydicom and its codecs raise on damaged content (a fuzz test holds this list).

    Not MemoryError: sizes are checked first, so that it says nothing of the file, which may be read another time.
    """
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (
        BytesLengthException, InvalidDicomError, OSError, ValueError, TypeError, LookupError, AttributeError, EOFError,
        ArithmeticError, RuntimeError, struct.error, zlib.error,
    )  # fmt: skip


def tag_name(keyword: str) -> str:
    """`Modality` -> `Modality (0008,0060)`."""
    from pydicom.datadict import tag_for_keyword

    tag = tag_for_keyword(keyword) or 0
    return f"{keyword} ({tag >> 16:04X},{tag & 0xFFFF:04X})"


class Tags:
    """One dataset being read: typed access to its tags, and the warnings met on the way."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name
        self.warnings: list[str] = []

    def value(self, keyword: str) -> Any:
        """A tag's value, None where it is absent or empty. DicomImageError for one that is damaged or huge."""
        from pydicom.datadict import tag_for_keyword

        try:
            element = self.dataset.get_item(tag_for_keyword(keyword) or 0, keep_deferred=True)
            if LARGE < getattr(element, "length", 0) != _UNDEFINED:  # not taken apart yet, which would take its time
                raise ValueError("too long")
            value = self.dataset.get(keyword)
            return None if value is None or (hasattr(value, "__len__") and len(value) == 0) else value
        except read_errors():
            raise DicomImageError(f"{self.name}: {tag_name(keyword)} holds a value that cannot be read") from None

    def text(self, keyword: str) -> str:
        value = self.value(keyword)
        return "" if value is None else str(value).strip()

    def text_of_first(self, keyword: str) -> str:
        """The first text of a tag that may hold several."""
        value = self.value(keyword)
        several = value is not None and not isinstance(value, str) and hasattr(value, "__getitem__")
        return str(value[0] if several else value or "").strip()

    def number(self, keyword: str) -> float | None:
        """The first number of a tag, None where it is absent or empty."""
        numbers = self.numbers(keyword)
        return numbers[0] if numbers else None

    def numbers(self, keyword: str) -> list[float]:
        """All numbers of a tag; one that is empty becomes NaN."""
        value = self.value(keyword)
        values = [] if value is None else [value] if isinstance(value, str | int | float) else list(value)
        try:
            return [math.nan if v is None or v == "" else float(v) for v in values]
        except (TypeError, ValueError):
            raise self.refusal(keyword, "expected numbers") from None

    def integer(self, keyword: str) -> int:
        """A tag's whole number; DicomImageError where it is absent."""
        number = self.number(keyword)
        if number is None or not number.is_integer():
            raise self.refusal(keyword, "expected a whole number")
        return int(number)

    def refusal(self, keyword: str, expected: str, *, found: str = "") -> DicomImageError:
        """What to raise; `found` where the tag's value is better said otherwise, and holds nothing of a patient."""
        text = found[:64] or self.text(keyword)
        said = repr(text) if text else "it missing or empty"
        # No code or number: a damaged length may take in other tags.
        if not found and (len(text) > 16 or not text.isprintable()):
            said = f"{len(text)} characters that are no such value"
        return DicomImageError(f"{self.name}: {tag_name(keyword)}: {expected}, found {said}")
