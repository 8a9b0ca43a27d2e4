"""Measure whether a search by region finds a boxed finding better than one by the whole image, and finds its place.

    cbmir data phantom -n 800 --seed 0 -o phantoms
    cbmir train phantoms/manifest.csv -o run …
    cbmir export run -o phantom.onnx
    cbmir data nih … --boxes BBox_List_2017.csv -o nih.csv
    python benchmarks/region.py --phantoms phantom.onnx phantoms/manifest.csv --boxes starter nih.csv -o region \
        --write-docs docs/region.md

A query is the box around a finding whose place is known, on the phantoms' test images or the manifest's images with
boxes. The gallery is the phantoms' training split, or all images of the manifest, without those of the query's patient.
An image with the query's finding is relevant, even with others. Writes region.json, and fills the tables in the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from evidence import box_places, phantom_places
from figures import filled, table
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.errors import UserError
from cbmir.files import write_json
from cbmir.machine import describe_machine, in_words
from cbmir.manifest import Manifest, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import Analysis, Finder, build_gallery, open_engine
from cbmir.runtime.evidence import Region, seen_part
from cbmir.training.metrics import interval, patient_weights, weighted_means

K = 10
WHOLE, REGION, CELLS = "the whole image", "the region", "the region, ranked again by cells"
MEASURES = ("nDCG", "precision")


def box_around(seen: NDArray[np.bool_], spec: PreprocessSpec) -> Region:
    """Return the box around a place, in fractions of the image. `seen` is bool [S, S], pixels of the model's input."""
    first, last = seen_part(spec)
    ends = []
    for side in (seen.any(axis=0), seen.any(axis=1)):
        at = np.flatnonzero(side)
        ends.append((first + (last - first) * at[0] / len(side), first + (last - first) * (at[-1] + 1) / len(side)))
    (x0, x1), (y0, y1) = ends
    return float(x0), float(y0), float(x1), float(y1)


def queries(manifest: Manifest, spec: PreprocessSpec, drawn: bool) -> Iterator[tuple[Any, str, Region]]:
    """Yield the queries: row, label and box."""
    for place in phantom_places(manifest, spec, "test") if drawn else box_places(manifest, spec):
        if place.region.any():
            yield place.row, place.label, box_around(place.region, spec)


def gains(analysis: Analysis, label: str) -> tuple[float, float]:
    """Return nDCG and precision of the first K neighbours for one finding, if at least K images are relevant."""
    relevant = np.array([label in one.labels for one in analysis.neighbours[:K]], float)
    weights = 1 / np.log2(np.arange(2, K + 2))
    return float(relevant @ weights / weights.sum()), float(relevant.mean())


def hit(place: Region, region: Region) -> bool:
    """Return whether the centre of the place is in the region."""
    x, y = (place[0] + place[2]) / 2, (place[1] + place[3]) / 2
    return region[0] <= x <= region[2] and region[1] <= y <= region[3]


def measure(model: str, manifest: Manifest, folder: Path, drawn: bool) -> dict[str, Any]:
    """Return the figures for one data set."""
    with open_engine(model, engine="onnxruntime") as engine:
        for name, cells in (("plain", False), ("cells", True)):
            build_gallery(engine, manifest, folder / name, splits=("train",) if drawn else ("all",), cells=cells)
    places: dict[tuple[Path, str], list[Region]] = {}  # places of findings on the gallery's images
    with Finder.open(model, folder / "plain") as plain, Finder.open(model, folder / "cells") as coded:
        spec = plain.card.preprocess
        if drawn:
            for place in phantom_places(manifest, spec, "train"):
                places.setdefault((place.row.image, place.label), []).append(box_around(place.region, spec))
        asked = list(queries(manifest, spec, drawn))
        if not drawn:
            for row, label, region in asked:
                places.setdefault((row.image, label), []).append(region)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in (WHOLE, REGION, CELLS)}
        patients, labels, hits, by_chance, small = list[str](), list[str](), list[float](), list[float](), 0
        for row, label, region in tqdm(asked, desc="queries", disable=None):
            image = plain.read(row.image)
            try:
                answers = {
                    WHOLE: plain.analyze(image, K, patient_id=row.patient_id),
                    REGION: plain.analyze(image, K, patient_id=row.patient_id, region=region),
                    CELLS: coded.analyze(image, K, patient_id=row.patient_id, region=region),
                }
            except UserError:  # the region is smaller than half a cell
                small += 1
                continue
            patients.append(row.patient_id)
            labels.append(label)
            for name, answer in answers.items():
                found[name].append(gains(answer, label))
            for one in answers[CELLS].neighbours:
                for truth in places.get((Path(one.image), label), ())[:1]:
                    hits.append(float(hit(one.place or (0, 0, 0, 0), truth)))
                    by_chance.append(_chance(one.place or (0, 0, 0, 0), truth, spec))
        assert coded.gallery is not None
        facts = coded.gallery.info()
    return {
        "model": model if model == "starter" else plain.card.encoder, "crop": spec.crop, "cells": facts["cells"],
        "gallery": facts["images"], "queries": len(patients), "patients": len(set(patients)), "too_small": small,
        "relevant": float(np.mean([facts["labels"][label] / facts["images"] for label in labels])),
        "methods": _summary(found, patients), "by_finding": _by_finding(found, labels),
        "places": {"neighbours": len(hits), "hits": float(np.mean(hits)) if hits else None,
                   "by_chance": float(np.mean(by_chance)) if hits else None},
    }  # fmt: skip


