"""The results of an analysis, in the requested formats."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cbmir.errors import UserError, require
from cbmir.runtime.finder import Finder
from cbmir.runtime.imaging.dicom_header import is_uid
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.imaging.reader import read_image
from cbmir.runtime.results import Analysis

if TYPE_CHECKING:
    from pydicom import Dataset

KINDS = ("sr", "sc", "kos", "fhir")
#: Comprehensive 3D SR, Secondary Capture Image, Key Object Selection Document.
_CLASSES = ("1.2.840.10008.5.1.4.1.1.88.34", "1.2.840.10008.5.1.4.1.1.7", "1.2.840.10008.5.1.4.1.1.88.59")


@dataclass(frozen=True, eq=False)
class Results:
    """The requested results. Others are None, as are `kos` without a prior of the patient, and `sr` without findings
    and similar images."""

    sr: Dataset | None = None
    sc: Dataset | None = None
    kos: Dataset | None = None
    fhir: dict[str, Any] | None = None  # a Bundle, plain values for JSON
    kos_copies: tuple[Dataset, ...] = ()  # the selection of priors, for the priors' own studies
    warnings: tuple[str, ...] = ()  # without patient data; the results contain them too

    def named(self) -> list[tuple[str, Dataset]]:
        """Return the DICOM objects, ready to be stored, by name: `sr`, `sc`, `kos`, and `kos-2` … for the copies."""
        copies = ((f"kos-{number}", copy) for number, copy in enumerate(self.kos_copies, 2))
        named = (("sr", self.sr), ("sc", self.sc), ("kos", self.kos), *copies)
        return [(name, dataset) for name, dataset in named if dataset is not None]

    def datasets(self) -> list[Dataset]:
        """Return the DICOM objects of `named`."""
        return [dataset for _, dataset in self.named()]


def make_results(
    data: bytes, analysis: Analysis, finder: Finder, *, kinds: Collection[str] = ("sr",),
    image: Radiograph | None = None, predecessor: str = "", copies: bool = True,
) -> Results:  # fmt: skip
    """Make results from an analysis of a DICOM file.

    Args:
        data: The file's bytes.
        finder: The finder that made the analysis.
        kinds: Which of `KINDS` to make.
        image: The image read from the same bytes, if you have it; else it is read again.
        predecessor: The SOP Instance UID of an earlier model's SR for the image, in the same study. The new SR names
            it, except if the model is the same, because then the new SR replaces it.
        copies: Whether to make the selection of priors for the priors' studies too, not only for the image's own.

    Raises:
        UserError: An unknown kind, a predecessor that is not a UID, or neighbours of another kind of search.
        ImageError: The data is not a DICOM object with its four UIDs.
        GalleryError: The gallery cannot be searched.
        MissingDependencyError: The extra `dicom` is not installed.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or isinstance(kinds, str):
        raise UserError(f"expected kinds of results among {', '.join(KINDS)}; found {', '.join(unknown) or kinds}")
    if analysis.rank != "nearness" or analysis.region or analysis.refinement:
        raise UserError("expected neighbours of the whole image ranked by nearness, since results show similar images; "
                        "found those of a region or a refined search, or ranked by findings")  # fmt: skip
    if predecessor and not is_uid(predecessor):
        raise UserError("expected the SOP Instance UID of an SR for predecessor, or none; found another text")
    warm_up()
    from cbmir.runtime.dicom_output import fhir, key_object_selection, secondary_capture, structured_report
    from cbmir.runtime.dicom_output.content import Content
    from cbmir.runtime.dicom_output.identifiers import pixels_digest
    from cbmir.runtime.dicom_output.source import SourceImage
    from cbmir.runtime.imaging.dicom_header import pydicom_unlogged

    source = SourceImage.read(io.BytesIO(data))
    with pydicom_unlogged():
        with_priors = not {"kos", "sc"}.isdisjoint(kinds)
        image = image or finder.read(data)
        if image.reduction is not None:  # UIDs are made from all pixels
            image = read_image(data, intensity=image.intensity, allow_lateral=True)
        content = Content.of(
            source, pixels_digest(image), analysis, finder, with_priors=with_priors, predecessor=predecessor
        )
        page = None
        if "sc" in kinds:
            page = secondary_capture.page(content, analysis, image, finder.card.preprocess)
        selections = key_object_selection.key_objects(content, copies=copies) if "kos" in kinds else []
        return Results(
            sr=structured_report.measurement_report(content) if "sr" in kinds else None, sc=page,
            kos=selections[0] if selections else None, fhir=fhir.bundle(content) if "fhir" in kinds else None,
            kos_copies=tuple(selections[1:]), warnings=content.warnings,
        )  # fmt: skip


def warm_up() -> None:
    """Import the packages that results need, which takes seconds the first time. Raises MissingDependencyError."""
    require("pydicom", "dicom")
    require("highdicom", "dicom")
    for module in ("fhir", "key_object_selection", "secondary_capture", "structured_report"):
        import_module(f"cbmir.runtime.dicom_output.{module}")


def is_own_result(dataset: Dataset) -> bool:
    """Return whether cbmir made an object, by its SOP class, Manufacturer and Manufacturer's Model Name."""
    made_by = {str(dataset.get(keyword, "")).strip() for keyword in ("Manufacturer", "ManufacturerModelName")}
    return made_by == {"cbmir"} and str(dataset.get("SOPClassUID", "")) in _CLASSES
