"""The picture check: its network against plain loops, and its results for phantoms, chests and other images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cbmir.runtime import read_image
from cbmir.runtime.imaging.picture_check import OUTPUTS, SENTENCES, SIDE, SMALLEST, PictureCheck, own_check, thumbnail
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.training.phantom import describe, draw
from cbmir.training.readers.nih import read_nih

Pixels = NDArray[np.uint8]
CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "inverted": lambda pixels: 255 - pixels,
    "turned 1": lambda pixels: np.rot90(pixels),
    "turned 2": lambda pixels: np.rot90(pixels, 2),
    "turned 3": lambda pixels: np.rot90(pixels, 3),
    "mirrored": lambda pixels: pixels[:, ::-1],
}


@pytest.fixture(scope="module")
def phantoms() -> list[Pixels]:
    """Phantoms with a seed that was not used in training."""
    return [draw(phantom, 128) for phantom in describe(12, seed=77)]


def said(pixels: Pixels) -> list[str]:
    """The keys of the picture check's warnings about an image."""
    warnings = read_image(np.ascontiguousarray(pixels)).warnings
    return [key for key, sentence in SENTENCES.items() if sentence in warnings]


def slowly(check: PictureCheck, grey: Pixels) -> NDArray[np.float64]:
    """Logits [9] of one thumbnail, computed pixel by pixel in float64."""
    x = grey.astype(np.float64)[..., None]
    x = (x - x.mean()) / (x.std() + 1)
    for weight, bias in zip(check.weights[:-1], check.biases[:-1], strict=True):
        kernel = weight.astype(np.float64).reshape(3, 3, x.shape[2], -1)
        around = np.zeros((x.shape[0] + 2, x.shape[1] + 2, x.shape[2]))
        around[1:-1, 1:-1] = x
        x = np.array([
            [np.einsum("ijc,ijco->o", around[y : y + 3, left : left + 3], kernel) + bias
             for left in range(0, x.shape[1], 2)]
            for y in range(0, x.shape[0], 2)
        ])  # fmt: skip
        x = np.maximum(x, 0)
    logits: NDArray[np.float64] = x.reshape(-1) @ check.weights[-1].astype(np.float64) + check.biases[-1]
    return logits


def test_the_network_agrees_with_a_direct_computation() -> None:
    check = own_check()
    greys = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE), dtype=np.uint8)
    expected = np.stack([slowly(check, grey) for grey in greys])
    assert expected.shape == (2, len(OUTPUTS))
    np.testing.assert_allclose(check.logits(greys), expected, atol=1e-3)


def test_a_mirror_image_has_the_opposite_rotation() -> None:
    check = own_check()
    grey = np.random.default_rng(1).integers(0, 256, (1, SIDE, SIDE), dtype=np.uint8)
    one, other = check.scores(grey), check.scores(grey[:, :, ::-1])
    for kind, its in {"turned 1": "turned 3", "turned 2": "turned 2", "turned 3": "turned 1", "part": "part"}.items():
        np.testing.assert_allclose(one[kind], other[its], atol=1e-4)
    np.testing.assert_allclose(one["mirrored"], -other["mirrored"], atol=1e-4)


@pytest.mark.parametrize(
    ("sure", "expected"),
    [
        ({}, []),
        ({"inverted": 1.0}, []),
        ({"inverted": 2.0}, ["inverted"]),
        ({"inverted": 2.0, "mirrored": 3.0}, ["inverted", "mirrored"]),
        ({"turned 1": 2.0, "turned 2": 3.0}, ["turned 2"]),
        ({"part": 3.0, "inverted": 9.0}, ["part"]),
        ({"part": 0.5}, []),
        ({"part": 0.5, "inverted": 2.0}, ["part"]),
        ({"other": 2.0, "turned 1": 9.0}, ["other"]),
    ],
)
def test_only_confident_results_are_reported(sure: dict[str, float], expected: list[str]) -> None:
    check = replace(own_check(), about={"thresholds": dict.fromkeys(SENTENCES, 1.0)})
    assert check.said(dict.fromkeys(SENTENCES, -1.0) | sure) == expected


def test_phantoms_are_chests_and_their_changes_are_seen(phantoms: list[Pixels]) -> None:
    assert [said(pixels) for pixels in phantoms] == [[]] * len(phantoms)
    for kind, change in CHANGES.items():
        seen = [said(change(pixels)) for pixels in phantoms]
        assert [kinds for kinds in seen if kinds not in ([kind], [])] == [], kind
        assert seen.count([kind]) >= (6 if kind == "mirrored" else 11), kind


def test_a_page_of_text_and_noise_are_not_chests() -> None:
    page = Image.new("L", (300, 400), 255)
    for line in range(20):
        ImageDraw.Draw(page).text((20, 20 + 18 * line), "A page of words, and no X-ray at all", fill=0)
    assert said(np.asarray(page)) == ["other"]
    assert said(np.random.default_rng(0).integers(0, 256, (300, 300), dtype=np.uint8)) == ["other"]


def test_small_images_are_not_checked() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (SMALLEST, SMALLEST), dtype=np.uint8)
    assert said(noise) == ["other"]
    assert said(noise[1:]) == []


def test_it_comes_before_other_warnings(phantoms: list[Pixels]) -> None:
    faint = (120 + (255 - phantoms[0]).astype(np.float64) / 255 * 25).astype(np.uint8)
    assert [warning.kind for warning in read_image(faint).warnings] == ["inverted", "little contrast"]


def test_a_thumbnail_shows_the_displayed_greys(phantoms: list[Pixels]) -> None:
    """Stored values are mapped to grey; a larger version of the picture gives nearly the same thumbnail."""
    pixels = phantoms[0]
    greys = np.arange(255, -1, -1, dtype=np.uint8)
    inverted = thumbnail(Radiograph(pixels, "", "", greys=greys))
    assert np.array_equal(inverted, thumbnail(Radiograph(255 - pixels, "", "")))
    large = np.asarray(Image.fromarray(pixels).resize((1500, 1800), Image.Resampling.BILINEAR))
    small = thumbnail(Radiograph(pixels, "", "")).astype(float)
    assert np.abs(thumbnail(Radiograph(large, "", "")) - small).mean() < 4


def test_real_chests(shared: Path) -> None:
    """At most one in a hundred held-out images is doubted, and nearly all changes are detected."""
    nih = read_nih(shared / "nih/images", shared / "nih/Data_Entry_2017_v2020.csv", splits=shared / "nih/splits.csv")
    chests = [read_image(row.image) for row in nih if row.split == "test"]
    assert len(chests) == 333
    doubted = sum(any(warning in SENTENCES.values() for warning in chest.warnings) for chest in chests)
    assert doubted <= 0.01 * len(chests)
    some = [chest.pixels for chest in chests[::4]]
    for kind, change in CHANGES.items():
        seen = sum(kind in said(change(pixels)) for pixels in some) / len(some)
        assert seen >= {"mirrored": 0.4}.get(kind, 0.9), kind