def _chance(place: Region, truth: Region, spec: PreprocessSpec) -> float:
    """Return the chance that a window of the place's size, anywhere in the model's input, has its centre in the box."""
    first, last = seen_part(spec)
    share = 1.0
    for low, high in ((0, 2), (1, 3)):
        half = (place[high] - place[low]) / 2
        start, end = first + half, last - half  # range of possible centres
        if end - start < 1e-9:
            share *= truth[low] <= start <= truth[high]
        else:
            share *= max(0.0, min(end, truth[high]) - max(start, truth[low])) / (end - start)
    return float(share)


def _summary(found: dict[str, list[tuple[float, float]]], patients: Sequence[str]) -> dict[str, Any]:
    weights = patient_weights(patients)
    methods: dict[str, Any] = {}
    for name, values in found.items():
        methods[name] = {}
        for at, measure_name in enumerate(MEASURES):
            own = np.array([value[at] for value in values])
            less = own - np.array([value[at] for value in found[WHOLE]])
            methods[name][measure_name] = [own.mean(), *interval(weighted_means(own, weights))]
            methods[name][f"{measure_name}_difference"] = [less.mean(), *interval(weighted_means(less, weights))]
    return methods


def _by_finding(found: dict[str, list[tuple[float, float]]], labels: Sequence[str]) -> dict[str, Any]:
    """Return the number of queries and mean nDCG per kind of finding."""
    kinds, values = np.array(labels), {name: np.array(of)[:, 0] for name, of in found.items()}
    return {
        kind: {"queries": int((kinds == kind).sum())} | {name: of[kinds == kind].mean() for name, of in values.items()}
        for kind in sorted(set(labels))
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def methods_table(figures: dict[str, Any]) -> str:
    """Return a Markdown table with one row per way to search."""
    rows = []
    for name, one in figures["methods"].items():
        cells = []
        for what in MEASURES:
            text = "{:.3f} [{:.3f}, {:.3f}]".format(*one[what])
            less = "" if name == WHOLE else "; {:+.3f} [{:+.3f}, {:+.3f}]".format(*one[f"{what}_difference"])
            cells.append(text + less)
        rows.append((name, *cells))
    return table(("searched by", f"nDCG@{K}; difference from the whole image", f"precision@{K}; difference"), rows)


def findings_table(figures: dict[str, Any]) -> str:
    """Return a Markdown table of nDCG by finding."""
    rows = [
        (kind.replace("_", " "), str(one["queries"]), *(f"{one[name]:.3f}" for name in (WHOLE, REGION, CELLS)))
        for kind, one in figures["by_finding"].items()
    ]
    return table((f"finding: nDCG@{K}", "n", WHOLE, REGION, CELLS), rows)


@click.command(help=__doc__)
@click.option("--phantoms", type=(str, Path), help="MODEL MANIFEST.")
@click.option("--boxes", type=(str, Path), help="MODEL MANIFEST, with boxes.")
@click.option("-o", "--output", type=Path, required=True, help="Folder of region.json.")
@click.option("--write-docs", type=Path, help="Page whose tables are filled.")
def main(
    phantoms: tuple[str, Path] | None, boxes: tuple[str, Path] | None, output: Path, write_docs: Path | None
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"machine": describe_machine()}
    sections = {"machine": f"```\n{in_words(figures['machine'])}\n```"}
    for name, given in (("phantoms", phantoms), ("boxes", boxes)):
        if given is None:
            continue
        with TemporaryDirectory() as folder:
            figures[name] = measure(given[0], read_manifest(given[1]), Path(folder), name == "phantoms")
        sections |= {name: methods_table(figures[name]), f"{name}-findings": findings_table(figures[name])}
        facts = {
            key: figures[name][key] for key in ("gallery", "queries", "patients", "too_small", "relevant", "places")
        }
        click.echo(f"{facts}\n\n{sections[name]}\n\n{sections[f'{name}-findings']}\n")
    write_json(output / "region.json", figures)
    if write_docs is not None:
        write_docs.write_text(filled(write_docs.read_text("utf-8"), "region", sections), "utf-8")


if __name__ == "__main__":
    main()
