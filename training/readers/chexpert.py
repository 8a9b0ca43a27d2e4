"""CheXpert (Irvin et al., AAAI 2019), with its published tables, whose 14 columns MIMIC-CXR and BRAX share; and BRAX
(Reis et al., Scientific Data 2022), with its spreadsheet as PhysioNet ships it and PNG or DICOM images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cbmir.errors import ManifestError
from cbmir.input_file import existing
from cbmir.labels import CHEXPERT_9, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.text_table import uncollected
from cbmir.training.readers import common

Blank = Literal["zero", "unknown"]

#: CheXpert's 14 columns without "No Finding", which means the absence of the others.
CHEXPERT_13 = (
    "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation", "Pneumonia",
    "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture", "Support Devices",
)  # fmt: skip
CHEXPERT_14 = ("No Finding", *CHEXPERT_13)
_FINDINGS = {9: CHEXPERT_9, 13: CHEXPERT_13}
_PATH = re.compile(
    r"(?:^|/)(?:(?P<part>train|valid|test)/)?(?P<patient>patient\d+)/(?P<study>study\d+)/view\d+_(?P<view>frontal|lateral)\.\w+$"
)
_SPLITS = {"train": "train", "valid": "val", "test": "test"}
_VIEWS = {"PA": "PA", "AP": "AP", "FRONTAL": "FRONTAL", "LATERAL": "LATERAL"}
_BRAX_COLUMNS = ("PatientID", "AccessionNumber", "StudyDate", "ViewPosition", *CHEXPERT_14)
_BRAX_PATHS = ("PngPath", "DicomPath")
_BRAX_VIEWS = {"PA": "PA", "AP": "AP", "LL": "LATERAL", "RL": "LATERAL", "L": "LATERAL", "LATERAL": "LATERAL"}


@uncollected()
def read_chexpert(
    root: Path, tables: Sequence[Path], *, findings: int = 9, frontal_only: bool = True, blank: Blank = "zero",
    missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read CheXpert into a manifest.

    Patient, study, and frontal or lateral come from the path; AP or PA comes from its column. -1 stays -1 (uncertain).
    Tables of more than one part (train, valid, test) keep the publisher's splits; with train and test but not valid,
    one in eight training patients, drawn by `seed`, is in val. A single part is split by patient and `seed`.

    Args:
        root: The folder that contains `CheXpert-v1.0-small`; or that folder itself, under any name; or the folder with
            `CheXpert-v1.0 batch 1 (validate & csv)` and the other batches of the current download.
        tables: `train.csv`, `valid.csv`, `test_labels.csv`: one or more.
        findings: 9 (the paper's) or 13. With 9, an image that shows only one of the other four has every label 0; the
            sidecar counts these.
        blank: The meaning of an empty cell (not mentioned in the report): `zero` as in the paper, or `unknown`. If "No
            Finding" is 1 in the row, it always means 0.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The table or the folder is not as expected.
        SplitError: A patient is in two splits.
    """
    common.check_folder(root, "the folder that holds CheXpert")
    labels_of = label_reader(findings, blank)
    views = common.ViewChoice(_VIEWS, frontal_only)
    rows = [row for table in tables for row in _rows(table, labels_of, views)]
    policies = views.policies(rows, tables[0])
    rows, located = common.locate(rows, _finder(root.resolve()), missing, root)
    parts = {row.split for row in rows}
    policies = label_policies(findings, blank) | policies | located
    splits = "CheXpert's own: train, valid as val, test" if len(parts) > 1 and "" not in parts else None
    if parts == {"train", "test"}:
        rows = common.with_validation(rows, seed)
        splits = "CheXpert's own train and test; one in eight of the training patients in val"
        policies["val_seed"] = seed
    return common.finish(
        kept_findings(rows, findings), "chexpert", tables, seed, splits=splits, policies=policies
    )  # fmt: skip


def label_reader(findings: int, blank: Blank) -> Callable[[Mapping[str, str], str], tuple[int | None, ...]]:
    """Return a function (record, file and row) -> values of the 13 findings, with the policy `blank`.

    Raises ManifestError unless `findings` is 9 or 13.
    """
    if findings not in _FINDINGS:
        raise ManifestError(f"expected 9 or 13 findings, found {findings}")

    def labels_of(record: Mapping[str, str], where: str) -> tuple[int | None, ...]:
        # The labeller found nothing, so with either policy a blank means absent.
        healthy = common.label_value(record, "No Finding", where) == 1
        empty = 0 if healthy or blank == "zero" else None
        values = (common.label_value(record, name, where) for name in CHEXPERT_13)
        return tuple(empty if value is None else value for value in values)

    return labels_of


