"""The Key Object Selection that marks the patient's own similar priors (TID 2010).

If a selection refers to several studies, DICOM requires a copy in each of them that names the others (PS3.3
C.17.6.2.1).
"""

from __future__ import annotations

from highdicom.ko import KeyObjectSelection
from pydicom import Dataset
from pydicom.uid import KeyObjectSelectionDocumentStorage

from cbmir.card import OF_PHANTOMS
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import Content
from cbmir.runtime.dicom_output.objects import document, item, observer, references

_INTRODUCTION = "The image, and earlier images of the same patient by similarity:"


def key_objects(content: Content, *, copies: bool = True) -> list[Dataset]:
    """Make the selection in the image's own study, then its `copies` in those of the priors; empty without priors."""
    if not content.priors:
        return []
    studies = {content.source.study_uid: content.source}
    for prior in content.priors if copies else ():
        studies.setdefault(prior.source.study_uid, prior.source)
    uids = {study: own.part_uid(content.uid("kos"), study) for study in studies}
    uids[content.source.study_uid] = content.uid("kos")
    copy_of = {
        study: (study, own.series_uid(study, "kos"), KeyObjectSelectionDocumentStorage, uid)
        for study, uid in uids.items()
    }
    lines = [
        f"{number}. study of {prior.source.day or 'unknown day'}: distance {prior.distance:.3f}"
        for number, prior in enumerate(content.priors, 1)
    ]
    warnings = [OF_PHANTOMS] * (OF_PHANTOMS in content.warnings)
    images = [content.source, *(prior.source for prior in content.priors)]
    selections: list[Dataset] = []
    for study, of_study in studies.items():
        tree = KeyObjectSelection(
            document_title=own.concept(own.FOR_RESEARCH),
            # highdicom treats each as an image, because it has rows and columns
            referenced_objects=[item(SOPClassUID=i.sop_class, SOPInstanceUID=i.uid, Rows=1, Columns=1) for i in images],
            observer_device_context=observer(content),
            description="\r\n".join((own.DISCLAIMER, *warnings, _INTRODUCTION, *lines)),
        )
        made = document(content, "kos", of_study, KeyObjectSelectionDocumentStorage, "KO", tree[0], uid=uids[study])
        made.ReferencedPerformedProcedureStepSequence = []
        made.CurrentRequestedProcedureEvidenceSequence = references(one.reference for one in images)
        if others := references(copy for other, copy in copy_of.items() if other != study):
            made.IdenticalDocumentsSequence = others
        selections.append(made)
    return selections
