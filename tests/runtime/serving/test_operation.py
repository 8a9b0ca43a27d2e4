"""Readiness, reloads, overload, stopping and metrics of the service."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cbmir.card import ModelCard
from cbmir.runtime import Finder
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving import app
from cbmir.runtime.serving.settings import Settings
from http_service import Held, MakeClient


def test_health_is_ready_only_after_warm_up(make_client: MakeClient, tiny_model: Path) -> None:
    live = ReloadableFinder(lambda: Finder.open(tiny_model, threads=1), at_once=False)
    client = make_client(live=live)
    assert client.get("/health/live").json() == {"status": "live"}
    for path in ("/health", "/health/ready"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": "not ready", "problem": "not-ready"})
    early = client.post("/v1/embed", content=b"anything")
    assert (early.status_code, early.headers["retry-after"]) == (503, "5")
    live.reload()
    assert client.get("/health/ready").json() == {"status": "ready"}


def replace_gallery(gallery: Path) -> None:
    shutil.copytree(gallery, gallery.with_name("new"))
    shutil.rmtree(gallery)
    gallery.with_name("new").rename(gallery)


def test_a_replaced_gallery_is_reported_with_the_remedy(
    make_client: MakeClient, tiny_gallery: Path, tmp_path: Path, png: bytes
) -> None:
    gallery = Path(shutil.copytree(tiny_gallery, tmp_path / "gallery"))
    client = make_client(gallery=gallery)
    replace_gallery(gallery)
    answer = client.post("/v1/analyze", content=png)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cbmir:problem:gallery-replaced")
    assert "/v1/reload" in answer.json()["detail"]
    assert client.get("/health/ready").json()["problem"] == "gallery-replaced"
    assert "cbmir_ready 0.0" in client.get("/metrics").text
    reloaded = client.post("/v1/reload")
    assert (reloaded.status_code, reloaded.json()["generation"]) == (200, 2)
    assert client.post("/v1/analyze", content=png).status_code == 200
    assert client.get("/health/ready").status_code == 200


def test_a_failed_reload_changes_nothing(make_client: MakeClient, tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(tiny_model, tmp_path / "model.onnx"))
    client = make_client(live=ReloadableFinder(lambda: Finder.open(model, threads=1)))
    model.write_bytes(b"damaged")
    answer = client.post("/v1/reload")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cbmir:problem:reload")
    assert client.get("/health/ready").status_code == 200


def test_a_busy_service_refuses_requests(make_client: MakeClient, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(concurrency=1, queue=0)
    held = Held(Finder.embed)
    monkeypatch.setattr(Finder, "embed", lambda *arguments: held(*arguments))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/embed", content=png)
        assert held.begun.wait(60)
        refused = client.post("/v1/embed", content=png)
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:cbmir:problem:busy")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert client.get("/health/ready").status_code == 200
        assert "cbmir_requests_working 1.0" in client.get("/metrics").text
        held.let.set()
        assert first.result().status_code == 200
    assert client.post("/v1/embed", content=png).status_code == 200


def test_stopping_does_not_wait_for_abandoned_work(
    tiny_model: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, is_over = threading.Event(), threading.Event()

    def embed(*_: object) -> None:
        let.wait(30)
        is_over.set()

    monkeypatch.setattr(Finder, "embed", embed)
    live = ReloadableFinder(lambda: Finder.open(tiny_model, threads=1))
    try:
        with TestClient(app.create_app(live, Settings(timeout_s=0.05)), base_url="http://localhost") as client:
            assert client.post("/v1/embed", content=png).status_code == 503
        assert not is_over.is_set()
        assert not live.ready
    finally:
        let.set()


def test_a_hanging_gallery_is_reported_and_does_not_delay_a_reload(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_CHECK_S", 0.05)
    client = make_client()
    held = Held(Gallery.reading)
    with monkeypatch.context() as hanging:
        hanging.setattr(Gallery, "reading", lambda *arguments: held(*arguments))
        try:
            for _ in range(5):  # more than there are threads
                answer = client.get("/health/ready")
                assert (answer.status_code, answer.json()["problem"]) == (503, "timeout")
            assert client.get("/metrics").json()["type"] == "urn:cbmir:problem:timeout"
            assert client.get("/v1/about").status_code == 503
            hanging.undo()
            assert client.post("/v1/reload").status_code == 200
        finally:
            held.let.set()
    for _ in range(1000):
        if client.get("/health/ready").status_code == 200:
            break
    else:
        pytest.fail("the threads of what hung are not free again")


def test_one_reload_at_a_time(make_client: MakeClient, tiny_model: Path) -> None:
    live = ReloadableFinder(lambda: held(tiny_model, threads=1), at_once=False)
    held = Held(Finder.open)
    client = make_client(live=live)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/reload")
        assert held.begun.wait(60)
        second = client.post("/v1/reload")
        assert (second.status_code, second.json()["type"]) == (409, "urn:cbmir:problem:reloading")
        held.let.set()
        assert first.result().json()["generation"] == 1


def test_metrics(make_client: MakeClient, png: bytes, tiny_card: ModelCard) -> None:
    client = make_client()
    client.post("/v1/analyze", content=png)
    client.post("/v1/analyze", content=b"none")
    client.get("/nowhere")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'cbmir_http_requests_total{method="POST",route="/v1/analyze",status="200"} 1.0',
        'cbmir_http_requests_total{method="POST",route="/v1/analyze",status="415"} 1.0',
        'cbmir_http_requests_total{method="GET",route="none",status="404"} 1.0',
        'cbmir_http_request_duration_seconds_count{route="/v1/analyze"} 2.0',
        'cbmir_http_problems_total{kind="not-an-image"} 1.0',
        f"cbmir_uploaded_bytes_total {float(len(png) + 4)}",
        "cbmir_requests_working 0.0",
        "cbmir_requests_waiting 0.0",
        "cbmir_requests_capacity 34.0",
        "cbmir_gallery_images 20.0",
        "cbmir_ready 1.0",
        "cbmir_models_opened_total 1.0",
    ):
        assert line in answer.text.splitlines()
    model = next(line for line in answer.text.splitlines() if line.startswith("cbmir_model_info"))
    for text in (f'fingerprint="{tiny_card.fingerprint}"', 'engine="onnxruntime"', 'device="cpu"', "weights="):
        assert text in model
    assert "cbmir_gallery_generation " in answer.text
