"""A model that was trained on drawings says so in every answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cbmir.card import NOT_A_DEVICE, OF_PHANTOMS, ModelCard
from cbmir.cli.options import announce
from cbmir.export.compare import sample_of
from cbmir.manifest import read_manifest
from cbmir.runtime import Finder, build_gallery, open_engine
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.settings import Settings
from command_line import run
from dicom_files import make_dicom

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("phantoms") / "model.onnx", training={"source": "phantom"})


@pytest.fixture(scope="module")
def gallery(model: Path, tiny_manifest: Path) -> Path:
    with open_engine(model, threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), model.with_name("gallery"))
    return model.with_name("gallery")


@pytest.fixture
def finder(model: Path, gallery: Path) -> Iterator[Finder]:
    with Finder.open(model, gallery, threads=1) as finder:
        yield finder


@pytest.mark.parametrize(("source", "notes"), [("phantom", (OF_PHANTOMS,)), ("nih", ()), (None, ())])
def test_the_notes_depend_on_the_source(source: str | None, notes: tuple[str, ...], tiny_card: ModelCard) -> None:
    assert tiny_card.with_(training={} if source is None else {"source": source}).notes == notes


def test_it_is_the_first_warning(finder: Finder, tiny_manifest: Path) -> None:
    assert finder.analyze(tiny_manifest.with_name("image_20.png")).warnings[0] == OF_PHANTOMS


def test_the_command_line(model: Path, gallery: Path, tiny_manifest: Path, tmp_path: Path, capsys: Captured) -> None:
    image, report = tiny_manifest.with_name("image_20.png"), tmp_path / "report.html"
    for options in ([], ["--json"], ["--report", str(report)]):
        assert run("query", model, gallery, image, *options) == 0
        assert OF_PHANTOMS in " ".join(capsys.readouterr().out.split())
    assert f'<body><p class="phantoms">{OF_PHANTOMS}</p>' in report.read_text("utf-8")


def test_evaluate(model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    for options in ([], ["--json"]):
        assert run("evaluate", model, tiny_manifest, "-k", 2, *options) == 0
        assert OF_PHANTOMS in capsys.readouterr().out


def test_results_for_a_pacs(model: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "chest.dcm").write_bytes(make_dicom())
    assert run("pacs", "analyze", tmp_path / "chest.dcm", "-o", tmp_path / "r", "--model", model) == 0
    assert OF_PHANTOMS in capsys.readouterr().out


def test_the_first_lines_of_a_service(finder: Finder, capsys: Captured) -> None:
    announce("http://127.0.0.1:8000", finder.card.notes)
    assert capsys.readouterr().out.splitlines()[1:] == [OF_PHANTOMS, NOT_A_DEVICE]


def test_export_and_parity(tiny_manifest: Path, tiny_card: ModelCard, caplog: pytest.LogCaptureFixture) -> None:
    sample_of(read_manifest(tiny_manifest), tiny_card.with_(training={"source": "phantom"}))
    assert OF_PHANTOMS in caplog.text


def test_dicom_and_fhir(finder: Finder) -> None:
    data = make_dicom(PatientID="patient_01", SOPInstanceUID="1.2.826.0.1.3680043.10.1.7")
    made = make_results(data, finder.analyze(data, 3), finder, kinds=("sr", "fhir"))
    assert made.sr is not None and made.fhir is not None
    assert OF_PHANTOMS in [one.value for one in made.sr.iterall() if one.VR == "UT"]
    assert OF_PHANTOMS in json.dumps(made.fhir)


def test_over_http(model: Path, gallery: Path, tiny_manifest: Path) -> None:
    with ReloadableFinder(lambda: Finder.open(model, gallery, threads=1)) as live:
        client = TestClient(create_app(live, Settings()), base_url="http://127.0.0.1")
        image = tiny_manifest.with_name("image_20.png").read_bytes()
        answer = client.post("/v1/analyze", content=image, headers={"Content-Type": "image/png"}).json()
        case = {"case": answer["neighbours"][0]["id"]}
        for found in (answer, client.post("/v1/search", json=case).json()):
            assert OF_PHANTOMS in found["warnings"]
