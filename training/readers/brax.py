"""BRAX (Reis et al., Scientific Data 2022): its spreadsheet as PhysioNet ships it, PNG or DICOM images."""

from __future__ import annotations

from pathlib import Path

from cbmir.manifest import Manifest, Row
from cbmir.training.readers import common
from cbmir.training.readers.chexpert import CHEXPERT_14, Blank, kept_findings, label_policies, label_reader
from cbmir.training.readers.common import cell

_COLUMNS = ("PatientID", "AccessionNumber", "StudyDate", "ViewPosition", *CHEXPERT_14)
_PATHS = ("PngPath", "DicomPath")
_VIEWS = {"PA": "PA", "AP": "AP", "LL": "LATERAL", "RL": "LATERAL", "L": "LATERAL", "LATERAL": "LATERAL"}


def read_brax(
    folder: Path, *, findings: int = 9, blank: Blank = "zero", frontal_only: bool = True,
    missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """A manifest of BRAX.

    Args:
        folder: The folder with `master_spreadsheet_update.csv` and `images` or `Anonymized_DICOMs`.
        findings, blank: As in `read_chexpert`: CheXpert's labeller for Portuguese made the labels.
        frontal_only: Leave out lateral images, and those without a view.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The spreadsheet or the folder is not as expected.
    """
    path = common.find_file(folder, ["master_spreadsheet_update.csv", "master_spreadsheet.csv"], "BRAX's spreadsheet")
    labels_of, days = label_reader(findings, blank), common.Days()
    views = common.ViewChoice(_VIEWS, frontal_only)
    rows: list[Row] = []
    files: dict[Path, list[Path]] = {}
    root = folder.resolve()
    for where, record in common.read_source(path, _COLUMNS, "BRAX's spreadsheet", _PATHS).records():
        patient, study, day, position = (cell(record, column, where) for column in _COLUMNS[:4])
        view, labels = views.choose(position), labels_of(record, where)
        places = [root / record[column].strip() for column in _PATHS if record.get(column, "").strip()]
        if view is not None:
            image = places[0] if places else Path(f"(no path, {where})")
            files[image] = places
            rows.append(Row(image, patient, labels, study, view, date=days.read(day)))
    policies = views.policies(rows, path)
    rows, absent = common.locate(
        rows, lambda row: next(filter(common.existing, files[row.image]), None), missing, folder
    )
    return common.finish(
        kept_findings(rows, findings),
        reader="brax",
        sources=[path],
        policies=label_policies(findings, blank) | policies | {
            "dates": "fictitious, by the publisher", "dates_not_read": days.not_read,
            "missing": missing, "missing_images": absent,
        },
        seed=seed,
        splits=None,
    )  # fmt: skip
