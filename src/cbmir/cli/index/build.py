"""`cbmir index build`: build a gallery. `cbmir index add` shares its options and report."""

from __future__ import annotations

import re
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
    model_argument,
    option,
    print_answer,
    pseudonyms_option,
    reading_options,
    resumable,
    tell_warnings,
    together,
)
from cbmir.manifest import read_manifest

if TYPE_CHECKING:
    from cbmir.runtime.gallery.build import IndexReport

#: Which images to add, and how to read them.
source_options = together(
    option("--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True, default=["train"],
           help="Which images of the manifest to add; may be repeated. Without splits in the manifest, all."),
    reading_options,
    pseudonyms_option,
    engine_option,
)  # fmt: skip


def _parse_shard(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse `3/64`, the third of 64 shards."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"expected a shard such as 3/64, from 1/64 to 64/64; found {value!r}")
    return int(match[1]), int(match[2])


@command(
    "cbmir index build model.onnx manifest.csv -o gallery",
    "cbmir index build model.onnx manifest.csv -o gallery --split train --split val",
    "cbmir index build model.onnx manifest.csv -o milvus://localhost:19530/chest",
    "cbmir index build model.onnx manifest.csv -o shard3 --shard 3/64",
    "cbmir index build model.onnx manifest.csv -o gallery --ray auto",
)
@model_argument
@click.argument("manifest", type=PATH)
@option("-o", "--output", metavar="GALLERY", required=True, help="The gallery's folder; or milvus://HOST:PORT/NAME, or "
        "milvus:./FILE.db for an embedded one.")  # fmt: skip
@option("--index", type=click.Choice(INDEX_SETTINGS), default="auto", help="How to search: auto compares all "
        "images of a small gallery, and uses an index for a large one.")  # fmt: skip
@option("--replace", "replace_others", is_flag=True, help="Replace a gallery even if that loses its pseudonyms, or "
        "images that are not in MANIFEST.")  # fmt: skip
@option("--cells", is_flag=True, help="Also store compact codes of each image's cells, a few kB per image. A search by "
        "region then ranks again by them, and shows the matching place.")  # fmt: skip
@option("--shard", callback=_parse_shard, metavar="i/n", help="Build part i of n (from 1) as a separate gallery, as "
        "one job of a batch scheduler; 'cbmir index merge' joins all n.")  # fmt: skip
@option("--ray", metavar="ADDRESS", help="Build shards as tasks of Ray, and merge them: 'auto' for the cluster that "
        "RAY_ADDRESS names, else this machine. Every node must see MODEL, the images and GALLERY under the same "
        "paths.")  # fmt: skip
@source_options
@json_option
def build(
    model: Path, manifest: Path, output: str, engine: str, cells: bool, ray: str | None, shard: tuple[int, int] | None,
    workers: int | None, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Embed the images of MANIFEST with MODEL into a gallery. An older gallery of these images is replaced at the end.

    After an interruption the same command continues. Images that cannot be read are left out and listed in the
    gallery's unreadable.csv; the exit code is then 2. Of images with the same content only one is added, and the others
    are listed in duplicates.csv. Images that were read with a warning are listed in warnings.csv. A gallery is patient
    data: protect it like the images.
    """
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import build_gallery, build_on_ray

    if ray is not None and (workers is not None or shard is not None):
        raise click.UsageError("--workers and --shard cannot be used with --ray, which makes its own shards, each "
                               "decoded with its task's processors.")  # fmt: skip
    if ray is not None and cells:
        raise click.UsageError("--cells cannot be built with --ray; build each --shard with --cells, then merge them.")
    table = read_manifest(manifest)
    with resumable():
        if ray is not None:
            report = build_on_ray(ray, model, table, output, engine=engine, **how)
        else:
            with open_engine(model, engine=engine) as opened:
                report = build_gallery(opened, table, output, workers=workers, shard=shard, cells=cells, **how)
    if how["pseudonyms"] is not None:
        log.warning(STAYS_CLEAR)
    finish(output, report, f"{output}: {report.images} images", as_json)


def finish(gallery: str, report: IndexReport, text: str, as_json: bool) -> None:
    """Print the report and the images that were left out. Exits with 2 if images are unreadable or have changed."""
    from cbmir.runtime.gallery.protocol import is_milvus
    from cbmir.runtime.imaging.image_warning import count_kinds

    kinds = count_kinds(kind for _, kind in report.warned)
    value = (
        {"gallery": gallery, "images": report.images, "resumed": report.resumed, "there": report.there}
        | {"unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable]}
        | {"duplicates": [{"path": path, "id": entry} for path, entry in report.duplicates]}
        | {"changed": [{"path": path, "id": entry} for path, entry in report.changed]}
        | {"warnings": kinds}
    )
    print_answer(as_json, value, text)
    folder = "" if is_milvus(gallery) else f"{gallery}/"
    tell_warnings(len({path for path, _ in report.warned}), kinds, f"{folder}warnings.csv")
    if count := len(report.duplicates):
        log.warning("%d images are copies of others and were left out: see %sduplicates.csv", count, folder)
    if count := len(report.changed):
        log.error("%d image files have changed since they were added, and the gallery keeps the old entries: see "
                  "%schanged.csv; to update them, remove them with 'cbmir index remove' and add them "
                  "again", count, folder)  # fmt: skip
    if report.unreadable:
        log.error("%d images could not be read: see %sunreadable.csv", len(report.unreadable), folder)
    if report.changed or report.unreadable:
        sys.exit(2)
