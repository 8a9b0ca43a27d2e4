"""The example images of the demo."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo import examples as module
from cbmir.demo.examples import MOST, find_examples
from cbmir.errors import UserError
from cbmir.runtime import Entry, Finder, Gallery


@pytest.fixture
def finder(tiny_model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        yield finder


def test_examples_from_the_gallery(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image for each common finding, from different patients if possible, captioned with its labels."""
    monkeypatch.delattr(module, "read_image")  # no image is read at the start
    examples = find_examples(finder)
    assert finder.gallery is not None
    entries = {Path(entry.image): entry for entry in finder.gallery.every_entry()}
    chosen = [entries[example.path] for example in examples]
    assert len(chosen) == len({entry.id for entry in chosen}) == MOST
    counts = Counter(label for entry in entries.values() for label in entry.positive)
    (common, _), *_ = counts.most_common(1)
    assert chosen[0] == next(entry for entry in entries.values() if common in entry.positive)
    for entry, example in zip(chosen, examples, strict=True):
        assert example.caption == (", ".join(entry.positive) or "No finding")
        assert example.thumbnail == finder.gallery.thumbnail(entry.id)


def test_gallery_whose_files_are_gone(tiny_model: Path, tmp_path: Path) -> None:
    with Finder.open(tiny_model) as plain:
        gallery = Gallery.create(tmp_path / "gallery", plain.card)
        with Finder(plain.engine, gallery) as finder:
            vector = np.eye(1, 8, dtype=np.float32)
            gallery.add([Entry("a", str(tmp_path / "gone.png"), "p")], vector)
            assert find_examples(finder) == []


def test_held_out_images_come_first(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    labels: dict[str, int | None] = {"Effusion": 1, "Mass": 0, "Nodule": 0}
    with Finder.open(tiny_model) as plain:
        gallery = Gallery.create(tmp_path / "gallery", plain.card)
        with Finder(plain.engine, gallery) as finder:
            entries = [Entry(split, str(tmp_path / "a.png"), split, split=split, labels=labels, sha256=split)
                       for split in ("train", "test")]  # fmt: skip
            gallery.add(entries, np.eye(2, 8, dtype=np.float32), [b"jpeg", b"jpeg"])
            assert [one.caption for one in find_examples(finder)] == ["Effusion (test split)", "Effusion"]


def test_without_gallery(tiny_model: Path) -> None:
    with Finder.open(tiny_model) as finder:
        assert find_examples(finder) == []


def test_examples_from_a_folder(
    finder: Finder, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cbmir")
    for name in "cab":
        Image.fromarray(make_xray(1)).save(tmp_path / f"{name}.png")
    (tmp_path / "notes.txt").write_text("hello")
    assert [example.caption for example in find_examples(finder, tmp_path)] == ["a", "b", "c"]
    assert "Not an example: NotAnImageError" in caplog.text
    assert "notes" not in caplog.text
    assert str(tmp_path) not in caplog.text


def test_folder_without_images(finder: Finder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none that can be read"):
        find_examples(finder, tmp_path)
    with pytest.raises(UserError, match="expected a folder"):
        find_examples(finder, tmp_path / "nowhere")
