"""Codes of the results: standard ones where a concept means just that, else those of cbmir's own scheme 99CBMIR.

`cbmir.labels.Code` throughout; `concept` makes of it what highdicom takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbmir.labels import Code, canonical, code_for

if TYPE_CHECKING:
    from highdicom.sr import CodedConcept

SCHEME = "99CBMIR"
SCHEME_UID = "2.25.92689651567244863674355425848909154203"
SCHEME_NAME = "cbmir, content-based medical image retrieval"

#: What every result says of itself.
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
LOOK_ALIKE = Code(SCHEME, "look-alike", "Image of the reference collection that looks alike")
COSINE = Code(SCHEME, "cosine", "Cosine similarity of embeddings")
LABEL = Code(SCHEME, "label", "Label of the look-alike")
UNCERTAIN_LABEL = Code(SCHEME, "uncertain-label", "Uncertain label of the look-alike")

#: Coding schemes as FHIR names them.
SYSTEMS = {
    "SCT": "http://snomed.info/sct",
    "DCM": "http://dicom.nema.org/resources/ontology/DCM",
    "UCUM": "http://unitsofmeasure.org",
    SCHEME: f"urn:oid:{SCHEME_UID}",
}

_LONGEST_MEANING = 64  # characters of an LO (PS3.5 6.2)


def predicted_code(predicted: bool | None) -> Code:
    """Yes, No, or Undetermined for a finding without a threshold."""
    return UNDETERMINED if predicted is None else YES if predicted else NO


def label_code(label: str) -> Code:
    """A label's standard code, else one of 99CBMIR: its canonical name."""
    name = "".join(one if one.isprintable() and one != "\\" else "?" for one in canonical(label))
    return code_for(label) or Code(SCHEME, name, readable(name)[:_LONGEST_MEANING])


def readable(label: str) -> str:
    """A label as people write it."""
    return label.replace("_", " ")


def concept(code: Code) -> CodedConcept:
    """A code as highdicom takes it."""
    from highdicom.sr import CodedConcept

    return CodedConcept(code.value, code.scheme, code.meaning)
