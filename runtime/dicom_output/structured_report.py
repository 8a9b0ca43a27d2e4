"""The Comprehensive 3D SR: TID 1500 "Measurement Report" (DICOM PS3.16), a TID 1501 group for each finding and for each
look-alike. It is complete, PRELIMINARY and UNVERIFIED: nobody answers for it."""

from __future__ import annotations

from highdicom.base import SOPClass
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
from pydicom.uid import Comprehensive3DSRStorage, ExplicitVRLittleEndian

from cbmir.labels import Code
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import ALGORITHM, Content, LookAlike
from cbmir.runtime.dicom_output.identifiers import part_uid, series_uid
from cbmir.runtime.dicom_output.objects import coding_schemes, complete, context, identity, itself, observer, references
from cbmir.runtime.results import Finding


def measurement_report(content: Content) -> Dataset:
    """The SR of an analysis, ready to be stored.

    highdicom's `Comprehensive3DSR` would copy the tree and search it twice, which takes twice as long as to build it;
    and it takes the image's attributes by its SOP class, where it knows no private one.
    """
    made = SOPClass(
        sop_class_uid=Comprehensive3DSRStorage,
        modality="SR",
        transfer_syntax_uid=ExplicitVRLittleEndian,
        coding_schemes=coding_schemes(),
        **identity(content, "sr", content.source) | context(content.source),
    )
    for element in _tree(content)[0]:
        made.add(element)
    made.CompletionFlag, made.VerificationFlag, made.PreliminaryFlag = "COMPLETE", "UNVERIFIED", "PRELIMINARY"
    made.PerformedProcedureCodeSequence = made.ReferencedPerformedProcedureStepSequence = []  # type 2: not known
    made.CurrentRequestedProcedureEvidenceSequence = references([itself(content.source)])
    if content.predecessor:
        study = content.source.study_uid
        earlier = (study, series_uid(study, "sr"), Comprehensive3DSRStorage, content.predecessor)
        made.PredecessorDocumentsSequence = references([earlier])
    return complete(made, content.source)


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
    measured = [_measurement(own.SCORE, finding.score, own.NO_UNITS)]
    if finding.probability is not None:
        measured.insert(0, _measurement(own.CERTAINTY, 100 * finding.probability, own.PERCENT))
    if finding.threshold is not None:
        measured.append(_measurement(own.THRESHOLD, finding.threshold, own.NO_UNITS))
    return MeasurementsAndQualitativeEvaluations(
        tracking_identifier=TrackingIdentifier(part_uid(content.uid("sr"), "finding", finding.label), finding.label),
        finding_type=own.concept(own.label_code(finding.label)),
        algorithm_id=_algorithm(content),
        measurements=measured,
        qualitative_evaluations=[_evaluation(own.PREDICTED, own.predicted_code(finding.predicted))],
        source_images=[_source_image(content)],
    )


def _look_alike(content: Content, one: LookAlike) -> MeasurementsAndQualitativeEvaluations:
    return MeasurementsAndQualitativeEvaluations(
        tracking_identifier=TrackingIdentifier(part_uid(content.uid("sr"), "look-alike", one.case), one.case),
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
