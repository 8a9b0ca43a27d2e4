"""The one frame of a DICOM object: where its encoded pixels lie in the file, and how they become stored values.

imagecodecs decodes JPEG Lossless, JPEG-LS and JPEG 2000 two to three times as fast as pydicom's plugins, which have the
last word where it is not installed or does not understand a frame. RLE is decoded here. A few bytes may claim
gigabytes, so a frame's own size is read from its header before it is decoded.
"""

from __future__ import annotations

import importlib
import io
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile

from cbmir.errors import DamagedImageError, DicomImageError, MissingDependencyError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.dicom_header import Tags, pydicom_unlogged, read_errors, tag_name
from cbmir.runtime.imaging.threads import together


def _jpeg(*numbers: int) -> tuple[str, ...]:
    """Transfer syntaxes of the JPEG family."""
    return tuple(f"1.2.840.10008.1.2.4.{number}" for number in numbers)


_RLE = "1.2.840.10008.1.2.5"
_JPEG_2000 = _jpeg(90, 91)
#: imagecodecs' functions. Its other two decoders of JPEG Lossless hang on damaged frames.
_CODECS = {
    **dict.fromkeys(_jpeg(57, 70), "jpeg8_decode"),
    **dict.fromkeys(_jpeg(80, 81), "jpegls_decode"),
    **dict.fromkeys(_jpeg(90, 91, 201, 202, 203), "jpeg2k_decode"),  # OpenJPEG decodes HTJ2K too
}
#: JPEG itself knows no signs: of a signed image it holds bit patterns.
_UNSIGNED = _jpeg(50, 51, 57, 70)
_LOSSY = _jpeg(50, 51, 81, 91, 203)
#: What imagecodecs raises on damage, and where a codec is not built.
_CODEC_ERRORS = (RuntimeError, ValueError, LookupError, ImportError)


