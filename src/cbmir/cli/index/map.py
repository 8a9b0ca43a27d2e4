"""`cbmir index map`: lay a gallery out in the plane, for the demo to show."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from cbmir.cli.options import command, json_option, option, print_answer
from cbmir.errors import GalleryError, require


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
        if method == "auto":  # fewer than 20 images have no neighbourhoods to keep
            method = "tsne" if find_spec("sklearn") is not None and len(opened) >= 20 else "pca"
        layout = (_tsne(seed), "t-SNE") if method == "tsne" else (principal_plane, "principal components")
        made = GalleryProjection.make(opened, *layout, most=most, seed=seed)
    made.save(Path(gallery))
    value = {"gallery": gallery, "images": len(made.ids), "method": made.method}
    print_answer(as_json, value, f"{gallery}: a map of {len(made.ids)} images by {made.method}")


def _tsne(seed: int) -> Any:
    """t-SNE by scikit-learn, which the runtime does without."""
    manifold = require("sklearn.manifold", "train")

    def layout(vectors: Any) -> Any:
        perplexity = min(30.0, (len(vectors) - 1) / 3)
        tsne = manifold.TSNE(metric="cosine", perplexity=perplexity, init="random", random_state=seed)
        return tsne.fit_transform(vectors)

    return layout
