"""Access to the service, and the headers of every answer."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from cbmir.card import NOT_A_DEVICE
from http_service import MakeClient

TOKEN = "a-token-of-thirty-two-characters"
ROUTES = [
    ("POST", "/v1/analyze"), ("POST", "/v1/embed"), ("POST", "/v1/search"), ("POST", "/v1/reload"),
    ("GET", "/v1/about"), ("GET", "/v1/cases/case-0123456789abcdef/thumbnail"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("GET", "/nowhere"),
]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(make_client: MakeClient) -> TestClient:
    return make_client(token=TOKEN)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN,
     "Bearer \xff\xfe"],
)  # fmt: skip
def test_no_route_without_the_token(method: str, path: str, given: str | None, guarded: TestClient) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = guarded.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["type"] == "urn:cbmir:problem:token"
    assert TOKEN not in answer.text


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer  {TOKEN} "])
def test_with_the_token(given: str, guarded: TestClient, png: bytes) -> None:
    headers = {"Authorization": given}
    assert guarded.post("/v1/analyze", headers=headers, content=png).status_code == 200
    assert guarded.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize("app", ["client", "guarded"])
def test_the_front_page_links_to_the_api_and_loads_nothing(app: str, request: pytest.FixtureRequest) -> None:
    answer = request.getfixturevalue(app).get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert re.findall('href="(.*?)"', answer.text) == ["openapi.json", "v1/about", "health", "metrics"]
    assert NOT_A_DEVICE in answer.text and not re.search(r"<(script|link|img|style)|https?://(?!ADDRESS/)", answer.text)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_needs_no_token_and_shows_only_the_status(path: str, guarded: TestClient) -> None:
    answer = guarded.get(path)
    assert answer.status_code == 200
    assert set(answer.json()) == {"status"}
    assert guarded.head(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/health/", "/health/../v1/about", "/health%2f..%2fmetrics", "http://testserver//metrics", "/HEALTH"]
)
def test_paths_similar_to_health_need_a_token(path: str, guarded: TestClient) -> None:
    assert guarded.get(path).status_code == 401


def test_without_a_token_only_local_host_names_are_accepted(client: TestClient) -> None:
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
        assert client.get("/health", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        answer = client.get("/health", headers={"Host": host})
        assert (answer.status_code, answer.json()["type"]) == (421, "urn:cbmir:problem:host")


def test_with_a_token_any_host_name_is_accepted(guarded: TestClient) -> None:
    assert guarded.get("/health", headers={"Host": "cbmir.hospital.example"}).status_code == 200


def test_pages_of_other_sites_are_refused(client: TestClient) -> None:
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://[", "localhost", "",
                   "http://localhost/", "http://user@localhost"):  # fmt: skip
        answer = client.post("/v1/reload", headers={"Origin": origin})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:cbmir:problem:origin")
        assert "access-control-allow-origin" not in answer.headers
    assert client.post("/v1/reload", headers={"Origin": "http://localhost"}).status_code == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_sec_fetch_site_takes_precedence(site: str, status: int, client: TestClient) -> None:
    """Behind a proxy the page's origin differs from the requested host, and a form sends no Origin."""
    headers = {"Sec-Fetch-Site": site}
    assert client.post("/v1/reload", headers=headers).status_code == status
    assert client.post("/v1/reload", headers=headers | {"Origin": "https://proxy.example"}).status_code == status
    assert client.get("/v1/about", headers=headers).status_code == 200  # a link does not change anything


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/about", "/v1/search"])
def test_headers_of_every_answer(path: str, client: TestClient) -> None:
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-request-id"]
    assert "access-control-allow-origin" not in headers


def test_complete_headers_are_limited(client: TestClient) -> None:
    """h11 only limits incomplete headers."""
    many = {f"x-{number}": "x" * 400 for number in range(100)}
    for answer in (
        client.get("/health", headers={"x-long": "x" * 40_000}),
        client.get("/health", headers=many),
        client.get("/health?" + "x" * 33_000),
        client.get("/" + "x" * 33_000),
    ):
        assert (answer.status_code, answer.json()["type"]) == (431, "urn:cbmir:problem:headers")
    assert client.get("/health", headers={"x-long": "x" * 30_000}).status_code == 200
