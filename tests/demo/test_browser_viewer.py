"""The viewer in Chromium: window and level over all values of a file, and the ruler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.manifest import Manifest, Row
from cbmir.runtime import build_gallery, open_engine
from demo_page import example, picture, shown, upload
from dicom_files import make_dicom

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser


def hidden_detail() -> NDArray[np.uint16]:
    """A 12-bit image: a ramp from 1000 to 1400, a patch of 3000, and a stripe of 3200 in it, as bright as bone."""
    pixels = np.tile(np.linspace(1000, 1400, 128).astype(np.uint16), (128, 1))
    pixels[40:80, 40:80] = 3000
    pixels[55:60, 45:75] = 3200
    return pixels


def whole(page: Any) -> None:
    """Wait until all values have arrived."""
    page.locator("#viewer .readout", has_text="full resolution").wait_for()


def readout(page: Any, at: int = 0) -> str:
    return str(page.locator("#viewer .readout").nth(at).inner_text())


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Open a DICOM file with given pixels and tags."""

    def opened(pixels: NDArray[Any], **tags: Any) -> Any:
        (tmp_path / "chest.dcm").write_bytes(make_dicom(pixels, **tags))
        upload(page, tmp_path / "chest.dcm")
        shown(page, "chest.dcm")
        return page

    return opened


def test_view_date_and_the_patients_sides_are_shown(opened: Callable[..., Any]) -> None:
    page = opened(hidden_detail(), PatientOrientation=["L", "F"], ViewPosition="PA", StudyDate="20200131")
    assert page.locator("#viewer .name").inner_text() == "chest.dcm · PA · 2020-01-31"
    film = page.locator("#viewer .film").bounding_box()
    (right, left) = (page.locator("#viewer .side", has_text=side).bounding_box() for side in ("R", "L"))
    assert film["x"] < right["x"] < film["x"] + 40 and film["x"] + film["width"] - 40 < left["x"]


@pytest.mark.parametrize("photometric", ["MONOCHROME2", "MONOCHROME1"])
def test_detail_outside_the_headers_window_can_be_seen(opened: Callable[..., Any], photometric: str) -> None:
    page = opened(hidden_detail(), WindowCenter=1200, WindowWidth=400, PhotometricInterpretation=photometric)
    white = 255 if photometric == "MONOCHROME2" else 0
    before = picture(page)
    assert (before[40:80, 40:80] == white).all()
    assert "W 255  L 128" in readout(page)
    page.keyboard.press(".")  # the first change fetches the values
    whole(page)
    page.locator("[data-do=reset]").click()
    assert "W 400  L 1200" in readout(page)
    assert np.abs(picture(page).astype(int) - before).max() <= 1  # the first frame equals the picture
    level = (3100 - 1200 + 0.5) / 399
    level = level + 0.5 if photometric == "MONOCHROME2" else 0.5 - level
    page.locator("[data-slide=level]").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", 100 * level
    )
    assert "W 400  L 3100" in readout(page)
    found = picture(page)
    by_hand = np.clip((np.array([3000, 3200]) - (3100 - 200)) / 399, 0, 1) * 255
    by_hand = by_hand if photometric == "MONOCHROME2" else 255 - by_hand
    assert [found[45, 50], found[57, 60]] == pytest.approx(by_hand, abs=1)
    assert (found[:20] == 255 - white).all()


def test_values_are_fetched_once_and_only_when_they_are_needed(opened: Callable[..., Any]) -> None:
    page = opened(hidden_detail(), WindowCenter=1200, WindowWidth=400)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("component_server") else None)
    page.keyboard.press("i")
    page.keyboard.press("m")
    assert asked == []
    for key in ("[", ".", "+", "]"):
        page.keyboard.press(key)
        whole(page)
    assert len(asked) == 1


def test_a_sigmoid_stays_a_picture(opened: Callable[..., Any]) -> None:
    page = opened(hidden_detail(), WindowCenter=1200, WindowWidth=400, VOILUTFunction="SIGMOID")
    page.keyboard.press("[")
    assert "W 242  L 128" in readout(page)
    page.keyboard.press("+")
    assert "full resolution" not in readout(page)  # there is only the picture


def test_16_and_8_bit_images_share_window_and_level_relative_to_their_range(page: Any, tmp_path: Path) -> None:
    Image.fromarray(hidden_detail() * 16).save(tmp_path / "deep.png")
    upload(page, tmp_path / "deep.png")
    shown(page, "deep.png")
    page.get_by_role("button", name="Side by side: similar image 1", exact=True).click()
    shown(page, "Beside 1")
    page.keyboard.press("[")
    whole(page)
    assert "W 62258  L 32768" in readout(page) and "W 242  L 128" in readout(page, 1)
    page.keyboard.press("l")  # unlinked: now each image has its own
    page.locator("#viewer .film").nth(1).focus()
    page.keyboard.press("[")
    assert "W 62258  L 32768" in readout(page) and "W 230  L 128" in readout(page, 1)


def drag(page: Any, start: tuple[float, float], end: tuple[float, float], at: int = 0) -> None:
    """Drag the mouse between two points, given as fractions of an image in the viewer."""
    box = page.locator("#viewer .stage").nth(at).bounding_box()
    place = lambda part: (box["x"] + part[0] * box["width"], box["y"] + part[1] * box["height"])  # noqa: E731
    page.mouse.move(*place(start))
    page.mouse.down()
    page.mouse.move(*place(end), steps=3)
    page.mouse.up()


