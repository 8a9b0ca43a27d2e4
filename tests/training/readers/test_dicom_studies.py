"""`read_dicom_studies`: accepted and skipped files of a folder or DICOMDIR, with reasons."""

from __future__ import annotations

import csv
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MediaStorageDirectoryStorage

from cbmir.cli import main
from cbmir.errors import ManifestError
from cbmir.manifest import read_manifest
from cbmir.runtime import build_gallery, open_engine
from cbmir.training.dataset import cached_images
from cbmir.training.readers import read_dicom_studies, write_left_out
from command_line import run
from dicom_files import STORED, make_dicom


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Four patients with one image each, one of them with a bad window, and every kind of file to leave out."""
    folder = tmp_path / "archive"
    (folder / "A" / "B").mkdir(parents=True)

    def put(name: str, number: int, **tags: Any) -> None:
        tags = {
            "PatientID": f"P{number}",
            "SOPInstanceUID": f"1.2.{number}",
            "StudyInstanceUID": f"1.3.{number}",
        } | tags
        pixels = ((STORED + number) % 4096).astype(np.uint16)
        (folder / name).write_bytes(make_dicom(pixels, **tags))

    put("A/1", 1, StudyDate="20200131")
    put("A/B/2", 2, ViewPosition="AP")
    put("3", 3, WindowCenter=30000, WindowWidth=2)
    put("4", 4)
    put("copy", 4)
    put("knee", 5, BodyPartExamined="KNEE")
    put("side", 6, ViewPosition="LL")
    put("nobody", 7, PatientID="")
    put("cut", 8)
    (folder / "cut").write_bytes((folder / "cut").read_bytes()[:-100])
    (folder / "notes.txt").write_text("Name: Secret")
    (folder / "DICOMDIR").write_bytes(b"")
    return folder


def test_a_folder(archive: Path) -> None:
    manifest, left_out, _ = read_dicom_studies(archive, intensity="minmax", workers=0)
    rows = {row.image.relative_to(archive).as_posix(): row for row in manifest}
    assert set(rows) == {"3", "4", "A/1", "A/B/2"}
    first = rows["A/1"]
    assert (first.patient_id, first.study_id, first.view, first.date) == ("P1", "1.3.1", "PA", "2020-01-31")
    assert rows["A/B/2"].view == "AP"
    assert len(manifest.labels) == 14
    assert {value for row in manifest for value in row.labels} == {None}
    assert {row.split for row in manifest} == {"train", "val", "test"}
    reasons = {entry.path.name: (entry.damaged, entry.reason) for entry in left_out}
    assert set(reasons) == {"copy", "cut", "knee", "nobody", "notes.txt", "side"}
    assert [name for name, (damaged, _) in reasons.items() if damaged] == ["cut"]
    assert "the same object as" in reasons["copy"][1]
    assert "BodyPartExamined (0018,0015)" in reasons["knee"][1]
    assert "PatientID (0010,0020) is missing" in reasons["nobody"][1]
    assert reasons["notes.txt"][1] == "not a DICOM file"
    assert "ViewPosition (0018,5101)" in reasons["side"][1]


def test_images_that_are_blank_under_the_policy_are_left_out(archive: Path, tmp_path: Path, tiny_model: Path) -> None:
    """The default policy is `header`, as in training, so that all images of the manifest can be trained on."""
    manifest, left_out, _ = read_dicom_studies(archive, workers=0)
    assert {row.image.name for row in manifest} == {"1", "2", "4"}
    (missed,) = (entry for entry in left_out if entry.path.name == "3")
    assert not missed.damaged
    assert "WindowCenter (0028,1050) 30000" in missed.reason
    with open_engine(tiny_model, threads=1) as engine:
        cached_images(manifest, engine.card.preprocess, tmp_path)


def test_folders_are_followed_or_listed(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (archive / "4").rename(elsewhere / "4")
    (archive / "copy").unlink()
    (archive / "linked").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(archive)
    (archive / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(archive / "pipe")
    (archive / "closed").mkdir()
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root ignores permissions
    manifest, left_out, _ = read_dicom_studies(archive, workers=0)
    assert sorted(row.image.relative_to(archive).as_posix() for row in manifest) == ["A/1", "A/B/2", "linked/4"]
    reasons = {entry.path.name: (entry.damaged, entry.reason) for entry in left_out}
    assert reasons["closed"] == (True, "the folder cannot be read: Permission denied")
    assert reasons["broken"] == (True, "cannot be read: No such file or directory")
    assert reasons["pipe"] == (False, "a device or pipe")


def test_lateral_views_on_request(archive: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The manifest marks them as lateral, so later steps accept them."""
    manifest, _, _ = read_dicom_studies(archive, allow_lateral=True, workers=0, labels=("Mass",))
    (side,) = (row for row in manifest if row.view == "LATERAL")
    assert side.image.name == "side"
    with open_engine(tiny_model, threads=1) as engine:
        report = build_gallery(engine, manifest, tmp_path / "gallery", splits=("all",))
        assert (report.images, report.unreadable) == (4, ())
        cached_images(replace(manifest, rows=(side,)), engine.card.preprocess, tmp_path)
        unasked = replace(manifest, rows=(replace(side, view=""),))
        with pytest.raises(ManifestError, match="ViewPosition"):
            cached_images(unasked, engine.card.preprocess, tmp_path / "anew")


