"""The page in Chromium: opening files, what it remembers, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import OF_PHANTOMS
from cbmir.demo.page.findings import GATE
from cbmir.manifest import Manifest, Row
from cbmir.runtime import build_gallery, open_engine
from demo_page import cards, example, shown, upload

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

Visit = Callable[..., Any]


def test_dark_by_default_and_light_is_remembered(page: Any) -> None:
    dark = "document.body.classList.contains('dark')"
    assert page.evaluate(dark)
    page.locator("#bar .look").click()
    assert not page.evaluate(dark)
    page.reload()
    page.locator("#viewer .film").wait_for()
    page.wait_for_function(f"!({dark})")


def test_no_code_in_the_data_is_run(page: Any, report: str) -> None:
    example(page)
    page.locator("#similar .report summary").first.click()
    text = page.locator("#similar .report p").first
    assert text.inner_text() == report
    assert "effusion" in "".join(text.locator("mark").all_inner_texts())
    assert page.title() == "cbmir"


def test_a_file_that_is_not_an_image_removes_the_previous_one(page: Any, tmp_path: Path) -> None:
    example(page)
    (tmp_path / "notes.txt").write_text("No X-ray at all.")
    upload(page, tmp_path / "notes.txt")
    page.locator("#alerts .note.bad", has_text="notes.txt: expected").wait_for()
    assert cards(page) == []
    assert page.locator("#viewer .film canvas").count() == page.locator("#findings [data-finding]").count() == 0
    example(page, 1)
    assert page.locator("#alerts .note.bad").count() == 0


def test_a_study_and_the_files_left_out_of_it(page: Any, xray: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("No X-ray at all.")
    second = tmp_path / "second.png"
    second.write_bytes(xray.read_bytes() + b"\0")
    upload(page, xray, second, tmp_path / "notes.txt")
    shown(page, "xray.png")
    assert "1 of the files are not shown" in page.locator("#alerts").inner_text()
    page.get_by_role("combobox", name="Image", exact=True).select_option("2. second.png")
    shown(page, "second.png")


def test_a_dropped_file_is_opened(page: Any, xray: Path) -> None:
    page.evaluate(
        """bytes => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
          document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }""",
        list(xray.read_bytes()),
    )
    shown(page, "dropped.png")


def test_findings_wait_for_a_click_if_the_image_is_not_a_chest(
    visit: Visit, running_demo: Callable[..., Any], make_tiny_model: Callable[..., Path],
    make_xray: Callable[..., NDArray[np.uint8]], tmp_path: Path,
) -> None:  # fmt: skip
    """The gallery has 100 images, since novelty cannot be judged with fewer. The model was trained on phantoms."""
    model = make_tiny_model(tmp_path / "model.onnx", training={"source": "phantom"})
    rows = []
    for number in range(100):
        Image.fromarray(make_xray(number, 40)).save(tmp_path / f"{number}.png")
        rows.append(Row(tmp_path / f"{number}.png", f"p{number}", (number % 2, 0, 1), split="train"))
    with open_engine(model, threads=1) as engine:
        build_gallery(engine, Manifest(engine.card.labels, tuple(rows)), tmp_path / "gallery", workers=0)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "noise.png")
    with running_demo(model, tmp_path / "gallery") as url:
        page = visit(url)
        assert page.locator("#phantoms").inner_text() == OF_PHANTOMS
        upload(page, tmp_path / "noise.png")
        shown(page, "noise.png")
        alerts = page.locator("#alerts .note.bad").all_inner_texts()
        assert [text.split(",")[0].split("\n")[0] for text in alerts] == [
            "Nothing in the gallery looks like this image", "This model knows only phantoms"
        ]  # fmt: skip
        assert not page.locator("#findings [data-finding]").first.is_visible()
        page.get_by_text(GATE).click()
        assert page.locator("#findings [data-finding]").first.is_visible()
        page.get_by_role("button", name="More like this: similar image 1", exact=True).click()
        shown(page, "Similar image 1")
        page.go_back()
        shown(page, "noise.png")
        assert page.locator("#findings [data-finding]").first.is_visible()  # they stay open
        page.close()


def test_login(browser: Any, demo_with_login: str) -> None:
    context = browser.new_context(http_credentials={"username": "ada", "password": "correct horse"})
    page = context.new_page()
    page.goto(demo_with_login)
    page.locator("#viewer .film").wait_for()
    context.close()
