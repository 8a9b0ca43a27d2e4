"""What the DICOM results share: the arguments that highdicom takes of an object's patient, study, series and equipment,
and references to instances (PS3.3 C.17.2.1, "Hierarchical SOP Instance Reference Macro")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.sr import DeviceObserverIdentifyingAttributes, ObserverContext
from pydicom import Dataset
from pydicom.sr.codedict import codes

from cbmir.runtime.dicom_output.content import MANUFACTURER, MODEL_NAME, VERSION, Content
from cbmir.runtime.dicom_output.identifiers import SCHEME, SCHEME_NAME, SCHEME_UID, part_uid, series_uid
from cbmir.runtime.dicom_output.source import NAMES, OPTIONAL, UTF_8, Source

#: What each kind's series is called; its number is far from those of modalities.
SERIES = {
    "sr": (9901, "cbmir findings (for research, not for diagnosis)"),
    "sc": (9902, "cbmir page (for research, not for diagnosis)"),
    "kos": (9903, "cbmir similar priors (for research, not for diagnosis)"),
}


def identity(content: Content, kind: str, of_study: Source) -> dict[str, Any]:
    """highdicom's arguments for an object of one kind in the study of an image."""
    number, description = SERIES[kind]
    moment = of_study.local(content.moment)
    return {
        "series_instance_uid": series_uid(of_study.study_uid, kind),
        "series_number": number,
        "series_description": description,
        "sop_instance_uid": content.uid(kind),
        "instance_number": content.source.number,
        "manufacturer": MANUFACTURER,
        "manufacturer_model_name": MODEL_NAME,
        "software_versions": VERSION,
        "content_date": moment.date(),
        "content_time": moment.time(),
        "specific_character_set": UTF_8,
    }


def context(of_study: Source) -> dict[str, Any]:
    """highdicom's arguments for the patient and study, for objects that do not take them from a data set.

    Names are left to `complete`: highdicom warns of those with a single component, and quotes them.
    """
    header = of_study.header
    return {
        "study_instance_uid": of_study.study_uid,
        "patient_id": header.PatientID,
        "patient_birth_date": header.PatientBirthDate,
        "patient_sex": header.PatientSex,
        "accession_number": header.AccessionNumber,
        "study_id": header.StudyID,
        "study_date": header.StudyDate,
        "study_time": header.StudyTime,
    }


def complete(made: Dataset, of_study: Source) -> Dataset:
    """Add names, what highdicom has no argument for (optional tags of patient and study, the time zone), and the time
    of creation in that zone."""
    for keyword in (*NAMES, *OPTIONAL):
        if keyword in of_study.header:
            made[keyword] = of_study.header[keyword]
    made.InstanceCreationDate, made.InstanceCreationTime = made.ContentDate, made.ContentTime
    return made


def observer(content: Content) -> ObserverContext:
    """The model as the device that observed (PS3.16 TID 1004): its UID and serial number are those of its answers."""
    device = DeviceObserverIdentifyingAttributes(
        uid=part_uid(content.fingerprint, "device"),
        name=MODEL_NAME,
        manufacturer_name=MANUFACTURER,
        model_name=MODEL_NAME,
        serial_number=content.fingerprint,
    )
    return ObserverContext(codes.DCM.Device, device)


def coding_schemes() -> list[CodingSchemeIdentificationItem]:
    """Coding Scheme Identification Sequence: where 99CBMIR is from (PS3.3 C.12.1.1.4)."""
    item = CodingSchemeIdentificationItem(SCHEME, name=SCHEME_NAME, responsible_organization=MANUFACTURER)
    item.CodingSchemeUID = SCHEME_UID  # which highdicom writes for registered schemes alone
    return [item]


def references(instances: Iterable[tuple[str, str, str, str]]) -> list[Dataset]:
    """Items that refer to instances given as (study, series, SOP class, SOP instance): an item a study."""
    studies: dict[str, dict[str, list[Dataset]]] = defaultdict(lambda: defaultdict(list))
    for study, series, sop_class, uid in instances:
        item = Dataset()
        item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = sop_class, uid
        studies[study][series].append(item)
    made = []
    for study, of_study in studies.items():
        item = Dataset()
        item.ReferencedSeriesSequence = []
        for series, of_series in of_study.items():
            part = Dataset()
            part.ReferencedSOPSequence, part.SeriesInstanceUID = of_series, series
            item.ReferencedSeriesSequence.append(part)
        item.StudyInstanceUID = study
        made.append(item)
    return made


def itself(source: Source) -> tuple[str, str, str, str]:
    """The source image, as `references` takes it."""
    return source.study_uid, str(source.header.SeriesInstanceUID), source.sop_class, source.uid
