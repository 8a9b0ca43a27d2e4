"""Measure whether evidence maps point at findings whose place is known, compared with Grad-CAM and Grad-CAM++.

    cbmir data nih … --boxes BBox_List_2017.csv -o nih.csv
    python benchmarks/evidence.py hold-out nih.csv -o boxed.csv
    cbmir train boxed.csv -o boxed_run …
    python benchmarks/evidence.py measure --phantoms RUN manifest.csv --boxes boxed_run boxed.csv \
        -o evidence --write-docs docs/evidence.md

Each phantom is drawn again without each of its findings; a finding's place is where that changes the image. Boxes come
from the manifest. Patients with boxes must not be in the training set: `hold-out` moves them to the test split. All
maps of a data set come from one network, and are enlarged in the same way. Writes evidence.json and evidence.jpg, and
fills the tables in the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np
from evidence_maps import CONTRAST, GRAD_CAM, GRAD_CAM_PP, PLAIN, Cells, Network
from figures import filled, table
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import distance_transform_edt
from tqdm import tqdm

from cbmir.files import replacing, write_json
from cbmir.labels import spelled
from cbmir.machine import describe_machine, in_words
from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import overlay, seen_box
from cbmir.runtime.imaging.preprocess import centre_crop, resize_square
from cbmir.runtime.imaging.reader import read_image
from cbmir.training.evaluate import splits_of
from cbmir.training.metrics import interval, patient_weights, weighted_means
from cbmir.training.phantom.files import study_id
from cbmir.training.phantom.patients import describe
from cbmir.training.phantom.picture import render
from cbmir.training.run import load_model
from cbmir.training.splits import shuffle_patients

CENTRE, RANDOM = "the middle of the image", "random cells"
DRAWS = 20  # random maps per finding
QUANTILES = tuple(np.arange(0.5, 0.985, 0.02).round(2).tolist())
TOLERANCE = 15 / 224  # as a share of the image's side, from the original pointing game (Zhang et al., 2016)
LEAST = 0.25  # minimum change, as a share of the finding's largest change, for a pixel to be part of its place

Region = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a finding on an image, bool [S, S] in the pixels of the model's input."""

    row: Row
    label: str
    region: Region


@dataclass(frozen=True, eq=False)
class Measured:
    """For each method, a map [R, h, w] for each place's finding, and the correlations between the maps of one image."""

    places: Sequence[Place]
    maps: dict[str, list[Cells]]
    correlations: dict[str, list[float]]

    @property
    def patients(self) -> list[str]:
        return [place.row.patient_id for place in self.places]

    def hits(self, method: str, tolerance: float = 0) -> Cells:
        """Return the results of the pointing game, float64 [N]; `tolerance` is a share of the image's side."""
        pairs = zip(self.maps[method], self.places, strict=True)
        return np.array([hit(maps, grown(place.region, tolerance)) for maps, place in pairs])

    def overlaps(self, method: str, quantiles: Sequence[float]) -> Cells:
        """Return the IoU at each place and quantile, float64 [N, Q]."""
        pairs = zip(self.maps[method], self.places, strict=True)
        return np.array([overlap(maps, place.region, quantiles) for maps, place in pairs])


# --- measures ---------------------------------------------------------------------------------------------------------


def hit(maps: Cells, region: Region) -> float:
    """Return whether the centre of the largest cell is in the region, or the share if several are largest. Mean over R
    maps [R, h, w]."""
    sides = zip(maps.shape[1:], region.shape, strict=True)
    middles = [((np.arange(cells) + 0.5) * side / cells).astype(int) for cells, side in sides]
    inside = region[np.ix_(*middles)]
    return float(np.mean([inside[cells == cells.max()].mean() for cells in maps]))


def grown(region: Region, tolerance: float) -> Region:
    """Return the region, enlarged by `tolerance`, a share of the side."""
    near: Region = distance_transform_edt(~region) <= tolerance * len(region)
    return near