def kept_findings(rows: Sequence[Row], findings: int) -> Manifest:
    """Return a manifest of rows with 13 findings, reduced to 9 or 13 of them."""
    return common.keep_labels(Manifest(LabelSet(CHEXPERT_13), tuple(rows)), _FINDINGS[findings])


def label_policies(findings: int, blank: Blank) -> dict[str, Any]:
    """Return the sidecar's entries about labels."""
    return {"findings": findings, "blank": blank, "uncertain": "kept as -1"}


def _rows(
    table: Path, labels_of: Callable[[Mapping[str, str], str], tuple[int | None, ...]], views: common.ViewChoice
) -> list[Row]:
    rows = []
    source = common.read_source(table, ("Path", *CHEXPERT_14), "a table of CheXpert", ("AP/PA",))
    for where, record in source.records():
        text = common.cell(record, "Path", where)
        parts = _PATH.search(text)
        if parts is None:
            raise ManifestError(
                f"{where}: expected a path such as CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg, "
                f"found {text!r}"
            )
        projection = (record.get("AP/PA") or "").strip().upper()
        # A few frontal images are marked LL or RL in this column: their projection is unknown.
        frontal = projection if projection in ("AP", "PA") else "FRONTAL"
        view = views.choose("LATERAL" if parts["view"] == "lateral" else frontal)
        labels = labels_of(record, where)
        if view is not None:
            study = f"{parts['patient']}_{parts['study']}"
            split = _SPLITS.get(parts["part"] or "", "")
            rows.append(Row(Path(text), parts["patient"], labels, study, view, split))
    return rows


def _finder(root: Path) -> Callable[[Row], Path | None]:
    """Return a function that finds an image below CheXpert's folder, its parent folder, or a batch."""
    batches = cache(lambda: _patients_of_batches(root))

    def find(row: Row) -> Path | None:
        within = PurePosixPath(row.image.as_posix()).parts[1:]
        direct = next(filter(existing, (root / row.image, root.joinpath(*within))), None)
        if direct is not None:
            return direct
        folder = batches().get(row.patient_id)
        return existing(folder.joinpath(*row.image.parts[-2:])) if folder else None

    return find


def _patients_of_batches(root: Path) -> dict[str, Path]:
    """Return the folder of each patient, in folders such as `CheXpert-v1.0 batch 2 (train 1)`, or one level deeper."""
    found: dict[str, Path] = {}
    batches = [path for path in sorted(root.glob("*batch*")) if path.is_dir()]
    for folder in (place for batch in batches for place in (batch, *sorted(batch.iterdir()))):
        if folder.is_dir() and not folder.name.startswith("patient"):
            for patient in folder.glob("patient*"):
                if found.setdefault(patient.name, patient) != patient:
                    raise ManifestError(
                        f"{root}: expected each patient in one batch, found {found[patient.name]} and {patient}"
                    )
    return found


def read_brax(
    folder: Path, *, findings: int = 9, blank: Blank = "zero", frontal_only: bool = True,
    missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read BRAX into a manifest.

    Args:
        folder: The folder with `master_spreadsheet_update.csv` and `images` or `Anonymized_DICOMs`.
        findings: As in `read_chexpert`; the labels come from CheXpert's labeller, adapted to Portuguese.
        blank: As in `read_chexpert`.
        frontal_only: Leave out lateral images, and those without a view.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The spreadsheet or the folder is not as expected.
    """
    path = common.find_file(folder, ["master_spreadsheet_update.csv", "master_spreadsheet.csv"], "BRAX's spreadsheet")
    labels_of, days = label_reader(findings, blank), common.Days()
    views = common.ViewChoice(_BRAX_VIEWS, frontal_only)
    rows: list[Row] = []
    files: dict[Path, list[Path]] = {}
    root = folder.resolve()
    for where, record in common.read_source(path, _BRAX_COLUMNS, "BRAX's spreadsheet", _BRAX_PATHS).records():
        patient, study, day, position = (common.cell(record, column, where) for column in _BRAX_COLUMNS[:4])
        view, labels = views.choose(position), labels_of(record, where)
        places = [root / record[column].strip() for column in _BRAX_PATHS if record.get(column, "").strip()]
        if view is not None:
            image = places[0] if places else Path(f"(no path, {where})")
            files[image] = places
            rows.append(Row(image, patient, labels, study, view, date=days.read(day)))
    policies = views.policies(rows, path)
    rows, located = common.locate(rows, lambda row: next(filter(existing, files[row.image]), None), missing, folder)
    return common.finish(
        kept_findings(rows, findings), "brax", [path], seed, policies=label_policies(findings, blank) | policies | {
            "dates": "fictitious, by the publisher", "dates_not_read": days.not_read, **located,
        }
    )  # fmt: skip
