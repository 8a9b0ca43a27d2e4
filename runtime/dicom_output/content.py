"""The content of a result in any format: findings, similar images under case ids, priors, warnings, and the model.

The patient's own priors are the only other images whose UIDs a result may name. The UIDs come from the prior's DICOM
file, because a gallery has no series; the file must name the same patient. Unreadable priors are left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from cbmir import __version__
from cbmir.errors import ImageError
from cbmir.input_file import open_input
from cbmir.labels import spelled
from cbmir.runtime.dicom_output.identifiers import answers_fingerprint, result_uid
from cbmir.runtime.dicom_output.source import SourceImage
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.entry import Hit
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.results import Analysis, Finding, Neighbour, most_probable_first

#: Manufacturer and Manufacturer's Model Name of every object that cbmir makes.
MANUFACTURER = MODEL_NAME = "cbmir"
VERSION = __version__
ALGORITHM = "cbmir chest X-ray findings and retrieval"
#: The warning if there are neither findings nor neighbours, as for an embedding model without a gallery.
NOTHING_TO_REPORT = "This image has neither findings nor similar images, so no structured report is made."
MOST = 10  # priors in a result
_LOOKED_AT = 100  # nearest images of the patient to look for priors in: some are later, or of the same study


@dataclass(frozen=True, eq=False)
class Prior:
    """An image of the same patient from an earlier study, or from one of unknown date."""

    source: SourceImage
    distance: float


@dataclass(frozen=True)
class SimilarImage:
    """An image of the gallery without its identity. `labels` are its positive labels, without the `uncertain` ones."""

    case: str
    distance: float
    labels: tuple[str, ...]
    uncertain: tuple[str, ...]

    @classmethod
    def of(cls, gallery: SearchableGallery, one: Neighbour) -> Self:
        positive = tuple(label for label in one.labels if label not in one.uncertain)
        return cls(gallery.case_id(one.id), one.distance, positive, one.uncertain)

    @property
    def words(self) -> str:
        uncertain = (f"{spelled(label)} (uncertain)" for label in self.uncertain)
        return ", ".join((*map(spelled, self.labels), *uncertain)) or "no finding known"


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a result."""

    source: SourceImage
    pixels: str  # `pixels_digest`
    findings: tuple[Finding, ...]  # most probable first; empty for an embedding model, with a warning
    similar_images: tuple[SimilarImage, ...]
    priors: tuple[Prior, ...]  # if requested
    collection: int | None  # images in the gallery
    warnings: tuple[str, ...]
    fingerprint: str  # `answers_fingerprint`
    version: str  # identifies the model to a reader, with `parameters`
    parameters: tuple[str, ...]
    moment: datetime
    operating_point: str
    predecessor: str = ""  # the SOP Instance UID of an earlier model's SR

    @classmethod
    def of(
        cls, source: SourceImage, pixels: str, analysis: Analysis, finder: Finder, *, with_priors: bool,
        predecessor: str,
    ) -> Self:  # fmt: skip
        """Collect the content of an analysis. Raises GalleryError if the gallery cannot be searched."""
        point, gallery, health = analysis.operating_point, finder.gallery, finder.health()
        card = finder.engine.card.at(point)
        fingerprint = answers_fingerprint(card)
        priors, notes = _own_priors(source, analysis, gallery) if with_priors else ((), ())
        if not analysis.findings and not analysis.neighbours:
            notes = (*notes, NOTHING_TO_REPORT)
        return cls(
            source=source,
            pixels=pixels,
            findings=most_probable_first(analysis.findings),
            similar_images=tuple(SimilarImage.of(gallery, one) for one in analysis.neighbours if gallery is not None),
            priors=priors,
            collection=None if gallery is None else len(gallery),
            warnings=(*analysis.warnings, *source.warnings, *notes),
            fingerprint=fingerprint,
            version=f"{VERSION}+{fingerprint[:12]}",
            parameters=(
                f"weights: {card.weights}",
                f"embedding space: {card.fingerprint}",
                f"encoder: {card.encoder}, {card.preprocess.crop} pixels, grey by {card.preprocess.intensity}",
                *([f"operating point: {point}"] if card.has_findings else []),
                f"engine: {health.engine} {health.version}, {health.precision}",
            ),
            moment=datetime.now(UTC),
            operating_point=point,
            predecessor="" if predecessor == result_uid(source, pixels, fingerprint, "sr") else predecessor,
        )

    def uid(self, kind: str) -> str:
        """Return the SOP Instance UID of one kind of result."""
        return result_uid(self.source, self.pixels, self.fingerprint, kind)


def _own_priors(
    source: SourceImage, analysis: Analysis, gallery: SearchableGallery | None
) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
    """Return the most similar priors, nearest first, and warnings."""
    if gallery is None:
        return (), ("No gallery was searched for priors of this patient.",)
    if not source.patient_id:
        return (), ("The patient of this image is not known, so priors were not searched for.",)
    if not gallery.finds_patients:
        return (), ("The gallery keeps pseudonyms and was opened without their key, so priors were not searched for.",)
    asked = Filter(only_patients=frozenset({source.patient_id}))
    priors: list[Prior] = []
    unreadable = 0
    for hit in gallery.search(analysis.embedding, _LOOKED_AT, filter=asked).hits:
        if len(priors) == MOST:
            break
        found = _look_up(hit, source)
        if found is None:
            unreadable += 1
        elif _is_prior(found, source):
            priors.append(Prior(found, hit.distance))
    note = (
        f"{unreadable} image(s) of this patient in the gallery are not marked as priors: their DICOM files cannot be "
        f"read here, or do not name the same patient."
    )
    return tuple(priors), (note,) if unreadable else ()


def _look_up(hit: Hit, source: SourceImage) -> SourceImage | None:
    try:
        with open_input(hit.entry.image) as stream:
            found = SourceImage.read(stream)
    except (OSError, ImageError):
        return None  # the caller counts it
    indexed = hit.entry.sop_instance_uid
    same_image = not indexed or found.uid == indexed  # the file may have been replaced since
    return found if same_image and _is_same_patient(found, source) else None


def _is_same_patient(one: SourceImage, other: SourceImage) -> bool:
    """Compare ids, and names or birth dates too: many patients have the id UNKNOWN, and hospitals may share an id."""
    tags = ("IssuerOfPatientID", "PatientBirthDate", "PatientSex", "PatientName")
    issuer, birth, sex, name = (_agree(one, other, keyword) for keyword in tags)
    if one.patient_id != other.patient_id or False in (issuer, birth, sex):
        return False
    # A name may have changed, but then the birth date and a stated issuer must be the same: if many patients share an
    # id, some of them share a birth date too.
    return bool(name or (birth and (name is None or issuer)))


def _agree(one: SourceImage, other: SourceImage, keyword: str) -> bool | None:
    """Return whether both state the same value; None if one of them states nothing."""
    first, second = (str(of.header.get(keyword, "")).casefold().rstrip("^= ") for of in (one, other))
    if keyword == "PatientBirthDate" and any(day.endswith("0101") for day in (first, second)):
        return None  # an unknown birth date is often filled in as January 1
    return first == second if first and second else None


def _is_prior(found: SourceImage, source: SourceImage) -> bool:
    days = [str(of.header.StudyDate) for of in (found, source)]
    return found.study_uid != source.study_uid and (not all(days) or days[0] <= days[1])
