"""The Key Object Selection that marks the patient's own similar priors (TID 2010), one in each study that it refers to.

DICOM wants a selection that refers to several studies to be in each of them, and each copy to name the others
(PS3.3 C.17.6.2.1).
"""

from __future__ import annotations

from highdicom.ko import KeyObjectSelection
from pydicom import Dataset
from pydicom.uid import KeyObjectSelectionDocumentStorage

from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import Content
from cbmir.runtime.dicom_output.identifiers import part_uid, series_uid
from cbmir.runtime.dicom_output.objects import complete, document, identity, itself, observer, references
from cbmir.runtime.dicom_output.source import SourceImage

_INTRODUCTION = "The image, and earlier images of the same patient by similarity:"


def key_objects(content: Content, *, copies: bool = True) -> list[Dataset]:
    """The selection in the image's own study, then its `copies` in those of the priors; empty without priors."""
    if not content.priors:
        return []
    studies = {content.source.study_uid: content.source}
    for prior in content.priors if copies else ():
        studies.setdefault(prior.source.study_uid, prior.source)
    uids = {
        study: content.uid("kos") if study == content.source.study_uid else part_uid(content.uid("kos"), study)
        for study in studies
    }
    made = []
    for study, of_study in studies.items():
        others = [
            (other, series_uid(other, "kos"), KeyObjectSelectionDocumentStorage, uids[other])
            for other in studies if other != study
        ]  # fmt: skip
        made.append(_selection(content, of_study, uids[study], references(others)))
    return made


def _selection(content: Content, of_study: SourceImage, uid: str, others: list[Dataset]) -> Dataset:
    lines = (
        f"{number}. study of {prior.day}: cosine similarity {prior.cosine:.3f}"
        for number, prior in enumerate(content.priors, 1)
    )
    images = [content.source, *(prior.source for prior in content.priors)]
    tree = KeyObjectSelection(
        document_title=own.concept(own.FOR_RESEARCH),
        referenced_objects=[_image(one) for one in images],
        observer_device_context=observer(content),
        description="\r\n".join((own.DISCLAIMER, _INTRODUCTION, *lines)),
    )
    arguments = identity(content, "kos", of_study) | {"sop_instance_uid": uid}
    made = document(KeyObjectSelectionDocumentStorage, "KO", tree[0], arguments)
    made.ReferencedPerformedProcedureStepSequence = []
    made.CurrentRequestedProcedureEvidenceSequence = references(map(itself, images))
    if others:
        made.IdenticalDocumentsSequence = others
    return complete(made, of_study)


def _image(source: SourceImage) -> Dataset:
    """A reference that highdicom takes for an image, since it has rows and columns."""
    image = Dataset()
    image.SOPClassUID, image.SOPInstanceUID, image.Rows, image.Columns = source.sop_class, source.uid, 1, 1
    return image
