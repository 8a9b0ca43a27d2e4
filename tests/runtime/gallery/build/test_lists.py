"""The lists beside a gallery: errors name those that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbmir.errors import GalleryError, ManifestError
from cbmir.files import write_csv
from cbmir.runtime.gallery.build.work import read_list


def test_round_trip_of_a_list(tmp_path: Path) -> None:
    file = tmp_path / "unreadable.csv"
    assert read_list(file) == ()
    write_csv(file, [("image", "reason"), ("a.png", "=not"), ("b, c.png", "two\nlines")])
    assert read_list(file) == (("a.png", "=not"), ("b, c.png", "two\nlines"))


@pytest.mark.parametrize("data", [b"image,reason\na.png\n", b"image,reason\n\xff,b\n", b"h,h\n" + b"x" * 200_000])
def test_an_invalid_list(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "unreadable.csv").write_bytes(data)
    with pytest.raises((GalleryError, ManifestError), match=r"unreadable\.csv: expected .* found "):
        read_list(tmp_path / "unreadable.csv")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unreadable.csv")
    with pytest.raises(ManifestError, match="a device or pipe"):
        read_list(tmp_path / "unreadable.csv")
