"""Maps of the gallery: choice of pairs, groups of images, and the share of negative neighbours."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet
from cbmir.manifest import read_manifest
from cbmir.training.comparison.cells import VECTORS, cell_folder
from cbmir.training.comparison.figures.maps import GalleryLabels, draw_maps, label_pairs, negative_share, tsne
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Plan, selection_path


def groups(path: Path) -> Counter[tuple[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert np.isfinite([[float(row["x"]), float(row["y"])] for row in rows]).all()
    return Counter((row["panel"], row["group"]) for row in rows)


def test_the_most_common_pairs_of_labels_are_chosen() -> None:
    """Images with both labels: ab 1, ac 2, bc 3, ad 0, bd 1, cd 1. Three pairs are chosen; ties are in label order."""
    carried = ["abc", "ac", "bc", "bc", "bd", "cd", "a", ""]
    positive = np.array([[name in labels for name in "abcd"] for labels in carried])
    assert label_pairs((), LabelSet(tuple("abcd")), positive) == [(1, 2), (0, 2), (0, 1)]
    assert label_pairs((), LabelSet(tuple("abcd")), positive & np.array([1, 1, 0, 0], dtype=bool)) == [(0, 1)]


def test_requested_pairs_are_matched_by_their_aliases() -> None:
    labels = LabelSet(("Effusion", "Mass"))
    assert label_pairs(("Mass / Pleural Effusion",), labels, np.zeros((1, 2), dtype=bool)) == [(1, 0)]
    for wrong in ("Mass/Nodule", "Mass"):
        with pytest.raises(ManifestError, match="expected one of Effusion, Mass"):
            label_pairs((wrong,), labels, np.zeros((1, 2), dtype=bool))


def test_negative_share_by_hand() -> None:
    """Image 0 is the query, and image 1 its patient's; four of the next ten are negative, and the last two far away."""
    radians = np.deg2rad([0, 1, *range(2, 12), 80, 90])
    vectors = np.column_stack([np.cos(radians), np.sin(radians)]).astype(np.float32)
    negative = np.array([1, 1, *[1, 0] * 4, 0, 0, 1, 1], dtype=bool)
    patients = ["p", "p", *"abcdefghijkl"]
    gallery = GalleryLabels(LabelSet(("x",)), patients, ~negative[:, None], negative, np.array([0, 3]))
    assert negative_share(vectors, gallery) == pytest.approx(0.4)  # image 3 is drawn, but positive


def test_tsne_keeps_clusters_apart_and_repeats() -> None:
    rng = np.random.default_rng(0)
    cluster = np.arange(30) % 2
    vectors = (np.eye(2, 4)[cluster] + rng.normal(0, 0.05, (30, 4))).astype(np.float32)
    points = tsne(vectors)
    assert points.shape == (30, 2) and points.dtype == np.float32
    near = np.linalg.norm(points[:, None] - points[None], axis=2) + np.diag(np.full(30, np.inf))
    assert (cluster[near.argmin(axis=1)] == cluster).all()
    assert np.array_equal(points, tsne(vectors))


def test_every_drawn_image_is_in_its_group(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    report, plan = small_report
    pictures = draw_maps(report, replace(plan, pairs=("Mass/Effusion",)), tmp_path)
    assert [picture.name for picture in pictures] == ["tsne-pairs", "tsne-negatives"]
    for picture in pictures:
        assert (tmp_path / f"{picture.name}.png").read_bytes().startswith(b"\x89PNG")
        svg = ElementTree.parse(tmp_path / f"{picture.name}.svg").getroot()
        assert svg.findtext("{http://www.w3.org/2000/svg}title") == picture.title
    rows = read_manifest(selection_path(report, plan.parts()[0])).split("train").rows
    pair = {(True, True): "both", (True, False): "Mass only", (False, True): "Effusion only"}
    expected = Counter(pair.get((r.labels[1] in (1, -1), r.labels[0] in (1, -1)), "neither") for r in rows)
    assert groups(tmp_path / "tsne-pairs.csv") == {("Mass / Effusion", name): n for name, n in expected.items()}
    sides = Counter("positive sample" if any(r.labels) else "negative sample" for r in rows)
    assert groups(tmp_path / "tsne-negatives.csv") == {
        (panel, name): n
        for panel in (METHODS["proxy-negative"].title, METHODS["proxy"].title)
        for name, n in sides.items()
    }


def test_label_names_are_escaped(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    report, plan = small_report
    draw_maps(report, replace(plan, methods=("proxy",), pairs=("Mass/<b>$\\x$&",)), tmp_path)
    texts = ElementTree.parse(tmp_path / "tsne-pairs.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    assert "Mass / <b>$\\x$&" in [text.text for text in texts]


def test_missing_cells_are_not_drawn(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    """Without finished cells, nothing. With one proxy method, no comparison with and without negative proxies."""
    report, plan = small_report
    assert draw_maps(tmp_path / "none", plan, tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()
    (part,) = plan.parts()
    alone = tmp_path / "alone"
    for source in (selection_path(report, part), *cell_folder(report, Cell(part, "proxy", "2")).iterdir()):
        copy = alone / source.relative_to(report)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    (picture,) = draw_maps(alone, plan, tmp_path / "figures")
    assert picture.name == "tsne-pairs" and f"“{METHODS['proxy'].title}”" in picture.caption
    (cell_folder(alone, Cell(part, "proxy", "2")) / VECTORS).unlink()
    assert draw_maps(alone, plan, tmp_path / "figures") == [], "answers may be kept without their vectors"
