"""Checks of a DICOM object's header: whether it is one chest radiograph, and of which view.

Other objects and contradictory tags are refused, with the tag and its value; an unknown value, such as a vendor's own
code, causes a warning. Messages never name a patient: pydicom's messages quote values, so they are not passed on.
"""

from __future__ import annotations

import logging
import math
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.body_part import named_parts
from cbmir.runtime.imaging.image_warning import ImageWarning, Kind
from cbmir.runtime.imaging.radiograph import Spacing

if TYPE_CHECKING:
    from pydicom import Dataset

#: Type 1 in every image, and in every reference to one (PS3.3 tables 10-11 and C.17-3).
UIDS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
MODALITIES = ("CR", "DX", "RG")
#: Words for a lateral view: PS3.3 C.8.1.1 (CR Series), and vendors' own.
LATERAL_VIEWS = ("LL", "RL", "LAT", "LATERAL", "LLAT", "RLAT")
#: Neither frontal nor lateral: decubitus, oblique.
OTHER_VIEWS = ("LLD", "RLD", "LLO", "RLO", "LAO", "RAO", "LPO", "RPO", "OBLIQUE")

#: SOP classes that the DICOM node accepts: CR, DX, and Secondary Capture (one grey frame), in which archives and
#: challenges keep radiographs. For Processing is left out, so that a sender that has both sends the readable one.
IMAGE_CLASSES = tuple(f"1.2.840.10008.5.1.4.1.1.{number}" for number in ("1", "1.1", "7", "7.2", "7.3"))
_FOR_PROCESSING = "1.2.840.10008.5.1.4.1.1.1.1.1"
#: Designators in files for the codes of SNOMED CT and for its older ones (PS3.16 section 8).
_SCHEMES = ("SCT", "SRT", "SNM3", "99SDM")
#: Codes from PS3.16 CID 4 and 4009 (DX Anatomy Imaged), and their older ones: thorax, thoracic cavity, chest wall,
#: lung, its apex, pleura, mediastinum, heart, rib.
_CHEST_REGIONS = frozenset(
    ("816094009", "51185008", "43799004", "78904004", "39607008", "86598002", "3120008", "72410000", "80891009",
     "113197003",
     "T-D3000", "T-D3050", "T-28000", "T-280A0", "T-29000", "T-D3300", "T-D3200", "T-32000", "T-11300")
)  # fmt: skip
#: PS3.16 CID 4010 (DX View), SNOMED CT and the older codes.
_VIEW_CODES = {
    "272479007": "PA", "R-10214": "PA", "R-40888": "PA",
    "399348003": "AP", "R-10206": "AP",
    "399033003": "FRONTAL", "R-10202": "FRONTAL",
    "399067008": "LATERAL", "R-102CD": "LATERAL", "R-10228": "LATERAL",
    "399173006": "LATERAL", "R-10236": "LATERAL", "399198007": "LATERAL", "R-10232": "LATERAL",
}  # fmt: skip

_HUMAN = frozenset(("HUMAN", "HUMANO", "HUMANA", "HUMAIN", "UMANO", "MENSCH", "MENS", "HOMO", "PERSON"))
_HOMO_SAPIENS = ("337915000", "L-85B00")  # PS3.16 CID 7454, and its older code

LARGE = 2**20  # bytes: only pixel data has more
_UNDEFINED = 2**32 - 1  # length of a sequence that ends with a delimiter

_LIBRARIES = ("pydicom", "highdicom")
_HERE = threading.local()


def _is_heard(_: logging.LogRecord) -> bool:
    return not getattr(_HERE, "unlogged", False)


@contextmanager
def pydicom_unlogged() -> Iterator[None]:
    """Suppress what pydicom and its codecs log in this thread, because they quote a patient's values."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".", 1)[0] in _LIBRARIES:
            logging.getLogger(name).addFilter(_is_heard)  # never removed: another thread may be logging
    before = getattr(_HERE, "unlogged", False)
    _HERE.unlogged = True
    try:
        yield
    finally:
        _HERE.unlogged = before


def read_errors() -> tuple[type[Exception], ...]:
    """Return all exceptions that pydicom and its codecs raise on damaged content (a fuzz test checks this list).

    MemoryError is left out: sizes are checked first, so it says nothing about the file.
    """
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (
        BytesLengthException, InvalidDicomError, OSError, ValueError, TypeError, LookupError, AttributeError, EOFError,
        ArithmeticError, RuntimeError, struct.error, zlib.error,
    )  # fmt: skip


def is_uid(text: str) -> bool:
    """Return whether a text has a UID's characters and length (PS3.5 9.1)."""
    return re.fullmatch(r"[0-9.]{1,64}", text) is not None


