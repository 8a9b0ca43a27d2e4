"""CheXpert (Irvin et al., AAAI 2019): its train.csv or valid.csv as they come, small or full size."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Literal

from cbmir.errors import ManifestError
from cbmir.labels import CHEXPERT_9, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.readers import common

Blank = Literal["zero", "unknown"]

#: CheXpert's 14 columns without "No Finding", which is no finding of its own but the absence of the others.
CHEXPERT_13 = (
    "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation", "Pneumonia",
    "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture", "Support Devices",
)  # fmt: skip
_FINDINGS = {9: CHEXPERT_9, 13: CHEXPERT_13}
_PATH = re.compile(r"(?P<patient>patient\d+)/(?P<study>study\d+)/view\d+_(?P<view>frontal|lateral)\.\w+$")


def read_chexpert(
    root: Path, table: Path, *, findings: int = 9, frontal_only: bool = True, blank: Blank = "zero",
    missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """A manifest of CheXpert.

    Patient, study and frontal or lateral come from the path; AP or PA from its column. -1 stays -1 (uncertain).
    CheXpert's own training and validation files are split again: by patient, by `seed`.

    Args:
        root: The folder that holds `CheXpert-v1.0-small`, or that folder itself under any name.
        table: `train.csv` or `valid.csv`.
        findings: 9 (the paper's) or 13. With 9 an image that shows only one of the other four has every label 0, which
            the sidecar counts.
        blank: What an empty cell (not mentioned in the report) means: `zero` as the paper and most users take it, or
            `unknown`; in a row whose "No Finding" is 1 it is 0 in both.
        missing: `error`, or `skip` to leave rows without an image file out.

    Raises:
        ManifestError: Table or folder do not fit.
    """
    if findings not in _FINDINGS:
        raise ManifestError(f"expected 9 or 13 findings, found {findings}")
    _, records = common.read_source(table, ("Path", *CHEXPERT_13), "CheXpert's train.csv or valid.csv")
    common.check_folder(root, "the folder that holds CheXpert")
    empty = 0 if blank == "zero" else None
    rows = [_entry(record, f"{table}, row {number}", empty) for number, record in enumerate(records, start=2)]
    lateral = sum(row.view == "LATERAL" for row in rows)
    if frontal_only:
        rows = [row for row in rows if row.view != "LATERAL"]
        if not rows:
            raise ManifestError(
                f"{table}: expected frontal images, found only lateral ones; use --all-views to keep them"
            )
    folder = root.resolve()
    rows, absent = common.locate(rows, lambda row: _find(folder, row.image), missing, root)
    return common.finish(
        common.keep_labels(Manifest(LabelSet(CHEXPERT_13), tuple(rows)), _FINDINGS[findings]),
        reader="chexpert",
        sources=[table],
        policies={
            "findings": findings, "blank": blank, "uncertain": "kept as -1",
            "views": "frontal only" if frontal_only else "all",
            "lateral_images_left_out": lateral if frontal_only else 0,
            "missing": missing, "missing_images": absent,
        },
        seed=seed,
        splits=None,
    )  # fmt: skip


def _entry(record: dict[str, str], where: str, empty: int | None) -> Row:
    text = common.cell(record, "Path", where)
    parts = _PATH.search(text)
    if parts is None:
        raise ManifestError(
            f"{where}: expected a path such as CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg, "
            f"found {text!r}"
        )
    projection = (record.get("AP/PA") or "").strip().upper()
    # A few frontal images are marked LL or RL there: their projection is not known.
    view = "LATERAL" if parts["view"] == "lateral" else projection if projection in ("AP", "PA") else ""
    # The labeller's own word that nothing was found: under every policy a blank then means absent.
    if (record.get("No Finding") or "").strip() in ("1", "1.0"):
        empty = 0
    values = (common.label_value(record, name, where) for name in CHEXPERT_13)
    labels = tuple(empty if value is None else value for value in values)
    return Row(Path(text), parts["patient"], labels, study_id=f"{parts['patient']}_{parts['study']}", view=view)


def _find(root: Path, image: Path) -> Path | None:
    """The file below the folder that holds CheXpert, or below CheXpert's own folder."""
    within = PurePosixPath(image.as_posix()).parts[1:]
    return next((path for path in (root / image, root.joinpath(*within)) if path.is_file()), None)
