"""`cbmir pacs analyze`: written files, output and exit codes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

from cbmir.card import NOT_A_DEVICE
from cbmir.runtime import Finder
from command_line import run
from dicom_files import make_dicom

pytest.importorskip("highdicom")
Captured = pytest.CaptureFixture[str]


def written(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def chest(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "chest.dcm"
    path.parent.mkdir()
    path.write_bytes(make_dicom(SeriesInstanceUID="1.2.5"))
    return path


def test_a_file(chest: Path, tiny_model: Path, tiny_gallery: Path, tmp_path: Path, capsys: Captured) -> None:
    options = ("-o", tmp_path / "out", "--model", tiny_model, "--gallery", tiny_gallery)
    assert run("pacs", "analyze", chest, *options) == 0
    assert written(tmp_path / "out") == ["chest.sr.dcm"]
    report = dcmread(tmp_path / "out" / "chest.sr.dcm")
    assert (report.Modality, report.PatientID, report.StudyInstanceUID) == ("SR", "SECRET-ID", "1.2.4")
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"{tmp_path / 'out'}: results of 1 of 1 images", NOT_A_DEVICE]
    assert run("pacs", "analyze", chest, *options, "--sc", "--fhir", "--kos") == 0
    assert written(tmp_path / "out") == ["chest.fhir.json", "chest.sc.dcm", "chest.sr.dcm"]
    assert json.loads((tmp_path / "out" / "chest.fhir.json").read_text("utf-8"))["resourceType"] == "Bundle"
    assert "1 images have no similar prior" in capsys.readouterr().err


def test_results_are_for_their_owner_only(chest: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert run("pacs", "analyze", chest, "-o", tmp_path / "out", "--model", tiny_model, "--sr", "--fhir") == 0
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()] == [0o600, 0o600]


def test_without_a_gallery(chest: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert run("pacs", "analyze", chest, "-o", tmp_path / "out", "--model", tiny_model) == 0
    assert written(tmp_path / "out") == ["chest.sr.dcm"]


def test_one_unreadable_file_does_not_end_the_run(
    chest: Path, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "knee.dcm").write_bytes(make_dicom(BodyPartExamined="KNEE", SeriesInstanceUID="1.2.5"))
    (tmp_path / "cut.dcm").write_bytes(chest.read_bytes()[:3000])
    (tmp_path / "lonely.dcm").write_bytes(make_dicom(SeriesInstanceUID=None))
    files = [tmp_path / "knee.dcm", tmp_path / "absent.dcm", tmp_path / "cut.dcm", tmp_path / "lonely.dcm", chest]
    assert run("pacs", "analyze", *files, "-o", tmp_path / "out", "--model", tiny_model) == 2
    assert written(tmp_path / "out") == ["chest.sr.dcm"]
    said = capsys.readouterr()
    assert "results of 1 of 5 images" in said.out
    for wrong in ("BodyPartExamined", "no such file", "cut.dcm", "SeriesInstanceUID"):
        assert wrong in said.err
    assert "SECRET" not in said.out + said.err


def test_a_file_that_may_not_be_read_does_not_end_the_run(
    chest: Path, tiny_model: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(chest, chest.with_name("locked.dcm"))

    real = os.open

    def locked(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(os.fsdecode(path)).name == "locked.dcm":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", locked)
    assert run("pacs", "analyze", chest.parent, "-o", tmp_path / "out", "--model", tiny_model) == 2
    assert written(tmp_path / "out") == ["chest.sr.dcm"]
    said = capsys.readouterr()
    assert "results of 1 of 2 images" in said.out
    assert "locked.dcm: the file cannot be read: Permission denied" in said.err


def test_a_file_replaced_during_its_analysis_is_one_image(
    chest: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is about the file that was read, not its replacement."""
    real = Finder.analyze

    def replaced(self: Finder, *arguments: Any, **options: Any) -> Any:
        chest.write_bytes(make_dicom(SeriesInstanceUID="1.2.5", StudyInstanceUID="1.2.99"))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Finder, "analyze", replaced)
    assert run("pacs", "analyze", chest, "-o", tmp_path / "out", "--model", tiny_model) == 0
    assert dcmread(tmp_path / "out" / "chest.sr.dcm").StudyInstanceUID == "1.2.4"


def test_a_folder(chest: Path, tiny_model: Path, tmp_path: Path, capsys: Captured) -> None:
    """Its DICOM files are analysed, except results of an earlier run; equal names are distinguished by folders."""
    folder = chest.parent
    for place in ("a", "b"):
        (folder / place).mkdir()
        shutil.copy(chest, folder / place / "image.dcm")
    (folder / "notes.txt").write_text("no DICOM")
    (folder / "DICOMDIR").write_bytes(chest.read_bytes())
    options = ("-o", folder / "results", "--model", tiny_model, "--sr", "--sc")
    expected = [f"{name}.{kind}.dcm" for name in ("a/image", "b/image", "chest") for kind in ("sc", "sr")]
    for _ in range(2):
        assert run("pacs", "analyze", folder, *options) == 0
        assert "results of 3 of 3 images" in capsys.readouterr().out
        assert written(folder / "results") == expected
    assert run("pacs", "analyze", folder, chest, *options) == 0  # given twice, analysed once
    assert "results of 3 of 3 images" in capsys.readouterr().out


def test_an_empty_folder_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("pacs", "analyze", tmp_path / "empty", "-o", tmp_path / "out", "--model", tiny_model) == 2


def test_no_partial_file_stays(chest: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pydicom.Dataset.save_as", fail)
    assert run("pacs", "analyze", chest, "-o", tmp_path / "out", "--model", tiny_model) == 2
    assert written(tmp_path / "out") == []
