"""`cbmir index info`, `verify`, `rebuild`, `compact`, `export` and `map`: maintenance of a gallery."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from cbmir.choices import INDEX_SETTINGS
from cbmir.cli.options import PATH, PATIENT_DATA, STAYS_CLEAR, command, json_option, log, option, print_answer
from cbmir.errors import GalleryError, require
from cbmir.files import folder_size


@command("cbmir index info gallery --json")
@click.argument("gallery", type=click.Path())
@json_option
def info(gallery: str, as_json: bool) -> None:
    """Show what GALLERY holds, which model it belongs to, and how it is searched."""
    from cbmir.runtime.gallery.build.folder import GalleryFolder
    from cbmir.runtime.gallery.protocol import is_milvus, open_gallery

    with open_gallery(gallery) as opened:
        facts = opened.info()
    if not is_milvus(gallery):
        facts["unfinished"] = [str(folder) for folder in GalleryFolder(gallery).unfinished()]
    lines = []
    for key, value in facts.items():
        if key == "sources" and not any(value):
            continue  # no image has a source
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name or '(none)':<26} {count:>8}" for name, count in value.items())]
        else:
            text = ", ".join(str(one) for one in value if one != "") or "none" if isinstance(value, list) else value
            lines.append(f"{key + ':':<14} {text}")
    print_answer(as_json, facts, "\n".join(lines))
    log.warning(PATIENT_DATA)
    if facts.get("pseudonyms"):
        log.warning(STAYS_CLEAR)


@command("cbmir index verify gallery")
@click.argument("gallery", type=PATH)
@json_option
def verify(gallery: Path, as_json: bool) -> None:
    """Read all of GALLERY and report damage: which images it affects, and what to do.

    The exit code is 2 if anything is damaged.
    """
    from cbmir.runtime.gallery.maintenance import verify as look_through

    problems = look_through(gallery)
    lines = []
    for problem in problems:
        affected = f" Affected: {', '.join(problem.affected)}." if problem.affected else ""
        lines.append(f"{problem.what}.{affected} What to do: {problem.remedy}.")
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "nothing is damaged"
    print_answer(as_json, [asdict(problem) for problem in problems], "\n".join([*lines, f"{gallery}: {count}"]))
    if problems:
        sys.exit(2)


@command("cbmir index rebuild gallery --index int8")
@click.argument("gallery", type=PATH)
@option("--index", "setting", type=click.Choice(INDEX_SETTINGS), help="How to search from now on.")
@json_option
def rebuild(gallery: Path, setting: str | None, as_json: bool) -> None:
    """Rebuild the search files from the gallery's database. Searches continue meanwhile.

    It is never required: damaged or outdated files are detected and rebuilt when they are needed.
    """
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        opened.rebuild(setting)
        facts = opened.info()
    print_answer(as_json, facts, f"{gallery}: {facts['images']} images, search: {facts['search']}")


@command("cbmir index compact gallery")
@click.argument("gallery", type=PATH)
@json_option
def compact(gallery: Path, as_json: bool) -> None:
    """Rewrite GALLERY's database to free the space of removed images, and to erase what is left of them."""
    from cbmir.runtime.gallery import Gallery

    with Gallery.open(gallery) as opened:
        before = folder_size(gallery)
        opened.compact()
    after = folder_size(gallery)
    value = {"gallery": gallery, "bytes_before": before, "bytes_after": after}
    print_answer(as_json, value, f"{gallery}: {before:,} bytes before, {after:,} now")


@command("cbmir index export gallery -o backup", "cbmir index export gallery -o shared --deidentified")
@click.argument("gallery", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="A new or empty folder.")
@option("--deidentified", is_flag=True,
        help="Only embeddings, labels, views and splits, under new ids and in another order.")  # fmt: skip
@json_option
def export(gallery: Path, output: Path, deidentified: bool, as_json: bool) -> None:
    """Copy GALLERY in a consistent state, even while it is in use.

    De-identified is not anonymous: an embedding is still close to the embeddings of other images of the same patient,
    so anyone with such an image can find the patient. Do not publish such a copy.
    """
    from cbmir.runtime.gallery import Gallery, maintenance

    with Gallery.open(gallery) as opened:
        (maintenance.export_deidentified if deidentified else maintenance.export)(opened, output)
    with Gallery.open(output) as made:
        images = len(made)
    print_answer(as_json, {"gallery": output, "images": images}, f"{output}: {images} images")
    log.warning(PATIENT_DATA if not deidentified else "De-identified is not anonymous: do not make it public.")


@command("cbmir index map gallery", "cbmir index map gallery --method pca", name="map")
@click.argument("gallery", type=click.Path())
@option("--method", type=click.Choice(["auto", "tsne", "pca"]), default="auto", help="auto: t-SNE if scikit-learn is "
        "installed and there are enough images, else the first two principal components.")  # fmt: skip
@option("--most", type=click.IntRange(3), default=5000, help="Maximum number of images to show, chosen at random if "
        "there are more.")  # fmt: skip
@option("--seed", default=0, help="Seed of the layout and of the random choice.")
@json_option
def map_command(gallery: str, method: str, most: int, seed: int, as_json: bool) -> None:
    """Make a map of GALLERY in which similar images lie near each other, and save it in the gallery's folder.

    'cbmir demo' shows it. Rebuild it after adding images. Like the gallery, it is patient data.
    """
    from cbmir.runtime.gallery.projection import GalleryProjection, principal_plane
    from cbmir.runtime.gallery.protocol import is_milvus, open_gallery

    if is_milvus(gallery):
        raise GalleryError("expected a gallery in a folder, found one in Milvus: a map is kept in the gallery's folder")
    with open_gallery(gallery) as opened:
        if method == "auto":  # t-SNE is no use for fewer than 20 images
            method = "tsne" if find_spec("sklearn") is not None and len(opened) >= 20 else "pca"
        layout = (_tsne(seed), "t-SNE") if method == "tsne" else (principal_plane, "principal components")
        made = GalleryProjection.make(opened, *layout, most=most, seed=seed)
    made.save(Path(gallery))
    value = {"gallery": gallery, "images": len(made.ids), "method": made.method}
    print_answer(as_json, value, f"{gallery}: a map of {len(made.ids)} images by {made.method}")


def _tsne(seed: int) -> Any:
    """Return t-SNE by scikit-learn, which the runtime does not depend on."""
    manifold = require("sklearn.manifold", "train")

    def layout(vectors: Any) -> Any:
        perplexity = min(30.0, (len(vectors) - 1) / 3)
        tsne = manifold.TSNE(metric="cosine", perplexity=perplexity, init="random", random_state=seed)
        return tsne.fit_transform(vectors)

    return layout
