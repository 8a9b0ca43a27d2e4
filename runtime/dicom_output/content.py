"""What all results say, whatever their format: findings, look-alikes under case ids, warnings, and by which model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from cbmir import __version__
from cbmir.runtime.dicom_output.codes import readable
from cbmir.runtime.dicom_output.priors import Prior, own_priors
from cbmir.runtime.dicom_output.source import Source
from cbmir.runtime.dicom_output.uids import answers_fingerprint, case_id, result_uid
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.result import Analysis, Finding, Neighbour

#: Manufacturer and Manufacturer's Model Name of every object that cbmir makes.
MANUFACTURER = MODEL_NAME = "cbmir"
VERSION = __version__
ALGORITHM = "cbmir chest X-ray findings and retrieval"


@dataclass(frozen=True)
class LookAlike:
    """An image of the gallery as anybody may know it; `labels` are those positive, `uncertain` are others."""

    case: str
    cosine: float
    labels: tuple[str, ...]
    uncertain: tuple[str, ...]

    @classmethod
    def of(cls, gallery: AnyGallery, one: Neighbour) -> Self:
        """Raises as `case_id`."""
        positive = tuple(label for label in one.labels if label not in one.uncertain)
        return cls(case_id(gallery, one.id), one.cosine, positive, one.uncertain)

    @property
    def words(self) -> str:
        """The labels as people read them."""
        uncertain = (f"{readable(label)} (uncertain)" for label in self.uncertain)
        return ", ".join((*map(readable, self.labels), *uncertain)) or "no finding known"


@dataclass(frozen=True, eq=False)
class Content:
    """`priors` are the patient's own, where they were asked for. `collection` is the number of images in the gallery,
    None without one. `fingerprint` is that of the model's answers; `version` and `parameters` identify it to a reader.
    `predecessor` is the SOP Instance UID of the SR of an earlier model, or empty."""

    source: Source
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
        cls, source: Source, analysis: Analysis, finder: Finder, *, with_priors: bool = False, predecessor: str = ""
    ) -> Self:
        """Raises GalleryError where the gallery cannot be searched, and as `case_id`."""
        card, gallery, health = finder.card, finder.gallery, finder.health()
        fingerprint = answers_fingerprint(card)
        priors, notes = own_priors(source, analysis, gallery) if with_priors else ((), ())
        return cls(
            source=source,
            findings=analysis.findings,
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

    @property
    def ranked(self) -> tuple[Finding, ...]:
        """The findings, those that are most certain first."""
        return tuple(sorted(self.findings, key=lambda one: (-certainty(one), one.label)))


def certainty(finding: Finding) -> float:
    """The probability, or the score where there is none, in [0, 1]."""
    return finding.score if finding.probability is None else finding.probability
