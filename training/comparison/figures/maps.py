"""The gallery in two dimensions by t-SNE, like the paper's two figures of the feature space.

L. van der Maaten, G. Hinton, Visualizing Data using t-SNE, JMLR 2008, as in scikit-learn. The paper does not give its
settings; here they are unit vectors, perplexity 30, initialisation by principal components, seed 0, and at most 2,000
random images. A map does not preserve distances, so the figure of the negative proxies also counts neighbours in the
feature space itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import require
from cbmir.labels import LabelSet, spelled
from cbmir.manifest import read_manifest
from cbmir.training.comparison.cells import VECTORS, cell_folder, read_vectors, shown_cells
from cbmir.training.comparison.figures.sheet import BLACK, LIGHT, ORANGE, SKY, VERMILLION, ReportFigure, save, sheet
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan, selection_path
from cbmir.training.dataset import label_array
from cbmir.training.metrics import add_negative_class, inner_products, positives
from cbmir.training.rankings import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Most and fewest images in a map. More would be crowded and slow, fewer would show nothing.
MOST, LEAST = 2_000, 10
PAIRS = 3
#: Number of nearest images that are checked for each negative sample.
NEIGHBOURS = 10
HEADER = ("panel", "x", "y", "group")

# Styles differ in lightness, and in filled or open markers, so that they do not depend on colour.
_DUST: dict[str, Any] = {"marker": "o", "color": LIGHT, "s": 3, "linewidths": 0}
_TRIANGLES: dict[str, Any] = {"marker": "^", "color": SKY, "s": 12, "linewidths": 0}
_RINGS: dict[str, Any] = {"marker": "o", "facecolors": "none", "edgecolors": VERMILLION, "s": 9, "linewidths": 0.7}
_SQUARES: dict[str, Any] = {"marker": "s", "color": BLACK, "s": 9, "linewidths": 0}
_DOTS: dict[str, Any] = {"marker": "o", "color": ORANGE, "s": 8, "linewidths": 0}
_CROSSES: dict[str, Any] = {"marker": "x", "color": BLACK, "s": 7, "linewidths": 0.6}

Mask = NDArray[np.bool_]
#: Name of a group, which of the drawn images are in it, and their style.
Group = tuple[str, Mask, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class GalleryLabels:
    """The gallery's labels: positive bool [G, C], negative bool [G] (every finding is known to be absent). `drawn` are
    the positions of the drawn images."""

    labels: LabelSet
    patients: Sequence[str]
    positive: Mask
    negative: Mask
    drawn: NDArray[np.intp]

    @property
    def count(self) -> str:
        return f"{len(self.drawn):,} of {len(self.patients):,} gallery images"


def draw_maps(report: Path, plan: Plan, folder: Path) -> list[ReportFigure]:
    """Draw maps of label pairs, and of images with and without findings; none without a finished proxy method and its
    vectors. Raises ManifestError if a pair of the plan names an unknown label."""
    cells = shown_cells(report, plan, ("proxy-negative", "proxy"))
    cells = {name: cell for name, cell in cells.items() if (cell_folder(report, cell) / VECTORS).exists()}
    if not cells:
        return []
    shown = next(iter(cells.values()))
    gallery = read_gallery(selection_path(report, shown.part))
    if len(gallery.patients) < LEAST:
        return []
    compared = len(cells) == 2 and bool(gallery.negative[gallery.drawn].any())
    used = cells if compared else {shown.method: shown}
    vectors = {name: _unit(read_vectors(cell_folder(report, cell))["gallery"]) for name, cell in used.items()}
    maps = {name: tsne(own[gallery.drawn]) for name, own in vectors.items()}
    pairs = label_pairs(plan.pairs, gallery.labels, gallery.positive)
    pictures = [_pairs(maps[shown.method], shown.method, gallery, pairs, folder)] if pairs else []
    return [*pictures, _negatives(maps, vectors, gallery, folder)] if compared else pictures


def read_gallery(selection: Path) -> GalleryLabels:
    """Read the labels of a part's training images, and choose which images are drawn."""
    rows = read_manifest(selection).split("train")
    labels = label_array(rows)
    return GalleryLabels(
        rows.labels, [row.patient_id for row in rows], positives(labels) == 1, add_negative_class(labels)[:, -1] == 1,
        np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST]),
    )  # fmt: skip


def label_pairs(asked: Sequence[str], labels: LabelSet, positive: Mask) -> list[tuple[int, int]]:
    """Return the positions of the pairs "A/B", or of the three most frequent pairs. Raises ManifestError for an unknown
    label."""
    if asked:
        named = (pair.partition("/") for pair in asked)
        return [(labels.index(first.strip()), labels.index(second.strip())) for first, _, second in named]
    together = {
        (a, b): int((positive[:, a] & positive[:, b]).sum()) for a, b in itertools.combinations(range(len(labels)), 2)
    }
    return sorted((pair for pair, count in together.items() if count), key=lambda pair: -together[pair])[:PAIRS]


