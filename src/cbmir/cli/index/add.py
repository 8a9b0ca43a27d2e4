"""`cbmir index add`: add images to a gallery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cbmir.cli.index.build import finish, source_options
from cbmir.cli.options import PATH, command, gallery_argument, json_option, model_argument, resumable
from cbmir.manifest import read_manifest


@command("cbmir index add gallery model.onnx new.csv", "cbmir index add gallery model.onnx manifest.csv --split all")
@gallery_argument
@model_argument
@click.argument("manifest", type=PATH)
@source_options
@json_option
def add(gallery: str, model: Path, manifest: Path, engine: str, as_json: bool, **how: Any) -> None:
    """Embed those images of MANIFEST that GALLERY does not have, and add them.

    Images that are already there stay as they are ('cbmir index update' updates labels and reports). Searches continue
    meanwhile. Each batch of images is added completely or not at all; after an interruption the same command
    continues. The exit code is 2 if images cannot be read, or have changed since they were added (changed.csv). Lists
    of earlier runs keep their rows for other images.
    """
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import add_to_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = add_to_gallery(opened, table, gallery, **how)
    finish(gallery, report, f"{gallery}: {report.images} images added, {report.there} were already there", as_json)
