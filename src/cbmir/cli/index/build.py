"""`cbmir index build` and `add`: images into a gallery."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.choices import INDEX_SETTINGS
from cbmir.cli.options import (
    PATH,
    STAYS_CLEAR,
    command,
    engine_option,
    json_option,
    log,
    option,
    print_answer,
    pseudonyms_option,
    reading_options,
    resumable,
    together,
)

if TYPE_CHECKING:
    from cbmir.runtime.gallery.build import IndexReport


# Which images go in, and how they are read.
_source_options = together(
    option("--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True, default=["train"],
           help="Which of the manifest's images go in; may be repeated."),
    option("--embeddings", type=PATH, metavar="DIR",
           help="Take what 'cbmir embed' made of this manifest with this model, and read no image."),
    reading_options,
    pseudonyms_option,
    engine_option,
)  # fmt: skip


@command(
    "cbmir index build model.onnx manifest.csv -o gallery",
    "cbmir index build model.onnx manifest.csv -o gallery --split train --split val",
    "cbmir index build model.onnx manifest.csv -o milvus://localhost:19530/chest",
)
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@option("-o", "--output", metavar="GALLERY", required=True, help="The gallery's folder; or milvus://HOST:PORT/NAME, or "
        "milvus:./FILE.db for one embedded here.")  # fmt: skip
@option("--index", type=click.Choice(INDEX_SETTINGS), default="auto", help="How it is searched: auto compares all "
        "images of a small gallery, and has an index for a large one.")  # fmt: skip
@option("--replace", "replace_others", is_flag=True, help="Replace a gallery also where that loses images that are not "
        "among those of MANIFEST, or its pseudonyms.")  # fmt: skip
@_source_options
@json_option
def build(model: Path, manifest: Path, output: str, engine: str, as_json: bool, **how: Any) -> None:
    """Embed the images of MANIFEST with MODEL into a gallery; one of the same images is replaced at the end.

    A build that was stopped goes on when the same command is given again. Images that cannot be read are left out and
    listed in the gallery's unreadable.csv; the exit code is then 2. Of several with the same content one goes in; the
    others are listed in duplicates.csv. A gallery is patient data: keep it as safe as the images.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import build_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = build_gallery(opened, table, output, **how)
    if how["pseudonyms"] is not None:
        log.warning(STAYS_CLEAR)
    _finish(output, report, f"{output}: {report.images} images", as_json)


@command("cbmir index add gallery model.onnx new.csv", "cbmir index add gallery model.onnx manifest.csv --split all")
@click.argument("gallery", type=click.Path())
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@_source_options
@json_option
def add(gallery: str, model: Path, manifest: Path, engine: str, as_json: bool, **how: Any) -> None:
    """Embed those images of MANIFEST that GALLERY does not have, and add them all at once.

    What is there already stays as it is ('cbmir index update' brings labels and reports up to date). The gallery serves
    others meanwhile. An addition that was stopped leaves the gallery as it was, and goes on when the same command is
    given again. Images that could not be read, or have changed since they went in (changed.csv), give exit code 2; the
    lists of earlier runs keep what they say of other images.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import add_to_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = add_to_gallery(opened, table, gallery, **how)
    _finish(gallery, report, f"{gallery}: {report.images} images added, {report.there} were there", as_json)


def _finish(gallery: str, report: IndexReport, text: str, as_json: bool) -> None:
    """Print the report, and which images were left out; for some of these the exit code is 2."""
    from cbmir.runtime.gallery.protocol import is_milvus

    value = (
        {"gallery": gallery, "images": report.images, "resumed": report.resumed, "there": report.there}
        | {"unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable]}
        | {"duplicates": [{"path": path, "id": entry} for path, entry in report.duplicates]}
        | {"changed": [{"path": path, "id": entry} for path, entry in report.changed]}
    )
    print_answer(as_json, value, text)
    folder = "" if is_milvus(gallery) else f"{gallery}/"
    if report.duplicates:
        log.warning(
            "%d images have the content of others and were left out: see %sduplicates.csv",
            len(report.duplicates), folder,
        )  # fmt: skip
    if report.changed:
        log.error(
            "%d images have changed since they went in, and stay as they were: see %schanged.csv; "
            "'cbmir index remove' takes them out, then they can be added anew", len(report.changed), folder,
        )  # fmt: skip
    if report.unreadable:
        log.error("%d images could not be read: see %sunreadable.csv", len(report.unreadable), folder)
    if report.changed or report.unreadable:
        sys.exit(2)
