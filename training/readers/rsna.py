"""RSNA Pneumonia Detection Challenge (Shih et al., Radiology: AI 2019): its tables as Kaggle ships them."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from cbmir.errors import ManifestError
from cbmir.input_file import read_json
from cbmir.labels import LabelSet
from cbmir.manifest import Box, Manifest, Row
from cbmir.training.readers import common
from cbmir.training.readers.common import cell
from cbmir.training.readers.header import is_dicom_file, read_header

OPACITY, OTHER = "Lung Opacity", "Other Abnormality"
_BOX = ("x", "y", "width", "height")
_SIZE = (1024, 1024)  # size of the challenge's images; boxes are in their pixels
_CLASSES: dict[str, tuple[int, int | None]] = {
    "Lung Opacity": (1, None), "No Lung Opacity / Not Normal": (0, 1), "Normal": (0, 0),
}  # fmt: skip
_MAPPING = "pneumonia-challenge-dataset-mappings_2018.json"
logger = logging.getLogger("cbmir")


def read_rsna(folder: Path, *, missing: common.Missing = "error", seed: int = 0) -> Manifest:
    """Read the challenge's training images into a manifest.

    The label is Lung Opacity: boxes were drawn around opacities that may be pneumonia. With the table of classes,
    images that are "Not Normal" without an opacity have the label Other Abnormality, so images with neither label are
    healthy. The images are from NIH. RSNA's mapping gives the patients; without it each image counts as a patient.

    Args:
        folder: The folder with `stage_2_train_labels.csv`, the images (.dcm, or converted ones with the same name), and
            optionally `stage_2_detailed_class_info.csv` and `pneumonia-challenge-dataset-mappings_2018.json`.
        missing: `error`, or `skip` to leave out images without a file.

    Raises:
        ManifestError: A table or the folder is not as expected.
    """
    path = common.find_file(folder, ["stage_2_train_labels.csv"], "RSNA's labels")
    class_path = common.find_optional_file(folder, ["stage_2_detailed_class_info.csv"], "RSNA's classes")
    mapping_path = common.find_optional_file(folder, [_MAPPING], "RSNA's mapping to NIH's images")
    targets, boxes = _targets(path)
    classes = _classes(class_path) if class_path else {}
    patients = _patients(mapping_path) if mapping_path else {}
    index = common.index_images(folder)
    rows, located = common.locate(
        (Row(Path(image), image, ()) for image in targets), lambda row: index.get(row.image.name), missing, folder
    )
    made = []
    for row in tqdm(rows, desc="reading", unit="image", disable=None):
        image, target = row.patient_id, targets[row.patient_id]
        labels: tuple[int | None, ...] = (target,)
        if class_path:
            labels = classes.get(image, (target, None))
            if labels[0] != target:
                raise ManifestError(f"{class_path}: expected the class of {image} as in {path.name}, found another")
        if mapping_path and image not in patients:
            raise ManifestError(f"{mapping_path}: expected each image's name at NIH, found none for {image}")
        view = read_header(row.image).view if is_dicom_file(row.image) else ""
        made.append(Row(row.image, patients.get(image, image), labels, view=view, boxes=tuple(boxes[image])))
    if not mapping_path:
        logger.warning("%s is missing: each image counts as a patient, although some patients have several; "
                       "the file is on RSNA's page of the challenge", _MAPPING)  # fmt: skip
    return common.finish(
        Manifest(LabelSet((OPACITY, OTHER) if class_path else (OPACITY,)), tuple(made)), "rsna",
        [one for one in (path, class_path, mapping_path) if one], seed, policies={
            "labels": f"{OPACITY}: an opacity that may be pneumonia" + (
                f"; {OTHER}: not normal, and no opacity" if class_path
                else "; images without one may show something else, and count as healthy"),
            "each_image_its_own_patient": not mapping_path, **located,
        }
    )  # fmt: skip


def _targets(path: Path) -> tuple[dict[str, int], dict[str, list[Box]]]:
    """Read each image's Target and its boxes."""
    targets: dict[str, int] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for where, record in common.read_source(path, ("patientId", "Target", *_BOX), "RSNA's labels").records():
        image, target = cell(record, "patientId", where), common.label_value(record, "Target", where)
        if not image or target not in (0, 1):
            raise ManifestError(f"{where}: expected an image, and 0 or 1 as Target, found {image!r} and {target}")
        if targets.setdefault(image, target) != target:
            raise ManifestError(f"{where}: expected one Target for {image}, found 0 and 1")
        if target:
            left, top, width, height = (common.number(record, column, where) for column in _BOX)
            boxes[image].append(common.fraction_box(OPACITY, (left, top, width, height), _SIZE, where))
    return targets, boxes


def _classes(path: Path) -> dict[str, tuple[int, int | None]]:
    found = {}
    for where, record in common.read_source(path, ("patientId", "class"), "RSNA's classes").records():
        name = cell(record, "class", where)
        if name not in _CLASSES:
            raise ManifestError(f"{where}: expected one of {', '.join(_CLASSES)}, found {name!r}")
        found[cell(record, "patientId", where)] = _CLASSES[name]
    return found


def _patients(path: Path) -> dict[str, str]:
    """Read each image's NIH patient from RSNA's list of {"subset_img_id": …, "img_id": "00000013_026.png"}."""
    try:
        listed = read_json(path)
        return {str(one["subset_img_id"]): str(int(str(one["img_id"]).partition("_")[0])) for one in listed}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ManifestError(
            f"{path}: expected a list of subset_img_id and img_id such as 00000013_026.png, found {error!r}"
        ) from error
