"""From an analysis to the objects that were asked for."""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cbmir.errors import UserError, require
from cbmir.runtime.finder import Finder
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.results import Analysis

if TYPE_CHECKING:
    from pydicom import Dataset

#: What can be made of an analysis.
KINDS = ("sr", "sc", "kos", "fhir")
#: Comprehensive 3D SR, Secondary Capture Image, Key Object Selection Document.
_CLASSES = ("1.2.840.10008.5.1.4.1.1.88.34", "1.2.840.10008.5.1.4.1.1.7", "1.2.840.10008.5.1.4.1.1.88.59")


@dataclass(frozen=True, eq=False)
class Results:
    """What was asked for; None for the rest, and for `kos` where the gallery has no prior of the patient.

    `kos_copies` are those in the priors' studies. `fhir` is a Bundle, plain values for JSON. `warnings` are those of
    the analysis and of making these, without patient data; they stand in the results too.
    """

    sr: Dataset | None = None
    sc: Dataset | None = None
    kos: Dataset | None = None
    fhir: dict[str, Any] | None = None
    kos_copies: tuple[Dataset, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def named(self) -> list[tuple[str, Dataset]]:
        """The DICOM objects with their names: `sr`, `sc`, `kos`, and `kos-2` … for the copies. They are ready to be
        stored: file meta and transfer syntax are set."""
        copies = ((f"kos-{number}", copy) for number, copy in enumerate(self.kos_copies, 2))
        named = (("sr", self.sr), ("sc", self.sc), ("kos", self.kos), *copies)
        return [(name, dataset) for name, dataset in named if dataset is not None]

    def datasets(self) -> list[Dataset]:
        """The DICOM objects of `named`."""
        return [dataset for _, dataset in self.named()]


def make_results(
    data: bytes,
    analysis: Analysis,
    finder: Finder,
    *,
    kinds: Collection[str] = ("sr",),
    image: Radiograph | None = None,
    predecessor: str = "",
    copies: bool = True,
) -> Results:
    """Make results of the `kinds` (of `KINDS`) from an analysis of a DICOM file's bytes `data` by `finder`.

    `image` is what was read from the same bytes, where it is at hand: the page shows it. `predecessor` is the SOP
    Instance UID of the SR that an earlier model made of the image, in the same study: the new one names it in its
    Predecessor Documents Sequence, unless it is of the same model, which it replaces. Without `copies` the selection of
    priors stands in the image's own study alone.

    Raises UserError for an unknown kind, a kind of ImageError for data that is no DICOM object with its four UIDs,
    GalleryError where the gallery does not answer, and MissingDependencyError without the extra `dicom`.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or isinstance(kinds, str):
        raise UserError(f"expected kinds of results among {', '.join(KINDS)}; found {', '.join(unknown) or kinds}")
    if predecessor and not re.fullmatch(r"[0-9.]{1,64}", predecessor):
        raise UserError("expected the SOP Instance UID of an SR for predecessor, or none; found another text")
    require("pydicom", "dicom")
    require("highdicom", "dicom")
    from cbmir.runtime.dicom_output.content import Content
    from cbmir.runtime.dicom_output.source import Source
    from cbmir.runtime.imaging.dicom_header import pydicom_unlogged

    source = Source.read(io.BytesIO(data))
    with pydicom_unlogged():
        with_priors = not {"kos", "sc"}.isdisjoint(kinds)
        content = Content.of(source, analysis, finder, with_priors=with_priors, predecessor=predecessor)
        sr = sc = fhir = None
        selections: list[Dataset] = []
        if "sr" in kinds:
            from cbmir.runtime.dicom_output.structured_report import measurement_report

            sr = measurement_report(content)
        if "sc" in kinds:
            from cbmir.runtime.dicom_output.secondary_capture import page

            shown = image or finder.read(data)
            sc = page(content, analysis, shown, finder.card.preprocess)
        if "kos" in kinds:
            from cbmir.runtime.dicom_output.key_object_selection import key_objects

            selections = key_objects(content, copies=copies)
        if "fhir" in kinds:
            from cbmir.runtime.dicom_output.fhir import bundle

            fhir = bundle(content)
    kos = selections[0] if selections else None
    return Results(sr, sc, kos, fhir, tuple(selections[1:]), content.warnings)


def warm_up() -> None:
    """Import what making results needs: seconds that the first results would take. Raises MissingDependencyError."""
    require("pydicom", "dicom")
    require("highdicom", "dicom")
    for module in ("fhir", "key_object_selection", "secondary_capture", "structured_report"):
        import_module(f"cbmir.runtime.dicom_output.{module}")


def is_own_result(dataset: Dataset) -> bool:
    """Whether an object was made by cbmir: by its SOP class, Manufacturer and Manufacturer's Model Name."""
    made_by = {str(dataset.get(keyword, "")).strip() for keyword in ("Manufacturer", "ManufacturerModelName")}
    return made_by == {"cbmir"} and str(dataset.get("SOPClassUID", "")) in _CLASSES
