"""The demo's page in a browser: what tests do and look for on it. A page is one of Playwright's."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def upload(page: Any, *files: Path) -> None:
    page.locator("#file").set_input_files([str(file) for file in files])


def shown(page: Any, caption: str) -> None:
    """Wait until an image of this caption is on the page, with its look-alikes."""
    page.locator("#viewer .caption", has_text=caption).wait_for()
    page.locator(".card").first.wait_for()


def blank(page: Any) -> None:
    """There is nothing of any image on the page."""
    assert page.locator(".card").count() == page.locator("button.finding").count() == 0
    assert page.locator("#film img").is_hidden()
    assert page.locator(".desk").get_attribute("aria-busy") == "false"


def example(page: Any, at: int) -> None:
    page.locator("[data-act=example]").nth(at).click()


def transform(page: Any) -> str:
    return str(page.locator("#film .stage").evaluate("stage => stage.style.transform"))


def lines(page: Any) -> tuple[float, float]:
    """Slope and intercept of the filter on the picture."""
    line = page.locator("#film [type=linear]").first
    return float(line.get_attribute("slope")), float(line.get_attribute("intercept"))


def drawn(page: Any, canvas: str) -> bool:
    """Whether anything is on a canvas."""
    return bool(
        page.locator(canvas).evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(value => value > 0)"
        )
    )
