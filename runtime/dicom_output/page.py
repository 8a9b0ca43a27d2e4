"""The Secondary Capture image (PS3.3 A.8): the page as RGB pixels, in the study of the image that it shows."""

from __future__ import annotations

from highdicom import UID
from highdicom.sc import SCImage
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian

from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.dicom_output import codes as own
from cbmir.runtime.dicom_output.content import Content
from cbmir.runtime.dicom_output.objects import complete, context, identity
from cbmir.runtime.dicom_output.page_drawing import draw_page
from cbmir.runtime.radiograph import Radiograph
from cbmir.runtime.result import Analysis


def page(content: Content, analysis: Analysis, image: Radiograph, spec: PreprocessSpec) -> Dataset:
    """The page of an analysis of `image`, ready to be stored. The patient is named by tags; by pixels only where the
    image's own do."""
    source = content.source
    made = SCImage(
        pixel_array=draw_page(content, analysis, image, spec),
        photometric_interpretation="RGB",
        bits_allocated=8,
        coordinate_system="PATIENT",
        patient_orientation=("L", "F"),
        transfer_syntax_uid=ExplicitVRLittleEndian,
        **identity(content, "sc", source) | context(source),
    )
    made["PatientOrientation"].value = ""  # type 2C: a page has none, though highdicom asks for one
    made.Laterality = ""  # type 2C
    made.ConversionType = "WSD"
    made.DateOfSecondaryCapture, made.TimeOfSecondaryCapture = made.ContentDate, made.ContentTime
    if source.burned_in:
        made.BurnedInAnnotation = source.burned_in
    made.ImageComments = own.DISCLAIMER
    made.DerivationDescription = "Page of findings, evidence and look-alikes"
    reference = Dataset()
    reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = UID(source.sop_class), UID(source.uid)
    reference.PurposeOfReferenceCodeSequence = [own.concept(own.SOURCE_IMAGE)]
    made.SourceImageSequence = [reference]
    return complete(made, source)