def tag_name(keyword: str) -> str:
    """Add the tag's number to a keyword: `Modality` -> `Modality (0008,0060)`."""
    from pydicom.datadict import tag_for_keyword

    tag = tag_for_keyword(keyword) or 0
    return f"{keyword} ({tag >> 16:04X},{tag & 0xFFFF:04X})"


class Tags:
    """Typed access to the tags of a data set, and the warnings that arise while it is read."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name
        self.warnings: list[ImageWarning] = []

    def warn(self, kind: Kind, sentence: str) -> None:
        self.warnings.append(ImageWarning(kind, sentence))

    def value(self, keyword: str) -> Any:
        """Return a tag's value; None if it is absent or empty. Raises DicomImageError if it is damaged or huge."""
        from pydicom.datadict import tag_for_keyword

        try:
            element: Any = self.dataset.get_item(tag_for_keyword(keyword) or 0, keep_deferred=True)
            if element is None:
                return None
            if LARGE < getattr(element, "length", 0) != _UNDEFINED:  # not parsed yet, which would take long
                raise ValueError("too long")
            value = self.dataset.get(keyword)
            return None if value is None or (hasattr(value, "__len__") and len(value) == 0) else value
        except read_errors():
            message = f"{self.name}: {tag_name(keyword)} holds a value that cannot be read"
            raise DicomImageError(message, keyword) from None

    def text(self, keyword: str) -> str:
        value = self.value(keyword)
        return "" if value is None else str(value).strip()

    def text_of_first(self, keyword: str) -> str:
        """Return the first text of a tag that may hold several."""
        value = self.value(keyword)
        several = not isinstance(value, str) and hasattr(value, "__getitem__")
        return str(value[0] if several else value or "").strip()

    def number(self, keyword: str) -> float | None:
        """Return the first number of a tag; None if it is absent or empty."""
        numbers = self.numbers(keyword)
        return numbers[0] if numbers else None

    def numbers(self, keyword: str) -> list[float]:
        """Return all numbers of a tag. An empty one becomes NaN."""
        value = self.value(keyword)
        values = [] if value is None else [value] if isinstance(value, str | int | float) else list(value)
        try:
            return [math.nan if v is None or v == "" else float(v) for v in values]
        except (TypeError, ValueError):
            raise self.refusal(keyword, "expected numbers") from None

    def first_item(self, keyword: str) -> Tags | None:
        """Return the first item of a sequence, or an empty item for another value; None if it is absent or empty."""
        from pydicom import Dataset, Sequence

        sequence = self.value(keyword)
        if sequence is None:
            return None
        return Tags(sequence[0] if isinstance(sequence, Sequence) else Dataset(), self.name)

    def integer(self, keyword: str) -> int:
        """Return a tag's whole number. Raises DicomImageError if there is no such number."""
        number = self.number(keyword)
        if number is None or not number.is_integer():
            raise self.refusal(keyword, "expected a whole number")
        return int(number)

    def refusal(self, keyword: str, expected: str, *, found: str = "") -> DicomImageError:
        """Make the error to raise. `found` replaces the tag's value, and must not contain a patient's data."""
        text = found[:64] or self.text(keyword)
        said = repr(text) if text else "no value"
        # Neither a code nor a number: with a damaged length, the text may include other tags.
        if not found and (len(text) > 16 or not text.isprintable()):
            said = f"{len(text)} characters that are not such a value"
        return DicomImageError(f"{self.name}: {tag_name(keyword)}: {expected}, found {said}", keyword)


