"""Uploads: which files are accepted or refused, and that none is left behind."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo import uploads as module
from cbmir.demo.uploads import PICTURE_SIDE, Upload, read_uploads
from cbmir.errors import ImageSizeError, NotAnImageError, UserError
from cbmir.runtime import Finder, Radiograph, read_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of uploads as Gradio stores them, each in its own folder."""
    (tmp_path / "uploads" / "abc").mkdir(parents=True)
    return tmp_path / "uploads"


@pytest.fixture
def png(make_xray: Callable[..., NDArray[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(make_xray(1)).save(file, "PNG")
    return file.getvalue()


def put(folder: Path, name: str, data: bytes) -> str:
    path = folder / "abc" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return str(path)


def read(paths: Sequence[str], folder: Path) -> tuple[list[Radiograph], list[str]]:
    return read_uploads(paths, folder, lambda data, name: replace(read_image(data), name=name))


def with_wrong_checksums(archive: bytes) -> bytes:
    """Zero the checksums in the zip file's central directory, the ones that `zipfile` verifies."""
    return re.sub(rb"(PK\x01\x02.{12}).{4}", rb"\1\0\0\0\0", archive, flags=re.DOTALL)


def zipped(**members: bytes) -> bytes:
    return compressed(zipfile.ZIP_DEFLATED, members)


def compressed(method: int, members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def test_an_upload_keeps_its_name_and_is_deleted(folder: Path, png: bytes) -> None:
    (found,), left_out = read([put(folder, "chest.png", png)], folder)
    assert found.name == "chest.png"
    assert left_out == []
    assert list(folder.iterdir()) == []


def test_a_study_in_a_zip_file(folder: Path, png: bytes) -> None:
    study = zipped(**{"a/one.png": png, "../../two.png": png, "notes.txt": b"hello", "inner.zip": zipped(x=png)})
    found, left_out = read([put(folder, "study.zip", study)], folder)
    assert [one.name for one in found] == ["one.png", "two.png"]
    assert [reason.split(":")[0] for reason in left_out] == ["notes.txt", "inner.zip"]
    assert list(folder.parent.iterdir()) == [folder]  # nothing was unpacked


def test_the_content_decides_and_not_the_name(folder: Path, png: bytes) -> None:
    assert len(read([put(folder, "chest.exe", png)], folder)[0]) == 1
    with pytest.raises(NotAnImageError, match=r"chest\.png: expected PNG, JPEG, TIFF or DICOM, found text"):
        read([put(folder, "chest.png", b"#!/bin/sh\nrm -rf /\n" * 20)], folder)
    assert list(folder.iterdir()) == []


def test_a_disguised_zip_file_is_unpacked(folder: Path, png: bytes) -> None:
    assert len(read([put(folder, "chest.png", zipped(a=png))], folder)[0]) == 1


def test_the_first_error_is_reported_if_nothing_can_be_read(folder: Path) -> None:
    with pytest.raises(NotAnImageError, match=r"^one\.txt: expected"):
        read([put(folder, "one.txt", b"one"), put(folder, "two.txt", b"two")], folder)
    with pytest.raises(NotAnImageError, match="found no file"):
        read([], folder)


def test_damaged_and_encrypted_zip_files(folder: Path, png: bytes) -> None:
    data = zipped(a=png)
    with pytest.raises(NotAnImageError, match=r"study\.zip: expected a zip file that can be opened"):
        read([put(folder, "study.zip", data[: len(data) // 2])], folder)
    locked = bytearray(data)
    for signature, flag in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(signature) + flag] |= 1
    with pytest.raises(NotAnImageError, match=r"^a: expected a file that can be unpacked, found .* encrypted"):
        read([put(folder, "study.zip", bytes(locked))], folder)


def test_zip_files_that_are_too_large(folder: Path, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 2**20)
    with pytest.raises(ImageSizeError, match=r"^a: expected at most 1 MB in all"):
        read([put(folder, "bomb.zip", zipped(a=bytes(2**21)))], folder)
    monkeypatch.setattr(module, "_MOST_MEMBERS", 1)
    with pytest.raises(ImageSizeError, match="at most 1 files"):
        read([put(folder, "many.zip", zipped(a=png, b=png))], folder)


def test_a_damaged_zip_file_does_not_affect_other_files(folder: Path, png: bytes) -> None:
    data = bytearray(zipped(a=png, b=png))
    for at in range(40, 400):
        data[at] ^= 0x55
    found, left_out = read([put(folder, "chest.png", png), put(folder, "study.zip", bytes(data))], folder)
    assert [one.name for one in found] == ["chest.png", "b"]
    assert [reason.split(":")[0] for reason in left_out] == ["a"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_deflated_files_are_unpacked(folder: Path, png: bytes, method: int) -> None:
    with pytest.raises(NotAnImageError, match=r"^a: expected a file deflated in its zip file"):
        read([put(folder, "study.zip", compressed(method, {"a": png}))], folder)


def test_damaged_files_count_with_their_unpacked_size(
    folder: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 2**20 + len(png))
    damaged = with_wrong_checksums(zipped(**{name: bytes(2**19) for name in "abcd"}))
    files = [put(folder, "chest.png", png), put(folder, "bomb.zip", damaged), put(folder, "more.png", png)]
    found, left_out = read(files, folder)
    assert [one.name for one in found] == ["chest.png"]
    assert [reason.partition(", found")[0] for reason in left_out] == [
        "a: expected a file that can be unpacked", "b: expected a file that can be unpacked",
        "c: expected at most 1 MB in all",
    ]  # fmt: skip
    assert list(folder.iterdir()) == []


def test_all_files_share_one_limit_and_the_excess_is_reported(
    folder: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 2 * len(png))
    files = [put(folder, f"{number}.png", png) for number in range(4)]
    found, left_out = read(files, folder)
    assert [one.name for one in found] == ["0.png", "1.png"]
    assert left_out == ["2.png: expected at most 0 MB in all, found more; the rest was not read"]
    assert list(folder.iterdir()) == []


def test_refused_uploads_are_deleted(folder: Path, png: bytes) -> None:
    with pytest.raises(UserError, match="uploaded here"):
        read([put(folder, "chest.png", png), "/etc/passwd"], folder)
    assert list(folder.iterdir()) == []
    with pytest.raises(UserError, match="at most 60 files, found 61"):
        read([put(folder, f"{number}.png", png) for number in range(61)], folder)
    assert list(folder.iterdir()) == []


def test_files_are_in_memory_one_at_a_time(folder: Path, png: bytes) -> None:
    there: list[int] = []
    files = [put(folder, f"{number}.png", png) for number in range(3)]

    def count(data: bytes, name: str) -> None:
        there.append(len(list((folder / "abc").iterdir())) if (folder / "abc").exists() else 0)

    read_uploads(files, folder, count)
    assert there == [2, 1, 0]  # the others are not yet read


def test_an_upload_deleted_for_newer_ones_is_reported(folder: Path, png: bytes) -> None:
    files = [put(folder, "a.png", png), put(folder, "b.png", png)]

    def make_room(data: bytes, name: str) -> str:
        Path(files[1]).unlink()
        return name

    found, left_out = read_uploads(files, folder, make_room)
    assert found == ["a.png"]
    assert left_out == ["b.png: expected an upload, found it deleted for newer ones; send it again"]


def test_no_more_images_than_a_study_has(folder: Path, png: bytes) -> None:
    study = zipped(**{f"{number}.png": png for number in range(module.MOST_IMAGES + 3)})
    found, left_out = read([put(folder, "study.zip", study), put(folder, "more.png", png)], folder)
    assert len(found) == module.MOST_IMAGES
    assert left_out == ["only the first 12 images were read, not 12.png and later files"]
    assert list(folder.iterdir()) == []


def test_only_uploads_are_read_or_deleted(folder: Path, png: bytes) -> None:
    secret = folder.parent / "secret.png"
    secret.write_bytes(png)
    link = folder / "abc" / "link.png"
    link.symlink_to(secret)
    tricks = (f"{folder}/../secret.png", f"{folder}/abc/../../secret.png", str(link), str(folder))
    for path in (str(secret), *tricks, "/etc/passwd", "secret.png", ""):
        with pytest.raises(UserError, match="uploaded here"):
            read([path], folder)
    assert secret.read_bytes() == png


@pytest.mark.parametrize("shape", [(1500, 1200), (40, 50)])
def test_little_is_kept_and_the_analysis_is_that_of_the_whole_image(
    shape: tuple[int, int], tiny_model: Path, tiny_gallery: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    whole = read_image(np.resize(make_xray(5, 256), shape))
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        spec = finder.card.preprocess
        upload = Upload.of(whole, spec)
        expected, found = finder.analyze(whole, 5), finder.analyze(upload.radiograph, 5)
    assert upload.radiograph.pixels.shape == (spec.resize, spec.resize)
    assert max(upload.picture.shape) == min(PICTURE_SIDE, max(shape))
    assert upload.radiograph.pixels.base is None
    assert found.to_json() == expected.to_json()
    np.testing.assert_array_equal(found.embedding, expected.embedding)
    np.testing.assert_array_equal(found.feature_map, expected.feature_map)
