"""`cbmir index add`: more images into a gallery that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cbmir.cli.index.build import finish, source_options
from cbmir.cli.options import PATH, command, json_option, resumable
from cbmir.manifest import read_manifest


@command("cbmir index add gallery model.onnx new.csv", "cbmir index add gallery model.onnx manifest.csv --split all")
@click.argument("gallery", type=click.Path())
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@source_options
@json_option
def add(gallery: str, model: Path, manifest: Path, engine: str, as_json: bool, **how: Any) -> None:
    """Embed those images of MANIFEST that GALLERY does not have, and add them.

    What is there already stays as it is ('cbmir index update' brings labels and reports up to date). The gallery serves
    others meanwhile. Each batch of images is added whole or not at all: an addition that was stopped leaves those that
    were done, and goes on when the same command is given again. Images that could not be read, or have changed since
    they went in (changed.csv), give exit code 2; the lists of earlier runs keep what they say of other images.
    """
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import add_to_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = add_to_gallery(opened, table, gallery, **how)
    finish(gallery, report, f"{gallery}: {report.images} images added, {report.there} were there", as_json)
