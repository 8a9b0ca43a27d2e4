"""The Comprehensive 3D SR: TID 1500 "Measurement Report" (DICOM PS3.16), with a TID 1501 group for each finding and for
each similar image. It is complete, PRELIMINARY and UNVERIFIED: no physician has verified it."""

from __future__ import annotations

from collections.abc import Sequence

from highdicom import sr
from pydicom import Dataset
from pydicom.uid import Comprehensive3DSRStorage

from cbmir.labels import Code
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import ALGORITHM, Content, SimilarImage
from cbmir.runtime.dicom_output.objects import document, observer, references
from cbmir.runtime.results import Finding


def measurement_report(content: Content) -> Dataset | None:
    """Make the SR of an analysis, ready to be stored; None without findings and similar images: TID 1500 needs one."""
    groups = [
        *(_finding(content, one) for one in content.findings),
        *(_similar_image(content, one) for one in content.similar_images),
    ]
    if not groups:
        return None
    tree = sr.MeasurementReport(
        observation_context=sr.ObservationContext(observer_device_context=observer(content)),
        procedure_reported=own.concept(own.CHEST_XRAY), imaging_measurements=groups,
    )  # fmt: skip
    for text in (own.DISCLAIMER, *content.warnings):
        tree[0].ContentSequence.append(
            sr.TextContentItem(own.concept(own.COMMENT), text, relationship_type=sr.RelationshipTypeValues.CONTAINS)
        )
    made = document(content, "sr", content.source, Comprehensive3DSRStorage, "SR", tree[0])
    made.CompletionFlag, made.VerificationFlag, made.PreliminaryFlag = "COMPLETE", "UNVERIFIED", "PRELIMINARY"
    made.PerformedProcedureCodeSequence = made.ReferencedPerformedProcedureStepSequence = []  # type 2: not known
    made.CurrentRequestedProcedureEvidenceSequence = references([content.source.reference])
    if content.predecessor:
        study = content.source.study_uid
        earlier = (study, own.series_uid(study, "sr"), Comprehensive3DSRStorage, content.predecessor)
        made.PredecessorDocumentsSequence = references([earlier])
    return made


def _finding(content: Content, finding: Finding) -> sr.MeasurementsAndQualitativeEvaluations:
    code, verdict = own.label_code(finding.label), (own.PREDICTED, own.predicted_code(finding.predicted))
    return _group(content, "finding", finding.label, code, own.measured(finding), [verdict])


def _similar_image(content: Content, one: SimilarImage) -> sr.MeasurementsAndQualitativeEvaluations:
    labels = [(own.LABEL, own.label_code(label)) for label in one.labels]
    labels += [(own.UNCERTAIN_LABEL, own.label_code(label)) for label in one.uncertain]
    distance = (own.DISTANCE, one.distance, own.NO_UNITS)
    return _group(content, "similar-image", one.case, own.SIMILAR_IMAGE, [distance], labels)


def _group(
    content: Content, kind: str, name: str, code: Code, measured: Sequence[tuple[Code, float, Code]],
    evaluated: Sequence[tuple[Code, Code]],
) -> sr.MeasurementsAndQualitativeEvaluations:  # fmt: skip
    concept, source = own.concept, content.source
    return sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=sr.TrackingIdentifier(own.part_uid(content.uid("sr"), kind, name), name),
        finding_type=concept(code),
        algorithm_id=sr.AlgorithmIdentification(ALGORITHM, content.version, ["; ".join(content.parameters)]),
        measurements=[sr.Measurement(concept(of), round(value, 6), concept(unit)) for of, value, unit in measured],
        qualitative_evaluations=[sr.QualitativeEvaluation(concept(of), concept(value)) for of, value in evaluated],
        source_images=[sr.SourceImageForMeasurementGroup(source.sop_class, source.uid)],
    )