def dicomdir(folder: Path, *files: tuple[str, ...], comment: str = "") -> Path:
    directory = Dataset()
    directory.file_meta = FileMetaDataset()
    directory.file_meta.MediaStorageSOPClassUID = MediaStorageDirectoryStorage
    directory.file_meta.MediaStorageSOPInstanceUID = "1.2.9"
    directory.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    records = []
    for kind, parts in [("PATIENT", ()), *(("IMAGE", parts) for parts in files)]:
        record = Dataset()
        record.DirectoryRecordType = kind
        if comment:
            record.TextValue = comment
        if parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from pydicom, about a path outside the folder
                record.ReferencedFileID = list(parts)
        records.append(record)
    directory.DirectoryRecordSequence = records
    path = folder / "DICOMDIR"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory.save_as(path, enforce_file_format=True)
    return path


def test_a_dicomdir(archive: Path) -> None:
    (archive.parent / "outside").write_bytes((archive / "4").read_bytes())
    path = dicomdir(archive, ("A", "1"), ("A", "B", "2"), ("A", "1"), ("GONE",), ("..", "outside"))
    manifest, left_out, _ = read_dicom_studies(path, workers=0)
    assert [row.image.name for row in manifest] == ["1", "2"]
    assert {row.split for row in manifest} == {""}  # two patients cannot be split in three
    assert [(entry.damaged, entry.reason) for entry in left_out] == [
        (True, "listed in DICOMDIR, but missing"),
        (True, "lists a file outside of its folder"),
    ]


def test_a_dicomdir_on_a_medium_with_other_names(archive: Path) -> None:
    """Linux may show a CD's names in lower case, or with the version of each file."""
    (archive / "A").rename(archive / "a")
    (archive / "a" / "B").rename(archive / "a" / "b")
    (archive / "4").rename(archive / "im4.;1")
    manifest, left_out, _ = read_dicom_studies(dicomdir(archive, ("A", "1"), ("A", "B", "2"), ("IM4",)), workers=0)
    assert [row.image.name for row in manifest] == ["1", "2", "im4.;1"]
    assert left_out == ()


