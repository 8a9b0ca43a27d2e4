"""What results are called: UIDs that a second run makes again, and case ids that tell nothing of other patients.

A UID is `2.25.` and the integer of a UUID (DICOM PS3.5 B.2), here a version 5 one: made of names, without chance.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from typing import TYPE_CHECKING

from cbmir.card import ModelCard
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import AnyGallery

if TYPE_CHECKING:
    from cbmir.runtime.dicom_output.source import Source

_NAMESPACE = uuid.UUID("4eff4554-5046-4150-90c7-506715ec3988")


def result_uid(source: Source, fingerprint: str, kind: str) -> str:
    """The SOP Instance UID of a result of one kind, of one image by one model (`answers_fingerprint`).

    Of the image's patient and study too: an archive that corrects them and keeps the image's UID must not keep the
    result that names the wrong ones.
    """
    return _uid("instance", source.patient_id, source.study_uid, source.uid, fingerprint, kind)


def series_uid(study_instance_uid: str, kind: str) -> str:
    """The Series Instance UID of all results of one kind in a study, of whatever model: so that a predecessor's series
    is known by its study."""
    return _uid("series", study_instance_uid, kind)


def part_uid(result: str, *names: str) -> str:
    """A UID of something within a result: a tracked finding, a copy in another study."""
    return _uid("part", result, *names)


def answers_fingerprint(card: ModelCard) -> str:
    """32 hexadecimal digits: the same for models whose results replace each other.

    Made of what decides the answers: weights, labels, preprocessing, thresholds, calibration. Precision is no part of
    it (but for int8, whose embedding space is its own), nor are metrics, versions and the gallery.
    """
    of_card = card.to_json()
    names = ("labels", "preprocess", "encoder", "head", "sigma", "thresholds", "calibration", "fingerprint")
    deciding = {name: of_card[name] for name in names} | {"weights": card.weights}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:32]


def case_id(gallery: AnyGallery, entry_id: str) -> str:
    """`case-` and 16 hexadecimal digits for an entry of a gallery: HMAC-SHA256, whose key is the gallery's uuid.

    Who does not have the gallery cannot tell which entry it is. `find_case` is the way back. A copy of a gallery has a
    uuid of its own, and so other case ids. Raises GalleryError as the gallery's `uuid`.
    """
    return "case-" + hmac.new(gallery.uuid.encode(), entry_id.encode(), hashlib.sha256).hexdigest()[:16]


def find_case(gallery: AnyGallery, case: str) -> Entry | None:
    """The entry that a case id stands for, None where the gallery has none; every id is tried."""
    found = next((one for one in gallery.ids() if hmac.compare_digest(case_id(gallery, one), case)), None)
    return None if found is None else gallery.entry(found)


def _uid(*names: str) -> str:
    return f"2.25.{uuid.uuid5(_NAMESPACE, json.dumps(names)).int}"
