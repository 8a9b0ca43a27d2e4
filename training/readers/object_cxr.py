"""Object-CXR (JF Healthcare, MIDL 2020): foreign objects on chest X-rays."""

from __future__ import annotations

from pathlib import Path

from cbmir.errors import ManifestError
from cbmir.input_file import existing
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.readers import common

LABEL = "Foreign Object"
_SPLITS = {"train": "train", "dev": "val"}


def read_object_cxr(folder: Path, *, missing: common.Missing = "error", seed: int = 0) -> Manifest:
    """Read Object-CXR into a manifest: an image with an annotated object has the label. Outlines are not read.

    Two tables keep the publisher's sets, with dev as val; one table is split 70:10:20. Patients are not published, so
    each image counts as a patient. Images without an object count as healthy, but may show a disease.

    Args:
        folder: The folder with `train.csv`, `dev.csv` or both, and the images in `train` and `dev`.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: A table or the folder is not as expected.
    """
    paths = {name: path for name in _SPLITS if (path := common.find_optional_file(folder, [f"{name}.csv"], "objects"))}
    if not paths:
        raise ManifestError(f"{folder}: expected train.csv or dev.csv of Object-CXR, found neither")
    root, rows = folder.resolve(), []
    for name, path in paths.items():
        table = common.read_source(path, ("image_name", "annotation"), "Object-CXR's objects")
        for where, record in table.records():
            image = common.cell(record, "image_name", where)
            shown = int(bool(common.cell(record, "annotation", where)))
            rows.append(Row(Path(name, image), f"{name}-{Path(image).stem}", (shown,), split=_SPLITS[name]))
    rows, located = common.locate(rows, lambda row: existing(root / row.image), missing, folder)
    return common.finish(
        Manifest(LabelSet((LABEL,)), tuple(rows)), "object-cxr", list(paths.values()), seed,
        splits="Object-CXR's own, dev as val" if len(paths) > 1 else None,
        policies={"each_image_its_own_patient": True, "outlines": "not read", **located}
    )  # fmt: skip
