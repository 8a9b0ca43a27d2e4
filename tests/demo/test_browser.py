"""The whole demo, from the command line to what a person sees in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import NOT_A_DEVICE

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

TIMEOUT_MS = 60_000


@pytest.fixture
def page(browser: sync_api.Browser, url: str) -> Iterator[sync_api.Page]:
    """The opened demo; at the end, every request must have stayed on this machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    requests: list[str] = []
    errors: list[str] = []
    context.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.locator("#findings .empty").wait_for()
    yield page
    context.close()
    assert requests
    assert [request for request in requests if not request.startswith((f"{url}/", "data:", f"blob:{url}/"))] == []
    assert errors == []


def upload(page: sync_api.Page, file: Path) -> None:
    page.locator("#upload input[type=file]").set_input_files(file)


def explanation(page: sync_api.Page) -> sync_api.Locator:
    return page.locator("#explanation", has_text="sum to the cosine")


def test_upload_findings_neighbours_and_evidence(
    page: sync_api.Page, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    image = tmp_path / "xray.png"
    Image.fromarray(make_xray(50, 256)).save(image)
    upload(page, image)
    page.locator(".card").nth(7).wait_for()
    assert page.locator(".findings tbody tr").count() == 3
    assert page.locator("#message").inner_text().count("patient of this image is not known") == 1
    agreed = page.locator("#agreement tbody tr").first
    assert agreed.inner_text().split() == ["Effusion", "100%", "8", "0", "0", "0"]
    assert page.locator("#agreement", has_text="Cannot tell whether").is_visible()
    assert page.get_by_text(NOT_A_DEVICE).is_visible()

    picture = page.locator("#picture img")
    plain = picture.get_attribute("src")
    page.locator(".findings .why").first.click()
    explanation(page).wait_for()
    label = page.locator(".findings tbody th").first.inner_text().split("\n")[0].strip()
    assert page.locator("#evidence input").input_value() == f"Finding: {label}"
    with_finding = picture.get_attribute("src")
    assert with_finding != plain

    cosine = page.locator(".card .number span").nth(1).inner_text().removeprefix("cosine ")
    page.locator(".card .why").first.click()
    explanation(page).filter(has_text=cosine).wait_for()
    assert page.locator("#evidence input").input_value().startswith("Neighbour 1: image_")
    assert picture.get_attribute("src") != with_finding

    page.screenshot(path=tmp_path / "demo.png", full_page=True)
    assert (tmp_path / "demo.png").stat().st_size > 50_000


def test_example_leaves_its_own_patient_out_and_reports_are_text(page: sync_api.Page, report: str) -> None:
    page.locator("#examples button").first.click()
    page.locator(".card").first.wait_for()
    assert page.locator(".card").count() == 6
    assert "Patient patient_0" not in page.locator("#neighbours").inner_text()
    assert page.locator(".labels .shared").first.inner_text().startswith("✓ Effusion")
    assert page.locator(".report").first.inner_text() == report
    assert page.title() == "cbmir"
    page.locator("#exclude input").uncheck()
    page.locator(".card").nth(7).wait_for()
    assert "Patient patient_0" in page.locator("#neighbours").inner_text()


def test_two_quick_clicks_leave_what_the_controls_say(page: sync_api.Page) -> None:
    page.locator("#examples button").first.click()
    legend = page.locator("#neighbours .legend")
    legend.filter(has_text="k = 10; same patient left out.").wait_for()
    page.evaluate("""() => {
        const box = document.querySelector("#exclude input");
        box.click();
        setTimeout(() => box.click(), 60);
    }""")
    legend.filter(has_text="NOT left out").wait_for()  # the first click is answered, and then the second
    legend.filter(has_text="k = 10; same patient left out.").wait_for()
    assert page.locator("#exclude input").is_checked()
    assert "Patient patient_0" not in page.locator("#neighbours").inner_text()


def test_the_last_of_two_quick_examples_stays(page: sync_api.Page) -> None:
    page.evaluate("document.querySelectorAll('#examples button').forEach((b, i) => (i === 0 || i === 5) && b.click())")
    page.locator("#message", has_text="(id image_5)").wait_for()
    page.locator(".card").first.wait_for()
    assert "Patient patient_2" not in page.locator("#neighbours").inner_text()
    assert "Patient patient_0" in page.locator("#neighbours").inner_text()


def test_an_example_that_arrives_late_does_not_replace_the_one_clicked_after_it(page: sync_api.Page) -> None:
    held: list[sync_api.Route] = []
    page.route("**/queue/join**", lambda route: held.append(route) if not held else route.continue_())
    page.locator("#examples button").nth(0).click()
    page.locator("#examples button").nth(5).click()
    message = page.locator("#message")
    message.filter(has_text="(id image_5)").wait_for()
    with page.expect_response("**/queue/join**"):
        held[0].continue_()
    answered = page.locator("#neighbours .legend", has_text="NOT left out")
    for attempt in range(3):  # Gradio's page may miss an answer while it closes the stream of the one before
        page.locator("#exclude input").uncheck()  # the page's questions are answered one after the other
        try:
            answered.wait_for(timeout=60_000 if attempt == 2 else 15_000)
            break
        except sync_api.TimeoutError:
            if attempt == 2:
                raise
            page.locator("#exclude input").check()
    assert "(id image_5)" in message.inner_text()


def test_messages_are_announced(page: sync_api.Page) -> None:
    assert page.locator("#message [aria-live=polite], #message[aria-live=polite]").count() == 1


def test_a_text_file_gets_a_readable_error(page: sync_api.Page, tmp_path: Path) -> None:
    page.locator("#examples button").first.click()
    page.locator(".card").first.wait_for()
    notes = tmp_path / "notes.txt"
    notes.write_text("No X-ray at all.")
    upload(page, notes)
    error = page.locator(".message.error")
    error.wait_for()
    assert error.inner_text().startswith("Not analysed. notes.txt: expected PNG, JPEG, TIFF or DICOM, found text")
    assert page.locator(".card").count() == 0
    assert page.locator(".sheet").count() == 0


def test_narrow_page_needs_no_sideways_scrolling(page: sync_api.Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.locator("#examples button").first.click()
    page.locator(".card").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert page.get_by_text(NOT_A_DEVICE).is_visible()
