"""Analyses as objects for a PACS or a hospital's server: SR, Secondary Capture, KOS, FHIR.

::

    make_results(bytes of the file, analysis, finder, kinds=("sr", "sc", "kos", "fhir")) -> Results

    sr    TID 1500 Comprehensive 3D SR, UNVERIFIED: coded findings, and similar images
    sc    RGB page for people: the image, evidence, findings, similar images
    kos   the patient's own similar priors
    fhir  R4 Bundle: DiagnosticReport, Observation, ImagingStudy, Device

All belong to the image's patient and study. Of other patients' images they hold only labels and distances, under opaque
case ids. UIDs are derived from the image and the model, so a second run replaces the first. See docs/dicom_output.md.
"""

from cbmir.runtime.dicom_output.identifiers import answers_fingerprint, result_uid
from cbmir.runtime.dicom_output.results import KINDS, Results, is_own_result, make_results, warm_up

__all__ = ["KINDS", "Results", "answers_fingerprint", "is_own_result", "make_results", "result_uid", "warm_up"]
