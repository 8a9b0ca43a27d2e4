"""The single frame of a DICOM object: finding its encoded pixels in the file, and decoding them into stored values.

imagecodecs decodes compressed frames; RLE frames are split into segments here. A few bytes may claim gigabytes or
hours, so a frame's own header is checked before it is decoded (`codestream`).
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile

from cbmir.errors import DamagedImageError, DicomImageError, require
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.codestream import FrameShape, check_packets, check_scans, frame_header, without_boxes
from cbmir.runtime.imaging.dicom_header import Tags, read_errors, tag_name
from cbmir.runtime.imaging.threads import together


def _jpeg(*numbers: int) -> tuple[str, ...]:
    """Return transfer syntaxes of the JPEG family."""
    return tuple(f"1.2.840.10008.1.2.4.{number}" for number in numbers)


_RLE = "1.2.840.10008.1.2.5"
_JPEG_2000 = _jpeg(90, 91)
#: The compressed transfer syntaxes that are decoded here, and imagecodecs' codec for each. Its other two codecs for
#: JPEG Lossless hang on damaged frames.
COMPRESSED = {
    _RLE: "PACKBITS",
    **dict.fromkeys(_jpeg(50, 51, 57, 70), "JPEG8"),
    **dict.fromkeys(_jpeg(80, 81), "JPEGLS"),
    **dict.fromkeys(_jpeg(90, 91, 201, 202, 203), "JPEG2K"),  # OpenJPEG decodes HTJ2K too
}
#: Implicit and explicit VR, deflated, and big endian.
NATIVE = tuple(f"1.2.840.10008.1.2{end}" for end in ("", ".1", ".1.99", ".2"))
#: Start-of-frame markers by transfer syntax (PS3.5, 8.2.1 and 8.2.3); none is progressive. JPEG 2000 has 0.
_PROCESSES = {
    **dict.fromkeys(_jpeg(50, 51), (0xC0, 0xC1)),
    **dict.fromkeys(_jpeg(57, 70), (0xC3,)),
    **dict.fromkeys(_jpeg(80, 81), (0xF7,)),
    **dict.fromkeys(_jpeg(90, 91, 201, 202, 203), (0,)),
}
#: JPEG has no signed samples: for a signed image it holds bit patterns.
_UNSIGNED = _jpeg(50, 51, 57, 70)
_LOSSY = _jpeg(50, 51, 81, 91, 203)
#: Exceptions of imagecodecs for damaged data, and for codecs that were not built.
_CODEC_ERRORS = (RuntimeError, ValueError, LookupError, ImportError)
#: Colour as luma and chroma. JPEG 2000's own transform is undone by its decoder.
_LUMA_AND_CHROMA = ("YBR_FULL", "YBR_FULL_422")


@dataclass(frozen=True, eq=False)
class Frame:
    """The encoded pixels, and everything needed to decode them without the data set."""

    data: bytes | memoryview
    syntax: Any  # pydicom.uid.UID
    shape: tuple[int, int]
    allocated: int
    stored: int
    high_bit: int
    signed: bool
    samples: int  # per pixel
    planar: int  # PlanarConfiguration: 1 if each sample has its own plane
    photometric: str
    damaged: DamagedImageError  # the error for damaged data
    contradictory: DicomImageError  # the error for values with more bits than BitsStored

    def values(self) -> NDArray[np.float64]:
        """Return the stored value of each bit pattern of `decode`, float64 [2 ** allocated].

        Bits above and below the stored ones have no meaning (PS3.5 section 8.1.1); the high bit is the sign.
        """
        size = self.allocated // 8
        patterns = np.arange(2**self.allocated, dtype=f"u{size}").view(f"{'i' if self.signed else 'u'}{size}")
        raised = patterns << (self.allocated - 1 - self.high_bit)
        return (raised >> (self.allocated - self.stored)).astype(np.float64)

    def decode(self, threads: int = 1) -> NDArray[Any]:
        """Decode to bit patterns, uint8 or uint16 [H,W]. Raises `damaged` or `contradictory`."""
        if self.syntax.is_encapsulated:
            pixels = self._decompressed(threads)
        else:
            order = "<" if self.syntax.is_little_endian else ">"
            pixels = np.frombuffer(self.data, f"{order}u{self.allocated // 8}").reshape(self.shape)
        if pixels.shape != self.shape or pixels.dtype.itemsize > self.allocated // 8:
            raise self.damaged
        return pixels.astype(f"{pixels.dtype.kind}{self.allocated // 8}", copy=False).view(f"u{self.allocated // 8}")

    def decode_colour(self, threads: int = 1) -> Image.Image:
        """Decode to a picture in RGB, with three 8-bit samples per pixel. Raises `damaged`."""
        shape = (*self.shape, 3)
        if not self.syntax.is_encapsulated:
            pixels = self._native_colour()
        elif self.syntax == _RLE:
            pixels = np.stack(self._planes(threads), axis=2)
        else:
            pixels = self._by_imagecodecs(threads)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise self.damaged
        is_converted = self.syntax in _UNSIGNED  # by the codec
        mode = "YCbCr" if self.photometric in _LUMA_AND_CHROMA and not is_converted else "RGB"
        return Image.frombytes(mode, self.shape[::-1], np.ascontiguousarray(pixels)).convert("RGB")

    def _native_colour(self) -> NDArray[np.uint8]:
        values = np.frombuffer(self.data, np.uint8)
        rows, columns = self.shape
        if self.photometric == "YBR_FULL_422":  # Y Y Cb Cr for every two pixels (PS3.3 C.7.6.3.1.2)
            if columns % 2:
                raise self.damaged
            pairs = values.reshape(rows, columns // 2, 4)
            pixels = np.stack([pairs[..., :2], *(np.repeat(pairs[..., at, None], 2, axis=2) for at in (2, 3))], axis=3)
            return pixels.reshape(rows, columns, 3)
        return values.reshape(3, rows, columns).transpose(1, 2, 0) if self.planar else values.reshape(rows, columns, 3)

    def decode_halved(self, times: int) -> NDArray[Any] | None:
        """Decode as `decode`, but halve a JPEG 2000 image `times` times; None if only `decode` can."""
        if times == 0 or self.signed or self.syntax not in _JPEG_2000:
            return None
        pixels = decode_halved(bytes(self.data), self.shape, times)
        if pixels is None or pixels.dtype.itemsize > self.allocated // 8 or pixels.max() >= 2**self.stored:
            return None  # if values are too large, the wavelet overshoots or BitsStored is wrong
        return pixels.astype(f"u{self.allocated // 8}", copy=False)

    def _decompressed(self, threads: int) -> NDArray[Any]:
        if self.syntax == _RLE:
            high, *low = self._planes(threads)
            if not low:
                return high
            pixels = high.astype(np.uint16)
            pixels <<= 8
            pixels |= low[0]
            return pixels
        pixels = self._by_imagecodecs(threads)
        if self.signed and self.syntax in _UNSIGNED:
            pixels = pixels.view(f"i{pixels.dtype.itemsize}")
        elif self.signed or pixels.dtype.kind == "i":
            pixels = self._with_sign(pixels)
        return self._within_stored_bits(pixels)

    def _planes(self, threads: int) -> list[NDArray[np.uint8]]:
        try:
            return decode_rle(self.data, self.shape, self.samples * self.allocated // 8, threads)
        except ValueError:
            raise self.damaged from None

    def _by_imagecodecs(self, threads: int) -> NDArray[Any]:
        """Decode to samples [H,W] or [H,W,3] as they are in the codestream, except that colour JPEG becomes RGB."""
        imagecodecs = require("imagecodecs", "dicom")
        codec = COMPRESSED[self.syntax]
        options: dict[str, Any] = {}
        if codec == "JPEG2K":
            options = {"numthreads": threads}
        elif codec == "JPEG8" and self.samples == 3:
            marked = any(sign in bytes(self.data[:_MARKS]) for sign in (b"JFIF", b"Adobe"))  # then these decide
            options = {"outcolorspace": "RGB"} | (
                {"colorspace": "RGB"} if self.photometric == "RGB" and not marked else {}
            )
        try:
            return np.asarray(getattr(imagecodecs, f"{codec.lower()}_decode")(self.data, **options))
        except _CODEC_ERRORS:
            raise self.damaged from None

    def _with_sign(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Give samples the sign of PixelRepresentation, not of the codestream; JPEG-LS has no sign."""
        header = frame_header(self.data)
        if header is None or pixels.dtype.itemsize > 2:
            raise self.damaged
        size = pixels.dtype.itemsize
        unused = 8 * size - header.precision
        patterns = pixels.view(f"{'i' if self.signed else 'u'}{size}") << unused
        patterns >>= unused
        return patterns

    def _within_stored_bits(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Raise `contradictory` for values beyond BitsStored, but clip the small overshoots of a lossy codec."""
        half = 2 ** (self.stored - 1)
        low, high = (-half if self.signed else 0), (half if self.signed and self.syntax not in _UNSIGNED else 2 * half)
        lowest, highest = int(pixels.min()), int(pixels.max())
        if low <= lowest and highest < high:
            return pixels
        beyond = half // 4 if self.syntax in _LOSSY else 0
        if lowest < low - beyond or highest >= high + beyond:
            raise self.contradictory
        return pixels.clip(low, high - 1)


def find_frame(tags: Tags, buffer: bytes) -> Frame:
    """Find the frame of a data set parsed from `buffer`, and check it as far as possible without decoding."""
    from pydicom.dataelem import RawDataElement
    from pydicom.encaps import generate_frames

    syntax = _decodable_syntax(tags)
    damaged = DamagedImageError(f"{tags.name}: {tag_name('PixelData')} ({syntax.name}) is damaged or cut off")
    shape = tags.integer("Rows"), tags.integer("Columns")
    photometric, samples = tags.text("PhotometricInterpretation").upper(), int(tags.number("SamplesPerPixel") or 1)
    allocated, stored, high_bit = (tags.integer(k) for k in ("BitsAllocated", "BitsStored", "HighBit"))
    element: Any = tags.dataset.get_item(0x7FE00010, keep_deferred=True)  # PixelData
    if not isinstance(element, RawDataElement):  # parsed as a sequence
        raise damaged
    data: bytes | memoryview
    if syntax.is_encapsulated:
        if high_bit != stored - 1:
            raise tags.refusal("HighBit", f"expected {stored - 1} (BitsStored - 1)")
        stream = io.BytesIO(buffer)
        stream.seek(element.value_tell)
        try:
            (data,) = generate_frames(stream, number_of_frames=1)
        except read_errors():  # ValueError if there are two
            raise damaged from None
        # Decoders fill in missing data. JPEG, JPEG-LS and JPEG 2000 end alike; frames are padded to an even length.
        if syntax != _RLE and not data.rstrip(b"\0\xff").endswith(b"\xff\xd9"):
            raise damaged
        if COMPRESSED[syntax] == "JPEG2K":
            data = without_boxes(data)
        if syntax != _RLE:
            _check_codestream(data, syntax, FrameShape(*shape, samples), tags)
    else:
        a_pixel = 2 if photometric == "YBR_FULL_422" else samples  # two pixels share their chroma
        expected = shape[0] * shape[1] * a_pixel * allocated // 8
        data = memoryview(buffer)[element.value_tell :][: element.length]
        if len(data) < expected:
            raise damaged
        if len(data) > expected + expected % 2:
            tags.warn("excess pixel data", f"{tag_name('PixelData')} is longer than the image: the rest is ignored")
        if allocated == 8 and not syntax.is_little_endian and element.VR == "OW":
            if len(data) % 2:
                raise damaged
            data = np.frombuffer(data, "u2").byteswap().tobytes()  # two pixels per word, the first in the low byte
        data = data[:expected]
    signed = tags.integer("PixelRepresentation") == 1
    planar = int(tags.number("PlanarConfiguration") or 0) if samples > 1 else 0
    contradictory = tags.refusal("BitsStored", "expected as many bits as the values of the compressed frame have")
    return Frame(
        data, syntax, shape, allocated, stored, high_bit, signed, samples, planar, photometric, damaged, contradictory
    )


def _check_codestream(data: bytes, syntax: str, shape: FrameShape, tags: Tags) -> None:
    """Raise DamagedImageError for a frame of another size or kind, DecodingError for one that takes too much work."""
    header = frame_header(data)
    what = f"{tags.name}: {tag_name('PixelData')}"
    if header is None or header.shape != shape:
        found = "no header" if header is None else "{1}x{0} pixels of {2} component(s)".format(*header.shape)
        raise DamagedImageError(
            f"{what}: expected a frame of {shape.columns}x{shape.rows} pixels of {shape.components} component(s), as "
            f"Columns, Rows and SamplesPerPixel say, found {found}"
        )
    if header.process not in _PROCESSES[syntax]:
        kind = f"JPEG with the frame marker FF{header.process:02X}" if header.process else "JPEG 2000"
        raise DamagedImageError(f"{what}: expected a frame of the transfer syntax, found {kind}")
    if header.process:
        check_scans(data, shape.rows * shape.columns, what)
    else:
        check_packets(data, what)


def _decodable_syntax(tags: Tags) -> Any:
    """Return the transfer syntax. Raises DicomImageError if it cannot be decoded here."""
    from pydicom.uid import UID, ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    meta = tags.dataset.file_meta
    if not meta.get("TransferSyntaxUID"):  # no file meta: use what pydicom detected
        implicit, little = tags.dataset.original_encoding
        native = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else native
    syntax = UID(str(meta.TransferSyntaxUID))
    if syntax not in (*NATIVE, *COMPRESSED):
        raise DicomImageError(
            f"{tags.name}: no decoder for the transfer syntax {syntax.name} ({syntax}); "
            f"convert it to Explicit VR Little Endian"
        )
    return syntax


#: Pixels of a side that must remain for each pixel of the resized square, and the most halvings. In real files, at most
#: 0.3% of the model's input is then more than one grey level off (with two pixels 0.9%, with a third halving 1.1%).
_LEFT, _MOST = 3, 2
# Pillow's exceptions for a damaged codestream, for too few resolutions, and if it was built without JPEG 2000.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, MemoryError, struct.error)


def halvings(shape: tuple[int, int], spec: PreprocessSpec) -> int:
    """Return how often an image [H,W] may be halved for `spec`: 0, 1 or 2 times."""
    if spec.resize - spec.crop < 2:  # the crop needs the border, beyond which a reduced image has no pixels
        return 0
    return min(_MOST, max(0, (min(shape) // (_LEFT * spec.resize)).bit_length() - 1))


def decode_halved(codestream: bytes, shape: tuple[int, int], times: int) -> NDArray[Any] | None:
    """Decode a JPEG 2000 image [H,W] halved `times` times: its low-pass band, uint8 or uint16, sides rounded up.

    Returns None if it is another image, has no such resolution or is damaged; then the full decoder has to decide.
    """
    if not codestream.startswith(b"\xff\x4f\xff\x51") or len(codestream) < 45:
        return None
    width, height, left, top = struct.unpack_from(">4I", codestream, 8)
    components, depth, *spacing = struct.unpack_from(">H3B", codestream, 40)
    # A pixel of the low-pass band lies on the first of the pixels that it replaces, counted from the canvas's origin.
    if (height, width) != shape or (left, top) != (0, 0) or components != 1 or spacing != [1, 1] or depth > 15:
        return None
    step = 2**times
    try:
        image = Jpeg2KImageFile(io.BytesIO(codestream))
        # Pillow rounds sides to nearest, the codec rounds up, so they may not fit. Both give multiples the same size.
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


_MARKS = 4096  # bytes in which a JPEG says how its colours are stored
_HEADER = 64  # bytes: the number of segments, and the offsets of up to 15
_PADDING = 16  # bytes that may follow a plane's end; the standard allows one at most


def decode_rle(
    data: bytes | memoryview, shape: tuple[int, int], planes: int, threads: int
) -> list[NDArray[np.uint8]]:  # fmt: skip
    """Decode the planes of an RLE Lossless frame (PS3.5 annex G), uint8 [H,W] each, most significant byte first.

    A segment is a plane of bytes, packed with PackBits. If imagecodecs cannot decode one, Pillow tries. Both write no
    more than the plane's size; pydicom's own loop in Python may keep other threads waiting for seconds. Raises
    ValueError for a damaged frame.
    """
    if len(data) < _HEADER:
        raise ValueError("shorter than its header")
    header = np.frombuffer(data[:_HEADER], "<u4")
    edges = [*header[1 : planes + 1].tolist(), len(data)]
    if header[0] != planes or edges[0] < _HEADER or edges != sorted(edges):
        raise ValueError("the header does not fit")
    size = shape[0] * shape[1]
    segments = [data[first:last] for first, last in pairwise(edges)]
    unpacked = together(threads, *(partial(_unpacked, segment, size) for segment in segments))
    return [plane.reshape(shape) for plane in unpacked]


def _unpacked(segment: bytes | memoryview, size: int) -> NDArray[np.uint8]:
    imagecodecs = require("imagecodecs", "dicom")
    with suppress(RuntimeError, ValueError, ImportError):  # it refuses padding, and may lack the codec
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
    """Unpack a plane as one row uint8 [size]: packets may continue across rows. Raises ValueError if it is cut off."""
    return np.asarray(Image.frombytes("L", (size, 1), segment, "packbits", "L")).reshape(size)