def tsne(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Map float32 [N, D] -> [N, 2]; the same vectors give the same map."""
    manifold = require("sklearn.manifold", "train")
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    points = manifold.TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(vectors)
    return np.asarray(points, dtype=np.float32)


def negative_share(vectors: NDArray[np.float32], gallery: GalleryLabels) -> float:
    """Return the share of negatives among the 10 gallery images nearest to each drawn negative: unit vectors [G, D].

    Images of the same patient are left out.
    """
    asking = gallery.drawn[gallery.negative[gallery.drawn]]
    own = [gallery.patients[int(position)] for position in asking]
    found = nearest(inner_products(vectors[asking], vectors), own, gallery.patients, NEIGHBOURS)
    return float(gallery.negative[found[found >= 0]].mean())


def _pairs(
    points: NDArray[np.float32], method: str, gallery: GalleryLabels, pairs: Sequence[tuple[int, int]], folder: Path
) -> ReportFigure:
    names = list(map(spelled, gallery.labels.names))
    table: list[tuple[Any, ...]] = []
    with sheet(2.5 * len(pairs), 3.4) as figure:
        for axis, (a, b) in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
            first, second = gallery.positive[gallery.drawn][:, (a, b)].T
            groups = (
                ("neither", ~first & ~second, _DUST),
                (f"{names[a]} only", first & ~second, _TRIANGLES),
                (f"{names[b]} only", second & ~first, _RINGS),
                ("both", first & second, _SQUARES),
            )
            table += _scatter(axis, points, f"{names[a]} / {names[b]}", groups)
        picture = ReportFigure(
            "tsne-pairs",
            "The gallery by pairs of findings (t-SNE)",
            f"{gallery.count}, placed by their vectors (“{METHODS[method].title}”). In each panel triangles carry only "
            "the first finding of the pair, rings only the second, black squares both, and grey dots neither; their "
            "numbers are below. Images that lie close together are near in the feature space; the axes have no "
            "unit.",
        )
        return save(figure, picture, folder, HEADER, table)


def _negatives(
    maps: dict[str, NDArray[np.float32]], vectors: dict[str, NDArray[np.float32]], gallery: GalleryLabels, folder: Path
) -> ReportFigure:
    positive, negative = np.asarray(gallery.positive.any(axis=1))[gallery.drawn], gallery.negative[gallery.drawn]
    groups = (
        ("findings not all known", ~positive & ~negative, _DUST),
        ("negative sample", negative, _DOTS),
        ("positive sample", positive, _CROSSES),
    )
    shares = {METHODS[name].title: negative_share(own, gallery) for name, own in vectors.items()}
    table: list[tuple[Any, ...]] = []
    with sheet(6.6, 4.1) as figure:
        for axis, (title, share), points in zip(figure.subplots(1, 2), shares.items(), maps.values(), strict=True):
            note = f"{share:.1%} of the {NEIGHBOURS} nearest to\na negative sample are negative"
            table += _scatter(axis, points, title, groups, note)
        told = " and ".join(f"{share:.1%} with “{title}”" for title, share in shares.items())
        picture = ReportFigure(
            "tsne-negatives",
            "The gallery with and without negative proxies (t-SNE)",
            f"{gallery.count}. Dots are negative samples (every finding is known to be absent), crosses positive ones. "
            f"Of the {NEIGHBOURS} gallery images of other patients that are nearest to a negative sample, counted in "
            f"the feature space itself, {told} are negative too; of the whole gallery {gallery.negative.mean():.1%} "
            "are. The axes have no unit.",
        )
        return save(figure, picture, folder, HEADER, table)


def _scatter(
    axis: Axes, points: NDArray[np.float32], title: str, groups: Sequence[Group], note: str = ""
) -> list[tuple[Any, ...]]:
    """Draw the groups, later ones on top, and a legend below; return the points as rows of the CSV."""
    for name, members, style in groups:
        if members.any():
            axis.scatter(*points[members].T, label=f"{name} ({members.sum():,})", **style)
    axis.set(title=title, xticks=[], yticks=[], box_aspect=1)
    axis.set_aspect("equal", adjustable="datalim")
    axis.spines[["top", "right"]].set_visible(True)
    axis.legend(title=note, loc="upper center", bbox_to_anchor=(0.5, 0), handletextpad=0.2, markerscale=1.5)
    return [(title, *points[i].round(3).tolist(), name) for name, members, _ in groups for i in np.flatnonzero(members)]


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), dtype=np.float32)
