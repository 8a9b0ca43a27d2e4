"""The one frame of a DICOM object: where its encoded pixels lie in the file, and how they become stored values.

imagecodecs decodes JPEG Lossless, JPEG-LS and JPEG 2000 two to three times as fast as pydicom's plugins, and to the
same values. Where it is not installed or does not understand a frame, pydicom's plugins have the last word; RLE is
decoded by `dicom_rle`.
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DamagedImageError, DicomImageError, MissingDependencyError
from cbmir.runtime.codestream import codestream_shape
from cbmir.runtime.dicom_rle import decode_rle
from cbmir.runtime.dicom_tags import Tags, pydicom_unlogged, read_errors, tag_name
from cbmir.runtime.jpeg2000 import decode_halved

_PIXEL_DATA = 0x7FE00010
_RLE = "1.2.840.10008.1.2.5"
#: Transfer syntaxes and imagecodecs' functions. Its other two decoders of JPEG Lossless hang on damaged frames.
_CODECS = {
    "1.2.840.10008.1.2.4.57": "jpeg8_decode",
    "1.2.840.10008.1.2.4.70": "jpeg8_decode",
    "1.2.840.10008.1.2.4.80": "jpegls_decode",
    "1.2.840.10008.1.2.4.81": "jpegls_decode",
    "1.2.840.10008.1.2.4.90": "jpeg2k_decode",
    "1.2.840.10008.1.2.4.91": "jpeg2k_decode",
    "1.2.840.10008.1.2.4.201": "jpeg2k_decode",  # HTJ2K: OpenJPEG decodes it too
    "1.2.840.10008.1.2.4.202": "jpeg2k_decode",
    "1.2.840.10008.1.2.4.203": "jpeg2k_decode",
}
_JPEG_2000 = ("1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91")
#: JPEG itself knows no signs: of a signed image it holds bit patterns.
_UNSIGNED = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70))
_LOSSY = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 81, 91, 203))
_THREADED = tuple(syntax for syntax, codec in _CODECS.items() if codec == "jpeg2k_decode")
#: What imagecodecs raises on damage, and where a codec is not built.
_CODEC_ERRORS = (RuntimeError, ValueError, LookupError, ImportError)


@dataclass(frozen=True, eq=False)
class Frame:
    """The encoded pixels, and what is needed to decode them without a look at the data set."""

    data: bytes | memoryview
    syntax: Any  # pydicom.uid.UID
    shape: tuple[int, int]
    allocated: int
    stored: int
    high_bit: int
    signed: bool
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
        """Bit patterns, uint8 or uint16 [H,W], in the machine's byte order.

        Raises DamagedImageError, and DicomImageError for a codestream with values of more bits than BitsStored.
        """
        pixels = self._decompressed(threads) if self.syntax.is_encapsulated else self._native()
        if pixels.shape != self.shape or pixels.dtype.itemsize > self.allocated // 8:
            raise self.damaged
        return pixels.astype(f"{pixels.dtype.kind}{self.allocated // 8}", copy=False).view(f"u{self.allocated // 8}")

    def decode_halved(self, times: int) -> NDArray[Any] | None:
        """As `decode`, of JPEG 2000 alone, an image halved so many times; None where only `decode` can."""
        if times == 0 or self.signed or self.syntax not in _JPEG_2000:
            return None
        pixels = decode_halved(bytes(self.data), self.shape, times)
        if pixels is None or pixels.dtype.itemsize > self.allocated // 8:
            return None
        if pixels.max() >= 2**self.stored:  # the wavelet overshoots, or BitsStored is wrong
            return None
        halved: NDArray[Any] = pixels.astype(f"u{self.allocated // 8}", copy=False)
        return halved

    def _native(self) -> NDArray[Any]:
        order = "<" if self.syntax.is_little_endian else ">"
        return np.frombuffer(self.data, f"{order}u{self.allocated // 8}").reshape(self.shape)

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
                pixels = self._by_pydicom()
        return self._within_stored_bits(pixels)

    def _within_stored_bits(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Of a codestream, which has no bits beside the stored ones: larger values contradict BitsStored, but that a
        lossy codec overshoots by a little."""
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
            options = {"numthreads": threads} if self.syntax in _THREADED else {}
            pixels = np.asarray(getattr(imagecodecs, _CODECS[self.syntax])(self.data, **options))
        except _CODEC_ERRORS:
            return None
        return pixels if pixels.shape == self.shape and pixels.dtype.kind == "u" else None

    def _by_pydicom(self) -> NDArray[Any]:
        from pydicom.encaps import encapsulate
        from pydicom.pixels.decoders.base import get_decoder

        about: dict[str, Any] = {
            "rows": self.shape[0],
            "columns": self.shape[1],
            "number_of_frames": 1,
            "samples_per_pixel": 1,
            "bits_allocated": self.allocated,
            "bits_stored": self.stored,
            "pixel_representation": int(self.signed),
            "photometric_interpretation": self.photometric,
            "correct_unused_bits": False,  # it would wrap values that are too large
        }
        source = encapsulate([bytes(self.data)], has_bot=False)
        native = self.shape[0] * self.shape[1] * self.allocated // 8
        if len(source) in (native, native + native % 2):  # pydicom would warn that it may be no compressed frame
            source = encapsulate([bytes(self.data)], has_bot=True)
        try:
            pixels, _ = get_decoder(self.syntax).as_array(source, **about)
        except read_errors():
            raise self.damaged from None
        return np.asarray(pixels)


