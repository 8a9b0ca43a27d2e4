"""Reading a DICOM object that is one chest radiograph: it is parsed, checked by its header (`dicom_header`), decoded
(`dicom_pixels`), and converted to grey (`dicom_grayscale`).
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

from cbmir.errors import BlankImageError, DamagedImageError, DicomImageError, ImageSizeError, NotAnImageError, require
from cbmir.manifest import is_date
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.dicom_colour import COLOURS, PALETTE, ColourFrame
from cbmir.runtime.imaging.dicom_grayscale import Chain
from cbmir.runtime.imaging.dicom_header import (
    LARGE,
    Tags,
    check_object,
    pixel_spacing,
    pydicom_unlogged,
    read_errors,
    tag_name,
)
from cbmir.runtime.imaging.dicom_pixels import Frame, find_frame, halvings
from cbmir.runtime.imaging.radiograph import (
    PHANTOM,
    ImageLimits,
    Radiograph,
    Reduction,
    check_contrast,
    collected_warnings,
)

if TYPE_CHECKING:
    from pydicom import Dataset

#: First letter of PatientOrientation, the side at the right edge (PS3.3 C.7.6.1.1.1) -> `Radiograph.sides`.
_SIDES = {"L": "RL", "R": "LR"}
_META = 2**16  # bytes in which the File Meta Information ends
_MOST_READS = 200_000  # two or three per element: no radiograph has a thousand


def is_dicom(data: bytes) -> bool:
    """Return whether bytes are DICOM: "DICM" at 128 or, without it, a plausible first element of group 0002 or 0008."""
    if data[128:132] == b"DICM":
        return True
    if len(data) < 8:
        return False
    group, element, length = struct.unpack("<HHI", data[:8])
    explicit = data[4:6] in (b"UL", b"OB", b"UI", b"CS", b"SH", b"LO", b"DA", b"TM")
    return group in (0x0002, 0x0008) and element < 0x0100 and (explicit or (length <= 1024 and length % 2 == 0))


def read_dicom(
    data: bytes, name: str, limits: ImageLimits, intensity: str, allow_lateral: bool, threads: int,
    reduced_for: PreprocessSpec | None,
) -> Radiograph:  # fmt: skip
    """Decode a DICOM file's bytes, without the digest. `name` is for messages; the rest is as in `read_image`.

    Raises DicomImageError for an object that is not one chest radiograph of an allowed view or contradicts itself (for
    example, its window misses all values), DamagedImageError, ImageSizeError, BlankImageError, MissingDependencyError.
    """
    require("pydicom", "dicom")
    with collected_warnings() as collected, pydicom_unlogged():
        dataset, buffer = parse_dicom(data, name, limits)
        tags = Tags(dataset, name)
        view = check_object(tags, allow_lateral)
        _check_pixels(tags, limits)
        frame = _frame(tags, buffer)
        chain = Chain.of(tags, frame.values(), intensity)
        patient, study, instance = map(tags.text, ("PatientID", "StudyInstanceUID", "SOPInstanceUID"))
        day, spacing = _study_date(tags), pixel_spacing(tags)
        sides = _SIDES.get(tags.text_of_first("PatientOrientation")[:1].upper(), "")
    # Outside the lock on warnings, so that threads decode in parallel.
    times = halvings(frame.shape, reduced_for) if reduced_for and chain.averages else 0
    halved = frame.decode_halved(times)
    stored = frame.decode(threads) if halved is None else halved
    greys, values = chain.greys(stored, tags)
    try:
        tags.warnings += check_contrast(stored, greys, name)
    except BlankImageError:
        chain.check_shown(stored, greys, tags)
        raise
    if chain.padding.any():  # it is black, so `check_contrast` passes if all other pixels have one grey
        chain.check_shown(stored, greys, tags)
    if collected:
        sentence = f"DICOM: {len(collected)} deviation(s) from the standard, read as far as possible"
        tags.warn("nonstandard file", sentence)
    reduction = None if halved is None else Reduction(2**times, frame.shape)
    return Radiograph(
        stored, name, "", patient, study, view, tuple(tags.warnings), greys, reduction, instance, day, intensity,
        values, spacing, sides, tags.text("Manufacturer") == PHANTOM,
    )  # fmt: skip


def _frame(tags: Tags, buffer: bytes) -> Frame | ColourFrame:
    """Return the frame. If it turns out to be in true colour, `decode` raises DicomImageError."""
    frame = find_frame(tags, buffer)
    if frame.samples == 1:
        return frame
    return ColourFrame(frame, tags.refusal("PhotometricInterpretation", "expected a grey image"))


def _study_date(tags: Tags) -> str:
    """Return YYYY-MM-DD; empty, with a warning, for an invalid date."""
    text = tags.text("StudyDate").replace(".", "")  # ACR-NEMA's YYYY.MM.DD, which PS3.5 6.2 lets readers accept
    day = f"{text[:4]}-{text[4:6]}-{text[6:]}" if text else ""
    if is_date(day):
        return day
    tags.warn("date left out", f"{tag_name('StudyDate')} is not a date YYYYMMDD: left out")
    return ""


def parse_dicom(
    data: bytes, name: str, limits: ImageLimits, *, large: int = LARGE, most_reads: int = _MOST_READS
) -> tuple[Dataset, bytes]:
    """Parse a file's bytes. Returns the data set, and the bytes that still hold its elements above `large` bytes.

    A file that takes more than `most_reads` reads counts as damaged. Call this within `collected_warnings` and
    `pydicom_unlogged`. Raises DamagedImageError, NotAnImageError for a file without elements, ImageSizeError for one
    that inflates too much.
    """
    from pydicom import dcmread

    try:
        buffer = _inflated(data, name, limits)
        dataset = dcmread(_Header(buffer, most_reads), force=True, defer_size=large)
        tags = len(dataset)
    except read_errors() as error:
        raise DamagedImageError(f"{name}: the DICOM file is damaged or cut off ({type(error).__name__})") from None
    if tags == 0:
        raise NotAnImageError(f"{name}: expected a DICOM object, found no element after its header")
    return dataset, buffer


def parse_header(stream: BinaryIO, name: str) -> Dataset:
    """Parse a file without its pixels. A deflated file is inflated within the limits of images.

    Call this within `collected_warnings` and `pydicom_unlogged`. Raises as `parse_dicom`, NotAnImageError for a file
    larger than any image, and `read_errors`.
    """
    from pydicom import dcmread

    limits = ImageLimits()
    limits.check_bytes(stream.seek(0, io.SEEK_END), name)
    stream.seek(0)
    start = stream.read(_META)
    if _deflated_from(start) is not None:
        return parse_dicom(start + stream.read(), name, limits)[0]
    stream.seek(0)
    return dcmread(stream, force=True, stop_before_pixels=True)


class _Header(io.BytesIO):
    """A file with a limited number of reads, which take pydicom about a second."""

    def __init__(self, data: bytes, most_reads: int = _MOST_READS) -> None:
        super().__init__(data)
        self._left = most_reads

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("more elements than any radiograph has")
        return super().read(size)


def _inflated(data: bytes, name: str, limits: ImageLimits) -> bytes:
    """Return the data set of a deflated file; any other file unchanged. pydicom would inflate without a limit."""
    start = _deflated_from(data)
    if start is None:
        return data
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    dataset = inflater.decompress(data[start:], limits.max_inflated)
    if not inflater.eof and len(dataset) == (most := limits.max_inflated):
        raise ImageSizeError(f"{name}: expected a data set of at most {most:,} bytes; it inflates to more")
    if not inflater.eof or _deflated_from(dataset) is not None:
        raise DamagedImageError(f"{name}: the deflated data set is cut off or damaged")
    return dataset


def _deflated_from(data: bytes) -> int | None:
    """Return where the deflated data set begins in a file; None for another transfer syntax."""
    from pydicom.filereader import read_dataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    stream = _Header(data)
    stream.seek(132 if data[128:132] == b"DICM" else 0)
    meta = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 0x0002)
    return stream.tell() if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian else None


def _check_pixels(tags: Tags, limits: ImageLimits) -> None:
    """Refuse, by the header alone, anything but one image within the limits: grey of 8 or 16 bits, or colour of 8."""
    photometric, samples = tags.text("PhotometricInterpretation").upper(), tags.number("SamplesPerPixel")
    colour = photometric in COLOURS
    if photometric not in ("MONOCHROME1", "MONOCHROME2", PALETTE, *COLOURS) or (colour and samples in (None, 1)):
        raise tags.refusal("PhotometricInterpretation", "expected MONOCHROME1 or MONOCHROME2")
    if samples != 3 if colour else samples not in (None, 1):
        raise tags.refusal("SamplesPerPixel", "expected 3" if colour else "expected 1 (grey)")
    if tags.number("NumberOfFrames") not in (None, 1):
        raise tags.refusal("NumberOfFrames", "expected one frame")
    if "PixelData" not in tags.dataset:
        raise DicomImageError(f"{tags.name}: expected {tag_name('PixelData')}, found none; the object is not an image")
    if (allocated := tags.integer("BitsAllocated")) not in ((8,) if colour else (8, 16)):
        raise tags.refusal("BitsAllocated", "expected 8" if colour else "expected 8 or 16")
    if tags.integer("PixelRepresentation") not in (0, 1):
        raise tags.refusal("PixelRepresentation", "expected 0 (unsigned) or 1 (signed)")
    if not 1 <= (stored := tags.integer("BitsStored")) <= allocated:
        raise tags.refusal("BitsStored", f"expected 1 to {allocated}")
    if not stored <= tags.integer("HighBit") + 1 <= allocated:
        raise tags.refusal("HighBit", f"expected {stored - 1} (BitsStored - 1)")
    limits.check_size(tags.integer("Columns"), tags.integer("Rows"), tags.name)
