"""The Comprehensive 3D SR: TID 1500 "Measurement Report" (DICOM PS3.16), with a TID 1501 group for each finding and for
each look-alike. It is complete, PRELIMINARY and UNVERIFIED: no physician has verified it."""

from __future__ import annotations

from highdicom.sr import (
    AlgorithmIdentification,
    Measurement,
    MeasurementReport,
    MeasurementsAndQualitativeEvaluations,
    ObservationContext,
    QualitativeEvaluation,
    RelationshipTypeValues,
    SourceImageForMeasurementGroup,
    TextContentItem,
    TrackingIdentifier,
)
from pydicom import Dataset
from pydicom.uid import Comprehensive3DSRStorage

from cbmir.labels import Code
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import ALGORITHM, Content, LookAlike
from cbmir.runtime.dicom_output.objects import document, observer, references
from cbmir.runtime.results import Finding


def measurement_report(content: Content) -> Dataset:
    """The SR of an analysis, ready to be stored."""
    made = document(content, "sr", content.source, Comprehensive3DSRStorage, "SR", _tree(content)[0])
    made.CompletionFlag, made.VerificationFlag, made.PreliminaryFlag = "COMPLETE", "UNVERIFIED", "PRELIMINARY"
    made.PerformedProcedureCodeSequence = made.ReferencedPerformedProcedureStepSequence = []  # type 2: not known
    made.CurrentRequestedProcedureEvidenceSequence = references([content.source.reference])
    if content.predecessor:
        study = content.source.study_uid
        earlier = (study, own.series_uid(study, "sr"), Comprehensive3DSRStorage, content.predecessor)
        made.PredecessorDocumentsSequence = references([earlier])
    return made


def _tree(content: Content) -> MeasurementReport:
    tree = MeasurementReport(
        observation_context=ObservationContext(observer_device_context=observer(content)),
        procedure_reported=own.concept(own.CHEST_XRAY),
        imaging_measurements=[
            *(_finding(content, one) for one in content.findings),
            *(_look_alike(content, one) for one in content.look_alikes),
        ],
    )
    for text in (own.DISCLAIMER, *content.warnings):
        tree[0].ContentSequence.append(
            TextContentItem(own.concept(own.COMMENT), text, relationship_type=RelationshipTypeValues.CONTAINS)
        )
    return tree


def _finding(content: Content, finding: Finding) -> MeasurementsAndQualitativeEvaluations:
    return MeasurementsAndQualitativeEvaluations(
        tracking_identifier=TrackingIdentifier(
            own.part_uid(content.uid("sr"), "finding", finding.label), finding.label
        ),
        finding_type=own.concept(own.label_code(finding.label)),
        algorithm_id=_algorithm(content),
        measurements=[_measurement(*one) for one in own.measured(finding)],
        qualitative_evaluations=[_evaluation(own.PREDICTED, own.predicted_code(finding.predicted))],
        source_images=[_source_image(content)],
    )


def _look_alike(content: Content, one: LookAlike) -> MeasurementsAndQualitativeEvaluations:
    return MeasurementsAndQualitativeEvaluations(
        tracking_identifier=TrackingIdentifier(own.part_uid(content.uid("sr"), "look-alike", one.case), one.case),
        finding_type=own.concept(own.LOOK_ALIKE),
        algorithm_id=_algorithm(content),
        measurements=[_measurement(own.COSINE, one.cosine, own.NO_UNITS)],
        qualitative_evaluations=[
            *(_evaluation(own.LABEL, own.label_code(label)) for label in one.labels),
            *(_evaluation(own.UNCERTAIN_LABEL, own.label_code(label)) for label in one.uncertain),
        ],
        source_images=[_source_image(content)],
    )


def _algorithm(content: Content) -> AlgorithmIdentification:
    return AlgorithmIdentification(ALGORITHM, content.version, parameters=["; ".join(content.parameters)])


def _measurement(name: Code, value: float, unit: Code) -> Measurement:
    return Measurement(own.concept(name), round(value, 6), own.concept(unit))


def _evaluation(name: Code, value: Code) -> QualitativeEvaluation:
    return QualitativeEvaluation(own.concept(name), own.concept(value))


def _source_image(content: Content) -> SourceImageForMeasurementGroup:
    return SourceImageForMeasurementGroup(content.source.sop_class, content.source.uid)
