"""Actions and checks on the demo's page in a browser. A page is Playwright's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def upload(page: Any, *files: Path) -> None:
    page.locator("#way input[type=file]").set_input_files([str(file) for file in files])


def example(page: Any, at: int = 0) -> None:
    """Choose an example, and wait for its answer and findings."""
    page.locator("#start .gallery-item").nth(at).click()
    shown(page, "Example")
    show_findings(page)


def show_findings(page: Any) -> None:
    """Show the findings, which need a click if the image does not look like a chest."""
    gate = page.locator("#findings .gate:not([open]) summary")
    if gate.count():
        gate.click()


def shown(page: Any, title: str) -> None:
    """Wait until a step with this title is shown, with its similar images."""
    page.locator("#trail [aria-current]", has_text=title).wait_for()
    page.locator("#similar .card").first.wait_for()


def cards(page: Any) -> list[str]:
    """The ids of the similar images, in order."""
    found = page.locator("#similar .card").evaluate_all("cards => cards.map((card) => card.dataset.id)")
    return [str(one) for one in found]


def transform(page: Any, at: int = 0) -> str:
    return str(page.locator("#viewer .stage").nth(at).evaluate("stage => stage.style.transform"))


def drawn(page: Any, at: int = 0) -> bool:
    """Whether evidence is drawn on an image of the viewer."""
    return bool(page.locator("#viewer canvas:not(.picture)").nth(at).evaluate("canvas => canvas.width > 1"))


def picture(page: Any, at: int = 0) -> NDArray[np.uint8]:
    """The grey values [H, W] of an image in the viewer, as displayed."""
    canvas = page.locator("#viewer .picture").nth(at)
    page.wait_for_function("canvas => canvas.width !== 300", arg=canvas.element_handle())  # it is decoded
    width, greys = canvas.evaluate(
        """canvas => {
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return [canvas.width, [...data.filter((_, i) => i % 4 === 0)]];
        }"""
    )
    return np.array(greys, np.uint8).reshape(-1, width)
