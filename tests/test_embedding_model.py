"""A model without findings, from its file to all answers: it finds similar images and does not classify."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from cbmir.card import INTENDED_USE, INTENDED_USE_WITHOUT_FINDINGS, WITHOUT_FINDINGS, ModelCard
from cbmir.demo.controls import Controls
from cbmir.demo.desk import Desk, labels_of
from cbmir.demo.page.findings import findings_html
from cbmir.demo.sessions import Session
from cbmir.errors import CardError, ModelError, UserError
from cbmir.labels import LabelSet
from cbmir.runtime import Finder, open_engine
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.settings import Settings
from command_line import run
from http_service import encoded

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def finder(embedding_model: Path, embedding_gallery: Path) -> Iterator[Finder]:
    with Finder.open(embedding_model, embedding_gallery, threads=1) as finder:
        yield finder


@pytest.fixture
def image(tiny_manifest: Path) -> Path:
    return tiny_manifest.parent / "image_20.png"


def test_the_card_says_that_there_are_no_findings(embedding_model: Path, tiny_card: ModelCard) -> None:
    with open_engine(embedding_model, threads=1) as engine:
        assert (engine.card.head, engine.card.has_findings, engine.head.shape) == ("none", False, (0, 8))
        assert ModelCard.loads(engine.card.dumps()) == engine.card
    for changes in ({"head": "none"}, {"labels": LabelSet(()), "thresholds": (), "calibration": ()}):
        with pytest.raises(CardError, match="expected labels with every head but 'none'"):
            tiny_card.with_(**changes)
    assert "scores no findings" in INTENDED_USE_WITHOUT_FINDINGS and "scores findings" in INTENDED_USE


@pytest.mark.parametrize("count", [0, 1, 40])
def test_an_engine_gives_no_scores(embedding_model: Path, tiny_model: Path, count: int) -> None:
    batch = np.random.default_rng(0).integers(0, 256, (count, 1, 32, 32), np.uint8)
    with open_engine(embedding_model, threads=1) as engine, open_engine(tiny_model, threads=1) as usual:
        found = engine.run(batch, feature_map=True)
        assert found.scores.shape == engine.run(batch).scores.shape == (count, 0)
        np.testing.assert_array_equal(found.embedding, usual.run(batch).embedding)
        assert found.feature_map is not None and len(found.feature_map) == count


def test_a_file_with_scores_is_not_an_embedding_model(
    tmp_path: Path, tiny_card: ModelCard, embedding_model: Path, make_tiny_model: Callable[..., Path]
) -> None:
    with open_engine(embedding_model, threads=1) as engine:
        metadata = {"cbmir.card": engine.card.dumps(), "cbmir.head": ""}
    with pytest.raises(ModelError, match="the outputs embedding, feature_map, found"):
        open_engine(make_tiny_model(tmp_path / "model.onnx", metadata=metadata))


def test_neighbours_are_found_and_explained(finder: Finder, tiny_model: Path, tiny_gallery: Path, image: Path) -> None:
    analysis = finder.analyze(image, 5)
    with Finder.open(tiny_model, tiny_gallery, threads=1) as usual:
        wanted = usual.analyze(image, 5)
    assert [one.id for one in analysis.neighbours] == [one.id for one in wanted.neighbours]
    assert (analysis.findings, analysis.finding_vectors, analysis.query_labels) == ((), {}, ())
    assert not analysis.labels_known and wanted.labels_known
    assert WITHOUT_FINDINGS in analysis.warnings and WITHOUT_FINDINGS not in wanted.warnings
    assert {one.label for one in analysis.agreement} == {"Effusion", "Mass", "Nodule"}  # labels of the neighbours
    for one in analysis.neighbours:
        assert analysis.evidence_for_neighbour(one.id).sum() == pytest.approx(one.cosine, abs=1e-5)
    assert not any(one.shared for one in analysis.neighbours)
    known = finder.analyze(image.with_name("image_01.png"), 5)
    assert known.labels_known and known.query_labels == wanted_labels(known.known[0], finder)


def wanted_labels(id: str, finder: Finder) -> tuple[str, ...]:
    assert finder.gallery is not None
    return tuple(sorted(finder.gallery.entry(id).positive))


def test_requests_that_need_findings_are_refused(finder: Finder, image: Path, embedding_model: Path) -> None:
    with pytest.raises(UserError, match="expected a model that scores findings"):
        finder.search_by_findings(["Mass"])
    with pytest.raises(UserError, match="rank by nearness"):
        finder.analyze(image, rank="findings")
    with pytest.raises(UserError, match=r"expected an operating point of this model \(balanced\)"):
        Finder.open(embedding_model, operating_point="sensitive")


def test_the_command_line(
    embedding_model: Path, tiny_manifest: Path, image: Path, tmp_path: Path, capsys: Captured
) -> None:
    gallery = tmp_path / "gallery"
    assert run("index", "build", embedding_model, tiny_manifest, "-o", gallery) == 0
    assert run("query", embedding_model, gallery, image, "-k", 2) == 0
    text = capsys.readouterr().out
    assert WITHOUT_FINDINGS in text and "Neighbours, nearest first" in text
    assert "probability" not in text and "threshold" not in text
    assert run("query", embedding_model, gallery, image, "-k", 2, "--where", "Effusion", "--json") == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["findings"] == [] and [one["labels"][0] for one in answer["neighbours"]] == ["Effusion"] * 2
    assert run("embed", embedding_model, tiny_manifest, "-o", tmp_path / "embeddings.npz") == 0


def test_evaluation_measures_only_retrieval(embedding_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    assert run("evaluate", embedding_model, tiny_manifest, "-k", 3, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["all queries"]["ndcg"]["value"] is not None and set(found["auc_by_label"]) == {
        "Effusion", "Mass", "Nodule",
    }  # fmt: skip
    assert found["scores_findings"] is False and found["auc"]["value"] is None
    assert run("evaluate", embedding_model, tiny_manifest, "-k", 3) == 0
    text = capsys.readouterr().out
    assert "This model scores no findings" in text and "At the thresholds" not in text and "| AUC |  |" not in text


def test_parity_compares_only_embeddings(embedding_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    assert run("parity", embedding_model, embedding_model, tiny_manifest) == 0
    text = capsys.readouterr().out
    assert "unchanged top-10 neighbours" in text and "nan" not in text and "AUC" not in text and "scores" not in text


def test_the_service(
    embedding_model: Path, embedding_gallery: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    live = ReloadableFinder(lambda: Finder.open(embedding_model, embedding_gallery, threads=1))
    with TestClient(create_app(live, Settings()), base_url="http://localhost") as client:
        answer = client.post("/v1/analyze", params={"k": 4}, content=encoded(make_xray(100))).json()
        assert answer["findings"] == [] and len(answer["neighbours"]) == 4 and WITHOUT_FINDINGS in answer["warnings"]
        about = client.get("/v1/about").json()
        assert (about["labels"], about["thresholds"]) == ([], [])


def test_the_demo(finder: Finder, image: Path, tmp_path: Path) -> None:
    desk, session, few = Desk(finder, (), lambda: tmp_path), Session(), Controls(k=3)
    upload = shutil.copy(image, tmp_path / "upload.png")  # a copy, since uploads are deleted
    step = desk.open(session, few, [str(upload)])
    assert step.analysis is not None and WITHOUT_FINDINGS in findings_html(finder.card, step.analysis)
    assert step.analysis.findings == () and len(step.neighbours) == 3
    assert labels_of(step) is None  # the image has no known labels
    (beside,) = desk.beside(desk.compare(session, [step.neighbours[0].id]))
    assert beside.evidence is not None
    assert beside.evidence.sum() == pytest.approx(step.neighbours[0].cosine, abs=1e-3)
    report = desk.report(session)
    assert WITHOUT_FINDINGS in report and "Evidence for the nearest similar image" in report and "Verdict" not in report
    with pytest.raises(UserError):
        desk.by_findings(session, few, ["Mass"])
