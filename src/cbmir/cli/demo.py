"""`cbmir demo`: the runtime in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cbmir.cli.options import PATH, announce, command, engine_option, option, pseudonyms_option

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms


@command("cbmir demo model.onnx gallery", "cbmir demo model.onnx gallery --port 8080 --examples xrays/")
@click.argument("model", type=PATH)
@click.argument("gallery", type=click.Path())
@option("--host", default="127.0.0.1", help="The address to listen on.")
@option("--port", type=click.IntRange(0, 65535), default=7860, help="0: any free one.")
@option("--examples", type=PATH, help="A folder of X-rays to choose from.  [default: some of the gallery]")
@option(
    "--login", metavar="FILE|env:NAME",
    help="Let in only who knows NAME:PASSWORD, which stands in a file that only you can read, or an environment "
    "variable. It crosses the network in clear: put HTTPS in front where others listen.",
)  # fmt: skip
@pseudonyms_option
@engine_option
def demo(
    model: Path, gallery: str, host: str, port: int, examples: Path | None, login: str | None,
    pseudonyms: Pseudonyms | None, engine: str,
) -> None:  # fmt: skip
    """Serve MODEL and GALLERY as a page in the browser, until Ctrl-C. Nothing leaves this machine.

    'cbmir index map GALLERY' beforehand gives the page a map of the gallery.

    Research use only. Not a medical device, not for diagnosis.
    """
    from cbmir.runtime.finder import Finder

    with Finder.open(model, gallery, engine=engine, pseudonyms=pseudonyms) as finder:
        from cbmir.demo import Login, serve  # takes seconds; after the files are known to be good

        known = None if login is None else Login.load(login)
        serve(finder, host=host, port=port, examples=examples, login=known, ready=announce)
