"""Chromium: what a person sees of the gallery beside an image, and what is asked of it without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cbmir.card import NOT_A_DEVICE
from demo_page import drawn, example, shown

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser


def test_side_by_side(wall: Any) -> None:
    example(wall, 1)
    shown(wall, "Example")
    wall.locator(".card [data-act=compare]").first.click()
    wall.locator("#compare #there img:not([hidden])").wait_for()
    assert wall.locator("#compare-title").inner_text().startswith("Look-alike 1 · image_")
    assert "more alike than" in wall.locator("#compare-text").inner_text()
    assert "approximate" not in wall.locator("#compare-text").inner_text()
    assert drawn(wall, "#here canvas")
    wall.wait_for_function("document.querySelector('#there canvas').width > 1")
    assert drawn(wall, "#there canvas")
    wall.locator("#here .film").focus()
    wall.keyboard.press("+")
    both = [wall.locator(f"{side} .stage").evaluate("s => s.style.transform.match(/scale/) && s.style.transform")
            for side in ("#here", "#there")]  # fmt: skip
    assert all(both)
    wall.keyboard.press("0")
    assert wall.locator("#there .readout").inner_text().startswith("1.0")  # they fit together, too
    wall.keyboard.press("ArrowRight")
    wall.locator("#compare-title", has_text="Look-alike 2 ·").wait_for()
    wall.locator("#there .caption", has_text=re.compile(r"image_\d\d \(thumbnail\)")).wait_for()
    page_says = """(src) => document.dispatchEvent(new CustomEvent("cbmir-answer", {detail: {
        n: 99, action: "compare", about: 1, compare: {
            id: document.querySelector("#compare-title").textContent.split(" · ")[1],
            src, labels: "", report: ""}}}))"""
    wall.evaluate(page_says, "thumbnail?id=nobody")
    wall.locator("#there .resting", has_text="No thumbnail").wait_for()
    assert wall.locator("#there img").is_hidden()  # another's would stand under this one's name
    assert not drawn(wall, "#there canvas")
    wall.keyboard.press("Escape")
    assert not wall.locator("#compare").is_visible()


def test_boxes_on_request(wall: Any) -> None:
    """Off at first, on by the keyboard, in place on pictures that do not fill their film; no button without boxes."""
    place = """([box, width, height]) => {
        const [mark, film] = [box, box.closest(".film, .shown")].map(part => part.getBoundingClientRect());
        const scale = Math.min(film.width / width, film.height / height);
        const left = film.left + (film.width - scale * width) / 2, top = film.top + (film.height - scale * height) / 2;
        return [(mark.left - left) / scale / width, (mark.top - top) / scale / height,
                mark.width / scale / width, mark.height / scale / height];
    }"""
    button, box = wall.locator("#box-tools button"), wall.locator(".card .boxes > span").first
    assert button.is_hidden()
    example(wall, 1)
    shown(wall, "Example")
    assert button.get_attribute("aria-pressed") == "false"
    assert box.is_hidden()
    button.focus()
    wall.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    box.scroll_into_view_if_needed()
    assert box.inner_text() == "Mass"
    wall.wait_for_function("document.querySelector('.card .boxes').style.width === '75%'")
    assert box.evaluate(f"box => ({place})([box, 96, 128])") == pytest.approx([0.5, 0.05, 0.25, 0.5], abs=0.01)
    name = wall.locator(".card:has(.boxes)").first.get_attribute("data-id")
    wall.locator(f'.card[data-id="{name}"] .film').click()
    box = wall.locator("#there .boxes > span")
    box.wait_for()
    assert box.evaluate(f"box => ({place})([box, 96, 128])") == pytest.approx([0.5, 0.05, 0.25, 0.5], abs=0.01)
    wall.locator("#compare [data-act=boxes]").press("Enter")
    assert box.is_hidden()
    assert button.get_attribute("aria-pressed") == "false"
    wall.keyboard.press("Escape")
    wall.locator("#having").select_option("Effusion")  # those have no boxes
    wall.locator("#search", has_text="with Effusion").wait_for()
    assert button.is_hidden()
    wall.locator(".card .film").first.click()
    wall.locator("#compare #there img:not([hidden])").wait_for()
    assert wall.locator("#compare [data-act=boxes]").is_hidden()


def test_more_like_this(wall: Any) -> None:
    example(wall, 1)
    shown(wall, "Example")
    name = wall.locator(".card").nth(2).get_attribute("data-id")
    wall.locator(".card [data-act=like]").nth(2).focus()
    wall.keyboard.press("Enter")
    shown(wall, f"Gallery image {name} (thumbnail)")
    assert wall.locator(f'.card[data-id="{name}"]').count() == 0
    assert wall.evaluate("document.activeElement.id") == "film"  # the button that had the focus is gone
    assert wall.evaluate("scrollY") == 0
    wall.locator("#state[role=status]", has_text="20 look-alikes in").wait_for()


def test_search_by_findings_and_filters(wall: Any) -> None:
    wall.locator("#combination summary").click()
    wall.locator("[data-act=findings]").click()
    wall.locator("#errors .note.bad", has_text="Choose one").wait_for()
    for label in ("Effusion", "Mass"):
        wall.locator(f".chip[data-label={label}]").click()
    wall.locator("[data-act=findings]").click()
    wall.locator("#search", has_text="Effusion + Mass").wait_for()
    assert wall.locator(".card").count() == 20
    assert wall.locator(".legend .shared").inner_text() == "= asked for and there"
    assert wall.locator(".card .shared").first.get_attribute("title") == "asked for and there"
    wall.locator("#view").select_option("AP")
    wall.locator("#search", has_text="view AP").wait_for()
    assert all("· AP" in card for card in wall.locator(".card").all_inner_texts())
    wall.locator("#having").select_option("Nodule")
    wall.locator("#search", has_text="with Nodule").wait_for()
    assert all("Nodule" in card for card in wall.locator(".card").all_inner_texts())


def test_twenty_look_alikes_shift_nothing(wall: Any) -> None:
    wall.evaluate("""() => {
        window.shift = 0;
        new PerformanceObserver(list => list.getEntries().forEach(entry => { window.shift += entry.value; }))
            .observe({type: "layout-shift", buffered: false});
    }""")
    example(wall, 1)
    shown(wall, "Example")
    assert wall.locator(".card").count() == 20
    wall.locator(".card").last.scroll_into_view_if_needed()
    wall.wait_for_function("[...document.querySelectorAll('.card img')].every(image => image.naturalWidth > 0)")
    assert wall.evaluate("window.shift") < 0.02


def test_map_of_the_gallery(wall: Any) -> None:
    example(wall, 1)
    shown(wall, "Example")
    wall.locator("nav [data-page=map]").click()
    wall.locator("#map-about", has_text="40 images by principal components").wait_for()
    wall.locator("#map-label").select_option("Effusion")
    wall.locator("#map-count", has_text="20 of 40, 0 uncertain").wait_for()
    wall.locator("#map-label").select_option("Mass")
    wall.locator("#map-count", has_text="13 of 40, 13 uncertain").wait_for()
    canvas = wall.locator("#map")
    canvas.focus()
    wall.keyboard.press("ArrowRight")
    assert wall.locator("#map-tip").is_visible()
    assert re.match(r"image_\d\d: ", wall.locator("#map-tip figcaption").inner_text())
    wall.wait_for_function("document.querySelector('#map-tip img').naturalWidth > 0")
    name = wall.locator("#map-tip figcaption").inner_text().split(":")[0]
    wall.keyboard.press("Enter")
    shown(wall, f"Gallery image {name}")


def test_about_the_model_and_a_gallery_without_map(page: Any) -> None:
    page.locator("nav [data-page=model]").click()
    assert page.get_by_role("heading", name="Intended use").is_visible()
    assert not page.locator("#viewer").is_visible()
    page.locator("nav [data-page=map]").click()
    assert "cbmir index map" in page.locator("#map-note").inner_text()
    assert page.get_by_text(NOT_A_DEVICE).first.is_visible()


def test_report_for_download(page: Any, tmp_path: Path) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    with page.expect_download() as download:
        page.locator("[data-act=report]").click()
    download.value.save_as(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert NOT_A_DEVICE in html
    assert "k = 20; same patient left out" in html
    assert "image_" not in html and "patient_" not in html  # it leaves the machine