@dataclass(frozen=True, eq=False)
class Frame:
    """The encoded pixels, and what is needed to decode them without the data set."""

    data: bytes | memoryview
    syntax: Any  # pydicom.uid.UID
    shape: tuple[int, int]
    allocated: int
    stored: int
    high_bit: int
    signed: bool
    samples: int  # a pixel
    planar: int  # PlanarConfiguration: 1 where each sample has a plane of its own
    photometric: str
    damaged: DamagedImageError  # what to raise
    contradictory: DicomImageError  # what to raise where values have more bits than BitsStored

    def values(self) -> NDArray[np.float64]:
        """What each bit pattern of `decode` stands for, float64 [2 ** allocated].

        Bits above and below the stored ones mean nothing (PS3.5 section 8.1.1); the sign is that of the high bit.
        """
        size = self.allocated // 8
        patterns = np.arange(2**self.allocated, dtype=f"u{size}").view(f"{'i' if self.signed else 'u'}{size}")
        raised = patterns << (self.allocated - 1 - self.high_bit)
        return (raised >> (self.allocated - self.stored)).astype(np.float64)

    def decode(self, threads: int = 1) -> NDArray[Any]:
        """Bit patterns, uint8 or uint16 [H,W]. Raises `damaged` or `contradictory`."""
        if self.syntax.is_encapsulated:
            pixels = self._decompressed(threads)
        else:
            order = "<" if self.syntax.is_little_endian else ">"
            pixels = np.frombuffer(self.data, f"{order}u{self.allocated // 8}").reshape(self.shape)
        if pixels.shape != self.shape or pixels.dtype.itemsize > self.allocated // 8:
            raise self.damaged
        return pixels.astype(f"{pixels.dtype.kind}{self.allocated // 8}", copy=False).view(f"u{self.allocated // 8}")

    def decode_halved(self, times: int) -> NDArray[Any] | None:
        """As `decode`, for JPEG 2000, an image halved `times` times; None where only `decode` can."""
        if times == 0 or self.signed or self.syntax not in _JPEG_2000:
            return None
        pixels = decode_halved(bytes(self.data), self.shape, times)
        if pixels is None or pixels.dtype.itemsize > self.allocated // 8 or pixels.max() >= 2**self.stored:
            return None  # the last: the wavelet overshoots, or BitsStored is wrong
        return pixels.astype(f"u{self.allocated // 8}", copy=False)

    def _decompressed(self, threads: int) -> NDArray[Any]:
        imagecodecs = _imagecodecs()
        if self.syntax == _RLE:
            try:
                return decode_rle(self.data, self.shape, self.allocated // 8, imagecodecs, threads)
            except ValueError:
                raise self.damaged from None
        pixels = None if imagecodecs is None else self._by_imagecodecs(imagecodecs, threads)
        if pixels is None:
            with pydicom_unlogged():
                pixels = self.decode_by_pydicom()
        return self._within_stored_bits(pixels)

    def _within_stored_bits(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Of a codestream: larger values contradict BitsStored, but that a lossy codec overshoots by a little."""
        half = 2 ** (self.stored - 1)
        low, high = (-half if self.signed else 0), (half if self.signed and self.syntax not in _UNSIGNED else 2 * half)
        lowest, highest = int(pixels.min()), int(pixels.max())
        if low <= lowest and highest < high:
            return pixels
        beyond = half // 4 if self.syntax in _LOSSY else 0
        if lowest < low - beyond or highest >= high + beyond:
            raise self.contradictory
        return pixels.clip(low, high - 1)

    def _by_imagecodecs(self, imagecodecs: ModuleType, threads: int) -> NDArray[Any] | None:
        """Bit patterns [H,W], None where pydicom must decide."""
        try:
            if self.signed or self.syntax not in _CODECS:  # pydicom mends codestreams that contradict a signed header
                return None
            codec = _CODECS[self.syntax]
            options = {"numthreads": threads} if codec == "jpeg2k_decode" else {}
            pixels = np.asarray(getattr(imagecodecs, codec)(self.data, **options))
        except _CODEC_ERRORS:
            return None
        return pixels if pixels.shape == self.shape and pixels.dtype.kind == "u" else None

    def decode_by_pydicom(self) -> NDArray[Any]:
        """Values [H,W], or RGB [H,W,3], of which nothing is checked. Raises `damaged`."""
        from pydicom.encaps import encapsulate
        from pydicom.pixels.decoders.base import get_decoder

        rows, columns = self.shape
        about: dict[str, Any] = {
            "rows": rows, "columns": columns, "number_of_frames": 1, "samples_per_pixel": self.samples,
            "bits_allocated": self.allocated, "bits_stored": self.stored, "pixel_representation": int(self.signed),
            "photometric_interpretation": self.photometric, "planar_configuration": self.planar,
            "pixel_keyword": "PixelData", "pixel_vr": "OB",  # in the order of bytes, by `find_frame`
            "correct_unused_bits": False,  # it would wrap values that are too large
        }  # fmt: skip
        source = bytes(self.data)
        if self.syntax.is_encapsulated:
            native = rows * columns * self.samples * self.allocated // 8
            source = encapsulate([bytes(self.data)], has_bot=False)
            if len(source) in (native, native + native % 2):  # pydicom would warn that it may be no compressed frame
                source = encapsulate([bytes(self.data)], has_bot=True)
        try:
            pixels, _ = get_decoder(self.syntax).as_array(source, **about)
        except read_errors():
            raise self.damaged from None
        return np.asarray(pixels)


def find_frame(tags: Tags, buffer: bytes) -> Frame:
    """The one frame of a data set that was parsed from `buffer`, checked as far as possible without decoding."""
    from pydicom.dataelem import RawDataElement
    from pydicom.encaps import generate_frames

    syntax = _decodable_syntax(tags)
    damaged = DamagedImageError(f"{tags.name}: {tag_name('PixelData')} ({syntax.name}) is damaged or cut off")
    shape = tags.integer("Rows"), tags.integer("Columns")
    photometric, samples = tags.text("PhotometricInterpretation").upper(), int(tags.number("SamplesPerPixel") or 1)
    allocated, stored, high_bit = (tags.integer(k) for k in ("BitsAllocated", "BitsStored", "HighBit"))
    element: Any = tags.dataset.get_item(0x7FE00010, keep_deferred=True)  # PixelData
    if not isinstance(element, RawDataElement):  # taken for a sequence
        raise damaged
    data: bytes | memoryview
    if syntax.is_encapsulated:
        if high_bit != stored - 1:
            raise tags.refusal("HighBit", f"expected {stored - 1} (BitsStored - 1)")
        stream = io.BytesIO(buffer)
        stream.seek(element.value_tell)
        try:
            (data,) = generate_frames(stream, number_of_frames=1)
        except read_errors():  # ValueError where there are two
            raise damaged from None
        # Decoders fill in what is missing. JPEG, JPEG-LS and JPEG 2000 end alike; a frame is padded to even length.
        if syntax != _RLE and not data.rstrip(b"\0\xff").endswith(b"\xff\xd9"):
            raise damaged
        if syntax != _RLE and (found := codestream_shape(data)) != (*shape, samples):
            what = "no header" if found is None else "{1}x{0} pixels of {2} component(s)".format(*found)
            raise DamagedImageError(
                f"{tags.name}: {tag_name('PixelData')}: expected a frame of {shape[1]}x{shape[0]} pixels of {samples} "
                f"component(s), as Columns, Rows and SamplesPerPixel say, found {what}"
            )
    else:
        a_pixel = 2 if photometric == "YBR_FULL_422" else samples  # two pixels share their colour
        expected = shape[0] * shape[1] * a_pixel * allocated // 8
        data = memoryview(buffer)[element.value_tell :][: element.length]
        if len(data) < expected:
            raise damaged
        if len(data) > expected + expected % 2:
            tags.warn("excess pixel data", f"{tag_name('PixelData')} is longer than the image: the rest is left out")
        if allocated == 8 and not syntax.is_little_endian and element.VR == "OW":
            data = np.frombuffer(data, "u2").byteswap().tobytes()  # two pixels a word, the first in its low byte
        data = data[:expected]
    signed = tags.integer("PixelRepresentation") == 1
    planar = int(tags.number("PlanarConfiguration") or 0) if samples > 1 else 0
    contradictory = tags.refusal("BitsStored", "expected as many bits as the values of the compressed frame have")
    return Frame(
        data, syntax, shape, allocated, stored, high_bit, signed, samples, planar, photometric, damaged, contradictory
    )


def _decodable_syntax(tags: Tags) -> Any:
    """The transfer syntax. Raises DicomImageError or MissingDependencyError where nothing here decodes it."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.uid import UID, ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    meta = tags.dataset.file_meta
    if not meta.get("TransferSyntaxUID"):  # no file meta: what pydicom found out while parsing
        implicit, little = tags.dataset.original_encoding
        native = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else native
    syntax = UID(str(meta.TransferSyntaxUID))
    try:
        available = get_decoder(syntax).is_available
    except NotImplementedError:
        raise DicomImageError(
            f"{tags.name}: no decoder for the transfer syntax {syntax.name} ({syntax}); "
            f"convert it to Explicit VR Little Endian"
        ) from None
    if not available:
        raise MissingDependencyError(
            f"{tags.name}: the transfer syntax {syntax.name} ({syntax}) needs a codec that is not installed. "
            f'Install it with: pip install "cbmir[dicom]"'
        )
    return syntax


def _imagecodecs() -> ModuleType | None:
    with suppress(ImportError):  # not installed, or broken: pydicom's plugins do without
        return importlib.import_module("imagecodecs")
    return None


_SIZ = b"\xff\x4f\xff\x51"  # JPEG 2000, Part 1 and HTJ2K: start of codestream, then its size (ISO/IEC 15444-1, A.5.1)
#: Start-of-frame markers of JPEG (ISO/IEC 10918-1, table B.1: C0 to CF but for DHT, JPG and DAC) and JPEG-LS (F7).
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_BOXES = 4096  # bytes within which a JP2 file's boxes end and its codestream begins


def codestream_shape(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """(rows, columns, components) of a JPEG, JPEG-LS or JPEG 2000 frame; None without a valid header."""
    start = bytes(data[:_BOXES]).find(_SIZ)
    if start < 0:
        return _jpeg_shape(data)
    header = bytes(data[start : start + 42])
    if len(header) < 42:
        return None
    width, height, left, top = struct.unpack_from(">4I", header, 8)
    (components,) = struct.unpack_from(">H", header, 40)
    return height - top, width - left, components


def _jpeg_shape(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Go from segment to segment (10918-1, B.1.1.4) up to the frame header (B.2.2)."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            if at + 10 > len(data):
                return None
            rows, columns, components = struct.unpack(">HHB", bytes(data[at + 5 : at + 10]))
            return rows, columns, components
        else:
            at += 2 + int.from_bytes(bytes(data[at + 2 : at + 4]), "big")
    return None


#: Pixels of a side that stay for each one of the resized square, and the most halvings. In real files at most 0.3% of
#: the model's input is then more than one grey level off (with two pixels 0.9%, with a third halving 1.1%).
_LEFT, _MOST = 3, 2
# What Pillow raises on a damaged codestream, on fewer resolutions than are asked for, and where it is built without.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, MemoryError, struct.error)


def halvings(shape: tuple[int, int], spec: PreprocessSpec) -> int:
    """How often an image [H,W] may be halved for `spec`: 0, 1 or 2 times."""
    if spec.resize - spec.crop < 2:  # beyond the border, a reduced image would have to be continued
        return 0
    return min(_MOST, max(0, (min(shape) // (_LEFT * spec.resize)).bit_length() - 1))


def decode_halved(codestream: bytes, shape: tuple[int, int], times: int) -> NDArray[Any] | None:
    """A JPEG 2000 image [H,W] halved `times` times: its low-pass band, uint8 or uint16, sides rounded up.

    None where it is another image, has no such resolution or is damaged: the full decoder then has to decide.
    """
    if not codestream.startswith(_SIZ) or len(codestream) < 45:
        return None
    width, height, left, top = struct.unpack_from(">4I", codestream, 8)
    components, depth, *spacing = struct.unpack_from(">H3B", codestream, 40)
    # A pixel of the low-pass band lies on the first of those that it stands for, counted from the canvas's origin.
    if (height, width) != shape or (left, top) != (0, 0) or components != 1 or spacing != [1, 1] or depth > 15:
        return None
    step = 2**times
    try:
        image = Jpeg2KImageFile(io.BytesIO(codestream))
        # Pillow rounds sides to the nearest, the codec up, and then they do not fit: multiples are the same by both.
        image._size = -(-width // step) * step, -(-height // step) * step
        image.reduce = times
        image.load()
    except _PILLOW_ERRORS:
        return None
    values = np.asarray(image)
    if values.shape != (-(-height // step), -(-width // step)) or values.dtype.kind != "u":
        return None
    shifted: NDArray[Any] = values >> (8 * values.itemsize - (depth + 1))  # Pillow shifts them up to 8 or 16 bits
    return shifted


_HEADER = 64  # bytes: the number of segments, and where each of up to 15 begins
_PADDING = 16  # bytes that may follow a plane's end; the standard has at most one


def decode_rle(
    data: bytes | memoryview, shape: tuple[int, int], planes: int, imagecodecs: ModuleType | None, threads: int
) -> NDArray[Any]:
    """Bit patterns of an RLE Lossless frame (PS3.5 annex G), uint8 (one plane) or uint16 (two) [H,W].

    A segment is a plane of bytes, the most significant first, packed by PackBits. Where imagecodecs does not understand
    one, Pillow decides. Both give a plane just the room that the image has; pydicom's own loop in Python may keep other
    threads waiting for seconds. Raises ValueError for a damaged frame.
    """
    if len(data) < _HEADER:
        raise ValueError("shorter than its header")
    header = np.frombuffer(data[:_HEADER], "<u4")
    edges = [*header[1 : planes + 1].tolist(), len(data)]
    if header[0] != planes or edges[0] < _HEADER or edges != sorted(edges):
        raise ValueError("the header does not fit")
    size = shape[0] * shape[1]
    segments = [data[first:last] for first, last in pairwise(edges)]
    unpacked = together(threads, *(partial(_unpacked, segment, size, imagecodecs) for segment in segments))
    pixels: NDArray[Any] = unpacked[0]
    if planes == 2:
        pixels = pixels.astype(np.uint16)
        pixels <<= 8
        pixels |= unpacked[1]
    return pixels.reshape(shape)


def _unpacked(segment: bytes | memoryview, size: int, imagecodecs: ModuleType | None) -> NDArray[np.uint8]:
    if imagecodecs is not None:
        with suppress(RuntimeError, ValueError, ImportError):  # it takes no padding, and may be built without
            values: NDArray[np.uint8] = imagecodecs.packbits_decode(segment, out=np.empty(size, np.uint8))
            if len(values) == size:
                return values
    plane = _by_pillow(segment, size)
    try:
        _by_pillow(segment[:-_PADDING], size)
    except ValueError:
        return plane
    raise ValueError("the segment goes on beyond the plane")


def _by_pillow(segment: bytes | memoryview, size: int) -> NDArray[np.uint8]:
    """The plane, uint8 [size], as one row, since a packet may go on from row to row. ValueError where it is cut off."""
    return np.asarray(Image.frombytes("L", (size, 1), segment, "packbits", "L")).reshape(size)
