"""Tuberculosis: the sets from Montgomery County and Shenzhen (Jaeger et al., 2014), and TBX11K (Liu et al., 2020)."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from cbmir.errors import ManifestError
from cbmir.input_file import existing, read_json
from cbmir.labels import LabelSet
from cbmir.manifest import Box, Manifest, Row
from cbmir.training.readers import common

_NLM_NAME = re.compile(r"(?P<set>CHNCXR|MCUCXR)_\d+_(?P<label>[01])")
_NLM_SETS = {"CHNCXR": "Shenzhen", "MCUCXR": "Montgomery"}
TBX11K_LABELS = ("Tuberculosis", "Active Tuberculosis", "Obsolete Tuberculosis", "Other Abnormality")
_CATEGORIES = {
    "ActiveTuberculosis": "Active Tuberculosis", "ObsoletePulmonaryTuberculosis": "Obsolete Tuberculosis",
    "PulmonaryTuberculosis": "Tuberculosis",
}  # fmt: skip
_FOLDERS = ("health", "sick", "tb")


def read_nlm_tuberculosis(folder: Path, *, seed: int = 0) -> Manifest:
    """Read MontgomerySet, ChinaSet_AllFiles, or both into a manifest.

    The label is the last digit of a file's name, and the reports are the readings in `ClinicalReadings`. According to
    the data sets' paper, each image is of a different patient, with view PA.

    Args:
        folder: A folder with `CXR_png`, or a folder that contains such folders.

    Raises:
        ManifestError: There are no such images, or a name has another form.
    """
    common.check_folder(folder, "the folder of MontgomerySet or ChinaSet_AllFiles")
    images = sorted(path for path in folder.resolve().rglob("*.png") if path.parent.name == "CXR_png")
    if not images:
        raise ManifestError(f"{folder}: expected images in a folder CXR_png, found none")
    rows = []
    for image in images:
        name = _NLM_NAME.fullmatch(image.stem)
        if name is None:
            raise ManifestError(f"{image}: expected a name such as CHNCXR_0001_0.png or MCUCXR_0001_0.png")
        reading = image.parent.parent / "ClinicalReadings" / f"{image.stem}.txt"
        rows.append(Row(image, image.stem, (int(name["label"]),), view="PA", report=common.read_report(reading),
                        source=_NLM_SETS[name["set"]]))  # fmt: skip
    return common.finish(
        Manifest(LabelSet(TBX11K_LABELS[:1]), tuple(rows)), "tuberculosis", [folder], seed, policies={
            "labels": "the last digit of a file's name; images without tuberculosis may show something else",
            "view": "PA, according to the data sets' paper", "each_image_its_own_patient": True,
        }
    )  # fmt: skip


def read_tbx11k(folder: Path, *, missing: common.Missing = "error", seed: int = 0) -> Manifest:
    """Read TBX11K's training and validation images and boxes into a manifest. Labels of its test set are not published.

    Images in `health` have every label 0, those in `sick` have Other Abnormality. In `tb`, Other Abnormality is
    unknown, and boxes determine Active and Obsolete Tuberculosis; both are unknown if no box is of either kind.

    Args:
        folder: The folder with `imgs`, `lists` and `annotations/json`.
        missing: `error`, or `skip` to leave out images without a file.

    Raises:
        ManifestError: A list, the annotations or the folder is not as expected.
    """
    sources, rows = [], []
    boxes: dict[str, list[Box]] = defaultdict(list)
    for split in ("train", "val"):
        listed = common.find_file(folder, [f"TBX11K_{split}.txt"], f"TBX11K's list {split}")
        annotations = common.find_file(folder / "annotations", [f"TBX11K_{split}.json"], "TBX11K's boxes")
        sources += [listed, annotations]
        for image, box in _boxes(annotations):
            boxes[image].append(box)
        for number, name in enumerate(common.read_lines(listed), start=1):
            kind = name.partition("/")[0]
            if kind not in _FOLDERS:
                raise ManifestError(
                    f"{listed}, line {number}: expected a path in {', '.join(_FOLDERS)}, found {name!r}"
                )
            drawn = tuple(boxes.get(name, ()))
            rows.append(Row(Path(name), Path(name).stem, _labels(kind, drawn), split=split, boxes=drawn))
    root = folder.resolve() / "imgs"
    rows, located = common.locate(rows, lambda row: existing(root / row.image), missing, folder)
    return common.finish(
        Manifest(LabelSet(TBX11K_LABELS), tuple(rows)), "tbx11k", sources, seed, splits="TBX11K's own train and val",
        policies={
            "labels": "health: none; sick: Other Abnormality; tb: Tuberculosis, active and obsolete by its boxes",
            "each_image_its_own_patient": True, **located,
        }
    )  # fmt: skip


def _labels(kind: str, boxes: tuple[Box, ...]) -> tuple[int | None, ...]:
    if kind != "tb":
        return (0, 0, 0, int(kind == "sick"))
    drawn = {box.label for box in boxes}
    named = drawn & {*TBX11K_LABELS[1:3]}
    return (1, *(int(name in named) if named else None for name in TBX11K_LABELS[1:3]), None)


def _boxes(path: Path) -> list[tuple[str, Box]]:
    """Read each box of a COCO file, with the image's name below `imgs`."""
    try:
        coco: dict[str, Any] = read_json(path)
        labels = {one["id"]: _CATEGORIES[one["name"]] for one in coco["categories"]}
        images = {one["id"]: one for one in coco["images"]}
        found = [(images[one["image_id"]], labels[one["category_id"]], one["bbox"]) for one in coco["annotations"]]
        return [
            (str(image["file_name"]), common.fraction_box(label, (left, top, width, height),
                                                          (int(image["width"]), int(image["height"])), str(path)))
            for image, label, (left, top, width, height) in found
        ]  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ManifestError(f"{path}: expected TBX11K's boxes in COCO's form, found {error!r}") from error
