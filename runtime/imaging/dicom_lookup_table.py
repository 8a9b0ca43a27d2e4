"""Lookup tables as DICOM keeps them (PS3.3 C.11.1.1): entries of a byte or a word each, for values from a first one.

How bright an entry is depends on the bits that the header says it has. Devices state 16 for entries of 12: what the
entries reach decides, where it is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.dicom_header import Tags, read_errors, tag_name


@dataclass(frozen=True, eq=False)
class LookupTable:
    """`entries` float64 [n] of `bits` bits, the first of them for the value `first`."""

    entries: NDArray[np.float64]
    first: int
    bits: int

    @classmethod
    def of_sequence(cls, tags: Tags, keyword: str) -> Self | None:
        """The table of a sequence's first item, None without one. Raises DicomImageError for one that is broken."""
        item = tags.first_item(keyword)
        if item is None:
            return None
        try:
            return cls.parse(tags, keyword, item.dataset.LUTDescriptor, item.dataset.LUTData)
        except read_errors():
            raise cls._unreadable(tags, keyword) from None

    @classmethod
    def parse(cls, tags: Tags, keyword: str, descriptor: Any, data: Any) -> Self:
        """A table of its descriptor's three numbers and its data, as pydicom gives them; `keyword` is for messages."""
        try:
            count, first, bits = (int(number) for number in descriptor)
            order = "<" if tags.dataset.original_encoding[1] else ">"  # of words that pydicom leaves as bytes
            given = np.frombuffer(data, f"{order}u2") if isinstance(data, bytes) else np.atleast_1d(data)
            words = given.astype(np.int64).astype(np.uint16)
        except read_errors():
            raise cls._unreadable(tags, keyword) from None
        count = count % 2**16 or 2**16  # written as signed, or 0 for 65536
        if first >= 2**15 and tags.number("PixelRepresentation") == 1:
            first -= 2**16  # of the pixels' own sign (PS3.3 C.11.1.1.1), in any VR
        packed = bits <= 8 and len(words) < count  # one byte an entry, two in a word, the first in its low byte
        entries = (words.astype("<u2").view(np.uint8) if packed else words).astype(np.float64)
        if not 1 <= bits <= 16 or len(entries) < count or entries.max() > 2**bits - 1:
            raise DicomImageError(
                f"{tags.name}: {tag_name(keyword)}: expected {count} entries of 1 to 16 bits, found {len(entries)} "
                f"up to {entries.max(initial=0):.0f}, said to be of {bits} bits",
                keyword,
            )
        return cls(entries[:count], first, bits)

    @staticmethod
    def _unreadable(tags: Tags, keyword: str) -> DicomImageError:
        return DicomImageError(f"{tags.name}: {tag_name(keyword)} holds a lookup table that cannot be read", keyword)

    def look_up(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The entries of `values`; the first and the last go on beyond the table."""
        index = np.clip(np.rint(values) - self.first, 0, len(self.entries) - 1).astype(np.intp)
        entries: NDArray[np.float64] = self.entries[index]
        return entries

    @property
    def full(self) -> int:
        """What is white."""
        return (1 << self.bits) - 1


def believable(tables: Sequence[LookupTable], tags: Tags, keyword: str) -> list[LookupTable]:
    """The tables, which have one scale, of as many bits as their entries reach; a warning where that is fewer."""
    reached = int(max(table.entries.max() for table in tables)).bit_length()
    stated = max(table.bits for table in tables)
    if not 0 < reached < stated:
        return list(tables)
    tags.warn(
        "LUT rescaled",
        f"{tag_name(keyword)} is said to hold entries of {stated} bits, and none needs more than {reached}: read as "
        f"{reached} bits",
    )
    return [replace(table, bits=reached) for table in tables]
