"""DICOM's lookup tables (PS3.3 C.11.1.1): entries of one byte or one word, for consecutive values from a first one.

The brightness of an entry depends on the number of bits that the header states. Some devices state 16 or 8 for entries
of 12 bits: if the largest entry does not match that number, it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.dicom_header import Tags, read_errors, tag_name


@dataclass(frozen=True, eq=False)
class LookupTable:
    """A lookup table: `entries` float64 [n], the first of them for the value `first`. The header states `bits` bits."""

    entries: NDArray[np.float64]
    first: int
    bits: int

    @classmethod
    def of_sequence(cls, tags: Tags, keyword: str) -> Self | None:
        """Read the table in a sequence's first item; None without one. Raises DicomImageError if it is broken."""
        item = tags.first_item(keyword)
        if item is None:
            return None
        try:
            return cls.parse(tags, keyword, item.dataset.LUTDescriptor, item.dataset.LUTData)
        except read_errors():
            raise cls._unreadable(tags, keyword) from None

    @classmethod
    def parse(cls, tags: Tags, keyword: str, descriptor: Any, data: Any) -> Self:
        """Parse a descriptor's three numbers and a table's data, as pydicom returns them; `keyword` is for messages."""
        try:
            count, first, bits = (int(number) for number in descriptor)
            order = "<" if tags.dataset.original_encoding[1] else ">"  # of words that pydicom leaves as bytes
            given = np.frombuffer(data, f"{order}u2") if isinstance(data, bytes) else np.atleast_1d(data)
            words = given.astype(np.int64).astype(np.uint16)
        except read_errors():
            raise cls._unreadable(tags, keyword) from None
        count = count % 2**16 or 2**16  # written as signed, or 0 for 65536
        if first >= 2**15 and tags.number("PixelRepresentation") == 1:
            first -= 2**16  # signed like the pixels (PS3.3 C.11.1.1.1), in any VR
        packed = bits <= 8 and len(words) < count  # one byte per entry: two in a word, the first in the low byte
        entries = (words.astype("<u2").view(np.uint8) if packed else words).astype(np.float64)
        if len(entries) < count:
            message = f"{tags.name}: {tag_name(keyword)}: expected {count} entries, found {len(entries)}"
            raise DicomImageError(message, keyword)
        return cls(entries[:count], first, bits)

    @staticmethod
    def _unreadable(tags: Tags, keyword: str) -> DicomImageError:
        return DicomImageError(f"{tags.name}: {tag_name(keyword)} holds a lookup table that cannot be read", keyword)

    def look_up(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the entries of `values`. Values beyond the table get its first or last entry."""
        index = np.clip(np.rint(values) - self.first, 0, len(self.entries) - 1).astype(np.intp)
        entries: NDArray[np.float64] = self.entries[index]
        return entries


def white_of(tables: Sequence[LookupTable], tags: Tags, keyword: str) -> int:
    """Return the entry that is white in tables of one scale: the highest number with as many bits as the entries need.

    Warns if the header states another number of bits. Raises DicomImageError if no table can have that many.
    """
    highest = int(max(table.entries.max() for table in tables))
    reached, stated = highest.bit_length(), max(table.bits for table in tables)
    if not 1 <= stated <= 16:
        raise DicomImageError(
            f"{tags.name}: {tag_name(keyword)}: expected entries of 1 to 16 bits, found a stated size of {stated}",
            keyword,
        )
    if not highest or reached == stated:
        return int(2**stated - 1)
    white = highest if highest == 2 ** (reached - 1) else 2**reached - 1  # 0 to 4096 is a range of 12 bits and one more
    tags.warn(
        "LUT rescaled",
        f"{tag_name(keyword)} states entries of {stated} bits, but they reach {highest}: {white} is taken as white",
    )
    return int(white)
