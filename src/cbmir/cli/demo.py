"""`cbmir demo`: a page in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

from cbmir.cli import options
from cbmir.cli.options import PATH, command, option


@command("cbmir demo model.onnx gallery", "cbmir demo model.onnx gallery --port 8080 --examples xrays/")
@options.model_argument
@options.gallery_argument
@options.listen_options(7860)
@option("--examples", type=PATH, help="A folder of X-rays to choose from.  [default: some of the gallery]")
@option("--login", metavar="FILE|env:NAME",
        help="Ask visitors for NAME:PASSWORD, read from a file that only you can read or from an environment variable. "
        "It is sent unencrypted: put HTTPS in front on a network that you do not trust.")  # fmt: skip
@option("--open", "open_page", is_flag=True, help="Open the page in this machine's browser.")
@option("--feedback", type=PATH, metavar="FILE.csv",
        help="Ask readers whether the similar images and the findings are right, and add their answers to this table. "
        "It has case ids or digests of files, but no images, patients or names.")  # fmt: skip
@options.finder_options
def demo(
    model: Path, gallery: str, host: str, port: int, examples: Path | None, login: str | None, open_page: bool,
    feedback: Path | None, **opening: Any,
) -> None:  # fmt: skip
    """Show MODEL and GALLERY as a page in the browser, until Ctrl-C. Nothing leaves this machine.

    Run 'cbmir index map GALLERY' first to show a map of the gallery on the page.

    Research use only. Not a medical device, not for diagnosis.
    """
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.imaging.decoder_process import DecoderPool

    def ready(url: str) -> None:
        options.announce(url, finder.card.notes)
        if open_page:
            webbrowser.open(url)

    with DecoderPool(1) as decoders, Finder.open(model, gallery, read=decoders.read, **opening) as finder:
        from cbmir.demo import load_login, serve  # takes seconds, so check the files first

        known = None if login is None else load_login(login)
        serve(finder, host=host, port=port, examples=examples, feedback=feedback, login=known, ready=ready)