def check_object(tags: Tags, allow_lateral: bool = False) -> str:
    """Return the view: PA, AP, LATERAL (if allowed) or "" (unknown). Raises DicomImageError if it is another object."""
    _check_class(tags)
    _check_body_part(tags)
    _check_species(tags)
    return _view(tags, allow_lateral)


def _check_class(tags: Tags) -> None:
    modality, intent = tags.text("Modality").upper(), tags.text("PresentationIntentType").upper()
    if modality and modality not in MODALITIES:
        raise tags.refusal("Modality", f"expected a chest radiograph ({', '.join(MODALITIES)})")
    if not modality:
        tags.warn("modality unknown", f"{tag_name('Modality')} is missing: not known to be a radiograph")
    # Raw detector values (PS3.3 C.8.11.1.1.1): radiologists do not see them, and models are not trained on them.
    sop_class = tags.text("SOPClassUID")
    if intent == "FOR PROCESSING" or sop_class == _FOR_PROCESSING:
        keyword = "PresentationIntentType" if intent == "FOR PROCESSING" else "SOPClassUID"
        raise tags.refusal(keyword, "expected an image FOR PRESENTATION", found="FOR PROCESSING")
    if sop_class and sop_class not in IMAGE_CLASSES:
        from pydicom.uid import UID

        name = UID(sop_class).name  # of a private class the UID itself, which may identify a hospital
        if name == sop_class:
            sentence = f"{tag_name('SOPClassUID')} is not a standard class: not known to be a radiograph"
            tags.warn("modality unknown", sentence)
        else:
            raise tags.refusal("SOPClassUID", "expected a CR or DX image, as Modality says", found=name)


def _check_body_part(tags: Tags) -> None:
    """Check BodyPartExamined, and AnatomicRegionSequence, which DX images have instead (PS3.3 C.8.11.2)."""
    part, region = tags.text("BodyPartExamined"), _code(tags, "AnatomicRegionSequence")
    named = named_parts(part)
    if named == {"other"}:
        raise tags.refusal("BodyPartExamined", "expected CHEST")
    if region and region not in _CHEST_REGIONS:
        also = ", as BodyPartExamined says" if "chest" in named else ""
        raise tags.refusal("AnatomicRegionSequence", f"expected the code of the chest{also}", found=region)
    doubt = (
        "" if named == {"chest"} or (region and not named)
        else "names another part besides the chest" if named
        else "names no known body part" if part
        else "is missing"
    )  # fmt: skip
    if doubt:
        tags.warn("body part unknown", f"{tag_name('BodyPartExamined')} {doubt}: not known to be a chest radiograph")


def _check_species(tags: Tags) -> None:
    """Check PatientSpeciesDescription or PatientSpeciesCodeSequence, which animals have (PS3.3 C.7.1.1)."""
    words = set(_words(tags.text("PatientSpeciesDescription").upper()))
    item = tags.first_item("PatientSpeciesCodeSequence")
    code = "" if item is None else item.text("CodeValue")
    keyword = (
        "PatientSpeciesDescription" if words and not words & _HUMAN
        else "PatientSpeciesCodeSequence" if not words and code not in ("", *_HOMO_SAPIENS)
        else ""
    )  # fmt: skip
    if keyword:
        tags.warn("animal", f"{tag_name(keyword)} is not that of a human: not a radiograph of a person")


