"""Makes the pictures of the demo that the documents show.

python docs/screenshot.py MODEL GALLERY IMAGE FOLDER

FOLDER gets demo.jpg (what the README shows) and demo/STATE.jpg. IMAGE is an X-ray as PNG or JPEG; a study of two, one
that is upside down and a file that is none are made of it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDE = {"width": 1440, "height": 1000}


@contextmanager
def served(model: str, gallery: str) -> Iterator[str]:
    """Where the demo answers."""
    command = [sys.executable, "-m", "cbmir", "demo", model, gallery, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.send_signal(signal.SIGINT)


def opened(browser: Browser, url: str, scheme: str = "dark", size: dict[str, int] | None = None) -> Page:
    page = browser.new_page(viewport=size or WIDE, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.locator("#cbmir[data-ready]").wait_for()
    return page


def upload(page: Page, file: Path) -> None:
    page.locator("#file").set_input_files(str(file))


def answered(page: Page, image: Path) -> None:
    """Upload an image, wait for its look-alikes and their thumbnails, choose the first finding."""
    upload(page, image)
    page.locator(".card").first.wait_for()
    whole(page)
    page.locator("button.finding").first.click()


def whole(page: Page) -> None:
    """Thumbnails are loaded when they are looked at: look at all of them."""
    page.evaluate("document.querySelectorAll('.card img').forEach((image) => { image.loading = 'eager'; })")
    page.wait_for_function("[...document.querySelectorAll('.card img')].every((image) => image.naturalWidth)")


def save(page: Page, path: Path, to: str) -> None:
    """What is in view, or the page from its top to the end of the first `to`; as a JPEG small enough to keep."""
    path.parent.mkdir(exist_ok=True)
    clip = None
    if to:
        end = page.locator(to).first.evaluate("part => part.getBoundingClientRect().bottom + scrollY")
        clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": end + 14}  # type: ignore[index]
    page.screenshot(path=path, type="jpeg", quality=62, full_page=bool(to), clip=clip)  # type: ignore[arg-type]


def shoot(model: str, gallery: str, image: Path, folder: Path) -> None:
    """One picture a state."""
    with tempfile.TemporaryDirectory() as made, served(model, gallery) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        place = Path(made)
        turned, notes, study = place / "turned.png", place / "notes.txt", place / "study.zip"
        Image.open(image).rotate(180).save(turned)
        notes.write_text("No X-ray at all.")
        with zipfile.ZipFile(study, "w") as archive:
            archive.write(image, f"first{image.suffix}")
            archive.write(turned, "second.png")

        def state(name: str, act: Callable[[Page], None], *, to: str = "", seen: str = "#cbmir", **how: object) -> None:
            page = opened(browser, url, **how)  # type: ignore[arg-type]
            act(page)
            page.evaluate("document.activeElement?.blur()")
            page.mouse.move(0, 0)
            page.locator(seen).first.evaluate("part => part.scrollIntoView()")
            save(page, folder / (f"demo/{name}.jpg" if name else "demo.jpg"), to)
            page.close()

        def compared(page: Page) -> None:
            answered(page, image)
            page.locator(".card [data-act=compare]").first.click()
            page.locator("#compare #there img:not([hidden])").wait_for()

        def mapped(page: Page) -> None:
            answered(page, image)
            page.locator("nav [data-page=map]").click()
            page.locator("#map-about", has_text="images").wait_for()
            page.locator("#map").focus()
            page.keyboard.press("ArrowRight")
            page.wait_for_function("document.querySelector('#map-tip img').naturalWidth > 0")

        def by_findings(page: Page) -> None:
            page.locator("#combination summary").click()
            for chip in range(1, 3):
                page.locator(".chip").nth(chip).click()
            page.locator("[data-act=findings]").click()
            page.locator(".card").first.wait_for()
            whole(page)

        def windowed(page: Page) -> None:
            answered(page, image)
            page.locator("button.finding").first.click()
            page.locator("#film").focus()
            for key in "++++i[[[[":
                page.keyboard.press(key)

        def refused(page: Page) -> None:
            upload(page, notes)
            page.locator(".note.bad").wait_for()

        def many(page: Page) -> None:
            upload(page, study)
            page.locator(".members button").nth(1).wait_for()

        state("", lambda page: answered(page, image), scheme="light", to=".card", size={"width": 1280, "height": 900})
        state("dark", lambda page: answered(page, image))
        state("compare", compared)
        state("compare-light", compared, scheme="light")
        state("map", mapped)
        state("findings", by_findings, scheme="light", seen="#look-alikes")
        state("window", windowed)
        state("refused", refused, scheme="light")
        state("study", many)
        state("unlike", lambda page: answered(page, turned))
        state("model", lambda page: page.locator("nav [data-page=model]").click(), scheme="light", to="main")
        state("narrow", lambda page: answered(page, image), size={"width": 390, "height": 844}, seen="#alerts")

        page = opened(browser, url)
        answered(page, image)
        with page.expect_download() as download:
            page.locator("[data-act=report]").click()
        download.value.save_as(place / "report.html")
        page.set_viewport_size({"width": 820, "height": 1000})
        page.goto((place / "report.html").as_uri())
        save(page, folder / "demo/report.jpg", "body")
        browser.close()


if __name__ == "__main__":
    shoot(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
