"""A reader's steps in Chromium, and the way back."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.page.markup import static
from demo_page import cards, drawn, example, picture, shown, transform, upload
from dicom_files import make_dicom

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

Visit = Callable[..., Any]


def crumbs(page: Any) -> list[str]:
    return [str(text) for text in page.locator("#trail nav > *").all_inner_texts()]


def toast(page: Any, text: str) -> None:
    page.locator("[data-testid=toast-text]", has_text=text).wait_for()


def test_more_like_this_back_reload_and_links(wall: Any, wall_url: str) -> None:
    example(wall)
    first = cards(wall)
    wall.get_by_role("button", name="More like this: similar image 3").click()
    shown(wall, "Similar image 3")
    assert len(crumbs(wall)) == 2
    assert f"image={first[2]}" in wall.url
    wall.go_back()
    shown(wall, "Example")
    assert cards(wall) == first
    wall.go_forward()
    shown(wall, "Similar image 3")
    wall.reload()
    shown(wall, "Similar image 3")
    assert len(crumbs(wall)) == 2
    wall.locator("#filters button").first.click()
    wall.get_by_label("Expression").fill("Mass or Effusion")
    wall.get_by_label("Expression").press("Enter")
    wall.locator("#similar .chip").wait_for()
    link = wall.url
    wall.locator("#trail button").first.click()
    shown(wall, "Example")
    other = wall.context.browser.new_page()  # a colleague's
    other.goto(link)
    shown(other, f"Gallery image {first[2]}")
    assert "Mass or Effusion" in other.locator("#similar .chip").inner_text()  # the link includes the filters
    other.close()


def test_evidence_is_outlined_for_the_finding_that_is_chosen(wall: Any) -> None:
    example(wall)
    assert not drawn(wall)
    finding = wall.locator("#findings [data-finding]").first
    finding.click()
    assert drawn(wall) and finding.get_attribute("aria-pressed") == "true"
    assert "Outlined" in wall.locator("#viewer .note").inner_text()
    wall.keyboard.press("c")
    assert wall.locator("[data-do=cells]").get_attribute("aria-pressed") == "true"
    wall.keyboard.press("e")
    assert not drawn(wall)


def test_zoom_window_and_level_by_keys_wherever_the_focus_is(wall: Any) -> None:
    example(wall)
    before = transform(wall)
    wall.keyboard.press("+")
    assert transform(wall) != before
    wall.keyboard.press("0")
    assert transform(wall) == before
    greys = picture(wall)
    wall.keyboard.press("[")
    windowed = np.clip((greys / 255 - 0.5) / 0.95 + 0.5, 0, 1) * 255
    assert np.abs(picture(wall) - windowed).max() <= 0.5 + 1e-6
    wall.keyboard.press("i")
    assert np.abs(picture(wall) - (255 - windowed)).max() <= 0.5 + 1e-6
    wall.locator("[data-do=reset]").click()
    assert np.array_equal(picture(wall), greys)
    wall.keyboard.press("?")
    assert wall.locator("#viewer dialog").is_visible()


def test_a_large_image_is_shown_in_full_resolution_once_zoomed(
    page: Any, tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    Image.fromarray(make_xray(3, 1600)).save(tmp_path / "large.png")
    upload(page, tmp_path / "large.png")
    shown(page, "large.png")
    assert len(picture(page)) <= 1024
    page.keyboard.press("1")
    page.locator("#viewer .readout", has_text="full resolution").wait_for()
    assert np.array_equal(picture(page), make_xray(3, 1600))


def test_a_region_by_mouse_and_by_keys(wall: Any) -> None:
    example(wall)
    box = wall.locator("#viewer .film").bounding_box()
    at = lambda share: (box["x"] + share * box["width"], box["y"] + share * box["height"])  # noqa: E731
    wall.locator("[data-do=region]").click()
    wall.mouse.move(*at(0.3))
    wall.mouse.down()
    wall.mouse.move(*at(0.6), steps=4)
    wall.mouse.up()
    shown(wall, "Region")
    assert wall.locator("#viewer .region").is_visible()
    wall.keyboard.press("r")  # the whole image again
    shown(wall, "Example")
    assert wall.locator("#viewer .region").count() == 0
    wall.keyboard.press("r")
    wall.keyboard.press("ArrowLeft")
    wall.keyboard.press("Shift+ArrowDown")
    wall.keyboard.press("Enter")
    shown(wall, "Region")


def test_side_by_side_is_linked_and_controlled_by_keys(wall: Any) -> None:
    example(wall)
    wall.get_by_role("button", name="Side by side: similar image 2", exact=True).click()
    shown(wall, "Beside 2")
    assert wall.locator("#viewer figure").count() == 2
    assert drawn(wall, 0) and drawn(wall, 1)
    assert wall.locator("#found, #answers, #way").evaluate_all("parts => parts.every((part) => part.inert)")
    wall.keyboard.press("+")
    assert (
        "scale" in transform(wall, 0) and transform(wall, 0).split("scale")[0] == transform(wall, 1).split("scale")[0]
    )
    wall.keyboard.press("l")
    wall.locator("#viewer .film").nth(1).focus()
    before = transform(wall, 0)
    wall.keyboard.press("+")
    assert transform(wall, 0) == before
    wall.keyboard.press("o")
    assert "stack" in (wall.locator("#viewer .panes").get_attribute("class") or "")
    wall.keyboard.press("Escape")
    shown(wall, "Example")
    wall.locator("#similar :focus").get_by_text("2").wait_for()  # the focus is where it was


def test_pinned_images_stand_beside_the_query(wall: Any) -> None:
    example(wall)
    for rank in (1, 2, 4, 6):
        wall.get_by_role("button", name=f"Pin similar image {rank}", exact=True).click()
    assert "3 pinned" in wall.locator("#similar .marked").inner_text()  # the first was unpinned
    wall.get_by_role("button", name="Beside my image").click()
    shown(wall, "Beside 2, 4, 6")
    assert wall.locator("#viewer figure").count() == 4


def test_a_search_is_refined_and_undone(wall: Any) -> None:
    example(wall)
    before = cards(wall)
    wall.get_by_role("button", name="Alike: similar image 9", exact=True).click()
    wall.get_by_role("button", name="Not alike: similar image 1", exact=True).click()
    assert "1 alike, 1 not alike" in wall.locator("#similar .marked").inner_text()
    wall.locator("[data-do=refine]").click()
    shown(wall, "Refined: 1 alike, 1 not alike")
    assert cards(wall) != before
    wall.go_back()
    shown(wall, "Example")
    assert cards(wall) == before


def test_filters_are_chips_that_can_be_removed(wall: Any) -> None:
    example(wall)
    wall.locator("#filters button").first.click()
    wall.get_by_label("Expression").fill("Mass and not Effusion")
    wall.get_by_label("Expression").press("Enter")
    chip = wall.locator("#similar .chip", has_text="Mass and not Effusion")
    chip.wait_for()
    few = len(cards(wall))
    wall.get_by_label("Expression").fill("Mass and")
    wall.get_by_label("Expression").press("Enter")
    toast(wall, "Mass and")
    assert len(cards(wall)) == few
    chip.click()
    chip.wait_for(state="detached")
    assert len(cards(wall)) == 20
    wall.get_by_label("Source").click()
    wall.get_by_role("option", name="South (20)").click()
    wall.locator("#similar .chip", has_text="source South").wait_for()
    assert all("South" in facts for facts in wall.locator("#similar .facts").all_inner_texts())


def test_findings_without_an_image(wall: Any) -> None:
    wall.get_by_role("tab", name="By findings").click()
    wall.get_by_role("button", name="Find images").click()
    toast(wall, "Choose one or several")
    wall.get_by_label("Effusion").check()
    wall.get_by_label("Mass").check()
    wall.get_by_role("button", name="Find images").click()
    shown(wall, "Effusion + Mass")
    assert "2 of 2 findings" in wall.locator("#similar .card").first.inner_text()
    assert "finding=Effusion&finding=Mass" in wall.url


def test_readers_can_give_feedback_if_it_is_stored(
    visit: Visit, running_demo: Callable[..., Any], tiny_model: Path, wall_gallery: Path, tmp_path: Path
) -> None:
    with running_demo(tiny_model, wall_gallery, "--feedback", str(tmp_path / "feedback.csv")) as url:
        page = visit(url)
        example(page)
        page.get_by_role("button", name="Not alike: similar image 1", exact=True).click()
        page.locator("#findings [data-finding]").first.click()
        page.get_by_role("button", name="Agree", exact=True).click()
        page.get_by_role("button", name="Agree", exact=True, pressed=True).wait_for()
        example_again = page.locator("#similar .card").first
        example_again.get_by_role("button", name="More like this").click()  # answered after the feedback is stored
        shown(page, "Similar image 1")
        page.close()
    said = (tmp_path / "feedback.csv").read_text("utf-8").splitlines()
    assert len(said) == 3 and said[1].endswith(",,0") and said[0].startswith("time,model,image")


def test_the_map_and_the_report(wall: Any) -> None:
    wall.get_by_role("tab", name="Map").click()
    wall.get_by_text("40 images by principal components").wait_for()
    wall.get_by_role("tab", name="Read").click()
    example(wall)
    with wall.expect_download() as download:
        wall.get_by_role("button", name="Download report").click()
    assert download.value.suggested_filename == "cbmir-report.html"
    assert "report on an image" in Path(download.value.path()).read_text("utf-8")


def test_opened_images_are_listed(wall: Any, xray: Path) -> None:
    assert not wall.locator("#trail select:visible").count()
    example(wall)
    assert not wall.locator("#trail select:visible").count()
    upload(wall, xray)
    shown(wall, "xray.png")
    wall.get_by_role("combobox", name="Opened before").select_option(index=0)
    shown(wall, "Example")


def test_a_dicom_file_gives_sr_and_sc(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("highdicom")
    example(page)
    assert not page.get_by_role("button", name="DICOM SR + SC").is_visible()
    (tmp_path / "chest.dcm").write_bytes(make_dicom())
    upload(page, tmp_path / "chest.dcm")
    shown(page, "chest.dcm")
    with page.expect_download() as download:
        page.get_by_role("button", name="DICOM SR + SC").click()
    assert download.value.suggested_filename == "cbmir-dicom.zip"
    with zipfile.ZipFile(download.value.path()) as archive:
        assert sorted(archive.namelist()) == ["sc.dcm", "sr.dcm"]


def test_a_whole_case_by_keyboard_alone(wall: Any) -> None:
    """Open an example, choose a finding, look at a similar image, come back."""

    def is_at(selector: str) -> bool:
        return bool(wall.evaluate("selector => document.activeElement.matches(selector)", selector))

    def tab_to(selector: str) -> None:
        for _ in range(300):  # twice round the page
            wall.keyboard.press("Tab")
            if is_at(selector):
                return
        raise AssertionError(f"{selector} is not reached by Tab")

    tab_to("#start .gallery-item")
    wall.keyboard.press("Enter")
    shown(wall, "Example")
    tab_to("#similar .card .film")
    wall.keyboard.press("Enter")
    shown(wall, "Beside 1")
    wall.keyboard.press("ArrowRight")
    shown(wall, "Beside 2")
    wall.keyboard.press("Escape")
    shown(wall, "Example")
    assert is_at("#similar .card:first-child .film")  # the cards are new, but the focus is where it was
    if wall.locator("#findings .gate").count():  # the image does not look like a chest
        tab_to("#findings .gate summary")
        wall.keyboard.press("Enter")
    tab_to("#findings [data-finding]")
    wall.keyboard.press("Enter")
    assert drawn(wall)


@pytest.mark.parametrize(("peak", "outlined"), [(3.0, True), (-1.0, False)])
def test_evidence_against_a_finding_is_not_outlined(page: Any, peak: float, outlined: bool) -> None:
    """Both maps have one cell above the rest, but in the second that cell is evidence against the finding too."""
    cells = [[-4.0, -4.0, -4.0], [-4.0, peak, -4.0], [-4.0, -4.0, -4.0]]
    call = "return drawEvidence(document.createElement('canvas'), cells, false)"
    draw = f"([source, cells]) => new Function('cells', source + `; {call}`)(cells)"
    assert page.evaluate(draw, [static("elements.js", "evidence.js"), cells]) is outlined