def length(page: Any, at: int = 0) -> tuple[float, str]:
    """The number that the ruler shows, and the words after it."""
    number, _, words = page.locator("#viewer .length").nth(at).inner_text().partition(" ")
    return float(number), words


def test_the_ruler_measures_pixels_that_are_not_square(opened: Callable[..., Any]) -> None:
    """128 columns of 0.1 mm and 128 rows of 0.3 mm: 0.3 across and 0.4 down are 3.84 and 15.36 mm."""
    page = opened(hidden_detail(), ImagerPixelSpacing=[0.3, 0.1], PixelSpacing=[0.3, 0.1])
    page.locator("[data-do=measure]").click()
    drag(page, (0.2, 0.2), (0.5, 0.6))
    found, words = length(page)
    assert found == pytest.approx(np.hypot(3.84, 15.36), abs=0.2) and words == "mm at the detector"
    line = page.locator("#viewer .ruler")
    part = """line => {
      const [a, b] = [line, line.closest(".stage")].map((one) => one.getBoundingClientRect());
      return [(a.left - b.left) / b.width, (a.top - b.top) / b.height, a.width / b.width, a.height / b.height];
    }"""
    place = line.evaluate(part)
    assert place == pytest.approx([0.2, 0.2, 0.3, 0.4], abs=0.03)
    page.keyboard.press("Enter")  # dragging moves the image again
    page.keyboard.press("+")
    page.keyboard.press("+")
    drag(page, (0.5, 0.5), (0.55, 0.5))
    page.set_viewport_size({"width": 900, "height": 700})
    page.wait_for_function("document.querySelector('#viewer .film').clientWidth < 900")
    assert length(page) == (found, words)
    assert line.evaluate(part) == pytest.approx(place, abs=0.03)
    page.locator("[data-do=reset]").click()
    assert not line.is_visible()


def test_the_ruler_by_keys(opened: Callable[..., Any]) -> None:
    page = opened(hidden_detail(), PixelSpacing=[0.5, 0.5], ImagerPixelSpacing=[0.6, 0.6])
    page.keyboard.press("m")
    assert length(page) == (pytest.approx(0.3 * 64, abs=0.06), "mm")
    for key in ("ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert length(page) == (19.2, "mm")
    for _ in range(20):  # moves only the end, by 1/200 of the image
        page.keyboard.press("Shift+ArrowRight")
    assert length(page) == (25.6, "mm")
    assert "25.6 mm" in page.locator("#viewer .note").inner_text()
    page.keyboard.press("m")
    assert page.locator("[data-do=measure]").get_attribute("aria-pressed") == "false"
    assert page.locator("#viewer .ruler").is_visible()
    page.keyboard.press("m")
    page.keyboard.press("Escape")
    assert not page.locator("#viewer .ruler").is_visible()


def test_a_file_without_spacing_is_measured_in_pixels(page: Any) -> None:
    example(page)
    page.keyboard.press("m")
    assert "does not give the size of a pixel" in page.locator("#viewer .note").inner_text()
    assert length(page)[1] == "pixels"


def test_a_finger_measures_instead_of_scrolling_the_page(visit: Callable[..., Any], wall_url: str) -> None:
    page = visit(wall_url, has_touch=True, viewport={"width": 600, "height": 800})
    example(page)
    page.locator("[data-do=measure]").click()
    page.locator("#viewer .stage").scroll_into_view_if_needed()
    box = page.locator("#viewer .stage").bounding_box()
    touch = page.context.new_cdp_session(page)
    send = lambda kind, *points: touch.send(  # noqa: E731
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [
            {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for x, y in points]},
    )  # fmt: skip
    send("touchStart", (0.4, 0.2))
    for down in (0.3, 0.4, 0.5, 0.6, 0.7):
        send("touchMove", (0.5, down))
    send("touchEnd")
    assert length(page)[0] == pytest.approx(np.hypot(0.1, 0.5) * 128, abs=3)


def test_images_of_the_gallery_have_a_ruler(
    visit: Callable[..., Any],
    running_demo: Callable[..., AbstractContextManager[str]],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        pixels = np.roll(hidden_detail(), 5 * len(name), axis=0) + np.uint16(ord(name))
        (tmp_path / f"{name}.dcm").write_bytes(make_dicom(pixels, ImagerPixelSpacing=[0.2, 0.2]))
    rows = [Row(tmp_path / f"{name}.dcm", name, (1, 0, 0), split="train") for name in ("a", "b")]
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, Manifest(engine.card.labels, tuple(rows)), tmp_path / "gallery", workers=0)
    with running_demo(tiny_model, tmp_path / "gallery") as url:
        page = visit(url)
        example(page)
        page.locator("#similar .card .film").first.click()
        shown(page, "Beside 1")
        page.locator("#viewer .film").nth(1).focus()
        page.keyboard.press("m")
        assert length(page, 1) == (pytest.approx(0.3 * 128 * 0.2, abs=0.06), "mm at the detector")
        assert not page.locator("#viewer .ruler").first.is_visible()
        page.close()
