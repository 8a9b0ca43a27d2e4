"""Identifiers of results: UIDs that a second run reproduces, and codes.

A UID is `2.25.` followed by the integer of a version 5 UUID (DICOM PS3.5 B.2). A code is a standard one if its meaning
is exactly the same, else one from cbmir's own scheme 99CBMIR.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import TYPE_CHECKING

import numpy as np

from cbmir.card import ModelCard
from cbmir.labels import Code, canonical, code_for, spelled
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.results import Finding

if TYPE_CHECKING:
    from highdicom.sr import CodedConcept

    from cbmir.runtime.dicom_output.source import SourceImage

_NAMESPACE = uuid.UUID("4eff4554-5046-4150-90c7-506715ec3988")


def result_uid(source: SourceImage, pixels: str, fingerprint: str, kind: str) -> str:
    """Return the SOP Instance UID for one kind of result from one image and one model (`answers_fingerprint`).

    It depends on patient and study, so that an archive that corrects these does not keep a result with the wrong ones;
    and on the pixels, because senders have used one UID for two images, whose results must not replace each other.

    Args:
        pixels: The image's `pixels_digest`.
        kind: One of KINDS.

    Returns:
        A UID of at most 64 characters, the same for the same arguments.
    """
    return _uid("instance", source.patient_id, source.study_uid, source.uid, pixels, fingerprint, kind)


def pixels_digest(image: Radiograph) -> str:
    """Compute a digest that distinguishes images with the same UID and is equal in all lossless transfer syntaxes."""
    digest = hashlib.sha256(repr(image.stored.shape).encode())
    digest.update(np.ascontiguousarray(image.stored).data)
    return digest.hexdigest()


def series_uid(study_instance_uid: str, kind: str) -> str:
    """Return the Series Instance UID of all results of one kind in a study, for any model."""
    return _uid("series", study_instance_uid, kind)


def part_uid(result: str, *names: str) -> str:
    """Return a UID for a part of a result, such as a tracked finding or a copy in another study."""
    return _uid("part", result, *names)


def answers_fingerprint(card: ModelCard) -> str:
    """Return 32 hexadecimal digits that are equal for models with the same answers, whose results replace each other.

    They do not depend on precision (except int8, which has its own embedding space), metrics, versions or the gallery.
    """
    of_card = card.to_json()
    names = ("labels", "preprocess", "encoder", "head", "sigma", "thresholds", "calibration", "fingerprint")
    deciding = {name: of_card[name] for name in names} | {"weights": card.weights}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:32]


def _uid(*names: str) -> str:
    return f"2.25.{uuid.uuid5(_NAMESPACE, json.dumps(names)).int}"


SCHEME = "99CBMIR"
SCHEME_UID = "2.25.92689651567244863674355425848909154203"
SCHEME_NAME = "cbmir, content-based medical image retrieval"

#: Part of every result.
DISCLAIMER = "For research, not for diagnosis. cbmir is not a medical device."

CERTAINTY = Code("DCM", "111012", "Certainty of Finding")
THRESHOLD = Code("DCM", "122411", "Threshold Value")
COMMENT = Code("DCM", "121106", "Comment")
FOR_RESEARCH = Code("DCM", "113009", "For Research")
SOURCE_IMAGE = Code("DCM", "121322", "Source image for image processing operation")
CHEST_XRAY = Code("SCT", "399208008", "Plain chest X-ray")
YES = Code("SCT", "373066001", "Yes")
NO = Code("SCT", "373067005", "No")
UNDETERMINED = Code("SCT", "373068000", "Undetermined")
PERCENT = Code("UCUM", "%", "Percent")
NO_UNITS = Code("UCUM", "1", "no units")

SCORE = Code(SCHEME, "score", "Score of the model")
PREDICTED = Code(SCHEME, "predicted", "Score exceeds the threshold")
SIMILAR_IMAGE = Code(SCHEME, "similar-image", "Similar image in the gallery")
DISTANCE = Code(SCHEME, "distance", "Distance of the embeddings")
LABEL = Code(SCHEME, "label", "Label of the similar image")
UNCERTAIN_LABEL = Code(SCHEME, "uncertain-label", "Uncertain label of the similar image")

#: Coding schemes as FHIR names them.
SYSTEMS = {
    "SCT": "http://snomed.info/sct",
    "DCM": "http://dicom.nema.org/resources/ontology/DCM",
    "UCUM": "http://unitsofmeasure.org",
    SCHEME: f"urn:oid:{SCHEME_UID}",
}


def measured(finding: Finding) -> list[tuple[Code, float, Code]]:
    """Return the name, value and unit of a finding's certainty, score and threshold, as far as they are known."""
    certainty = None if finding.probability is None else 100 * finding.probability
    every = (CERTAINTY, certainty, PERCENT), (SCORE, finding.score, NO_UNITS), (THRESHOLD, finding.threshold, NO_UNITS)
    return [(name, value, unit) for name, value, unit in every if value is not None]


def predicted_code(predicted: bool | None) -> Code:
    """Return Yes, No, or Undetermined for a finding without a threshold."""
    return UNDETERMINED if predicted is None else YES if predicted else NO


def label_code(label: str) -> Code:
    """Return a label's standard code, else its canonical name as a code of 99CBMIR."""
    name = "".join(one if one.isprintable() and one != "\\" else "?" for one in canonical(label))
    return code_for(label) or Code(SCHEME, name, spelled(name)[:64])  # 64 characters, as in an LO (PS3.5 6.2)


def concept(code: Code) -> CodedConcept:
    """Convert a code for highdicom."""
    from highdicom.sr import CodedConcept

    return CodedConcept(code.value, code.scheme, code.meaning)
