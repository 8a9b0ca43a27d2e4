"""Chromium: how an image comes onto the page, and what a person sees of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import NOT_A_DEVICE
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import overlay
from demo_page import blank, drawn, example, lines, shown, transform, upload

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

MakeXray = Callable[..., NDArray[np.uint8]]


def test_upload_findings_look_alikes_and_evidence(page: Any, xray: Path) -> None:
    upload(page, xray)
    shown(page, "xray.png")
    assert page.locator(".card").count() == 8
    assert page.locator("button.finding").count() == 3
    assert "patient of this image is not known" in page.locator("#alerts").inner_text()
    assert page.locator("#agreement summary").inner_text().startswith("They agree on: Effusion 100%")
    assert page.get_by_text(NOT_A_DEVICE).first.is_visible()

    assert not drawn(page, "#film canvas")
    finding = page.locator("button.finding").first
    finding.click()
    assert finding.get_attribute("aria-pressed") == "true"
    assert drawn(page, "#film canvas")
    assert "Exact: the cells sum to its lead over the other findings" in page.locator("#evidence-text").inner_text()
    page.locator("[data-tool=opacity]").fill("20")
    assert page.locator("#film canvas").evaluate("canvas => canvas.style.opacity") == "0.2"
    finding.click()
    assert not drawn(page, "#film canvas")


def test_evidence_is_drawn_by_the_rule_of_the_report(page: Any) -> None:
    """Shares are spread and then coloured: where evidence is even, between more and less, the image is untouched."""
    even = PreprocessSpec(resize=64, crop=64)
    for evidence in (np.array([[2, 0], [2, 0]]), np.random.default_rng(0).normal(size=(5, 7))):
        side = [round(512 / evidence.shape[1] * evidence.shape[0]), 512]
        drawn = page.evaluate(
            """async (cells) => {
                const {drawEvidence} = await import(new URL("page/evidence.js", document.baseURI).href);
                const canvas = document.createElement("canvas");
                drawEvidence(canvas, cells);
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const some = [];
                for (let y = 4; y < canvas.height; y += 8) for (let x = 4; x < canvas.width; x += 8)
                    some.push([...data.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 4)]);
                return some;
            }""",
            evidence.tolist(),
        )
        rgba = np.array(drawn, float).reshape(len(range(4, side[0], 8)), len(range(4, side[1], 8)), 4)
        black = np.zeros(side, np.uint8)
        expected = overlay(black, evidence.astype(np.float32), even, 1)[4::8, 4::8].astype(float)
        difference = np.abs(rgba[..., :3] * rgba[..., 3:] / 255 - expected).max(axis=2)
        assert np.quantile(difference, 0.9) <= 2  # the rest are signs


def test_viewer_asks_nobody(page: Any) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    film = page.locator("#film")
    plain = transform(page)
    film.focus()
    for key in "++":
        page.keyboard.press(key)
    zoomed = transform(page)
    assert zoomed != plain
    page.keyboard.press("ArrowLeft")
    assert transform(page) != zoomed
    page.keyboard.press("0")
    assert transform(page) == plain
    assert lines(page) == (1, 0)
    page.keyboard.press("i")
    assert lines(page) == (-1, 1)
    page.keyboard.press("I")
    page.keyboard.press("[")
    assert lines(page)[0] > 1
    looks = lines(page)
    film.press("+")
    page.locator("[data-tool=fit]").click()
    assert transform(page) == plain
    assert lines(page) == looks  # to fit is to zoom, and leaves window, level and inversion
    page.locator("[data-tool=reset]").click()
    assert lines(page) == (1, 0)

    box = film.bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    page.mouse.wheel(0, 60)
    page.wait_for_function("scrollY > 0")
    page.mouse.wheel(0, -60)
    page.wait_for_function("scrollY === 0")
    assert transform(page) == plain  # who scrolls does not mean the image
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function("plain => document.querySelector('#film .stage').style.transform !== plain", arg=plain)
    zoomed = transform(page)
    page.mouse.down()
    page.mouse.move(middle[0] + 30, middle[1])
    page.mouse.up()
    assert transform(page) != zoomed
    page.mouse.wheel(0, 300)  # it was clicked
    page.wait_for_function("plain => document.querySelector('#film .stage').style.transform === plain", arg=plain)
    page.mouse.down(button="right")
    page.mouse.move(middle[0], middle[1] + 40)
    page.mouse.up(button="right")
    assert lines(page) != (1, 0)
    assert "W " in page.locator("#viewer .readout").inner_text()
    assert requests == []


def test_example_leaves_its_own_patient_out_and_reports_are_text(page: Any, report: str) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    assert page.locator(".card").count() == 6
    assert "patient patient_0" not in page.locator("#wall").inner_text()
    assert page.locator(".card .labels .shared").first.inner_text().startswith("= Effusion")
    assert page.locator(".card .report").first.inner_text() == report
    assert page.locator(".card .report mark").first.inner_text().endswith("Left pleural effusion.")
    assert page.title() == "cbmir"
    page.locator("#exclude").uncheck()
    page.locator(".card").nth(6).wait_for()
    assert "patient patient_0" in page.locator("#wall").inner_text()


def test_two_quick_clicks_leave_what_the_controls_say(page: Any) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    page.evaluate("""() => {
        const box = document.querySelector("#exclude");
        box.click();
        box.click();
        document.querySelector("#k").value = 3;
        document.querySelector("#k").dispatchEvent(new Event("change"));
    }""")
    page.locator("#search", has_text="k = 3; same patient left out").wait_for()
    assert page.locator("#exclude").is_checked()
    assert page.locator(".card").count() == 3


def test_an_example_that_arrives_late_does_not_replace_the_one_clicked_after_it(page: Any) -> None:
    held: list[Any] = []
    page.route("**/queue/join**", lambda route: held.append(route) if not held else route.continue_())
    example(page, 0)
    example(page, 5)
    shown(page, "Example image_5")
    held[0].continue_()
    page.locator("#exclude").uncheck()  # the page's questions are answered one after the other
    page.locator("#search", has_text="NOT left out").wait_for()
    assert page.locator("#viewer .caption").inner_text() == "Example image_5"


def test_a_text_file_gets_a_readable_error(page: Any, tmp_path: Path) -> None:
    example(page, 0)
    shown(page, "Example image_0")
    notes = tmp_path / "notes.txt"
    notes.write_text("No X-ray at all.")
    upload(page, notes)
    error = page.locator("#errors[role=alert] .note.bad")
    error.wait_for()
    assert error.inner_text().startswith("Not analysed. notes.txt: expected PNG, JPEG, TIFF or DICOM, found text")
    assert page.locator(".card").count() == page.locator("button.finding").count() == 0
    example(page, 0)
    shown(page, "Example image_0")
    assert page.locator("#errors").inner_text() == ""  # a good answer ends it


def test_an_upload_that_is_too_large_is_told(page: Any, tmp_path: Path) -> None:
    big = tmp_path / "big.png"
    with big.open("wb") as stream:
        stream.truncate(65 * 2**20)
    example(page, 0)
    shown(page, "Example image_0")
    upload(page, big)
    page.locator("#errors .note.bad", has_text="could not be sent").wait_for()
    blank(page)  # the example's findings could be taken for the file's
    page.locator("#k").fill("3")
    example(page, 5)
    shown(page, "Example image_5")
    assert page.locator("#errors").inner_text() == ""


def test_a_file_that_is_sent_slowly_gives_way_to_what_was_opened_after_it(page: Any, xray: Path) -> None:
    held: list[Any] = []
    page.route("**/upload**", lambda route: held.append(route))
    example(page, 0)
    shown(page, "Example image_0")
    upload(page, xray)
    page.locator("#state", has_text="Sending").wait_for()
    assert page.locator(".desk").get_attribute("aria-busy") == "true"
    page.locator("#k").fill("3")  # it is about the example, and its answer does not end the sending
    page.locator("#search", has_text="k = 3").wait_for()
    assert page.locator("#state").inner_text() == "Sending …"
    example(page, 5)
    page.locator("#viewer .caption", has_text="Example image_5").wait_for()
    assert page.locator(".desk").get_attribute("aria-busy") == "false"
    with page.expect_response("**/upload**"):
        held[0].continue_()
    page.locator("#k").fill("4")
    page.locator("#search", has_text="k = 4").wait_for()
    assert page.locator("#viewer .caption").inner_text() == "Example image_5"


def test_drop_and_paste(page: Any, xray: Path) -> None:
    send = """([bytes, event]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], event + "ed.png", {type: "image/png"}));
        document.dispatchEvent(event === "past"
            ? new ClipboardEvent("paste", {clipboardData: data}) : new DragEvent("drop", {dataTransfer: data}));
    }"""
    for event in ("dropp", "past"):
        page.evaluate(send, [list(xray.read_bytes()), event])
        shown(page, f"{event}ed.png")


def test_a_study_in_a_zip_file(page: Any, tmp_path: Path, xray: Path, make_xray: MakeXray) -> None:
    lateral = tmp_path / "second.png"
    Image.fromarray(make_xray(51, 200)).save(lateral)
    with zipfile.ZipFile(tmp_path / "study.zip", "w") as archive:
        archive.write(xray, "series/first.png")
        archive.write(lateral, "series/second.png")
    upload(page, tmp_path / "study.zip")
    shown(page, "first.png")
    page.get_by_role("button", name="2. second.png").click()
    shown(page, "second.png")
    assert page.locator(".members [aria-pressed=true]").inner_text() == "2. second.png"


def test_a_folder_of_which_something_is_left_out(page: Any, xray: Path, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    xray.rename(tmp_path / "study/chest.png")
    (tmp_path / "study/notes.txt").write_text("No X-ray at all.")
    page.locator("#folder").set_input_files(tmp_path / "study")
    shown(page, "chest.png")
    left_out = page.locator("#members .note.warn").inner_text()
    assert "notes.txt: expected PNG, JPEG, TIFF or DICOM" in left_out and "chest.png" not in left_out
