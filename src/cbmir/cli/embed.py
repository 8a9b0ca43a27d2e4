"""`cbmir embed`: write the embeddings of a manifest's images to an array."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cbmir.cli import options
from cbmir.cli.options import PATH, command, log, option
from cbmir.errors import ImageError
from cbmir.files import replacing
from cbmir.manifest import read_manifest


@command("cbmir embed model.onnx manifest.csv -o embeddings.npy")
@options.model_argument
@click.argument("manifest", type=PATH)
@option("-o", "--output", type=PATH, required=True, metavar="FILE", help="The .npy file to write.")
@options.reading_options
@options.engine_option
@options.json_option
def embed(
    model: Path, manifest: Path, output: Path, workers: int | None, reduced_jpeg2000: bool, engine: str, as_json: bool
) -> None:
    """Write the embeddings of MANIFEST's images to an array for NumPy: float32, one row per row of MANIFEST.

    Rows have unit length. The row of an image that cannot be read is NaN, and the exit code is then 2. The file is
    patient data; it appears once it is complete. Images that were read with a warning are listed beside it, in
    .warnings.csv. To search for neighbours use 'cbmir index build' instead.
    """
    import numpy as np
    from tqdm import tqdm

    from cbmir.runtime.finder import Finder
    from cbmir.runtime.imaging.image_warning import ImageWarning, write_warnings

    table = read_manifest(manifest)
    lateral = any(row.view == "LATERAL" for row in table)
    unreadable: list[dict[str, str]] = []
    warned: dict[Path, tuple[ImageWarning, ...]] = {}

    def note(at: int, warnings: tuple[ImageWarning, ...]) -> None:
        warned[table.rows[at].image] = warnings

    finder = Finder.open(
        model, engine=engine, mode="throughput", reduced_jpeg2000=reduced_jpeg2000, allow_lateral=lateral
    )
    with finder, replacing(output) as part:
        part.touch(mode=0o600)
        shape = len(table), finder.card.embedding_dim
        array = np.lib.format.open_memmap(part, "w+", np.dtype(np.float32), shape)
        results = finder.embed_many((row.image for row in table), workers=workers, warned=note)
        bar = tqdm(zip(table, results, strict=True), total=len(table), desc="Embedding", unit="image", disable=None)
        for at, (row, result) in enumerate(bar):
            if isinstance(result, ImageError):
                log.warning("Not read: %s", result)
                unreadable.append({"path": str(row.image), "reason": str(result)})
            array[at] = np.nan if isinstance(result, ImageError) else result
        array.flush()
    listed = output.with_suffix(".warnings.csv")
    kinds = write_warnings(warned, listed)
    answer = {"embeddings": output, "images": len(table), "unreadable": unreadable, "warnings": kinds}
    options.print_answer(as_json, answer, f"{output}: {len(table)} images")
    options.tell_warnings(len(warned), kinds, listed)
    if unreadable:
        log.error("%d images could not be read, and their rows are NaN", len(unreadable))
        sys.exit(2)
