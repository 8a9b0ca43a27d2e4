"""`cbmir embed`: the embeddings of a large archive, by as many machines as there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from cbmir.cli.options import (
    PATH,
    command,
    engine_option,
    json_option,
    log,
    option,
    print_json,
    reading_options,
    resumable,
)


def _parse_shard(ctx: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    """`3/64`: the third of 64."""
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"expected a shard such as 3/64, from 1/64 to 64/64; found {value!r}")
    return int(match[1]), int(match[2])


@command(
    "cbmir embed model.onnx manifest.csv -o embeddings",
    "cbmir embed model.onnx manifest.csv -o embeddings --shard 3/64",
    "cbmir embed model.onnx manifest.csv -o embeddings --ray auto",
    "cbmir index build model.onnx manifest.csv -o gallery --embeddings embeddings",
)
@click.argument("model", type=PATH)
@click.argument("manifest", type=PATH)
@option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder of blocks.")
@option("--shard", callback=_parse_shard, default="1/1", metavar="i/n", help="Do the i-th part of n, as one job of a "
        "batch scheduler (i from 1); all write into the same folder.")  # fmt: skip
@option("--ray", metavar="ADDRESS", help="Do it by Ray: 'auto' for the cluster that RAY_ADDRESS names, else this "
        "machine. Every node must see MODEL, the images and DIR under the same paths.")  # fmt: skip
@reading_options
@engine_option
@json_option
def embed(
    model: Path, manifest: Path, output: Path, shard: tuple[int, int], ray: str | None,
    workers: int | None, reduced_jpeg2000: bool, engine: str, as_json: bool,
) -> None:  # fmt: skip
    """Embed the images of MANIFEST with MODEL into files of 1,024 images each, for 'cbmir index build --embeddings'.

    Finished files are kept, so a run that was stopped goes on, and shards may run at any time, in any order. One
    process, shards and Ray write the same bytes, on processors of one kind; 'index build' needs the same MODEL file or
    one of its precision. Unreadable images are listed in
    unreadable.csv (of a shard: unreadable-3-of-64.csv); the exit code is then 2. The files are patient data.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.embedded_blocks import Blocks
    from cbmir.runtime.embedding import embed_blocks, embed_manifest
    from cbmir.runtime.engines.registry import open_engine

    if ray is not None and workers is not None:
        raise click.UsageError("--workers means nothing with --ray: each model decodes with its share of processors.")
    table = read_manifest(manifest)
    with resumable("Finished files are kept"):
        if ray is None:
            with open_engine(model, engine=engine, mode="throughput") as opened:
                report = embed_manifest(
                    opened, table, output, shard=shard, workers=workers, reduced_jpeg2000=reduced_jpeg2000
                )
        else:
            from cbmir.runtime.embedding_on_ray import on_ray, read_card

            blocks = Blocks.of(output, read_card(model), table.rows, reduced_jpeg2000=reduced_jpeg2000)
            report = embed_blocks(blocks, table, on_ray(ray, model, engine), shard=shard)
    if as_json:
        unreadable = [{"path": path, "reason": reason} for path, reason in report.unreadable]
        print_json({"embeddings": output, "images": report.images, "there": report.there_already}
                   | {"unreadable": unreadable})  # fmt: skip
    else:
        click.echo(f"{output}: {report.images} images, {report.there_already} of them embedded before")
    if report.unreadable:
        log.error(
            "%d images could not be read: see the lists unreadable*.csv in %s; a block is made again once its file "
            "part-….npz is deleted", len(report.unreadable), output,
        )  # fmt: skip
        sys.exit(2)
