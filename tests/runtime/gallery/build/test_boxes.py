"""Boxes of a manifest in the gallery: built, returned, merged, corrected, copied, but not in a de-identified copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbmir.labels import LabelSet
from cbmir.manifest import Box, Manifest
from cbmir.runtime import Engine, Finder, Gallery, build_gallery
from cbmir.runtime.gallery.build import merge_galleries
from cbmir.runtime.gallery.maintenance import export, export_deidentified, update_gallery

BOXES = (Box("Mass", 0.25, 0.5, 0.125, 0.5), Box("Effusion", 0, 0, 1, 1))


@pytest.fixture
def boxed(manifest: Manifest) -> Manifest:
    """The manifest with boxes on its first image."""
    return replace(manifest, rows=(replace(manifest.rows[0], boxes=BOXES), *manifest.rows[1:]))


def test_a_neighbour_has_the_boxes_of_its_image(
    tmp_path: Path, engine: Engine, tiny_model: Path, boxed: Manifest
) -> None:
    build_gallery(engine, boxed, tmp_path / "g")
    with Finder.open(tiny_model, tmp_path / "g", threads=1) as finder:
        found = finder.analyze(boxed.rows[0].image, 20, exclude_same_patient=False)
    assert {one.id: one.boxes for one in found.neighbours if one.boxes} == {"image_00": BOXES}


def test_boxes_are_matched_by_the_labels_of_the_gallery(tmp_path: Path, engine: Engine, boxed: Manifest) -> None:
    build_gallery(engine, boxed, tmp_path / "g")
    lower = LabelSet(tuple(name.lower() for name in boxed.labels.names))
    row = replace(boxed.rows[1], boxes=(Box("mass", 0, 0, 0.5, 0.5),))
    with Gallery.open(tmp_path / "g") as gallery:
        update_gallery(gallery, Manifest(lower, (row,)))
        assert gallery.entry("image_01").boxes == (Box("Mass", 0, 0, 0.5, 0.5),)


def test_boxes_are_kept_by_merge_and_export(tmp_path: Path, engine: Engine, boxed: Manifest) -> None:
    build_gallery(engine, boxed, tmp_path / "g")
    merge_galleries(tmp_path / "merged", [tmp_path / "g"])
    with Gallery.open(tmp_path / "merged") as gallery:
        export(gallery, tmp_path / "copy")
    with Gallery.open(tmp_path / "copy") as gallery:
        assert gallery.entry("image_00").boxes == BOXES
        export_deidentified(gallery, tmp_path / "out")
    with Gallery.open(tmp_path / "out") as gallery:  # a public data set's table would identify the image
        assert not any(entry.boxes for entry in gallery.every_entry())


def test_boxes_are_updated(tmp_path: Path, engine: Engine, manifest: Manifest, boxed: Manifest) -> None:
    build_gallery(engine, boxed, tmp_path / "g")
    other = replace(manifest, rows=(manifest.rows[0], replace(manifest.rows[1], boxes=BOXES[:1])))
    with Gallery.open(tmp_path / "g") as gallery:
        assert update_gallery(gallery, manifest).changed == 0  # the manifest has no boxes, so they stay
        assert gallery.entry("image_00").boxes == BOXES
        assert update_gallery(gallery, other).changed == 2
        assert (gallery.entry("image_00").boxes, gallery.entry("image_01").boxes) == ((), BOXES[:1])
