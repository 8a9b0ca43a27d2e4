"""What every result says, in any format: findings, look-alikes under case ids, priors, warnings, and by which model.

The patient's own priors are the only other images whose UIDs a result may name. A gallery knows no series, so each
prior is looked up in its DICOM file, which must be where it was when it was indexed and must name the same patient. A
prior that can't be read is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cbmir import __version__
from cbmir.errors import ImageError
from cbmir.runtime.dicom_output.identifiers import answers_fingerprint, readable, result_uid
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
#: At most this many priors are marked.
MOST = 10
_LOOKED_AT = 100  # nearest images of the patient: later ones and those of the same study are among them


@dataclass(frozen=True, eq=False)
class Prior:
    """An image of the same patient from an earlier study, or from one of unknown date."""

    source: SourceImage
    cosine: float

    @property
    def day(self) -> str:
        """The day of its study, YYYY-MM-DD."""
        day = str(self.source.header.StudyDate)
        return f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else "unknown day"


@dataclass(frozen=True)
class LookAlike:
    """An image of the gallery as anybody may know it. `labels` are the positive ones, without the `uncertain` ones."""

    case: str
    cosine: float
    labels: tuple[str, ...]
    uncertain: tuple[str, ...]

    @classmethod
    def of(cls, gallery: SearchableGallery, one: Neighbour) -> Self:
        positive = tuple(label for label in one.labels if label not in one.uncertain)
        return cls(gallery.case_id(one.id), one.cosine, positive, one.uncertain)

    @property
    def words(self) -> str:
        """The labels as people read them."""
        uncertain = (f"{readable(label)} (uncertain)" for label in self.uncertain)
        return ", ".join((*map(readable, self.labels), *uncertain)) or "no finding known"


@dataclass(frozen=True, eq=False)
class Content:
    """What a result says: findings most probable first, and the patient's own priors where they were asked for.

    `collection` is the number of images in the gallery, None without one; `fingerprint` is `answers_fingerprint`;
    `version` and `parameters` identify the model to a reader; `predecessor` is the SOP Instance UID of an earlier
    model's SR, or empty.
    """

    source: SourceImage
    findings: tuple[Finding, ...]
    look_alikes: tuple[LookAlike, ...]
    priors: tuple[Prior, ...]
    collection: int | None
    warnings: tuple[str, ...]
    fingerprint: str
    version: str
    parameters: tuple[str, ...]
    moment: datetime
    predecessor: str = ""

    @classmethod
    def of(
        cls, source: SourceImage, analysis: Analysis, finder: Finder, *, with_priors: bool, predecessor: str
    ) -> Self:
        """The content of an analysis. Raises GalleryError where the gallery cannot be searched."""
        card, gallery, health = finder.card, finder.gallery, finder.health()
        fingerprint = answers_fingerprint(card)
        priors, notes = _own_priors(source, analysis, gallery) if with_priors else ((), ())
        return cls(
            source=source,
            findings=most_probable_first(analysis.findings),
            look_alikes=() if gallery is None else tuple(LookAlike.of(gallery, one) for one in analysis.neighbours),
            priors=priors,
            collection=None if gallery is None else len(gallery),
            warnings=(*analysis.warnings, *source.warnings, *notes),
            fingerprint=fingerprint,
            version=f"{VERSION}+{fingerprint[:12]}",
            parameters=(
                f"weights: {card.weights}",
                f"embedding space: {card.fingerprint}",
                f"encoder: {card.encoder}, {card.preprocess.crop} pixels, grey by {card.preprocess.intensity}",
                f"engine: {health.engine} {health.version}, {health.precision}",
            ),
            moment=datetime.now(UTC),
            predecessor="" if predecessor == result_uid(source, fingerprint, "sr") else predecessor,
        )

    def uid(self, kind: str) -> str:
        """The SOP Instance UID of the result of a kind."""
        return result_uid(self.source, self.fingerprint, kind)


def _own_priors(
    source: SourceImage, analysis: Analysis, gallery: SearchableGallery | None
) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
    """The most similar priors, nearest first, and warnings."""
    if gallery is None:
        return (), ("No gallery was searched for priors of this patient.",)
    if not source.patient_id:
        return (), ("The patient of this image is not known, so no priors were searched.",)
    if not gallery.finds_patients:
        return (), ("The gallery keeps pseudonyms and was opened without their key, so no priors were searched.",)
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
            priors.append(Prior(found, hit.cosine))
    if not unreadable:
        return tuple(priors), ()
    return tuple(priors), (
        f"{unreadable} image(s) of this patient in the gallery are not marked as priors: their DICOM files cannot be "
        f"read here, or do not name the same patient.",
    )


def _look_up(hit: Hit, source: SourceImage) -> SourceImage | None:
    try:
        with Path(hit.entry.image).open("rb") as stream:
            found = SourceImage.read(stream)
    except (OSError, ImageError):
        return None  # counted
    indexed = hit.entry.sop_instance_uid
    same_image = not indexed or found.uid == indexed  # the file may have been replaced since
    return found if same_image and _is_same_patient(found, source) else None


def _is_same_patient(one: SourceImage, other: SourceImage) -> bool:
    """By id, and by name or birth date besides: many have the id UNKNOWN, and two hospitals may give the same one."""
    if one.patient_id != other.patient_id:
        return False
    issuer, birth, sex, name = (
        _agree(one, other, word) for word in ("IssuerOfPatientID", "PatientBirthDate", "PatientSex", "PatientName")
    )
    if False in (issuer, birth, sex):
        return False
    # A name may have changed: but then the birth date and a stated issuer must be the same, since among the many with
    # one id some have the same birth date.
    return bool(name or (birth and (name is None or issuer)))


def _agree(one: SourceImage, other: SourceImage, keyword: str) -> bool | None:
    """Whether both state the same; None where one of them states nothing."""
    first, second = (_stated(of, keyword) for of in (one, other))
    return first == second if first and second else None


def _stated(source: SourceImage, keyword: str) -> str:
    """Empty where nothing is stated: a birth date of January 1 is what an unknown one is filled in with."""
    text = str(source.header.get(keyword, "")).casefold().rstrip("^= ")
    return "" if keyword == "PatientBirthDate" and text.endswith("0101") else text


def _is_prior(found: SourceImage, source: SourceImage) -> bool:
    days = [str(of.header.StudyDate) for of in (found, source)]
    return found.study_uid != source.study_uid and (not all(days) or days[0] <= days[1])
