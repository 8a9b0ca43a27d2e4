"""Makes docs/demo.png: the demo on a phantom, with the evidence for its most likely finding.

python docs/screenshot.py MODEL GALLERY IMAGE docs/demo.png
"""

from __future__ import annotations

import signal
import subprocess
import sys

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"


def shoot(model: str, gallery: str, image: str, picture: str) -> None:
    """Start the demo, upload an image, choose the first finding, take the picture."""
    command = [sys.executable, "-m", "cbmir", "demo", model, gallery, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.locator("#upload input[type=file]").set_input_files(image)
        page.locator(".card").first.wait_for()
        page.locator(".findings .why").first.click()
        page.locator("#explanation", has_text="sum to the cosine").wait_for()
        page.screenshot(path=picture, full_page=True)
        browser.close()
        server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    shoot(*sys.argv[1:5])