def overlap(maps: Cells, region: Region, quantiles: Sequence[float]) -> list[float]:
    """Return the IoU of the region with pixels from each quantile of the enlarged map on: mean over maps [R, h, w]."""
    found = []
    for cells in maps:
        large = enlarged(cells, region.shape)
        masks = large >= np.quantile(large, quantiles)[:, None, None]
        found.append((masks & region).sum(axis=(1, 2)) / (masks | region).sum(axis=(1, 2)))
    return list(np.mean(found, axis=0))


def enlarged(cells: Cells, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Interpolate bilinearly between the centres of the cells, as when maps are drawn over the image."""
    height, width = shape
    return np.array(Image.fromarray(cells.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR))


def correlations(maps: Cells) -> list[float]:
    """Return the Pearson correlations of all pairs of maps [C, h, w], without constant maps."""
    uneven = [cells.ravel() for cells in maps if np.ptp(cells) > 0]
    return [float(np.corrcoef(one, other)[0, 1]) for one, other in combinations(uneven, 2)]


# --- places -----------------------------------------------------------------------------------------------------------


def phantom_places(manifest: Manifest, spec: PreprocessSpec, split: str) -> Iterator[Place]:
    """Yield the place of each finding in a split's phantoms, from drawings with and without it, both without noise."""
    drawn = {study_id(one): one for one in describe(manifest.about["count"], manifest.about["seed"])}
    for row in manifest.split(split):
        phantom = replace(drawn[row.study_id], noise=0.0)
        whole = render(phantom, spec.resize)
        for finding in phantom.findings:
            without = replace(phantom, findings=tuple(one for one in phantom.findings if one is not finding))
            change = centre_crop(np.abs(whole - render(without, spec.resize)), spec)
            yield Place(row, finding.label, change >= LEAST * change.max())


def box_places(manifest: Manifest, spec: PreprocessSpec) -> Iterator[Place]:
    """Yield the places of boxes on images that are not in the training split."""
    pixels = (np.arange(spec.resize) + 0.5) / spec.resize
    for row in manifest:
        for box in row.boxes if row.split != "train" else ():
            sides = ((box.top, box.height), (box.left, box.width))
            down, across = ((start <= pixels) & (pixels < start + length) for start, length in sides)
            yield Place(row, box.label, centre_crop(down[:, None] & across[None, :], spec))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(network: Network, places: Sequence[Place]) -> Measured:
    """Compute the maps of all methods for the places; each image is explained once."""
    card, random = network.card, np.random.default_rng(0)
    middle = (np.indices((card.preprocess.crop,) * 2) + 0.5) / card.preprocess.crop - 0.5
    methods = network.methods
    found = Measured(places, {name: [] for name in (*methods, CENTRE, RANDOM)}, {name: [] for name in methods})
    image, of_image = None, {}
    for place in tqdm(places, desc="maps", unit="finding", disable=None):
        if place.row.image != image:
            image = place.row.image
            square = resize_square(read_image(image, intensity=card.preprocess.intensity).pixels, card.preprocess)
            of_image = {name: method(square) for name, method in methods.items()}
            for name, maps in of_image.items():
                found.correlations[name] += correlations(maps)
        label = card.labels.index(place.label)
        for name, maps in of_image.items():
            found.maps[name].append(maps[label][None])
        found.maps[CENTRE].append(-np.hypot(*middle)[None])
        found.maps[RANDOM].append(random.random((DRAWS, *of_image[PLAIN].shape[1:])))
    return found


def best_quantiles(found: Measured) -> dict[str, float]:
    """Return, for each method, the quantile with the highest mean IoU."""
    return {name: QUANTILES[int(found.overlaps(name, QUANTILES).mean(axis=0).argmax())] for name in found.maps}


def summary(found: Measured, quantiles: dict[str, float]) -> dict[str, Any]:
    """Return figures per method: pointing game (`hits`, and `near` with the tolerance) and `iou`, each with its
    interval and difference from Grad-CAM; `correlation` is the median over pairs of findings."""
    weights = patient_weights(found.patients)
    values = {
        name: {
            "hits": found.hits(name),
            "near": found.hits(name, TOLERANCE),
            "iou": found.overlaps(name, [quantiles[name]])[:, 0],
        }
        for name in found.maps
    }
    kinds = np.array([place.label for place in found.places])
    methods: dict[str, Any] = {}
    for name, measures in values.items():
        methods[name] = {"quantile": quantiles[name]}
        for measure_name, of_places in measures.items():
            less = of_places - values[GRAD_CAM][measure_name]
            methods[name][measure_name] = [of_places.mean(), *interval(weighted_means(of_places, weights))]
            methods[name][f"{measure_name}_difference"] = [less.mean(), *interval(weighted_means(less, weights))]
            methods[name][f"{measure_name}_by_finding"] = {
                kind: of_places[kinds == kind].mean() for kind in sorted(set(kinds))
            }
        if name in found.correlations:
            methods[name]["correlation"] = float(np.median(found.correlations[name]))
    return {
        "findings": len(found.places),
        "images": len({place.row.image for place in found.places}),
        "patients": len(set(found.patients)),
        "by_finding": dict(sorted(Counter(kinds.tolist()).items())),
        "area": float(np.mean([place.region.mean() for place in found.places])),
        "methods": methods,
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def methods_table(figures: dict[str, Any]) -> str:
    """Return a Markdown table with one row per method."""
    rows = []
    for name, one in figures["methods"].items():
        shown = [f"{_text(one[what])}{_less(name, one[f'{what}_difference'])}" for what in ("hits", "near", "iou")]
        rows.append(
            (name, *shown, f"{one['quantile']:g}", f"{one['correlation']:.2f}" if "correlation" in one else "-")
        )
    header = ("map", "pointing game", "with tolerance", "IoU", "quantile", "correlation")
    return table(header, rows)


def findings_table(figures: dict[str, Any]) -> str:
    """Return a Markdown table with one row per kind of finding: pointing game / IoU by method."""
    shown = [name for name in (PLAIN, CONTRAST, GRAD_CAM, GRAD_CAM_PP, RANDOM) if name in figures["methods"]]
    rows = []
    for kind, count in figures["by_finding"].items():
        of_methods = (figures["methods"][name] for name in shown)
        pairs = (f"{one['hits_by_finding'][kind]:.2f} / {one['iou_by_finding'][kind]:.2f}" for one in of_methods)
        rows.append((spelled(kind), str(count), *pairs))
    return table(("finding: pointing game / IoU", "n", *shown), rows)


def _text(figure: Sequence[float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*figure)


def _less(name: str, figure: Sequence[float]) -> str:
    """Format the difference from Grad-CAM."""
    return "" if name == GRAD_CAM else "; {:+.2f} [{:+.2f}, {:+.2f}]".format(*figure)


def example(places: Sequence[Place]) -> list[int]:
    """Return indices of the places on the first image with two small findings at least a third of the side apart."""
    of_image: dict[Path, list[int]] = {}
    for number, place in enumerate(places):
        of_image.setdefault(place.row.image, []).append(number)
    for numbers in of_image.values():
        regions = [places[number].region for number in numbers]
        middles = [np.mean(np.nonzero(region), axis=1) / len(region) for region in regions]
        if len(numbers) == 2 and np.hypot(*(middles[0] - middles[1])) > 1 / 3 and max(map(np.mean, regions)) < 0.15:
            return numbers
    return next(iter(of_image.values()))


def draw(found: Measured, spec: PreprocessSpec, path: Path) -> None:
    """Draw the example's image with the places of its findings, and their maps."""
    from cbmir.training.comparison.figures.sheet import sheet

    numbers = example(found.places)
    pixels = read_image(found.places[numbers[0]].row.image, intensity=spec.intensity).pixels
    top, bottom, left, right = seen_box(*pixels.shape, spec)
    middles = (np.arange(spec.crop) + 0.5) / spec.crop
    names = (PLAIN, CONTRAST, GRAD_CAM)
    with sheet(7.2, 2.05 * len(numbers)) as figure:
        axes = figure.subplots(len(numbers), 1 + len(names), squeeze=False)
        for line, number in zip(axes, numbers, strict=True):
            place = found.places[number]
            pictures = [np.repeat(pixels[..., None], 3, axis=2)]
            pictures += [overlay(pixels, found.maps[name][number][0].astype(np.float32), spec, 0.6) for name in names]
            for axis, picture, title in zip(line, pictures, (spelled(place.label), *names), strict=True):
                axis.imshow(picture[top:bottom, left:right], extent=(0, 1, 1, 0))
                axis.contour(middles, middles, place.region, [0.5], colors="#00e0a0", linewidths=0.9)
                axis.set_title(title)
                axis.set_axis_off()
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=130, format="jpeg", pil_kwargs={"quality": 80})


# --- commands ---------------------------------------------------------------------------------------------------------


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("hold-out")
@click.argument("manifest", type=Path)
@click.option("-o", "--output", type=Path, required=True)
def hold_out(manifest: Path, output: Path) -> None:
    """Write a copy of the manifest in which all images of patients with a box are in the test split."""
    images = read_manifest(manifest)
    patients = {row.patient_id for row in images if row.boxes}
    write_manifest(images.with_splits(["test" if row.patient_id in patients else row.split for row in images]), output)
    click.echo(f"{output}: {len(patients)} patients with boxes are in the test split")


@main.command("measure")
@click.option("--phantoms", type=(Path, Path), required=True, help="RUN MANIFEST.")
@click.option("--boxes", type=(Path, Path), help="RUN MANIFEST, with boxes.")
@click.option("-o", "--output", type=Path, required=True, help="Folder of evidence.json and evidence.jpg.")
@click.option("--write-docs", type=Path, help="Page whose tables are filled, with evidence.jpg beside it.")
def measure_command(
    phantoms: tuple[Path, Path], boxes: tuple[Path, Path] | None, output: Path, write_docs: Path | None
) -> None:
    """Measure the maps, and write the figures."""
    network, manifest = _opened(*phantoms)
    spec = network.card.preprocess
    tuned = shuffle_patients((row.patient_id for row in manifest.split("val")), seed=0)[::2]
    tuning = [place for place in phantom_places(manifest, spec, "val") if place.row.patient_id in tuned]
    quantiles = best_quantiles(measure(network, tuning))
    found = measure(network, list(phantom_places(manifest, spec, "test")))
    report: dict[str, Any] = {"machine": describe_machine(), "phantoms": summary(found, quantiles)}
    report["phantoms"] |= {"tuning_findings": len(tuning), "training": _training(network)}
    if boxes:
        network, manifest = _opened(*boxes)
        places = [place for place in box_places(manifest, network.card.preprocess) if place.region.any()]
        report["boxes"] = summary(measure(network, places), quantiles) | {"training": _training(network)}
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "evidence.json", report)
    draw(found, spec, output / "evidence.jpg")
    sections = {"machine": f"```\n{in_words(report['machine'])}\n```"}
    for name in ("phantoms", "boxes"):
        if name in report:
            sections |= {name: methods_table(report[name]), f"{name}-findings": findings_table(report[name])}
            click.echo(f"{sections[name]}\n\n{sections[f'{name}-findings']}\n")
    if write_docs:
        write_docs.write_text(filled(write_docs.read_text("utf-8"), "evidence", sections), "utf-8")
        (write_docs.parent / "evidence.jpg").write_bytes((output / "evidence.jpg").read_bytes())


def _opened(run: Path, manifest: Path) -> tuple[Network, Manifest]:
    model, card, _ = load_model(run)
    return Network(model, card), splits_of(card, read_manifest(manifest))


def _training(network: Network) -> dict[str, Any]:
    card = network.card
    return {"encoder": card.encoder, "head": card.head, "crop": card.preprocess.crop, **card.training}


if __name__ == "__main__":
    main()
