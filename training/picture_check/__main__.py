"""Train the picture check, choose its thresholds, measure it and write the runtime's file.

    python -m cbmir.training.picture_check manifest.csv -o picture_check.npz

Chests are the frontal images of a manifest and phantoms; every other kind is made from them or drawn. The network
learns from the training split, the thresholds come from the validation split, and the table from the test split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from cbmir.errors import ManifestError
from cbmir.manifest import read_manifest
from cbmir.runtime.imaging.picture_check import PictureCheck, thumbnail
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.imaging.reader import read_image
from cbmir.training.phantom import describe, draw
from cbmir.training.picture_check.impostors import KINDS, impostor
from cbmir.training.picture_check.network import exported, fit, grey, save
from cbmir.training.picture_check.views import Views, stored

Pixels = NDArray[np.uint8]
#: Numbers of images for training and for measurement.
_PHANTOMS, _IMPOSTORS = (400, 100), (2000, 400)
#: Seeds of the impostors for measurement.
IMPOSTORS = range(_IMPOSTORS[0], sum(_IMPOSTORS))
#: For each kind, the largest share of false alarms on views of the validation split's chests.
_SHARES = {"other": 1e-3, "part": 1e-3, "inverted": 1e-3, "turned 1": 1e-3, "turned 2": 1e-3, "turned 3": 1e-3,
           "mirrored": 2e-3}  # fmt: skip
_VIEWS = 20


def _middle(pixels: Pixels) -> Pixels:
    height, width = pixels.shape
    return pixels[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4]


def _blurred(pixels: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(min(pixels.shape) / 50)))


def _cropped(pixels: Pixels) -> Pixels:
    height, width = pixels.shape
    return pixels[height // 10 : -(height // 10), width // 10 : -(width // 10)]


#: Name of a change to a chest -> the change, and the kind that should be reported (empty for no warning).
CHANGES: dict[str, tuple[Callable[[Pixels], Pixels], str]] = {
    "as they are": (lambda pixels: pixels, ""),
    "darkened (gamma 1.5)": (lambda pixels: (255 * (pixels / 255) ** 1.5).astype(np.uint8), ""),
    "brightened (gamma 0.67)": (lambda pixels: (255 * (pixels / 255) ** 0.67).astype(np.uint8), ""),
    "blurred by a fiftieth of a side": (_blurred, ""),
    "cropped by a tenth on each side": (_cropped, ""),
    "inverted": (lambda pixels: 255 - pixels, "inverted"),
    "turned by 90° anticlockwise": (np.rot90, "turned 1"),
    "turned by 180°": (lambda pixels: np.rot90(pixels, 2), "turned 2"),
    "turned by 90° clockwise": (lambda pixels: np.rot90(pixels, 3), "turned 3"),
    "mirrored": (lambda pixels: pixels[:, ::-1], "mirrored"),
    "the middle quarter": (_middle, "part"),
    "the upper left quarter": (lambda pixels: pixels[: len(pixels) // 2, : pixels.shape[1] // 2], "part"),
}


@click.command(help=__doc__)
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option("--steps", default=1500, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(manifest: Path, output: Path, steps: int, seed: int) -> None:
    torch.set_num_threads(1)  # sums depend on the number of threads
    rows = [row for row in read_manifest(manifest) if row.view != "LATERAL"]
    parts = [[n for n, row in enumerate(rows) if row.split == split] for split in ("train", "val", "test")]
    if not all(parts):
        raise ManifestError(f"{manifest}: expected frontal images in the splits train, val and test")
    chests = [read_image(row.image).pixels for row in rows]
    phantoms = [draw(phantom, 256) for phantom in describe(sum(_PHANTOMS), seed + 11)]  # not the demo's phantoms
    impostors = [impostor(number) for number in range(sum(_IMPOSTORS))]
    images = np.stack([stored(pixels) for pixels in (*chests, *phantoms, *impostors)])
    train, val, test = (torch.tensor(part) for part in parts)
    first = len(chests)
    learnt = torch.cat([train.repeat_interleave(2), first + torch.arange(_PHANTOMS[0])])
    others = first + len(phantoms) + torch.arange(_IMPOSTORS[0])
    model = fit(images, learnt, others, steps=steps, seed=seed)

    counts = {"chests": len(train), "phantoms": _PHANTOMS[0], "impostors": _IMPOSTORS[0]}
    about = {"seed": seed, "steps": steps, "learnt from": counts, "thresholds": dict.fromkeys(_SHARES, math.inf)}
    about["thresholds"] = thresholds_of(exported(model, about), Views(images, seed), val)
    measured = _measured(exported(model, about), [chests[n] for n in test], phantoms[_PHANTOMS[0] :],
                         impostors[_IMPOSTORS[0] :])  # fmt: skip
    click.echo("| pictures | n | expected warning | given, 95% interval | any warning, 95% interval |")
    click.echo("|---|---|---|---|---|")
    for name, (of, kind, right, doubted) in measured.items():
        said = _rate(right, of) if kind else "-"
        click.echo(f"| {name} | {of} | {kind or 'nothing'} | {said} | {_rate(doubted, of)} |")
    about["measured"] = {name: {"of": of, "kind": kind, "right": right, "doubted": doubted}
                         for name, (of, kind, right, doubted) in measured.items()}  # fmt: skip
    save(exported(model, about), output)


def thresholds_of(check: PictureCheck, views: Views, rows: torch.Tensor) -> dict[str, float]:
    """Return, for each kind, the score that at most its share of these chests' views exceeds, but at least 0."""
    seen = torch.cat([views.whole(rows) for _ in range(_VIEWS)])
    scores = check.scores(grey(seen))
    limits = {kind: float(np.quantile(scores[kind], 1 - share, method="higher")) for kind, share in _SHARES.items()}
    return {kind: round(max(0.0, limit), 3) for kind, limit in limits.items()}


