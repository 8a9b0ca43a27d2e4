"""`build(finder).launch()`, and the endpoints that `gradio_client` sees."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from cbmir.demo import build
from cbmir.demo.endpoints import told
from cbmir.errors import GalleryError
from cbmir.runtime import Finder

gradio_client = pytest.importorskip("gradio_client")
# gradio_client leaves event loops to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
NAMES = {"/analyze", "/search_by_findings", "/search_by_region", "/refine", "/report"}


@pytest.fixture(scope="module")
def launched(tiny_model: Path, wall_gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page launched as in a script or a notebook."""
    with pytest.MonkeyPatch.context() as patch, Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        blocks = build(finder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gradio's own server leaves sockets open
            _, url, _ = blocks.launch(prevent_thread_lock=True, quiet=True)
            try:
                yield url
            finally:
                blocks.close(verbose=False)
                gc.collect()  # so that unclosed resources are reported here, and not in the next test


@pytest.fixture
def client(launched: str) -> Any:
    return gradio_client.Client(launched, verbose=False)


def test_endpoints_are_named_and_documented(client: Any) -> None:
    info = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(info) == NAMES
    assert {one["parameter_name"] for one in info["/search_by_region"]["parameters"]} >= {"x0", "y0", "x1", "y1", "k"}


def test_a_case_from_file_to_report(client: Any, xray: Path) -> None:
    found = client.predict(image=gradio_client.handle_file(str(xray)), k=5, api_name="/analyze")
    assert len(found["findings"]) == 3 and len(found["neighbours"]) == 5
    assert {"image", "patient_id"}.isdisjoint(found["neighbours"][0])
    part = client.predict(x0=0.1, y0=0.1, x1=0.5, y1=0.5, k=3, api_name="/search_by_region")
    assert part["region"] == [0.1, 0.1, 0.5, 0.5] and len(part["neighbours"]) == 3
    last = found["neighbours"][-1]["id"]
    again = client.predict(alike=[last], unlike=[], findings={}, k=5, api_name="/refine")
    assert len(again["neighbours"]) == 5
    assert client.predict(api_name="/report").startswith("<!doctype html>")


def test_findings_alone(client: Any) -> None:
    found = client.predict(findings=["Mass"], k=4, where="not Effusion", api_name="/search_by_findings")
    assert [one["shared"] for one in found["neighbours"]] == [["Mass"]] * 4


def test_errors_are_in_plain_words_and_sessions_are_separate(client: Any) -> None:
    with pytest.raises(gradio_client.exceptions.AppError, match="Open an image first"):
        client.predict(api_name="/report")
    with pytest.raises(gradio_client.exceptions.AppError, match="1 to 40 similar images"):
        client.predict(findings=["Mass"], k=400, api_name="/search_by_findings")


def test_the_files_of_a_gallery_are_not_named() -> None:
    def act() -> None:
        raise GalleryError("/data/patients/gallery.db: expected image 7, found none")

    with pytest.raises(gr.Error, match="no longer has this image") as caught:
        told(act)()
    assert "/data" not in str(caught.value)
