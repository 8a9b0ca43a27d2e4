"""Reading a DICOM object that is one frontal chest radiograph.

Stored value -> modality LUT or rescale -> VOI LUT or window -> inverted if MONOCHROME1 (DICOM PS3.3 C.7.6.3.1.2,
C.11.1, C.11.2). The whole chain is worked out once for each possible stored value, then looked up pixel by pixel.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import (
    DamagedImageError,
    DicomImageError,
    ImageSizeError,
    NotAnImageError,
    require,
)
from cbmir.manifest import is_date
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.dicom_frame import find_frame
from cbmir.runtime.dicom_tags import Tags, pydicom_unlogged, read_errors, tag_name
from cbmir.runtime.jpeg2000 import halvings
from cbmir.runtime.radiograph import Limits, Radiograph, Reduction, check_contrast, collected_warnings
from cbmir.runtime.together import beside

if TYPE_CHECKING:
    from pydicom import Dataset

MODALITIES = ("CR", "DX", "RG")
BODY_PARTS = ("CHEST", "THORAX", "TORAX", "LUNG", "LUNGS")
#: PS3.3 C.8.1.1 (CR Series) and what vendors write: lateral, decubitus, oblique.
OTHER_VIEWS = (
    "LL", "RL", "LLD", "RLD", "LLO", "RLO", "LAO", "RAO", "LPO", "RPO", "LAT", "LATERAL", "LLAT", "RLAT", "OBLIQUE",
)  # fmt: skip

_LARGE = 2**20  # bytes: nothing that is read here but pixels has so many


def is_dicom(data: bytes) -> bool:
    """Whether bytes are DICOM: "DICM" at 128, or a first element of group 0002 or 0008 where a file has no preamble.

    pydicom, forced, "reads" any file; so the first element must also have a known VR, or a short even length.
    """
    if data[128:132] == b"DICM":
        return True
    if len(data) < 8:
        return False
    group, element, length = struct.unpack("<HHI", data[:8])
    explicit = data[4:6] in (b"UL", b"OB", b"UI", b"CS", b"SH", b"LO", b"DA", b"TM")
    return group in (0x0002, 0x0008) and element < 0x0100 and (explicit or (length <= 1024 and length % 2 == 0))


def read_dicom(
    data: bytes, name: str, limits: Limits, threads: int = 1, reduced_for: PreprocessSpec | None = None
) -> Radiograph:
    """Read a DICOM file's bytes. `name` is for messages; `reduced_for` as `read_image` has it.

    Raises DicomImageError for what is not one frontal chest radiograph or contradicts itself, DamagedImageError for
    broken content, ImageSizeError, BlankImageError, MissingDependencyError.
    """
    require("pydicom", "dicom")
    with beside(threads, lambda: hashlib.sha256(data).hexdigest()) as digest:
        with collected_warnings() as collected, pydicom_unlogged():
            dataset, buffer = _parse(data, name, limits)
            tags = Tags(dataset, name)
            view = _check_object(tags)
            _check_pixels(tags, limits)
            frame = find_frame(tags, buffer)
            chain = _chain(tags, frame.values())
            patient_id, study_id = tags.text("PatientID"), tags.text("StudyInstanceUID")
            instance, day = tags.text("SOPInstanceUID"), _study_date(tags)
        # Beyond the lock on warnings, so that threads decode at the same time.
        times = halvings(frame.shape, reduced_for) if reduced_for and chain.averages else 0
        halved = frame.decode_halved(times)
        stored = frame.decode(threads) if halved is None else halved
        greys = chain.greys(stored, tags)
        tags.warnings += check_contrast(stored, greys, name)
    if collected:
        tags.warnings.append(f"DICOM: {len(collected)} deviation(s) from the standard, read as well as they allow")
    reduction = None if halved is None else Reduction(2**times, frame.shape)
    return Radiograph(
        stored, name, digest(), patient_id, study_id, view, tuple(tags.warnings), greys, reduction, instance, day
    )


def _study_date(tags: Tags) -> str:
    """YYYY-MM-DD; empty, and a warning, for what is no day of the calendar."""
    text = tags.text("StudyDate").replace(".", "")  # ACR-NEMA's YYYY.MM.DD, which PS3.5 6.2 lets readers take
    day = f"{text[:4]}-{text[4:6]}-{text[6:]}" if text else ""
    if is_date(day):
        return day
    tags.warnings.append(f"{tag_name('StudyDate')} is no date YYYYMMDD: left out")
    return ""


def _parse(data: bytes, name: str, limits: Limits) -> tuple[Dataset, bytes]:
    """The data set, and the bytes in which its large elements lie: those are left where they are."""
    from pydicom import dcmread

    try:
        buffer = _inflated(data, name, limits)
        dataset = dcmread(io.BytesIO(buffer), force=True, defer_size=_LARGE)
        tags = len(dataset)
    except read_errors() as error:
        raise DamagedImageError(f"{name}: the DICOM file is damaged or cut off ({type(error).__name__})") from None
    if tags == 0:
        raise NotAnImageError(f"{name}: expected a DICOM object, found no element after its header")
    return dataset, buffer


def _inflated(data: bytes, name: str, limits: Limits) -> bytes:
    """The data set of a deflated file, any other file as it is. pydicom would inflate whatever there is."""
    start = _deflated_from(data)
    if start is None:
        return data
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    dataset = inflater.decompress(data[start:], limits.max_inflated)
    if not inflater.eof and len(dataset) == limits.max_inflated:
        raise ImageSizeError(
            f"{name}: expected a data set of at most {limits.max_inflated:,} bytes; it inflates to more"
        )
    if not inflater.eof or _deflated_from(dataset) is not None:
        raise DamagedImageError(f"{name}: the deflated data set is cut off or not one")
    return dataset


def _deflated_from(data: bytes) -> int | None:
    """Where the deflated data set begins in a file, None where it is of another transfer syntax."""
    from pydicom.filereader import read_dataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    stream = io.BytesIO(data)
    stream.seek(132 if data[128:132] == b"DICM" else 0)
    meta = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 0x0002)
    return stream.tell() if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian else None


def _check_object(tags: Tags) -> str:
    """Refuse what is known not to be a frontal chest radiograph; warn of what is not known. Gives PA, AP or ""."""
    modality, part, view = (tags.text(k).upper() for k in ("Modality", "BodyPartExamined", "ViewPosition"))
    if modality and modality not in MODALITIES:
        raise tags.refusal("Modality", f"expected a chest radiograph ({', '.join(MODALITIES)})")
    if part and not set(_words(part)) & set(BODY_PARTS):
        raise tags.refusal("BodyPartExamined", "expected CHEST")
    if set(_words(view)) & set(OTHER_VIEWS):
        raise tags.refusal("ViewPosition", "expected a frontal view (PA or AP)")
    for keyword, text in (("Modality", modality), ("BodyPartExamined", part), ("ViewPosition", view)):
        if not text:
            tags.warnings.append(f"{tag_name(keyword)} is missing: not known to be a frontal chest radiograph")
    processing = "AcquisitionDeviceProcessingDescription"  # free text of one image: doubt, no refusal
    for word in set(_words(tags.text(processing).upper())) & set(OTHER_VIEWS):
        tags.warnings.append(f"{tag_name(processing)} says {word}: probably not frontal")
    frontal = next((word for word in _words(view) if word in ("PA", "AP")), "")
    if view and not frontal:
        tags.warnings.append(f"{tag_name('ViewPosition')} is none of PA and AP: not known to be frontal")
    return frontal


def _check_pixels(tags: Tags, limits: Limits) -> None:
    """Refuse, from the header alone, pixels that are not one grey image of 8 or 16 bits within the limits."""
    photometric = tags.text("PhotometricInterpretation").upper()
    if photometric not in ("MONOCHROME1", "MONOCHROME2"):
        raise tags.refusal("PhotometricInterpretation", "expected MONOCHROME1 or MONOCHROME2")
    if tags.number("SamplesPerPixel") not in (None, 1):
        raise tags.refusal("SamplesPerPixel", "expected 1 (grey)")
    if tags.number("NumberOfFrames") not in (None, 1):
        raise tags.refusal("NumberOfFrames", "expected one frame")
    if "PixelData" not in tags.dataset:
        raise DicomImageError(f"{tags.name}: expected {tag_name('PixelData')}, found none; the object is no image")
    if tags.integer("BitsAllocated") not in (8, 16):
        raise tags.refusal("BitsAllocated", "expected 8 or 16")
    if tags.integer("PixelRepresentation") not in (0, 1):
        raise tags.refusal("PixelRepresentation", "expected 0 (unsigned) or 1 (signed)")
    if not 1 <= tags.integer("BitsStored") <= tags.integer("BitsAllocated"):
        raise tags.refusal("BitsStored", f"expected 1 to {tags.integer('BitsAllocated')}")
    if not tags.integer("BitsStored") <= tags.integer("HighBit") + 1 <= tags.integer("BitsAllocated"):
        raise tags.refusal("HighBit", f"expected {tags.integer('BitsStored') - 1} (BitsStored - 1)")
    limits.check_size(tags.integer("Columns"), tags.integer("Rows"), tags.name)


@dataclass(frozen=True, eq=False)
class _Chain:
    """What each bit pattern that the pixels' type can hold becomes; entry i is for the pattern i."""

    modality: NDArray[np.float64]
    voi: NDArray[np.float64] | None  # 0..1; None: from the lowest to the highest value present
    padding: NDArray[np.bool_]
    inverted: bool

    @property
    def averages(self) -> bool:
        """Whether the chain may be applied to averages of stored values: not where padding would be mixed with image,
        nor where the range is taken from the values present."""
        return self.voi is not None and not self.padding.any()

    def greys(self, stored: NDArray[Any], tags: Tags) -> NDArray[np.uint8]:
        """uint8, bone bright, for patterns as in `stored` [H,W]."""
        grey = self._by_range(stored, tags) if self.voi is None else self.voi
        if self.inverted:
            grey = 1 - grey
        grey = np.where(self.padding, 0, grey)  # outside of the image: as dark as air
        return np.rint(grey * 255).astype(np.uint8)

    def _by_range(self, stored: NDArray[Any], tags: Tags) -> NDArray[np.float64]:
        present = np.zeros(len(self.modality), dtype=bool)
        for row in stored:  # NumPy makes its indices 8 bytes long: a row of them stays in the cache
            present[row] = True
        used = self.modality[present & ~self.padding]
        if used.size == 0:
            raise tags.refusal("PixelPaddingValue", "expected pixels beside the padding")
        low, high = used.min(), used.max()
        if not math.isfinite(high - low):
            raise tags.refusal("RescaleSlope", "expected a number that keeps values finite")
        grey: NDArray[np.float64] = np.clip((self.modality - low) / (high - low or 1.0), 0, 1)
        return grey


