"""Answers of the routes: the same as in process, without data that identifies other patients."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread

from cbmir.card import NOT_A_DEVICE, ModelCard, OperatingPoint
from cbmir.errors import RankError
from cbmir.manifest import Box, read_manifest
from cbmir.runtime import Filter, Finder, Pseudonyms, build_gallery, open_engine
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.gallery.maintenance import export
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.neighbours import IN_GALLERY, PATIENT_NOT_FOUND, PATIENT_UNKNOWN
from dicom_files import make_dicom
from http_service import MakeClient, encoded


@pytest.fixture(scope="module")
def finder(tiny_model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        yield finder


def expected(finder: Finder, data: bytes, k: int, **options: Any) -> dict[str, Any]:
    """The expected answer of the service, from `Analysis.to_json`."""
    assert finder.gallery is not None
    answer = json.loads(json.dumps(finder.analyze(data, k, **options).to_json()))
    del answer["image"]
    del answer["refinement"]
    answer["known"] = [finder.gallery.case_id(one) for one in answer["known"]]
    for neighbour in answer["neighbours"]:
        neighbour["id"] = finder.gallery.case_id(neighbour["id"])
        neighbour["report"] = neighbour["boxes"] = None
        for of_a_patient in ("image", "patient_id", "view", "source", "date"):
            del neighbour[of_a_patient]
    return answer


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "DICOM"])
def test_analyze(kind: str, client: TestClient, finder: Finder, png: bytes) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(png)))
    data = make_dicom() if kind == "DICOM" else encoded(pixels, kind)
    answer = client.post("/v1/analyze", params={"k": 4}, content=data)
    assert answer.status_code == 200
    body = answer.json()
    assert {key: body[key] for key in expected(finder, data, 4)} == expected(finder, data, 4)
    assert len(body["neighbours"]) == 4
    assert body["notice"] == NOT_A_DEVICE
    assert body["model"]["fingerprint"] == finder.card.fingerprint
    assert body["model"]["engine"] == "onnxruntime"


def test_filters(
    client: TestClient, finder: Finder, png: bytes, tiny_gallery: Path, tmp_path: Path, make_client: MakeClient
) -> None:
    where = f"not {finder.card.labels.names[0]}"
    answer = client.post("/v1/analyze", params={"where": where, "view": "pa", "exact": True}, content=png).json()
    wanted = expected(finder, png, 10, filter=Filter(where=where, view="PA"), exact=True)
    assert answer["neighbours"] == wanted["neighbours"]
    assert not client.post("/v1/analyze", params={"since": "2020-01-01"}, content=png).json()["neighbours"]
    shutil.copytree(tiny_gallery, tmp_path / "sources")
    with Gallery.open(tmp_path / "sources") as gallery:
        gallery.update([replace(one, source="St. Süd") for one in gallery.entries(["image_03", "image_11"])])
        found = {gallery.case_id("image_03"), gallery.case_id("image_11")}
    other = make_client(gallery=tmp_path / "sources")
    for source, cases in (("st. süd", found), ("Süd", set())):
        answer = other.post("/v1/analyze", params={"source": source}, content=png).json()
        assert {one["id"] for one in answer["neighbours"]} == cases


def test_rank(client: TestClient, finder: Finder, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = client.post("/v1/analyze", params={"k": 5, "rank": "findings"}, content=png).json()
    wanted = expected(finder, png, 5, rank="findings")
    assert {key: answer[key] for key in wanted} == wanted
    assert answer["rank"] == "findings"
    assert answer["neighbours"] != expected(finder, png, 5)["neighbours"]
    wrong = client.post("/v1/analyze", params={"rank": "beauty"}, content=png)
    assert (wrong.status_code, wrong.json()["errors"][0]["where"]) == (422, "query.rank")
    both = client.post("/v1/analyze", params={"rank": "findings", "results": "sr"}, content=make_dicom())
    assert (both.status_code, both.json()["type"]) == (422, "urn:cbmir:problem:results")

    def refuse(*arguments: object, **options: object) -> None:
        raise RankError("expected another gallery")

    monkeypatch.setattr(Gallery, "search_by_agreement", refuse)
    refused = client.post("/v1/analyze", params={"rank": "findings"}, content=png)
    assert (refused.status_code, refused.json()["detail"]) == (422, "expected another gallery")
    assert refused.json()["type"] == "urn:cbmir:problem:rank"


def test_the_operating_point(
    make_client: MakeClient, make_tiny_model: Callable[..., Path], tmp_path: Path, png: bytes
) -> None:
    points = (None, OperatingPoint(0.75, 0.5, 0.9, 0.5, 0.9), None)
    model = make_tiny_model(tmp_path / "model.onnx", operating_points={"specific": points})
    live = ReloadableFinder(lambda: Finder.open(model, threads=1, operating_point="specific"))
    client = make_client(live=live)
    about = client.get("/v1/about").json()
    assert (about["operating_point"], about["thresholds"]) == ("specific", [None, 0.75, None])
    answer = client.post("/v1/analyze", content=png).json()
    assert (answer["operating_point"], answer["findings"][1]["threshold"]) == ("specific", 0.75)


def test_a_header_excludes_the_patient(client: TestClient, finder: Finder, png: bytes) -> None:
    asked = {"params": {"k": 20}, "content": png}
    answer = client.post("/v1/analyze", headers={"Patient-ID": "patient_03"}, **asked).json()
    assert answer["neighbours"] == expected(finder, png, 20, patient_id="patient_03")["neighbours"]
    assert len(answer["neighbours"]) == 18
    asked["params"]["include_same_patient"] = True
    assert len(client.post("/v1/analyze", headers={"Patient-ID": "patient_03"}, **asked).json()["neighbours"]) == 20


def test_warnings_of_the_picture_check_come_first(client: TestClient, inverted_chest: NDArray[np.uint8]) -> None:
    warnings = client.post("/v1/analyze", content=encoded(inverted_chest)).json()["warnings"]
    assert warnings == [SENTENCES["inverted"], PATIENT_UNKNOWN]


def test_an_image_of_the_gallery_is_named_by_its_case(client: TestClient, finder: Finder, tiny_manifest: Path) -> None:
    assert finder.gallery is not None
    data = (tiny_manifest.parent / "image_04.png").read_bytes()
    (entry,) = finder.gallery.find(hashlib.sha256(data).hexdigest())
    answer = client.post("/v1/analyze", content=data)
    assert answer.json()["warnings"][0] == IN_GALLERY
    assert answer.json()["known"] == [finder.gallery.case_id(entry.id)]
    assert entry.id not in answer.text


def test_an_image_of_the_gallery_is_reported_only_once(
    make_client: MakeClient, tiny_model: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.dcm"
    file.write_bytes(make_dicom(SeriesInstanceUID="1.2.5"))
    rows = replace(read_manifest(tiny_manifest).rows[0], image=file)
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, replace(read_manifest(tiny_manifest), rows=(rows,)), tmp_path / "gallery")
    client = make_client(gallery=tmp_path / "gallery")
    answer = client.post("/v1/analyze", params={"results": "sr"}, content=file.read_bytes()).json()
    assert [one for one in answer["warnings"] if "in the gallery" in one] == [IN_GALLERY]


def test_embed_then_search_is_analyze(client: TestClient, png: bytes, tiny_card: ModelCard) -> None:
    embedding = client.post("/v1/embed", content=png).json()["embedding"]
    assert len(embedding) == tiny_card.embedding_dim
    found = client.post("/v1/search", json={"embedding": embedding, "k": 5}).json()["neighbours"]
    analysed = client.post("/v1/analyze", params={"k": 5}, content=png).json()["neighbours"]
    assert [one["id"] for one in found] == [one["id"] for one in analysed]
    assert found[0]["distance"] == pytest.approx(analysed[0]["distance"], abs=1e-6)
    assert all(one["shared"] == [] for one in found)


def test_search_by_a_case_excludes_its_patient(client: TestClient, finder: Finder) -> None:
    gallery = finder.gallery
    assert gallery is not None
    entry = gallery.entry(gallery.ids()[0])
    question = {"case": gallery.case_id(entry.id), "k": 30}
    found = client.post("/v1/search", json=question).json()["neighbours"]
    others = {gallery.case_id(one.id): one for one in gallery.every_entry() if one.id != entry.id}
    assert {one["id"] for one in found} == {key for key, one in others.items() if one.patient_id != entry.patient_id}
    found = client.post("/v1/search", json=question | {"include_same_patient": True}).json()["neighbours"]
    assert {one["id"] for one in found} == set(others)
    assert all(set(one["shared"]) == set(one["labels"]) & set(entry.positive) for one in found)


def test_search_excludes_a_patient(client: TestClient, finder: Finder, png: bytes) -> None:
    embedding = client.post("/v1/embed", content=png).json()["embedding"]
    found = client.post("/v1/search", json={"embedding": embedding, "k": 20, "patient_id": " patient_01 "}).json()
    assert len(found["neighbours"]) == 18
    assert found["warnings"] == []


def test_a_search_without_a_patient_gives_a_warning(client: TestClient, png: bytes) -> None:
    question = {"embedding": client.post("/v1/embed", content=png).json()["embedding"]}
    assert client.post("/v1/search", json=question).json()["warnings"] == [PATIENT_UNKNOWN]
    misspelt = question | {"patient_id": "patient_1"}
    assert client.post("/v1/search", json=misspelt).json()["warnings"] == [PATIENT_NOT_FOUND]
    assert client.post("/v1/search", json=question | {"include_same_patient": True}).json()["warnings"] == []


def test_a_region(client: TestClient, finder: Finder, png: bytes) -> None:
    region = (0.1, 0.5, 0.5, 0.9)
    text = ",".join(map(str, region))
    body = client.post("/v1/analyze", params={"k": 4, "region": text}, content=png).json()
    wanted = expected(finder, png, 4, region=region)
    assert {key: body[key] for key in wanted} == wanted
    embedding = client.post("/v1/embed", params={"region": text}, content=png).json()["embedding"]
    assert embedding == pytest.approx(finder.embed_region(png, region).tolist(), abs=1e-6)
    for wrong, kind in (("0.1,0.5", "input"), ("0.5,0.5,0.5,0.5", "input")):
        for route in ("/v1/analyze", "/v1/embed"):
            answer = client.post(route, params={"region": wrong}, content=png)
            assert (answer.status_code, answer.json()["type"]) == (422, f"urn:cbmir:problem:{kind}")
    answer = client.post("/v1/analyze", params={"region": text, "results": "sr"}, content=make_dicom())
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:cbmir:problem:results")


def test_refine(client: TestClient, finder: Finder, png: bytes) -> None:
    gallery = finder.gallery
    assert gallery is not None
    analysis = finder.analyze(png, 4, exclude_same_patient=False)
    alike, unlike = (gallery.case_id(analysis.neighbours[at].id) for at in (2, 3))
    wanted = finder.refine(
        analysis, alike=[analysis.neighbours[2].id], unlike=[analysis.neighbours[3].id], findings={"Mass": -0.5}, k=4
    )
    body = {"embedding": analysis.embedding.tolist(), "k": 4, "alike": [alike], "unlike": [unlike]}
    answer = client.post("/v1/refine", json=body | {"findings": {"Mass": -0.5}}).json()
    assert [one["id"] for one in answer["neighbours"]] == [gallery.case_id(one.id) for one in wanted.neighbours]
    for more, status, kind in (
        ({"alike": ["case-0000000000000000"]}, 404, "no-case"),
        ({"findings": {"Mass": 2}}, 422, "input"),
        ({"findings": {"Hernia": 0.5}}, 422, "input"),
        ({"alike": [], "unlike": []}, 422, "input"),
        ({"alike": ["image_01"]}, 422, "parameters"),
    ):
        wrong = client.post("/v1/refine", json=body | more)
        assert (wrong.status_code, wrong.json()["type"]) == (status, f"urn:cbmir:problem:{kind}"), more


def test_results_of_a_dicom_file(client: TestClient) -> None:
    data = make_dicom(SeriesInstanceUID="1.2.5", PatientName="OWN^NAME")
    kinds = ("sr", "sc", "kos", "fhir")
    answer = client.post("/v1/analyze", params={"results": "sr, sc,kos,fhir", "k": 2}, content=data)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert set(results) == {*kinds, "kos_copies"}
    assert (results["kos"], results["kos_copies"]) == (None, [])  # the patient has no prior
    assert results["fhir"]["resourceType"] == "Bundle"
    for kind, modality in (("sr", "SR"), ("sc", "OT")):
        made = dcmread(io.BytesIO(base64.b64decode(results[kind])))
        assert (made.StudyInstanceUID, made.Manufacturer) == ("1.2.4", "cbmir")
        assert modality in (made.Modality, "OT")
    assert client.post("/v1/analyze", params={"results": ""}, content=data).json()["results"] is None
    for choice in ({"where": "Mass"}, {"view": "PA"}, {"rank": "findings"}, {"region": "0.1,0.1,0.5,0.5"}):
        refused = client.post("/v1/analyze", params={"results": "sr", **choice}, content=data)
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:cbmir:problem:results"), choice


def test_reports_and_thumbnails_if_they_are_shared(make_client: MakeClient, png: bytes) -> None:
    client = make_client(share=frozenset({"reports", "thumbnails"}))
    nearest = client.post("/v1/analyze", content=png).json()["neighbours"][0]
    assert nearest["report"].startswith("Report ")
    picture = client.get(f"/v1/cases/{nearest['id']}/thumbnail")
    assert picture.headers["content-type"] == "image/jpeg"
    assert picture.content.startswith(b"\xff\xd8\xff")


def test_boxes_if_thumbnails_are_shared(
    make_client: MakeClient, tiny_gallery: Path, tmp_path: Path, png: bytes
) -> None:
    with Gallery.open(tiny_gallery) as source:
        export(source, tmp_path / "g")
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.update([replace(one, boxes=(Box("Mass", 0.25, 0, 0.5, 1),)) for one in gallery.every_entry()])
    client = make_client(gallery=tmp_path / "g", share=frozenset({"thumbnails"}))
    nearest = client.post("/v1/analyze", content=png).json()["neighbours"][0]
    assert nearest["boxes"] == [{"label": "Mass", "left": 0.25, "top": 0, "width": 0.5, "height": 1}]
    assert (
        make_client(share=frozenset({"thumbnails"})).post("/v1/analyze", content=png).json()["neighbours"][0]["boxes"]
        == []
    )
    client = make_client(gallery=tmp_path / "g")
    assert client.post("/v1/analyze", content=png).json()["neighbours"][0]["boxes"] is None


def test_no_reports_and_thumbnails_by_default(client: TestClient, png: bytes) -> None:
    nearest = client.post("/v1/analyze", content=png).json()["neighbours"][0]
    assert nearest["report"] is None
    answer = client.get(f"/v1/cases/{nearest['id']}/thumbnail")
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:cbmir:problem:not-shared")


def test_an_unknown_case(make_client: MakeClient) -> None:
    client = make_client(share=frozenset({"thumbnails"}))
    for answer in (
        client.get("/v1/cases/case-0123456789abcdef/thumbnail"),
        client.post("/v1/search", json={"case": "case-0123456789abcdef"}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:cbmir:problem:no-case")


def test_a_case_removed_since_it_was_shown(make_client: MakeClient, tiny_gallery: Path, tmp_path: Path) -> None:
    client = make_client(gallery=Path(shutil.copytree(tiny_gallery, tmp_path / "gallery")))
    with Gallery.open(tmp_path / "gallery") as gallery:
        (first, *_) = gallery.ids()
        case = gallery.case_id(first)
        assert client.post("/v1/search", json={"case": case}).status_code == 200
        gallery.remove(ids=[first])
    answer = client.post("/v1/search", json={"case": case})
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:cbmir:problem:no-case")


def test_a_gallery_with_pseudonyms_without_their_key(
    make_client: MakeClient, tiny_model: Path, tiny_manifest: Path, tmp_path: Path, png: bytes
) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), tmp_path / "gallery", pseudonyms=Pseudonyms.throw_away())
    client = make_client(gallery=tmp_path / "gallery")
    neighbours = client.post("/v1/analyze", params={"k": 30}, content=png).json()["neighbours"]
    assert len(neighbours) == 20
    named = client.post("/v1/analyze", headers={"Patient-ID": "patient_01"}, content=png)
    assert (named.status_code, named.json()["type"]) == (422, "urn:cbmir:problem:pseudonyms")
    found = client.post("/v1/search", json={"case": neighbours[0]["id"], "k": 30}).json()
    assert len(found["neighbours"]) == 18  # the patient is still left out
    assert found["warnings"] == []


def test_without_a_gallery(make_client: MakeClient, png: bytes) -> None:
    client = make_client(gallery=None)
    answer = client.post("/v1/analyze", content=png).json()
    assert (answer["neighbours"], answer["novelty"]) == ([], None)
    assert answer["findings"]
    assert client.get("/health").status_code == 200
    assert client.post("/v1/search", json={"case": "case-0123456789abcdef"}).status_code == 404
    assert client.get("/v1/about").json()["gallery"] is None


def test_about(client: TestClient, tiny_card: ModelCard) -> None:
    about = client.get("/v1/about").json()
    assert about["labels"] == list(tiny_card.labels.names)
    assert about["embedding_dim"] == tiny_card.embedding_dim
    assert about["gallery"]["images"] == 20
    assert about["gallery"]["generation"] >= 1


def test_openapi_has_every_route_with_examples(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/analyze", "/v1/embed", "/v1/search", "/v1/refine", "/v1/cases/{case}/thumbnail", "/v1/about",
        "/v1/reload", "/metrics", "/health", "/health/live", "/health/ready",
    }  # fmt: skip
    analyze = document["paths"]["/v1/analyze"]["post"]
    assert set(analyze["requestBody"]["content"]) == {"application/dicom", "image/png", "image/jpeg"}
    assert analyze["responses"]["200"]["content"]["application/json"]["example"]["findings"]
    assert {one["name"] for one in analyze["parameters"]} == {
        "k", "where", "view", "source", "since", "until", "exact", "include_same_patient", "results", "rank",
        "region", "Patient-ID",
    }  # fmt: skip
    assert analyze["security"]
    (view,) = [one["schema"] for one in analyze["parameters"] if one["name"] == "view"]
    assert view["enum"] == ["", "PA", "AP", "LATERAL"]
    assert "application/problem+json" in analyze["responses"]["429"]["content"]
    search = document["paths"]["/v1/search"]["post"]["requestBody"]["content"]["application/json"]
    assert set(search["examples"]) == {"case", "embedding"}
    assert "not a medical device" in document["info"]["description"]
