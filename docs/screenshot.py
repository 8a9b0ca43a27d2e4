"""Make the screenshots of the demo for the documentation.

python docs/screenshot.py MODEL GALLERY IMAGE FOLDER

FOLDER gets demo.jpg (for the README) and demo/STATE.jpg. IMAGE is an X-ray as PNG or JPEG; one screenshot shows it
upside down.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright


@contextmanager
def served(model: str, gallery: str) -> Iterator[str]:
    """Run the demo, and yield its address."""
    command = [sys.executable, "-m", "cbmir", "demo", model, gallery, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.send_signal(signal.SIGINT)


def upload(page: Page, file: Path) -> None:
    page.locator("#way input[type=file]").set_input_files(str(file))
    page.locator("#similar .card").first.wait_for()


def shoot(model: str, gallery: str, image: Path, folder: Path) -> None:
    """Take one screenshot per state of the page."""
    with tempfile.TemporaryDirectory() as made, served(model, gallery) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        turned = Path(made) / "turned.png"
        Image.open(image).rotate(180).save(turned)
        (folder / "demo").mkdir(exist_ok=True)

        def state(name: str, act: Callable[[Page], object], size: tuple[int, int] = (1440, 900)) -> None:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.set_default_timeout(120_000)  # ms; enough for a busy machine
            page.goto(url)
            page.locator("#viewer .film").first.wait_for()
            page.locator("#start .gallery-item, #similar").first.wait_for()
            act(page)
            page.evaluate("document.activeElement?.blur(); scrollTo(0, 0)")
            page.mouse.move(0, 0)
            path = folder / (f"demo/{name}.jpg" if name else "demo.jpg")
            page.screenshot(path=path, type="jpeg", quality=70)
            page.close()

        def answered(page: Page) -> None:
            upload(page, image)
            page.locator("#findings [data-finding]").first.click()

        def compared(page: Page) -> None:
            upload(page, image)
            page.locator("#similar .card .film").first.click()
            page.locator("#viewer figure").nth(1).wait_for()

        def region(page: Page) -> None:
            upload(page, image)
            page.keyboard.press("r")
            page.keyboard.press("Enter")
            page.locator("#trail [aria-current]", has_text="Region").wait_for()

        def filtered(page: Page) -> None:
            upload(page, image)
            page.locator("#filters button").first.click()
            page.get_by_label("Expression").wait_for()

        def by_findings(page: Page) -> None:
            page.get_by_role("tab", name="By findings").click()
            for at in range(2):
                page.locator("#search input[type=checkbox]").nth(at).check()
            page.get_by_role("button", name="Find images").click()
            page.locator("#similar .card").first.wait_for()

        def mapped(page: Page) -> None:
            page.get_by_role("tab", name="Map").click()
            page.locator(".vega-embed .marks").first.wait_for()

        state("", answered)
        state("start", lambda page: None)
        state("compare", compared)
        state("region", region)
        state("ruler", lambda page: (upload(page, image), page.keyboard.press("m")))
        state("filters", filtered)
        state("findings", by_findings)
        state("map", mapped)
        state("unlike", lambda page: upload(page, turned))
        state("model", lambda page: page.get_by_role("tab", name="Model").click())
        state("landscape", answered, (1024, 768))
        state("tablet", answered, (768, 1024))
        state("phone", answered, (390, 844))
        browser.close()


if __name__ == "__main__":
    shoot(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
