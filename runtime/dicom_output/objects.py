"""Parts shared by all DICOM results: highdicom's arguments for an object's patient, study, series and equipment, and
references to instances (PS3.3 C.17.2.1, "Hierarchical SOP Instance Reference Macro")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from highdicom.base import SOPClass
from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.sr import DeviceObserverIdentifyingAttributes, ObserverContext
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian

from cbmir.runtime.dicom_output.content import MANUFACTURER, MODEL_NAME, VERSION, Content
from cbmir.runtime.dicom_output.identifiers import SCHEME, SCHEME_NAME, SCHEME_UID, part_uid, series_uid
from cbmir.runtime.dicom_output.source import NAMES, OPTIONAL, UTF_8, SourceImage

#: Number and description of each kind's series. The numbers are far from those that modalities use.
SERIES = {
    "sr": (9901, "cbmir findings (for research, not for diagnosis)"),
    "sc": (9902, "cbmir page (for research, not for diagnosis)"),
    "kos": (9903, "cbmir similar priors (for research, not for diagnosis)"),
}


def identity(content: Content, kind: str, of_study: SourceImage) -> dict[str, Any]:
    """Make highdicom's arguments for an object of one kind in the study of an image, without people's names.

    `complete` adds the names, because highdicom warns about those with a single component and quotes them.
    """
    number, description = SERIES[kind]
    moment = of_study.local(content.moment)
    header = of_study.header
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
        "study_instance_uid": of_study.study_uid,
        "patient_id": header.PatientID,
        "patient_birth_date": header.PatientBirthDate,
        "patient_sex": header.PatientSex,
        "accession_number": header.AccessionNumber,
        "study_id": header.StudyID,
        "study_date": header.StudyDate,
        "study_time": header.StudyTime,
    }


def document(
    content: Content, kind: str, of_study: SourceImage, sop_class: str, modality: str, tree: Dataset, *, uid: str = ""
) -> SOPClass:
    """Make a document of one kind in the study of an image, with the content of a tree. `uid` replaces the usual UID.

    highdicom's own classes are not used: they copy and search the tree, which takes twice as long as building it, know
    no private SOP class, and refuse a selection of several studies.
    """
    arguments = identity(content, kind, of_study) | ({"sop_instance_uid": uid} if uid else {})
    item = CodingSchemeIdentificationItem(SCHEME, name=SCHEME_NAME, responsible_organization=MANUFACTURER)
    item.CodingSchemeUID = SCHEME_UID  # highdicom only writes it for registered schemes (PS3.3 C.12.1.1.4)
    made = SOPClass(
        sop_class_uid=sop_class, modality=modality, transfer_syntax_uid=ExplicitVRLittleEndian, coding_schemes=[item],
        **arguments,
    )  # fmt: skip
    for element in tree:
        made.add(element)
    complete(made, of_study)
    return made


def complete(made: Dataset, of_study: SourceImage) -> None:
    """Add names, the optional tags of patient and study, and the time of creation in the image's time zone."""
    for keyword in (*NAMES, *OPTIONAL):
        if keyword in of_study.header:
            made[keyword] = of_study.header[keyword]
    made.InstanceCreationDate, made.InstanceCreationTime = made.ContentDate, made.ContentTime


def observer(content: Content) -> ObserverContext:
    """Describe the model as the observing device (PS3.16 TID 1004), identified by its `answers_fingerprint`."""
    uid, serial_number = part_uid(content.fingerprint, "device"), content.fingerprint
    device = DeviceObserverIdentifyingAttributes(uid, MODEL_NAME, MANUFACTURER, MODEL_NAME, serial_number)
    return ObserverContext(codes.DCM.Device, device)


def references(instances: Iterable[tuple[str, str, str, str]]) -> list[Dataset]:
    """Make items that refer to instances, given as (study, series, SOP class, SOP instance): one item per study."""
    studies: dict[str, dict[str, list[Dataset]]] = defaultdict(lambda: defaultdict(list))
    for study, series, sop_class, uid in instances:
        studies[study][series].append(item(ReferencedSOPClassUID=sop_class, ReferencedSOPInstanceUID=uid))
    made = []
    for study, of_study in studies.items():
        of_series = [item(SeriesInstanceUID=series, ReferencedSOPSequence=items) for series, items in of_study.items()]
        made.append(item(StudyInstanceUID=study, ReferencedSeriesSequence=of_series))
    return made


def item(**elements: Any) -> Dataset:
    made = Dataset()
    for keyword, value in elements.items():
        setattr(made, keyword, value)
    return made
