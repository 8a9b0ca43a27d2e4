"""Embed the images of a manifest into files, a block of rows each: what is there is kept, and shards share the work.

One process, any number of shards, or Ray (`cbmir.runtime.embedding_on_ray`) write the same bytes with an engine of mode
throughput on processors of one kind: batches are cut inside of blocks, and an image's values do not depend on threads.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from cbmir.errors import ImageError, UserError
from cbmir.files import replacing
from cbmir.manifest import Manifest
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery.pictures import BATCH, Picture, Source, embed_pictures, read_picture

log = logging.getLogger("cbmir")

#: Embeds some blocks, and says of each as it ends how many images it holds.
Run = Callable[[Blocks, Sequence[Source], Sequence[int]], Iterator[int]]


@dataclass(frozen=True)
class EmbedReport:
    """Of a shard: its images, how many of them an earlier run had embedded, and the (path, reason) of each that could
    not be read."""

    images: int
    there_already: int
    unreadable: tuple[tuple[str, str], ...]


def embed_manifest(
    engine: Engine,
    manifest: Manifest,
    folder: str | Path,
    *,
    shard: tuple[int, int] = (1, 1),
    workers: int | None = None,
    reduced_jpeg2000: bool = False,
) -> EmbedReport:
    """Embed the images of a manifest, or of shard (number, of how many), into block files in `folder`.

    Blocks that are there stay, so the same call goes on after a stop. `workers` is as `work_through` has it,
    `reduced_jpeg2000` as for `Finder`. Unreadable images are logged and listed in `folder` (`list_unreadable`). Raises
    GalleryError for a folder with embeddings of another model or other images, UserError for a shard that is none.
    """
    blocks = Blocks.of(folder, engine.card, manifest.rows, reduced_jpeg2000=reduced_jpeg2000)
    return embed_blocks(blocks, manifest, partial(embed_here, engine, workers), shard=shard)


def embed_blocks(blocks: Blocks, manifest: Manifest, run: Run, *, shard: tuple[int, int] = (1, 1)) -> EmbedReport:
    """Let `run` embed the blocks of a shard that are not there yet, with a progress bar. Raises as `embed_manifest`."""
    from tqdm import tqdm

    number, of = shard
    if not 1 <= number <= of:
        raise UserError(f"expected a shard from 1/{of} to {of}/{of}, found {number}/{of}")
    blocks.check_folder()
    own = blocks.shard(number, of)
    missing = [block for block in own if not blocks.is_there(block)]
    images = sum(len(blocks.rows(block)) for block in own)
    there = images - sum(len(blocks.rows(block)) for block in missing)
    if there:
        log.info("%s: %d of %d images are embedded already; going on", blocks.folder, there, images)
    sources = [Source.of(row) for row in manifest]
    with tqdm(total=images, initial=there, desc="Embedding", unit="image", disable=None) as progress:
        for count in run(blocks, sources, missing):
            progress.update(count)
    return EmbedReport(images, there, list_unreadable(blocks, sources, own, "" if of == 1 else f"-{number}-of-{of}"))


def list_unreadable(
    blocks: Blocks, sources: Sequence[Source], own: Iterable[int], name: str
) -> tuple[tuple[str, str], ...]:
    """The (path, reason) of each image of these blocks that could not be read, also in `unreadable<name>.csv`."""
    unreadable = tuple(
        (str(sources[row].path), error)
        for block in own
        for row, error in zip(blocks.rows(block), blocks.errors(block), strict=True)
        if error
    )
    listed = blocks.folder / f"unreadable{name}.csv"
    listed.unlink(missing_ok=True)
    if unreadable:
        with replacing(listed) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("image", "reason"), *unreadable])
    return unreadable


def embed_block(engine: Engine, blocks: Blocks, block: int, results: Iterator[Picture | ImageError]) -> Iterator[int]:
    """Embed and write a block from what reading its images gave, in order; says how many images are done, as they are.

    Batches are of neighbouring rows, whichever of them could be read. A picture's crop goes once it is embedded.
    """
    pictures: list[Picture | ImageError] = []
    embeddings = [np.empty((0, blocks.dim), np.float32)]
    left = len(blocks.rows(block))
    while left:
        batch = list(islice(results, min(BATCH, left)))
        left -= len(batch)
        readable = [picture for picture in batch if not isinstance(picture, ImageError)]
        if readable:
            embeddings.append(embed_pictures(engine, readable))
        for picture in batch:
            if isinstance(picture, ImageError):
                log.warning("Left out: %s", picture)
        pictures += [p if isinstance(p, ImageError) else replace(p, crop=None) for p in batch]
        yield len(batch)
    blocks.write(block, pictures, np.concatenate(embeddings))


def embed_here(
    engine: Engine, workers: int | None, blocks: Blocks, sources: Sequence[Source], missing: Sequence[int]
) -> Iterator[int]:
    """All of them in this process, with one set of workers that read ahead into the next block."""
    from cbmir.runtime.imaging.workers import work_through

    ahead = (sources[row] for block in missing for row in blocks.rows(block))
    results = work_through(reader(engine, blocks), ahead, workers=workers)
    with closing(results):
        for block in missing:
            yield from embed_block(engine, blocks, block, results)


def reader(engine: Engine, blocks: Blocks) -> Callable[[Source], Picture]:
    """What reads an image for these blocks; picklable."""
    spec = engine.card.preprocess
    return partial(read_picture, spec, spec if blocks.stamp["reduced_jpeg2000"] else None)
