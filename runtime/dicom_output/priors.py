"""The patient's own earlier images in the gallery that look alike: the only images whose UIDs a result may name.

A gallery knows no series. So each is looked up in its DICOM file, which must be where it was when it was indexed, and
must name the same patient: a prior that cannot be read is left out, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import ImageError
from cbmir.runtime.dicom_output.source import Source
from cbmir.runtime.gallery.entry import Hit
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.result import Analysis

#: At most so many are marked.
MOST = 10
_LOOKED_AT = 100  # nearest images of the patient: later ones and those of the same study are among them


@dataclass(frozen=True, eq=False)
class Prior:
    """An image of the same patient of an earlier study, or of one whose day is not known."""

    source: Source
    cosine: float

    @property
    def day(self) -> str:
        """Of its study, YYYY-MM-DD."""
        day = str(self.source.header.StudyDate)
        return f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else "unknown day"


def own_priors(
    source: Source, analysis: Analysis, gallery: AnyGallery | None
) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
    """The most similar priors, nearest first, and warnings. Raises GalleryError where none can be searched."""
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


def _look_up(hit: Hit, source: Source) -> Source | None:
    try:
        with Path(hit.entry.image).open("rb") as stream:
            found = Source.read(stream)
    except (OSError, ImageError):
        return None  # counted
    indexed = hit.entry.sop_instance_uid
    same_image = not indexed or found.uid == indexed  # the file may have been replaced since
    return found if same_image and _is_same_patient(found, source) else None


def _is_same_patient(one: Source, other: Source) -> bool:
    """By id, and by name or birth date besides: many have the id UNKNOWN, and two hospitals may give the same one. What
    both state of issuer, birth date and sex must be the same. A name may have changed: but then the birth date and a
    stated issuer must be the same, since among the many of one id some have the same birth date."""
    if one.patient_id != other.patient_id:
        return False
    issuer, birth, sex, name = (
        _agree(one, other, word) for word in ("IssuerOfPatientID", "PatientBirthDate", "PatientSex", "PatientName")
    )
    if False in (issuer, birth, sex):
        return False
    return bool(name or (birth and (name is None or issuer)))


def _agree(one: Source, other: Source, keyword: str) -> bool | None:
    """Whether both state the same; None where one of them states nothing."""
    first, second = (_stated(of, keyword) for of in (one, other))
    return first == second if first and second else None


def _stated(source: Source, keyword: str) -> str:
    """Empty where nothing is stated, as by a birth date of January 1: that is what an unknown one is filled in with."""
    text = str(source.header.get(keyword, "")).casefold().rstrip("^= ")
    return "" if keyword == "PatientBirthDate" and text.endswith("0101") else text


def _is_prior(found: Source, source: Source) -> bool:
    days = [str(of.header.StudyDate) for of in (found, source)]
    return found.study_uid != source.study_uid and (not all(days) or days[0] <= days[1])
