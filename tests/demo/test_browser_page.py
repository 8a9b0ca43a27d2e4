"""Chromium: the page on every screen and for everyone, and with a server that is busy, gone or forgetful."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import NOT_A_DEVICE
from cbmir.manifest import Manifest, Row
from cbmir.runtime import build_gallery, open_engine
from cbmir.runtime.neighbours import NOTHING_ALIKE
from demo_page import blank, example, shown, upload

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
MakeXray = Callable[..., NDArray[np.uint8]]


def test_narrow_page_needs_no_sideways_scrolling(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    example(page, 0)
    shown(page, "Example image_0")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert page.get_by_text(NOT_A_DEVICE).first.is_visible()


def test_narrow_page_comes_to_the_flags_before_the_image(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    example(page, 0)
    shown(page, "Example image_0")
    tops = [page.locator(part).bounding_box()["y"] for part in (".top", "#alerts", "#film", "#findings", ".offers")]
    assert tops == sorted(tops)
    assert 84 <= tops[1] < 400  # under the bar, in view
    page.locator(".card [data-act=compare]").first.click()
    page.locator("#compare #there img:not([hidden])").wait_for()
    assert page.locator("#there .film").bounding_box()["width"] > 300


def test_a_finger_scrolls_the_page(visit: Visit, wall_url: str) -> None:
    page = visit(wall_url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    example(page, 1)
    shown(page, "Example")
    touch = page.context.new_cdp_session(page)

    def swipe(part: str) -> None:
        """From the middle of a part, which is brought to that of the screen."""
        page.locator(part).first.evaluate("part => part.scrollIntoView({block: 'center'})")
        box, before = page.locator(part).first.bounding_box(), page.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind, way in [("touchStart", 0), *(("touchMove", 10 * step) for step in range(1, 16)), ("touchEnd", None)]:
            places = [] if way is None else [{"x": x, "y": y - way}]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})
        page.wait_for_function("before => scrollY > before + 100", arg=before)

    swipe(".card .film")
    swipe("#film")
    page.locator("[data-tool=in]").click()
    assert page.locator("#film").evaluate("film => getComputedStyle(film).touchAction") == "none"  # it moves the image


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(visit: Visit, url: str, scheme: str) -> None:
    page = visit(url, color_scheme=scheme)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == scheme
    page.locator("#theme").click()
    assert page.evaluate(theme) != scheme


def test_place_in_the_queue_is_shown(visit: Visit, gated: Any) -> None:
    first, second = visit(gated.url), visit(gated.url)
    example(first, 0)
    first.locator("#state", has_text="Reading").wait_for()
    example(second, 1)
    second.locator("#state", has_text=re.compile(r"Waiting: place \d of \d")).wait_for()
    assert "Waiting" in second.locator("#viewer .resting").inner_text()
    first.evaluate("(() => { const now = performance.now(); performance.now = () => now + 150_000; })()")
    first.locator("#errors .note.bad", has_text="two minutes").wait_for()
    blank(first)
    gated.gate.set()
    shown(second, "Example")
    shown(first, "Example")
    assert first.locator("#errors").inner_text() == ""  # it was answered after all


def test_a_queue_that_is_full_is_told(page: Any) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    page.route("**/queue/join**", lambda route: route.fulfill(status=503, json={"detail": "Queue is full."}))
    example(page, 5)
    page.locator("#errors .note.bad", has_text="too much to do").wait_for()
    assert page.locator("#state").inner_text() == ""
    blank(page)
    page.unroute("**/queue/join**")
    example(page, 5)
    shown(page, "Example image_5")
    page.locator("#state", has_text="look-alikes in").wait_for()
    assert page.locator("#errors").inner_text() == ""


def test_a_server_that_is_gone_is_told(page: Any) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    page.context.set_offline(True)
    page.locator("#k").fill("3")
    page.locator("#errors .note.bad", has_text="cannot be reached").wait_for()
    assert page.locator("#state").inner_text() == ""
    assert page.locator(".card").count() == 6  # no other image was to be opened


def test_a_proxy_that_answers_for_a_server_that_is_gone_is_no_server(page: Any) -> None:
    page.route("**/queue/join**", lambda route: None)  # nothing ever comes of it
    page.route("**/page/page.js", lambda route: route.fulfill(status=502))
    example(page, 0)
    page.locator("#errors .note.bad", has_text="cannot be reached").wait_for()
    blank(page)


def test_the_flag_stands_above_the_findings_and_an_error_leaves_it(
    visit: Visit, running_demo: Callable[..., Any], tiny_model: Path, make_xray: MakeXray, tmp_path: Path
) -> None:
    """A hundred images: with fewer it cannot be told what is unlike a gallery."""
    rows = []
    for number in range(100):
        Image.fromarray(make_xray(number, 40)).save(tmp_path / f"{number}.png")
        rows.append(Row(tmp_path / f"{number}.png", f"p{number}", (number % 2, 0, 1), split="train"))
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, Manifest(engine.card.labels, tuple(rows)), tmp_path / "gallery", workers=0)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "noise.png")
    with running_demo(tiny_model, tmp_path / "gallery") as url:
        page = visit(url)
        upload(page, tmp_path / "noise.png")
        shown(page, "noise.png")
        flag = page.locator("#alerts .note.bad")
        assert flag.inner_text() == f"Caution. {NOTHING_ALIKE}"
        assert flag.bounding_box()["y"] < page.locator("button.finding").first.bounding_box()["y"]
        page.locator("#combination summary").click()
        page.locator("[data-act=findings]").click()
        page.locator("#errors .note.bad", has_text="Choose one").wait_for()
        assert flag.is_visible()
        assert page.locator("button.finding").count() == 3
        page.close()


def test_a_page_whose_image_is_forgotten_is_blank(visit: Visit, gated: Any) -> None:
    gated.gate.set()
    page = visit(gated.url)
    example(page, 0)
    shown(page, "Example")
    (backend,) = gated.backends
    for name in list(backend.sessions._sessions):
        backend.sessions.end(name)
    page.locator("#view").select_option("AP")
    page.locator("#errors .note.bad", has_text="forgotten").wait_for()
    assert page.locator(".card").count() == page.locator("button.finding").count() == 0
    assert page.locator("#film img").is_hidden()
    example(page, 1)
    shown(page, "Example")


def test_an_answer_about_another_image_is_not_shown(page: Any) -> None:
    """The page is told so by hand: the server never says such a thing."""
    example(page, 0)
    shown(page, "Example image_0")
    before = page.locator("#findings").inner_html()
    page.evaluate("""document.dispatchEvent(new CustomEvent("cbmir-answer", {detail: {
        n: 9, action: "search", about: 8, html: {findings: "of another image", wall: ""}}}))""")
    page.locator("#errors .note.bad", has_text="another image").wait_for()
    assert page.locator("#findings").inner_html() == before
    assert page.locator(".card").count() == 6


def test_what_a_session_holds_ends_with_its_page(visit: Visit, gated: Any, xray: Path, tmp_path: Path) -> None:
    gated.gate.set()
    page = visit(gated.url)
    upload(page, xray)
    shown(page, "xray.png")
    (backend,) = gated.backends
    assert len(backend.sessions) == 1
    assert list(tmp_path.rglob("*~xray.png")) == []  # deleted once it was read
    page.close()
    assert gated.left.wait(120)
    assert len(backend.sessions) == 0


def test_login(tiny_model: Path, demo_gallery: Path, browser: Any, demo_with_login: str) -> None:
    context = browser.new_context(http_credentials={"username": "ada", "password": "correct horse"})
    page = context.new_page()
    page.goto(demo_with_login)
    page.locator("#cbmir[data-ready]").wait_for(timeout=90_000)
    example(page, 0)
    shown(page, "Example image_0")
    context.close()
    other = browser.new_context()
    for path in ("/", "/config", "/thumbnail?id=image_0", "/page/page.js", "/map.json"):
        assert other.request.get(demo_with_login + path).status == 401
    other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_by_axe(visit: Visit, wall_url: str, scheme: str, require_axe: str) -> None:
    """No serious finding in any state, by WCAG 2.2 AA."""
    page = visit(wall_url, color_scheme=scheme)
    page.evaluate(require_axe)

    def serious() -> list[str]:
        found = page.evaluate("""async () => {
            const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
            const result = await axe.run(document.querySelector("#cbmir"), {runOnly: tags});
            return result.violations.map(({id, impact, nodes}) => ({id, impact, nodes: nodes.map(n => n.html)}));
        }""")
        return [json.dumps(one)[:600] for one in found if one["impact"] in ("serious", "critical")]

    assert serious() == []
    example(page, 1)
    shown(page, "Example")
    page.locator("button.finding").first.click()
    page.locator("#combination summary").click()
    page.locator("#agreement summary").click()
    page.locator("#box-tools button").click()
    assert serious() == []
    page.locator(".card:has(.boxes) .film").first.click()
    page.locator("#compare #there .boxes > span").wait_for()
    assert serious() == []
    page.keyboard.press("Escape")
    for name in ("map", "model"):
        page.locator(f"nav [data-page={name}]").click()
        assert serious() == []
