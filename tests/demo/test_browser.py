"""The whole demo, from the command line to what a person sees in Chromium."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import NOT_A_DEVICE
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import build_gallery, open_engine
from cbmir.runtime.evidence import overlay
from cbmir.runtime.finder import NOTHING_ALIKE

pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

Visit = Callable[..., Any]
MakeXray = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def page(visit: Visit, url: str) -> Any:
    """The opened demo of eight images."""
    return visit(url)


@pytest.fixture
def wall(visit: Visit, wall_url: str) -> Any:
    """The opened demo of forty images."""
    return visit(wall_url)


@pytest.fixture
def xray(tmp_path: Path, make_xray: MakeXray) -> Path:
    path = tmp_path / "xray.png"
    Image.fromarray(make_xray(50, 256)).save(path)
    return path


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
    assert "Exact: the cells sum to the cosine" in page.locator("#evidence-text").inner_text()
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
                const {drawEvidence} = await import(new URL("room/evidence.js", document.baseURI).href);
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
    page.route("**/room/room.js", lambda route: route.fulfill(status=502))
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
    (room,) = gated.rooms
    for name in list(room.sessions._sessions):
        room.sessions.end(name)
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
    (room,) = gated.rooms
    assert len(room.sessions) == 1
    assert list(tmp_path.rglob("*~xray.png")) == []  # deleted once it was read
    page.close()
    assert gated.left.wait(120)
    assert len(room.sessions) == 0


def test_login(tiny_model: Path, demo_gallery: Path, browser: Any, demo_with_login: str) -> None:
    context = browser.new_context(http_credentials={"username": "ada", "password": "correct horse"})
    page = context.new_page()
    page.goto(demo_with_login)
    page.locator("#cbmir[data-ready]").wait_for(timeout=90_000)
    example(page, 0)
    shown(page, "Example image_0")
    context.close()
    other = browser.new_context()
    for path in ("/", "/config", "/thumbnail?id=image_0", "/room/room.js", "/map.json"):
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
    assert serious() == []
    page.locator(".card [data-act=compare]").first.click()
    page.locator("#compare #there img:not([hidden])").wait_for()
    assert serious() == []
    page.keyboard.press("Escape")
    for name in ("map", "model"):
        page.locator(f"nav [data-page={name}]").click()
        assert serious() == []
