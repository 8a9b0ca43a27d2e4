from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

import command_line
from cbmir.cli import cli
from cbmir.cli.data import data
from cbmir.errors import ManifestError
from cbmir.manifest import read_manifest
from cbmir.text_table import read_table
from published_tables import copy_tables, draw_images


def _run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["-q", "data", *map(str, args)])


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """A folder with four images of three patients, and a table like NIH's."""
    lines = ["Image Index,Finding Labels,Follow-up #,Patient ID,View Position,OriginalImage[Width,Height]"]
    for index, (patient, follow_up) in enumerate([(1, 0), (1, 1), (2, 0), (3, 0)]):
        name = f"0000000{patient}_00{follow_up}.png"
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        lines.append(f"{name},{['Mass', 'No Finding', 'Hernia', 'Edema|Mass'][index]},{follow_up},{patient},PA,1,1")
    (tmp_path / "entries.csv").write_text("\n".join(lines), "utf-8")
    return tmp_path


@pytest.mark.parametrize("command", [[], *([name] for name in data.list_commands(click.Context(data)))])
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


#: Data set of `../shared/tables` -> the image of a row, and options of its command.
PUBLISHED: dict[str, tuple[Callable[[dict[str, str]], str], tuple[str, ...]]] = {
    "covid": (lambda record: f"images/{record['filename']}", ("--all-views",)),
    "mimic": (
        lambda record: (
            f"files/p{record['subject_id'][:2]}/p{record['subject_id']}/s{record['study_id']}/{record['dicom_id']}.png"
        ),
        ("--labeller", "chexpert", "--blank", "unknown"),
    ),
    "padchest": (lambda record: f"{record['ImageDir']}/{record['ImageID']}", ("--labels", "own")),
    "rsna": (lambda record: f"{record['patientId']}.png", ()),
    "siim": (lambda record: f"{record['ImageId']}.png", ()),
    "openi": (lambda record: f"{record['id']}.png", ("--labels", "mapped")),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_command_makes_a_valid_manifest_from_published_tables(name: str, shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, name, tmp_path)
    image_of, options = PUBLISHED[name]
    tables = {"mimic": "*metadata.csv", "rsna": "*labels.csv"}
    records = [record for path in folder.glob(tables.get(name, "*.csv")) for _, record in read_table(path).records()]
    if name == "openi":
        text = "".join(path.read_text("utf-8") for path in folder.rglob("*.xml"))
        records = [{"id": one} for one in re.findall(r'parentImage id="([^"]+)"', text)]
    draw_images(folder, dict.fromkeys(map(image_of, records)))
    result = _run(name, folder, *options, "-o", tmp_path / "manifest.csv", "--json")
    assert result.exit_code == 0, result.output
    about = read_manifest(tmp_path / "manifest.csv").about
    assert json.loads(result.stdout)["images"] == about["counts"]["images"] > 0
    assert about["reader"] == name
    assert _run("check", tmp_path / "manifest.csv").exit_code == 0


def test_the_other_data_sets(shared: Path, tmp_path: Path) -> None:
    """Data sets whose tables are made here; the tests of their readers check the results."""
    draw_images(tmp_path, [f"nlm/CXR_png/CHNCXR_000{n}_{n % 2}.png" for n in range(4)])
    draw_images(tmp_path, [f"objects/train/{n}.jpg" for n in range(4)])
    (tmp_path / "objects" / "train.csv").write_text("image_name,annotation\n0.jpg,0 1 2 3 4\n1.jpg,\n2.jpg,\n3.jpg,\n")
    for name, folder in (("tuberculosis", "nlm"), ("object-cxr", "objects")):
        result = _run(name, tmp_path / folder, "-o", tmp_path / f"{name}.csv")
        assert result.exit_code == 0, result.output
    for name in ("brax", "ralo", "tbx11k", "vindr"):
        result = _run(name, tmp_path / "nlm", "-o", tmp_path / f"{name}.csv")
        assert isinstance(result.exception, ManifestError), result.output
        assert str(tmp_path / "nlm") in str(result.exception)


def test_options_for_the_labels_of_a_table(nih: Path) -> None:
    table = nih / "own.csv"
    table.write_text(
        'file;pid;"Mass, left";day\n00000001_000.png;1;present;31.5.2019\n00000002_000.png;2;absent;\n'
        "00000003_000.png;3;;\n"
    )
    manifest = nih / "m.csv"
    options = ["--image-column", "file", "--patient-column", "pid", "--labels", '"Mass, left"']
    options += ["--date-column", "day", "--date-format", "%d.%m.%Y", "--label-values", "present=1, absent=0"]
    result = _run("table", table, *options, "-o", manifest)
    assert result.exit_code == 0, result.output
    assert [(row.labels, row.date) for row in read_manifest(manifest)] == [
        ((1,), "2019-05-31"), ((0,), ""), ((None,), ""),
    ]  # fmt: skip
    assert read_manifest(manifest).labels.names == ("Mass, left",)
    wrong = _run("table", table, *options[:-1], "present=2", "-o", manifest)
    assert wrong.exit_code == 2
    assert "expected WORD=1, WORD=0 or WORD=-1 (uncertain), found 'present=2'" in wrong.output


def test_a_separator_may_be_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Excel writes one for Alt+Enter."""
    for name in "abc":
        (tmp_path / f"{name}.png").touch()
    rows = "\n".join(f'{name}.png,{name},"Mass\nEdema"' for name in "abc")
    (tmp_path / "t.csv").write_text(f"image,patient_id,findings\n{rows}\n")
    words = ["data", "table", tmp_path / "t.csv", "--labels-column", "findings", "-o", tmp_path / "m.csv"]
    assert command_line.run(*words) == 2
    assert r"--separator '\n'" in capsys.readouterr().err
    assert command_line.run(*words, "--separator", r"\n") == 0
    assert read_manifest(tmp_path / "m.csv").rows[0].labels == (1, 1)
    assert command_line.run(*words, "--separator", "") == 2
    assert "expected a character, found nothing" in capsys.readouterr().err


def test_a_mistake_exits_2_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cbmir", "data", "check", str(tmp_path / "absent.csv")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert "no such manifest" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_exit_code_of_a_problem_reaches_the_shell(nih: Path) -> None:
    manifest = nih / "manifest.csv"
    assert _run("nih", "--images", nih, "--entries", nih / "entries.csv", "-o", manifest).exit_code == 0
    (nih / "00000002_000.png").unlink()
    assert command_line.run("data", "check", manifest, "--quick") == 2


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


def test_a_read_only_data_set_is_checked(nih: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    manifest = nih / "manifest.csv"
    assert _run("nih", "--images", nih, "--entries", nih / "entries.csv", "-o", manifest).exit_code == 0
    monkeypatch.setattr("cbmir.runtime.imaging.image_warning.write_warnings", closed)
    result = _run("check", manifest)
    assert result.exit_code == 0, result.output
    assert "manifest.warnings.csv: not written (Permission denied)" in result.stderr