def test_a_large_dicomdir(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is larger and has more elements than a radiograph may have."""
    path = dicomdir(archive, ("A", "1"), comment="x" * 2**20)
    assert len(read_dicom_studies(path, workers=0)[0]) == 1
    monkeypatch.setattr("cbmir.runtime.imaging.dicom_reader._MOST_READS", 0)  # the limit for radiographs does not apply
    monkeypatch.setattr("cbmir.training.readers.dicom._MOST_READS", 5)
    with pytest.raises(ManifestError, match="DICOMDIR"):
        read_dicom_studies(path, workers=0)


def test_unusable_paths_are_refused(tmp_path: Path, archive: Path) -> None:
    with pytest.raises(ManifestError, match="found nothing"):
        read_dicom_studies(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match="has no files"):
        read_dicom_studies(tmp_path / "empty")
    with pytest.raises(ManifestError, match="expected a folder or a DICOMDIR"):
        read_dicom_studies(archive / "4")
    with pytest.raises(ManifestError, match="DICOMDIR"):
        read_dicom_studies(archive / "notes.txt")
    (tmp_path / "empty" / "knee").write_bytes((archive / "knee").read_bytes())
    with pytest.raises(ManifestError, match="BodyPartExamined"):
        read_dicom_studies(tmp_path / "empty", workers=0)


def test_the_command(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "m" / "manifest.csv"

    command = ("data", "dicom", archive, "-o", output, "--workers", 0)
    assert run(*command) == 2
    captured = capsys.readouterr()
    assert "3 images of 3 patients" in captured.out
    assert "7 files left out, 1 of them damaged" in captured.err
    assert len(read_manifest(output)) == 3
    with output.with_suffix(".left-out.csv").open() as stream:
        listed = list(csv.DictReader(stream))
    assert {(Path(row["file"]).name, row["kind"]) for row in listed} >= {("cut", "damaged"), ("knee", "refused")}
    (archive / "cut").unlink()
    assert run(*command, "--allow-lateral", "--intensity", "minmax", "--labels", "Effusion, Mass") == 0
    assert read_manifest(output).labels.names == ("Effusion", "Mass")
    assert len(read_manifest(output)) == 5


def test_warnings_are_counted_and_listed(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted by kind on stderr and in the sidecar, and listed beside the manifest; skipped files have their
    own list."""
    for number, name in enumerate(("5", "6", "7"), start=10):
        pixels = ((STORED + number) % 4096).astype(np.uint16)
        tags = {"PatientID": name, "SOPInstanceUID": f"1.9.{number}", "SeriesDescription": "CHEST LAT"}
        (archive / name).write_bytes(make_dicom(pixels, ViewPosition=None, **tags))
    (archive / "cut").unlink()
    output = tmp_path / "manifest.csv"
    with pytest.raises(SystemExit, match="0"):
        main(["data", "dicom", str(archive), "-o", str(output), "--workers", "0"])
    listed = output.with_suffix(".warnings.csv")
    said = f"3 images were read with a warning (3 probably not frontal, 3 view unknown): see {listed}"
    assert said in capsys.readouterr().err
    assert read_manifest(output).about["warnings"] == {"probably not frontal": 3, "view unknown": 3}
    with listed.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(Path(row["image"]).name, row["kind"]) for row in rows[:2]] == [
        ("5", "view unknown"), ("5", "probably not frontal"),
    ]  # fmt: skip
    assert "SeriesDescription (0008,103E) says LAT" in rows[1]["warning"]


def test_names_that_are_not_utf_8_are_left_out(archive: Path, tmp_path: Path) -> None:
    """A manifest cannot hold them."""
    for given, name in (("3", b"M\xfcller.dcm"), ("notes.txt", b"M\xfcller.txt")):
        (archive / given).rename(archive / os.fsdecode(name))
    assert run("data", "dicom", archive, "--intensity", "minmax", "-o", tmp_path / "m.csv") == 2
    assert len(read_manifest(tmp_path / "m.csv")) == 3
    listed = (tmp_path / "m.left-out.csv").read_text("utf-8")
    assert 'M\\xfcller.dcm,damaged,"expected a name in UTF-8' in listed and "M\\xfcller.txt,refused" in listed


@pytest.mark.parametrize(("option", "value", "message"), [
    ("-o", "m.xlsx", "expected a name that ends in .csv"), ("--labels", "Mass,mass", "found 'Mass' and 'mass'"),
])  # fmt: skip
def test_unusable_options_are_refused_before_the_work(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str,
    value: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("cbmir.training.readers.dicom.work_through", lambda *_, **__: pytest.fail("files were read"))
    monkeypatch.chdir(tmp_path)
    assert run("data", "dicom", archive, "-o", "m.csv", option, value) == 2
    assert message in capsys.readouterr().err


def test_the_list_is_deleted_if_nothing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    path.with_suffix(".left-out.csv").write_text("old")
    assert not write_left_out((), path).exists()
