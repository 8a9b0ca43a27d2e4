"""Ids of a gallery's images: short and unique."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import GalleryError
from cbmir.manifest import Row
from cbmir.runtime.gallery.entry import entry_ids


def ids_of(*paths: str) -> list[str]:
    return entry_ids([Row(Path(path), "p", (1,)) for path in paths])


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["a/x.png", "b/y.png"], ["x", "y"]),
        (["a/x.png", "b/x.png", "b/y.png"], ["a/x", "b/x", "y"]),
        (["p1/s1/v.jpg", "p1/s2/v.jpg", "p2/s1/v.jpg"], ["p1/s1/v", "s2/v", "p2/s1/v"]),
        (["x.png", "sub/x.png"], ["x", "sub/x"]),
        (["x.png", "x.jpg", "x.png.jpg", "y.png"], ["x.png", "x.jpg", "x.png.jpg", "y.png"]),
        (["a/x.png", "a/x.dcm", "b/x.png"], ["a/x.png", "x.dcm", "b/x.png"]),
        (["x.png"], ["x"]),
    ],
)
def test_ids_are_the_shortest_unique_names(paths: list[str], ids: list[str]) -> None:
    for folder in ("/", "/data/", "/some/where/x/"):
        assert ids_of(*(folder + path for path in paths)) == ids


def test_a_duplicate_file_is_refused() -> None:
    with pytest.raises(GalleryError, match=r"each image once, found /a/x.png more than once"):
        ids_of("/a/x.png", "/b/x.png", "/a/x.png")


@pytest.mark.slow
def test_ids_of_a_data_set_as_large_as_chexpert() -> None:
    """CheXpert's files have only a few names: 32 bits of a digest were not enough to distinguish 188,000 of them."""
    paths = [
        f"/data/CheXpert-v1.0/train/patient{n:05}/study{study}/view1_frontal.jpg"
        for n in range(47_000)
        for study in range(1, 5)
    ]
    ids = ids_of(*paths)
    assert len(set(ids)) == len(paths) == 188_000
    assert ids[0] == "patient00000/study1/view1_frontal"


@pytest.mark.parametrize(
    ("taken", "ids"),
    [
        ({"x"}, ["b/x", "y"]),
        ({"x", "y", "b/x"}, ["a/b/x", "b/y"]),
        ({"x", "b/x", "a/b/x"}, ["/a/b/x", "y"]),
    ],
)
def test_duplicate_ids_get_more_folders(taken: set[str], ids: list[str]) -> None:
    rows = [Row(Path(path), "p", (1,)) for path in ("/a/b/x.png", "/a/b/y.png")]
    assert entry_ids(rows, taken) == ids


def test_an_image_whose_full_path_is_taken_is_refused() -> None:
    with pytest.raises(GalleryError, match=r"found /a/x\.png taken by another"):
        entry_ids([Row(Path("/a/x.png"), "p", (1,))], {"x", "a/x", "/a/x"})