def find_frame(tags: Tags, buffer: bytes) -> Frame:
    """The one frame of a data set that was parsed from `buffer`, checked as far as it goes without decoding.

    Its large elements are not read but looked up where they lie: the pixels of a native frame are not copied.
    """
    from pydicom.dataelem import RawDataElement
    from pydicom.encaps import generate_frames

    syntax = _decodable_syntax(tags)
    damaged = DamagedImageError(f"{tags.name}: {tag_name('PixelData')} ({syntax.name}) is damaged or cut off")
    shape = tags.integer("Rows"), tags.integer("Columns")
    allocated, stored, high_bit = (tags.integer(k) for k in ("BitsAllocated", "BitsStored", "HighBit"))
    element: Any = tags.dataset.get_item(_PIXEL_DATA, keep_deferred=True)
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
        if syntax != _RLE:
            _check_codestream(data, shape, tags.name)
    else:
        expected = shape[0] * shape[1] * allocated // 8
        data = memoryview(buffer)[element.value_tell :][: element.length]
        if len(data) < expected:
            raise damaged
        if len(data) > expected + expected % 2:
            tags.warnings.append(f"{tag_name('PixelData')} is longer than the image: the rest is left out")
        if allocated == 8 and not syntax.is_little_endian and element.VR == "OW":
            data = np.frombuffer(data, "u2").byteswap().tobytes()  # two pixels a word, the first in its low byte
        data = data[:expected]
    signed, photometric = tags.integer("PixelRepresentation") == 1, tags.text("PhotometricInterpretation").upper()
    contradictory = tags.refusal("BitsStored", "expected as many bits as the values of the compressed frame have")
    return Frame(data, syntax, shape, allocated, stored, high_bit, signed, photometric, damaged, contradictory)


def _check_codestream(data: bytes, shape: tuple[int, int], name: str) -> None:
    """Raise DamagedImageError for a frame of another size than the tags say, before a decoder makes room for it."""
    found = codestream_shape(data)
    if found != (*shape, 1):
        what = "no header" if found is None else "{1}x{0} pixels of {2} component(s)".format(*found)
        raise DamagedImageError(
            f"{name}: {tag_name('PixelData')}: expected a frame of {shape[1]}x{shape[0]} grey pixels, as Columns and "
            f"Rows say, found {what}"
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
    try:
        return importlib.import_module("imagecodecs")
    except ImportError:  # not installed, or broken: pydicom's plugins do without
        return None
