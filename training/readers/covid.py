"""Two COVID-19 data sets: ieee8023's collection (Cohen et al., 2020), and Stony Brook's scored X-rays (RALO)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cbmir.errors import ManifestError
from cbmir.input_file import existing
from cbmir.labels import LabelSet, means_no_finding
from cbmir.manifest import Manifest, Row
from cbmir.text_table import read_table
from cbmir.training.readers import common
from cbmir.training.readers.common import cell

_COLUMNS = ("patientid", "finding", "view", "modality", "date", "folder", "filename", "clinical_notes")
_VIEWS = {"PA": "PA", "AP": "AP", "AP SUPINE": "AP", "AP ERECT": "AP", "AP SEMI ERECT": "AP", "L": "LATERAL"}
_DATES = ("%B %d, %Y", "%b %d, %Y", "%m/%d/%Y")
_UNKNOWN = ("", "todo", "unknown")
_SCORES = "Total OPACITY"


def read_covid(
    folder: Path, *, frontal_only: bool = True, missing: common.Missing = "error", seed: int = 0
) -> Manifest:
    """Read ieee8023/covid-chestxray-dataset into a manifest.

    Each part of a finding such as Pneumonia/Viral/COVID-19 is a label. With "todo" or "Unknown", every label is
    unknown. CT images are left out.

    Args:
        folder: The repository's folder, with `metadata.csv` and `images`.
        frontal_only: Leave out lateral images.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The table or the folder is not as expected.
    """
    path = common.find_file(folder, ["metadata.csv"], "the collection's table")
    views, days = common.ViewChoice(_VIEWS, frontal_only), common.Days(_DATES)
    found: list[tuple[Row, list[str]]] = []
    modalities: Counter[str] = Counter()
    for where, record in common.read_source(path, _COLUMNS, "the collection's table").records():
        patient, finding, position, modality, day, place, name, notes = (cell(record, c, where) for c in _COLUMNS)
        if not patient or not name:
            raise ManifestError(f"{where}: expected a patient and a file, found {patient!r} and {name!r}")
        if modality.casefold() not in ("x-ray", "xray"):
            modalities[modality] += 1
        elif (view := views.choose(position)) is not None:
            parts = [] if finding.casefold() in _UNKNOWN else [part.strip() for part in finding.split("/")]
            found.append((Row(Path(place, name), patient, (), view=view, report=notes, date=days.read(day)), parts))
    policies = views.policies([row for row, _ in found], path)
    labels = LabelSet(tuple(sorted({part for _, parts in found for part in parts if not means_no_finding(part)})))
    unknown = (None,) * len(labels)
    root = folder.resolve()
    rows, located = common.locate(
        (Row(row.image, row.patient_id, tuple(int(name in parts) for name in labels.names) if parts else unknown,
             view=row.view, report=row.report, date=row.date) for row, parts in found),
        lambda row: existing(root / row.image), missing, folder,
    )  # fmt: skip
    return common.finish(
        Manifest(labels, tuple(rows)), "covid", [path], seed, policies=policies | {
            "labels": "each part of a finding such as Pneumonia/Viral/COVID-19",
            "left_out_by_modality": dict(modalities), "dates_not_read": days.not_read,
            "report": "clinical_notes", **located,
        }
    )  # fmt: skip


def read_ralo(folder: Path, *, missing: common.Missing = "error", seed: int = 0) -> Manifest:
    """Read Stony Brook's Radiographic Assessment of Lung Opacity (doi.org/10.5281/zenodo.4633999) into a manifest.

    Two radiologists scored the opacity of each image. Lung Opacity is 1 if both scores are above 0, 0 if both are 0,
    and -1 (uncertain) if they disagree.

    Args:
        folder: The folder with `ralo-dataset-metadata.csv` and `CXR_images_scored`, whose images are numbered by row.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The table or the folder is not as expected.
    """
    path = common.find_file(folder, ["ralo-dataset-metadata.csv"], "RALO's table")
    table = read_table(path)
    header = list(table.rows[0]) if table.rows else []  # the file's first line names groups of columns
    scores = [place for place, name in enumerate(header) if name.strip() == _SCORES]
    if len(scores) != 2 or not {"Subject_ID", "Exam_DateTime"} <= set(header):
        raise ManifestError(
            f"{path}: expected a second line with Subject_ID, Exam_DateTime and {_SCORES} twice, found "
            f"{', '.join(header) or 'no such line'}"
        )
    days, rows = common.Days(), []
    for number, values in enumerate(table.rows[1:]):
        where = f"{path}, row {number + 3}"
        record = dict(zip(header, values, strict=False))
        given = [common.number({_SCORES: values[place]}, _SCORES, where) for place in scores if place < len(values)]
        patient = cell(record, "Subject_ID", where)
        if len(given) != 2 or not patient:
            raise ManifestError(f"{where}: expected a subject and two scores, found {patient!r} and {given}")
        label = int(given[0] > 0) if (given[0] > 0) == (given[1] > 0) else -1
        date = days.read(cell(record, "Exam_DateTime", where).partition("_")[0])
        rows.append(Row(Path(f"{number}.jpg"), patient, (label,), view="AP", date=date))
    index = common.index_images(folder)
    rows, located = common.locate(rows, lambda row: index.get(row.image.stem), missing, folder)
    return common.finish(
        Manifest(LabelSet(("Lung Opacity",)), tuple(rows)), "ralo", [path], seed, policies={
            "labels": "1 if both radiologists score above 0, 0 if neither does, -1 if they disagree",
            "view": "AP, according to the data set's description", "dates_not_read": days.not_read, **located,
        }
    )  # fmt: skip