def _chain(tags: Tags, values: NDArray[np.float64]) -> _Chain:
    modality = _modality(tags, values)
    inverted = tags.text("PhotometricInterpretation").upper() == "MONOCHROME1"
    return _Chain(modality, _voi(tags, modality), _padding(tags, values), inverted)


def _padding(tags: Tags, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which stored values are padding (PS3.3 C.7.5.1.1.2): one, or a range."""
    value = tags.number("PixelPaddingValue")
    if value is None:
        return np.zeros(len(values), dtype=bool)
    limit = tags.number("PixelPaddingRangeLimit")
    low, high = sorted(_of_sign(number, values) for number in (value, value if limit is None else limit))
    return (values >= low) & (values <= high)


def _of_sign(number: float, values: NDArray[np.float64]) -> float:
    """A tag's 16-bit number as the pixels' own type has it, whether it was written as signed or unsigned."""
    if number > values.max() and values.min() < 0:
        return number - 2**16
    return number + 2**16 if number < values.min() else number


def _modality(tags: Tags, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Modality LUT, or rescale slope and intercept (PS3.3 C.11.1)."""
    table = _lookup_table(tags, "ModalityLUTSequence")
    if table is not None:
        return table.lookup(values)
    slope, intercept = tags.number("RescaleSlope"), tags.number("RescaleIntercept")
    if slope is not None and (slope == 0 or not math.isfinite(slope)):
        raise tags.refusal("RescaleSlope", "expected a number other than 0")
    if intercept is not None and not math.isfinite(intercept):
        raise tags.refusal("RescaleIntercept", "expected a finite number")
    return values * (1.0 if slope is None else slope) + (intercept or 0.0)


def _voi(tags: Tags, values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """VOI LUT or first usable window -> 0..1 (PS3.3 C.11.2); None, and a warning, where there is neither."""
    table = _lookup_table(tags, "VOILUTSequence")
    if table is not None:
        return table.lookup(values) / table.full
    function = tags.text("VOILUTFunction").upper() or "LINEAR"
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        tags.warnings.append(f"{tag_name('VOILUTFunction')} is unknown: taken as LINEAR")
        function = "LINEAR"
    centres, widths = tags.numbers("WindowCenter"), tags.numbers("WindowWidth")
    for number, (centre, width) in enumerate(zip(centres, widths, strict=False)):
        if math.isfinite(centre) and math.isfinite(width) and (width >= 1 or (width > 0 and function != "LINEAR")):
            if number:
                tags.warnings.append(f"{tag_name('WindowWidth')}: window {number + 1} taken, those before are invalid")
            return window(values, centre, width, function)
    why = "holds no valid window" if centres or widths else "is missing, and there is no VOI LUT"
    tags.warnings.append(f"{tag_name('WindowWidth')} {why}: grey runs from the lowest to the highest value present")
    return None


def _lookup_table(tags: Tags, keyword: str) -> _Table | None:
    sequence = tags.value(keyword)
    if sequence is None:
        return None
    try:
        item = sequence[0]
        entries, first, bits = (int(v) for v in item.LUTDescriptor)
        data = item.LUTData
        order = "<" if tags.dataset.original_encoding[1] else ">"  # of words that pydicom leaves as bytes
        values = np.frombuffer(data, f"{order}u2") if isinstance(data, bytes) else np.atleast_1d(data)
        values = values.astype(np.float64)
    except read_errors():
        raise DicomImageError(f"{tags.name}: {tag_name(keyword)} holds a lookup table that cannot be read") from None
    entries = entries % 2**16 or 2**16  # written as signed, or 0 for 65536
    if first >= 2**15 and tags.number("PixelRepresentation") == 1:
        first -= 2**16  # of the pixels' own sign (PS3.3 C.11.1.1.1), whatever VR it was written with
    full = 2.0 ** min(bits, 16) - 1
    if not 1 <= bits <= 16 or len(values) < entries or values.max() > full:
        raise DicomImageError(
            f"{tags.name}: {tag_name(keyword)}: expected {entries} entries of 1 to 16 bits, found {len(values)} "
            f"up to {values.max(initial=0):.0f}, said to be of {bits} bits"
        )
    return _Table(first, values[:entries], full)


@dataclass(frozen=True, eq=False)
class _Table:
    """A LUT of DICOM (PS3.3 C.11.1.1): `values[0]` is for inputs up to `first`, the last for all beyond the end."""

    first: int
    values: NDArray[np.float64]
    full: float  # the largest value that its bits can hold

    def lookup(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        index: NDArray[np.intp] = np.clip(np.rint(inputs) - self.first, 0, len(self.values) - 1).astype(np.intp)
        return self.values[index]


def window(values: NDArray[np.float64], centre: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Grey 0..1 by a window: LINEAR (PS3.3 C.11.2.1.2.1), LINEAR_EXACT (C.11.2.1.3.2) or SIGMOID (C.11.2.1.3.1)."""
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1
    if width == 0:
        return (values > centre).astype(np.float64)
    return np.clip((values - centre) / width + 0.5, 0, 1)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Z]+", text)
