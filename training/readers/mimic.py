"""MIMIC-CXR-JPG (Johnson et al., 2019): labels, metadata and split as PhysioNet ships them, and optional reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cbmir.errors import ManifestError
from cbmir.input_file import existing
from cbmir.manifest import Manifest, Row
from cbmir.text_table import uncollected
from cbmir.training.readers import common
from cbmir.training.readers.chexpert import CHEXPERT_14, Blank, kept_findings, label_policies, label_reader
from cbmir.training.readers.common import cell

_SUFFIXES = (".jpg", ".dcm", ".png")  # MIMIC-CXR-JPG, MIMIC-CXR, and conversions
_SPLITS = {"train": "train", "validate": "val", "test": "test"}
_VIEWS = {
    "PA": "PA", "AP": "AP", "POSTERO-ANTERIOR": "PA", "ANTERO-POSTERIOR": "AP",
    "LATERAL": "LATERAL", "LL": "LATERAL", "LEFT LATERAL": "LATERAL",
}  # fmt: skip
_VIEW_CODE = "ViewCodeSequence_CodeMeaning"


@uncollected()
def read_mimic(
    folder: Path, *, labeller: Literal["chexpert", "negbio"] = "chexpert", findings: int = 9, blank: Blank = "zero",
    frontal_only: bool = True, reports: Path | None = None, missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read MIMIC-CXR-JPG into a manifest.

    Images are files/p10/p10000032/s50414267/<dicom_id>.jpg (or .dcm, .png). The publisher's split is used if its table
    exists, with validate as val. A study without a row in the table of labels has unknown labels.

    Args:
        folder: The folder with `files` and the tables `mimic-cxr-2.*-{chexpert,negbio,metadata,split}.csv` (.csv.gz).
        labeller: The labeller whose labels are used.
        findings: As in `read_chexpert`.
        blank: As in `read_chexpert`.
        frontal_only: Leave out lateral images, and those without a view.
        reports: The folder with the `files` of mimic-cxr-reports.zip; by default `folder` or its `mimic-cxr-reports`.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: A table or the folder is not as expected.
    """
    names = {part: [f"mimic-cxr-2.*-{part}.csv", f"mimic-cxr-2.*-{part}.csv.gz"] for part in ("metadata", "split")}
    labels_of = label_reader(findings, blank)
    labels_path = common.find_file(folder, [f"mimic-cxr-2.*-{labeller}.csv", f"mimic-cxr-2.*-{labeller}.csv.gz"],
                                   f"MIMIC's labels by {labeller}")  # fmt: skip
    labels = {
        cell(record, "study_id", where): labels_of(record, where)
        for where, record in common.read_source(labels_path, ("study_id", *CHEXPERT_14), "MIMIC's labels").records()
    }
    sources = [labels_path, common.find_file(folder, names["metadata"], "MIMIC's metadata")]
    split_path = common.find_optional_file(folder, names["split"], "MIMIC's split")
    splits = _splits(split_path) if split_path else {}
    views = common.ViewChoice(_VIEWS, frontal_only)
    unknown = (None,) * len(CHEXPERT_14[1:])
    rows = [
        Row(Path(image), patient, labels.get(study, unknown), study, view, splits.get(image, ""), date=date)
        for image, patient, study, view, date in _images(sources[1], views)
    ]
    policies = views.policies(rows, sources[1])
    if split_path:
        sources.append(split_path)
        without = [row.image.name for row in rows if not row.split]
        if without:
            raise ManifestError(f"{split_path}: expected a split for each image, found none for {without[0]}")
    root, texts = folder.resolve(), _report_folder(folder, reports)
    rows, located = common.locate(rows, lambda row: _file(root, row, _SUFFIXES), missing, folder)
    rows = [_with_report(row, texts) for row in rows]
    return common.finish(
        kept_findings(rows, findings), "mimic", sources, seed,
        splits="MIMIC's own, validate as val" if split_path else None,
        policies=label_policies(findings, blank) | policies | {
            "labeller": labeller,
            "images_of_studies_without_labels": sum(row.study_id not in labels for row in rows),
            "dates": "shifted by the publisher, all of a patient by the same time: only differences are meaningful",
            "reports": sum(bool(row.report) for row in rows), **located,
        }
    )  # fmt: skip


def _images(path: Path, views: common.ViewChoice) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield image, patient, study, view and date of each row of the metadata whose view is included."""
    required = ("dicom_id", "subject_id", "study_id", "ViewPosition", "StudyDate")
    for where, record in common.read_source(path, required, "MIMIC's metadata", (_VIEW_CODE,)).records():
        image, patient, study, position, day = (cell(record, column, where) for column in required)
        if not (image and patient.isdigit() and study.isdigit()):
            raise ManifestError(f"{where}: expected the ids of image, patient and study, found {image!r}, {patient!r}, "
                                f"{study!r}")  # fmt: skip
        view = views.choose(position or record.get(_VIEW_CODE, "").strip())
        date = common.read_day(day)
        if date is None:
            raise ManifestError(f"{where}: expected a date YYYYMMDD in column 'StudyDate', found {day!r}")
        if view is not None:
            yield image, patient, study, view, date


def _splits(path: Path) -> dict[str, str]:
    found = {}
    for where, record in common.read_source(path, ("dicom_id", "split"), "MIMIC's split").records():
        split = cell(record, "split", where)
        if split not in _SPLITS:
            raise ManifestError(f"{where}: expected split train, validate or test, found {split!r}")
        found[cell(record, "dicom_id", where)] = _SPLITS[split]
    return found


def _study(row: Row) -> str:
    return f"files/p{row.patient_id[:2]}/p{row.patient_id}/s{row.study_id}"


def _file(root: Path, row: Row, suffixes: tuple[str, ...]) -> Path | None:
    paths = (Path(f"{root}/{_study(row)}/{row.image}{suffix}") for suffix in suffixes)
    return next(filter(existing, paths), None)


def _report_folder(folder: Path, reports: Path | None) -> Path:
    """Return the folder whose `files` may contain reports."""
    if reports is not None:
        common.check_folder(reports / "files", "the folder 'files' of mimic-cxr-reports.zip")
        return reports
    beside = folder / "mimic-cxr-reports"
    return beside if (beside / "files").is_dir() else folder


def _with_report(row: Row, folder: Path) -> Row:
    return replace(row, report=common.read_report(folder / f"{_study(row)}.txt"))
