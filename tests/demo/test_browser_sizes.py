"""A reader's whole case in Chromium, on a laptop, a small laptop, a tablet and a phone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbmir.card import NOT_A_DEVICE
from demo_page import cards, drawn, example, show_findings, shown

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
Size = tuple[int, int]
LAPTOPS = ((1440, 900), (1280, 720))
SIZES = [(1440, 900), (390, 844), *(pytest.param(size, marks=pytest.mark.slow) for size in ((1280, 720), (768, 1024)))]
LIGHT = ((1280, 720), (390, 844))  # the others are dark
_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
_SETTLED = "() => Promise.all(document.getAnimations().filter(a => a instanceof CSSTransition).map(a => a.finished))"


def bottom(page: Any, part: str, at: int = 0) -> float:
    box = page.locator(part).nth(at).bounding_box()
    return float(box["y"] + box["height"])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_case_from_the_first_view_to_the_report(visit: Visit, wall_url: str, require_axe: str, size: Size) -> None:
    page = visit(wall_url, viewport={"width": size[0], "height": size[1]})

    def is_clean(*controls: str) -> None:
        """Check that all these controls can be reached, nothing scrolls sideways, and axe finds no violation."""
        page.evaluate(_SETTLED)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for part in controls:
            assert page.locator(part).count()
            for box in (one.bounding_box() for one in page.locator(part).all() if one.is_visible()):
                assert box["x"] >= 0 and box["x"] + box["width"] <= size[0], part
        page.evaluate(require_axe)
        found = page.evaluate("rules => axe.run(document, rules)", _RULES)["violations"]
        assert [f"{one['id']}: {json.dumps([node['html'][:160] for node in one['nodes'][:3]])}" for one in found] == []

    if size in LIGHT:
        page.locator("#bar .look").click()
    assert page.get_by_text("Chosen by rule").is_visible() and page.get_by_text(NOT_A_DEVICE).first.is_visible()
    is_clean("#way button", "#tabs [role=tab]", "#start .gallery-item")

    example(page)
    assert bottom(page, "#viewer .film") <= size[1]
    if size in LAPTOPS:
        assert page.evaluate("document.documentElement.scrollHeight") <= size[1]
        assert bottom(page, "#similar .card .film", 3) <= size[1]
        assert bottom(page, "#findings [data-finding]", 2) <= size[1]
    page.locator("#findings [data-finding=Mass]").click()
    assert drawn(page)
    is_clean("#way button", "#viewer .tools button", "#viewer .sliders *", "#similar .card:first-child .acts button")
    first = cards(page)

    page.locator("[data-do=region]").click()  # a click on the X-ray selects the smallest box
    page.locator("#viewer .film").click()
    shown(page, "Region")
    assert page.locator("#similar h2").inner_text() == "Similar to the box"
    page.locator("#findings [data-finding=Mass][aria-pressed=true]").wait_for(state="attached")  # in the redrawn list
    page.go_back()
    shown(page, "Example")
    assert cards(page) == first

    page.get_by_role("button", name="Alike: similar image 2", exact=True).click()
    page.locator("[data-do=refine]").click()
    shown(page, "Refined: 1 alike")
    page.locator("#trail button").first.click()
    shown(page, "Example")

    page.get_by_role("button", name="Side by side: similar image 2", exact=True).click()
    shown(page, "Beside 2")
    sides = [film.bounding_box() for film in page.locator("#viewer .film").all()]
    assert sides[0]["height"] == sides[1]["height"] and min(min(one["width"], one["height"]) for one in sides) > 230
    is_clean("#viewer .tools button")
    page.locator("[data-do=close]").click()
    shown(page, "Example")

    page.locator("#filters button").first.click()
    page.get_by_label("Expression").wait_for()
    is_clean("#filters input")
    page.get_by_label("Expression").fill("Mass")
    page.get_by_label("Expression").press("Enter")
    page.locator("#similar .chip", has_text="Mass").click()
    page.locator("#similar .chip").wait_for(state="detached")

    show_findings(page)
    page.locator("#findings [data-finding=Effusion]").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download report").click()
    assert "Evidence for Effusion" in Path(download.value.path()).read_text("utf-8")


@pytest.mark.parametrize(("size", "beside"), [((1024, 768), True), ((768, 1024), False), ((375, 667), False)], ids=str)
def test_the_image_comes_first_and_stays_in_sight(visit: Visit, wall_url: str, size: Size, beside: bool) -> None:
    """Similar images are beside it, or below it."""
    page = visit(wall_url, viewport={"width": size[0], "height": size[1]})
    example(page)
    film, card = page.locator("#viewer .film").bounding_box(), page.locator("#similar .card").first.bounding_box()
    assert film["y"] + film["height"] <= size[1]
    if beside:
        assert film["x"] + film["width"] <= card["x"] and card["y"] + card["height"] <= size[1]
    else:
        assert film["y"] + film["height"] <= card["y"]
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    out = page.evaluate("document.querySelector('#viewer .film').getBoundingClientRect().bottom") < 0
    assert out or size[0] > 500
    if out:
        page.locator("#viewer .mini").wait_for()  # the query stays in sight


def test_a_region_by_touch(visit: Visit, wall_url: str) -> None:
    """The page does not scroll away under the finger."""
    page = visit(wall_url, viewport={"width": 390, "height": 844}, has_touch=True)
    example(page)
    page.locator("[data-do=region]").tap()
    box, finger = page.locator("#viewer .film").bounding_box(), page.context.new_cdp_session(page)
    for kind, share in (("Start", 0.3), ("Move", 0.4), ("Move", 0.5), ("Move", 0.7), ("End", None)):
        at = [] if share is None else [{key: box[key] + share * box["width"] for key in "xy"}]
        finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": at})
    shown(page, "Region")
    region = page.locator("#viewer .region").bounding_box()
    assert region["height"] == pytest.approx(0.4 * box["width"], rel=0.05)