def _measured(
    check: PictureCheck, chests: list[Pixels], phantoms: list[Pixels], impostors: list[Pixels]
) -> dict[str, tuple[int, str, int, int]]:
    """Return, for each set of pictures: size, expected kind, how often it is reported, and how often any kind is."""
    sets = {f"{what} {name}": ([change(one) for one in of], kind) for name, (change, kind) in CHANGES.items()
            for what, of in (("chests", chests), ("phantoms", phantoms))}  # fmt: skip
    for number, impostor_of in enumerate(KINDS):
        some = impostors[(number - _IMPOSTORS[0]) % len(KINDS) :: len(KINDS)]
        sets.setdefault(f"drawn: {impostor_of.__name__}", ([], "other"))[0].extend(some)
    measured = {}
    for name, (pictures, kind) in sets.items():
        said = [check.said(scores) for scores in scores_of(check, pictures)]
        measured[name] = len(pictures), kind, sum(kind in kinds for kinds in said), sum(map(bool, said))
    return measured


def scores_of(check: PictureCheck, pictures: Iterable[Pixels]) -> list[dict[str, float]]:
    """Return the scores of each picture, uint8 [H, W]."""
    thumbnails = np.stack([thumbnail(Radiograph(np.ascontiguousarray(pixels), "", "")) for pixels in pictures])
    scores = check.scores(thumbnails)
    return [{kind: float(of[n]) for kind, of in scores.items()} for n in range(len(thumbnails))]


def _rate(count: int, of: int) -> str:
    low, high = wilson(count, of)
    return f"{count / of:.1%} ({low:.1%} to {high:.1%})"


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a rate (Wilson 1927)."""
    z, rate = 1.959964, count / of
    centre, half = rate + z * z / (2 * of), z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return (centre - half) / (1 + z * z / of), (centre + half) / (1 + z * z / of)


if __name__ == "__main__":
    main()
