"""PadChest (Bustos et al., Medical Image Analysis 2020): its published table, and 16-bit PNG in numbered folders."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet, means_no_finding
from cbmir.manifest import Manifest, Row
from cbmir.text_table import uncollected
from cbmir.training.readers import common
from cbmir.training.readers.common import cell

_COLUMNS = ("ImageID", "StudyDate_DICOM", "StudyID", "PatientID", "Projection", "Report", "Labels")
_LABELLED_BY = "MethodLabel"  # Physician or RNN_model
_VIEWS = {"PA": "PA", "AP": "AP", "AP_HORIZONTAL": "AP", "L": "LATERAL"}  # not COSTAL, EXCLUDE
#: NIH's findings -> PadChest's names for them: a name and those below it in PadChest's tree, except masses outside lung
#: and pleura, pseudonodules, and air under the skin.
MAPPED: dict[str, tuple[str, ...]] = {
    "Atelectasis": ("atelectasis", "laminar atelectasis", "lobar atelectasis", "segmental atelectasis",
                    "total atelectasis", "round atelectasis", "atelectasis basal"),
    "Cardiomegaly": ("cardiomegaly",),
    "Effusion": ("pleural effusion", "loculated pleural effusion", "loculated fissural effusion", "hydropneumothorax",
                 "empyema", "hemothorax"),
    "Infiltration": ("infiltrates", "interstitial pattern", "ground glass pattern", "reticular interstitial pattern",
                     "reticulonodular interstitial pattern", "miliary opacities", "alveolar pattern", "consolidation",
                     "air bronchogram"),
    "Mass": ("mass", "pulmonary mass", "pleural mass"),
    "Nodule": ("nodule", "multiple nodules"),
    "Pneumonia": ("pneumonia", "atypical pneumonia"),
    "Pneumothorax": ("pneumothorax", "hydropneumothorax"),
    "Consolidation": ("consolidation", "air bronchogram"),
    "Edema": ("pulmonary edema",),
    "Emphysema": ("emphysema", "bullas"),
    "Fibrosis": ("pulmonary fibrosis",),
    "Pleural_Thickening": ("pleural thickening", "apical pleural thickening", "calcified pleural thickening"),
    "Hernia": ("hiatal hernia",),
}  # fmt: skip
#: Names that are not findings and imply nothing about others.
_SILENT = {"unchanged", "suboptimal study"}
#: Unreadable files in the published archives, as listed in torchxrayvision's reader.
DAMAGED = (
    "216840111366964012819207061112010307142602253_04-014-084.png",
    "216840111366964012989926673512011074122523403_00-163-058.png",
    "216840111366964012959786098432011033083840143_00-176-115.png",
    "216840111366964012558082906712009327122220177_00-102-064.png",
    "216840111366964012339356563862009072111404053_00-043-192.png",
    "216840111366964013076187734852011291090445391_00-196-188.png",
    "216840111366964012373310883942009117084022290_00-064-025.png",
    "216840111366964012283393834152009033102258826_00-059-087.png",
    "216840111366964012373310883942009170084120009_00-097-074.png",
    "216840111366964012819207061112010315104455352_04-024-184.png",
    "216840111366964012819207061112010306085429121_04-020-102.png",
)


@uncollected()
def read_padchest(
    folder: Path, *, labels: Literal["mapped", "own"] = "mapped", frontal_only: bool = True,
    damaged: Path | None = None, missing: common.Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read PadChest into a manifest.

    ['normal'] makes every label 0. With an empty cell or list, or only 'unchanged' or 'suboptimal study', all are
    unknown. Images labelled 'exclude' are left out.

    Args:
        folder: The folder with PadChest's table, and its images at any depth (`0/…`, `1/…`).
        labels: `mapped` to the 14 findings of NIH (`MAPPED`), or PadChest's `own` names, about 190.
        frontal_only: Leave out lateral images, and those without a projection.
        damaged: A text file with names of further images to leave out, one per line, besides `DAMAGED`.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The table or the folder is not as expected.
    """
    path = common.find_file(folder, ["PADCHEST_*.csv", "PADCHEST_*.csv.gz"], "PadChest's table")
    views, days = common.ViewChoice(_VIEWS, frontal_only), common.Days()
    broken = {*DAMAGED, *(common.read_lines(damaged) if damaged else ())}
    found: list[tuple[Row, set[str]]] = []
    labelled_by: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for where, record in common.read_source(path, _COLUMNS, "PadChest's table", [_LABELLED_BY]).records():
        image, day, study, patient, projection, report, listed = (cell(record, column, where) for column in _COLUMNS)
        names = common.listed_labels(listed)
        if names is None or not image or not patient:
            raise ManifestError(
                f"{where}: expected an image, a patient and labels as a list such as ['cardiomegaly'], found "
                f"{image!r}, {patient!r}, {listed!r}"
            )
        reason = "damaged" if image in broken else "labelled 'exclude'" if "exclude" in names else ""
        if reason:
            left_out[reason] += 1
        elif (view := views.choose(projection)) is not None:
            row = Row(Path(image), patient, (), study, view, report=report, date=days.read(day))
            labelled_by[row.image.stem] = record.get(_LABELLED_BY, "").strip() or "not given"
            found.append((row, {name.lower() for name in names}))
    policies = views.policies([row for row, _ in found], path)
    findings = {name for _, names in found for name in names if not means_no_finding(name)} - _SILENT
    mapping: dict[str, tuple[str, ...]] = MAPPED if labels == "mapped" else {name: (name,) for name in sorted(findings)}
    index = common.index_images(folder)
    rows, located = common.locate(
        (replace(row, labels=_labels(names, mapping)) for row, names in found),
        lambda row: index.get(row.image.stem), missing, folder,
    )  # fmt: skip
    other = findings - {name for names in mapping.values() for name in names}
    return common.finish(
        Manifest(LabelSet(tuple(mapping)), tuple(rows)), "padchest", [path], seed, policies=policies | {
            "labels": MAPPED if labels == "mapped" else "PadChest's own",
            "findings_not_mapped": sorted(other),
            "images_with_only_these": sum(bool(names & other) and not names - other - _SILENT for _, names in found),
            "labelled_by": dict(Counter(labelled_by[row.image.stem] for row in rows)),
            "left_out": dict(left_out), "dates_not_read": days.not_read, **located,
        }
    )  # fmt: skip


def _labels(names: set[str], mapping: dict[str, tuple[str, ...]]) -> tuple[int | None, ...]:
    if not names - _SILENT:
        return (None,) * len(mapping)
    return common.mapped_labels(names, mapping)
