from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from cbmir.cli import cli, main
from cbmir.manifest import read_manifest


def _run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["-q", "data", *map(str, args)])


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """A folder with four images of three patients, and NIH's table of them."""
    lines = ["Image Index,Finding Labels,Follow-up #,Patient ID,View Position,OriginalImage[Width,Height]"]
    for index, (patient, follow_up) in enumerate([(1, 0), (1, 1), (2, 0), (3, 0)]):
        name = f"0000000{patient}_00{follow_up}.png"
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        lines.append(f"{name},{['Mass', 'No Finding', 'Hernia', 'Edema|Mass'][index]},{follow_up},{patient},PA,1,1")
    (tmp_path / "entries.csv").write_text("\n".join(lines), "utf-8")
    return tmp_path


@pytest.mark.parametrize("command", [[], ["nih"], ["chexpert"], ["table"], ["phantom"], ["check"]])
def test_help_shows_an_example(command: list[str]) -> None:
    result = _run(*command, "--help")
    assert result.exit_code == 0
    assert f"  cbmir data {' '.join(command)}" in result.output


def test_nih_then_check(nih: Path) -> None:
    manifest = nih / "out" / "manifest.csv"
    result = _run("nih", "--images", nih, "--entries", nih / "entries.csv", "--findings", "13", "-o", manifest)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{manifest}: 4 images of 3 patients (train {_train(manifest)})\n"
    assert len(read_manifest(manifest).labels) == 13
    check = _run("check", manifest)
    assert check.exit_code == 0, check.output
    assert "4 images of 3 patients" in check.stdout


def _train(manifest: Path) -> str:
    splits = [row.split for row in read_manifest(manifest)]
    return f"{splits.count('train')}, val {splits.count('val')}, test {splits.count('test')}"


def test_check_exits_2_for_a_problem_and_prints_json(nih: Path) -> None:
    manifest = nih / "manifest.csv"
    assert _run("nih", "--images", nih, "--entries", nih / "entries.csv", "-o", manifest).exit_code == 0
    (nih / "00000002_000.png").unlink()
    for options in ([], ["--quick"], ["--workers", "1"]):
        result = _run("check", manifest, "--json", *options)
        assert result.exit_code == 2
        found = json.loads(result.stdout)
        assert found["ok"] is False
        assert found["missing"] == [str(nih.resolve() / "00000002_000.png")]


def test_table(nih: Path) -> None:
    table = nih / "own.csv"
    table.write_text(
        "file,pid,findings,day\n00000001_000.png,1,Mass,2020-01-31\n00000002_000.png,2,,\n"
        "00000003_000.png,3,Mass;Edema,2021-01-31\n"
    )
    manifest = nih / "m.csv"
    result = _run(
        "table", table, "--image-column", "file", "--patient-column", "pid", "--labels-column", "findings",
        "--separator", ";", "--date-column", "day", "-o", manifest,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [row.date for row in read_manifest(manifest)] == ["2020-01-31", "", "2021-01-31"]
    assert [row.labels for row in read_manifest(manifest)] == [(0, 1), (None, None), (1, 1)]


def test_chexpert(tmp_path: Path) -> None:
    names = (
        "Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,Edema,Consolidation,Pneumonia,Atelectasis,"
        "Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
    )
    lines = [f"Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,{names}"]
    for patient in "123":
        path = f"CheXpert-v1.0-small/train/patient0000{patient}/study1/view1_frontal.jpg"
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
        lines.append(f"{path},Male,50,Frontal,AP,,1.0,,,,,,,,,-1.0,,,")
    (tmp_path / "train.csv").write_text("\n".join(lines), "utf-8")
    manifest = tmp_path / "m.csv"
    result = _run("chexpert", "--root", tmp_path, "--csv", tmp_path / "train.csv", "--blank", "unknown", "-o", manifest)
    assert result.exit_code == 0, result.output
    assert read_manifest(manifest).rows[0].labels == (1, *[None] * 7, -1)


def test_a_mistake_exits_2_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cbmir", "data", "check", str(tmp_path / "absent.csv")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert "no such manifest" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_problem_s_exit_code_reaches_the_shell(nih: Path) -> None:
    manifest = nih / "manifest.csv"
    assert _run("nih", "--images", nih, "--entries", nih / "entries.csv", "-o", manifest).exit_code == 0
    (nih / "00000002_000.png").unlink()
    with pytest.raises(SystemExit) as stopped:
        main(["data", "check", str(manifest), "--quick"])
    assert stopped.value.code == 2


def test_readers_import_no_torch() -> None:
    code = (
        "import sys; import cbmir.training.readers, cbmir.training.comparison.protocols;"
        "import cbmir.training.manifest_check, cbmir.cli.data;"
        "sys.exit(bool({'torch', 'pandas', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_phantom_then_check(tmp_path: Path) -> None:
    result = _run("phantom", "-n", "8", "--size", "64", "-o", tmp_path / "phantoms")
    assert result.exit_code == 0, result.output
    manifest = tmp_path / "phantoms" / "manifest.csv"
    assert result.stdout.startswith(f"{manifest}: 8 images of ")
    assert _run("check", manifest).exit_code == 0


@pytest.mark.parametrize("command", ["nih --images . --entries e.csv", "table t.csv", "phantom"])
def test_negative_seed_is_a_mistake(command: str, tmp_path: Path) -> None:
    result = _run(*command.split(), "--seed", "-1", "-o", tmp_path / "m.csv")
    assert result.exit_code == 2
    assert "-1 is not in the range x>=0" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_that_may_not_be_written_to_is_checked(nih: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    manifest = nih / "manifest.csv"
    assert _run("nih", "--images", nih, "--entries", nih / "entries.csv", "-o", manifest).exit_code == 0
    monkeypatch.setattr("cbmir.runtime.imaging.image_warning.write_warnings", closed)
    result = _run("check", manifest)
    assert result.exit_code == 0, result.output
    assert "manifest.warnings.csv: not written (Permission denied)" in result.stderr
