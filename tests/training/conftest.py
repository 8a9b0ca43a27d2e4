"""A small learnable data set: each finding is a bright square in its own corner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, write_manifest

LABELS = LabelSet(("Effusion", "Mass"))


def write_squares(folder: Path, count: int = 72) -> Path:
    """Write `count` images of 48 px, two per patient; patients are split into train, val and test as 4 : 1 : 1."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        labels = tuple(int(v) for v in rng.integers(0, 2, 2))
        pixels = rng.integers(60, 120, (48, 48)).astype(np.uint8)
        if labels[0]:
            pixels[30:42, 6:18] = 250
        if labels[1]:
            pixels[6:18, 30:42] = 250
        path = folder / f"{number:03}.png"
        Image.fromarray(pixels).save(path)
        patient = number // 2
        split = ("train", "train", "val", "train", "train", "test")[patient % 6]
        rows.append(Row(path, f"p{patient}", labels, view="PA", split=split))
    write_manifest(Manifest(LABELS, tuple(rows), {"reader": "squares"}), folder / "manifest.csv")
    return folder / "manifest.csv"


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of 72 images with two findings, learnable in a few epochs."""
    return write_squares(tmp_path_factory.mktemp("squares"))