def _view(tags: Tags, allow_lateral: bool) -> str:
    """Read the view from ViewPosition, and from ViewCodeSequence, which DX images have instead (PS3.3 C.8.11.5)."""
    text, code = tags.text("ViewPosition").upper(), _code(tags, "ViewCodeSequence")
    view, coded = _written(text), _VIEW_CODES.get(code, "OTHER") if code else ""
    wanted = "a frontal view (PA or AP)" + (" or a lateral one" if allow_lateral else "")
    allowed = ("PA", "AP", "FRONTAL", "", *(["LATERAL"] if allow_lateral else []))
    if view not in allowed:
        raise tags.refusal("ViewPosition", f"expected {wanted}")
    if coded not in allowed:
        raise tags.refusal("ViewCodeSequence", f"expected {wanted}", found=code)
    if {view, coded} in ({"PA", "LATERAL"}, {"AP", "LATERAL"}, {"FRONTAL", "LATERAL"}, {"PA", "AP"}):
        raise tags.refusal("ViewPosition", f"expected the view that ViewCodeSequence gives, {coded}")
    view = next((found for found in (view, coded) if found in ("PA", "AP", "LATERAL")), "")
    if not text and not code:
        tags.warn("view unknown", f"{tag_name('ViewPosition')} is missing: not known to be frontal")
        _doubt(tags, "SeriesDescription")  # describes the whole series: only used if the image has no view
    elif not view:
        keyword = "ViewPosition" if text else "ViewCodeSequence"
        tags.warn("view unknown", f"{tag_name(keyword)} is neither PA nor AP: not known to be frontal")
    if view == "LATERAL":
        tags.warn("lateral view", "lateral view: the model's findings are those of frontal radiographs")
    else:
        _doubt(tags, "AcquisitionDeviceProcessingDescription")
        rows = tags.text_of_first("PatientOrientation").upper()
        if rows[:1] in ("A", "P"):  # rows run from front to back (PS3.3 C.7.6.1.1.1)
            sentence = f"{tag_name('PatientOrientation')} is that of a lateral view: probably not frontal"
            tags.warn("probably not frontal", sentence)
    return view


def _written(view: str) -> str:
    """Return the view that the words in ViewPosition name: PA, AP, LATERAL, OTHER or "" (unknown)."""
    words = _words(view)
    if set(words) & set(OTHER_VIEWS):
        return "OTHER"
    if set(words) & set(LATERAL_VIEWS):
        return "LATERAL"
    return next((word for word in words if word in ("PA", "AP")), "")


def _doubt(tags: Tags, keyword: str) -> None:
    """Warn if free text names another view. It is not a reason to refuse the image."""
    text = set(_words(tags.text(keyword).upper()))
    for word in (*LATERAL_VIEWS, *OTHER_VIEWS):
        if word in text:
            tags.warn("probably not frontal", f"{tag_name(keyword)} says {word}: probably not frontal")


def _code(tags: Tags, keyword: str) -> str:
    """Return the SNOMED code of a sequence's first item (PS3.3 8.8); "" without one. Warns about other schemes."""
    item = tags.first_item(keyword)
    if item is None:
        return ""
    code = item.text("CodeValue")
    if not code.isprintable() or not 1 <= len(code) <= 16:  # the limit of an SH
        raise tags.refusal(keyword, "expected an item with a CodeValue")
    if item.text("CodingSchemeDesignator").upper() not in _SCHEMES:
        tags.warn("unknown code", f"{tag_name(keyword)} holds a code of an unknown scheme, which is ignored")
        return ""
    return code


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Z]+", text)


def pixel_spacing(tags: Tags) -> Spacing | None:
    """Return the pixel spacing (PS3.3 10.7.1). PixelSpacing is in the patient if it is marked as calibrated or differs
    from the spacing at the detector. The latter can be corrected by an estimated magnification."""
    pixel, imager, film = (_positive(tags, f"{kind}PixelSpacing") for kind in ("", "Imager", "NominalScanned"))
    detector = imager or film
    differs = not np.allclose(pixel, detector, rtol=1e-3) if pixel and detector else False
    if pixel and (differs or tags.text("PixelSpacingCalibrationType")):
        return Spacing(pixel[0], pixel[1], "")
    if pixel and not detector:
        return Spacing(pixel[0], pixel[1], "(the file does not say in which plane)")
    if not detector:
        return None
    factor = _positive(tags, "EstimatedRadiographicMagnificationFactor", count=1)
    if factor:
        return Spacing(detector[0] / factor[0], detector[1] / factor[0], "by the estimated magnification")
    return Spacing(detector[0], detector[1], "at the detector")


def _positive(tags: Tags, keyword: str, count: int = 2) -> tuple[float, ...]:
    """Return a tag's positive numbers; an empty tuple, and a warning, for others."""
    with suppress(DicomImageError):
        numbers = tags.numbers(keyword)
        if not any(numbers):  # zeros mean unknown
            return ()
        if len(numbers) == count and all(0 < number < math.inf for number in numbers):
            return tuple(numbers)
    tags.warn("spacing left out", f"{tag_name(keyword)} is not {count} positive number(s): left out")
    return ()
