"""Measure how well novelty detects unsuitable images, compared with the plain mean distance and the picture check.

    python benchmarks/novelty.py model.onnx manifest.csv ../shared/dicom > novelty.md

The gallery is the manifest's training split. Queries are its other images, unchanged and with the changes that the
picture check was measured with, the drawings of that check, and the DICOM files of the folder, of any body part.
Novelty and picture check are computed as for answers. Prints a table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from figures import table
from numpy.typing import NDArray

from cbmir.errors import ImageError
from cbmir.manifest import read_manifest
from cbmir.runtime import Engine, Entry, Filter, Gallery, Novelty, open_engine, read_image
from cbmir.runtime.imaging.dicom_header import Tags
from cbmir.runtime.imaging.dicom_pixels import find_frame
from cbmir.runtime.imaging.dicom_reader import parse_dicom
from cbmir.runtime.imaging.picture_check import check_picture
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.radiograph import ImageLimits, Radiograph
from cbmir.runtime.novelty import FEWEST, NEAREST, QUANTILE, score_novelty
from cbmir.training.picture_check.__main__ import CHANGES, IMPOSTORS
from cbmir.training.picture_check.impostors import KINDS, impostor

Pixels = NDArray[np.uint8]
Values = NDArray[np.float64]
#: Number of neighbours for the plain mean distance.
_MEAN_OF = 10


def _in_black(pixels: Pixels) -> Pixels:
    height, width = pixels.shape
    return np.pad(pixels, ((height // 2, height // 2), (width // 2, width // 2)))


QUERIES: dict[str, Callable[[Pixels], Pixels]] = {
    **{f"chests, {name}": change for name, (change, _) in CHANGES.items()},
    "chests, at half size in black": _in_black,
}


def main(model: str, manifest: str, dicom: str) -> None:
    images = read_manifest(manifest)
    groups: dict[str, list[tuple[Pixels, str]]] = defaultdict(list)  # images, and their patients
    with open_engine(model) as engine, TemporaryDirectory() as folder:
        spec = engine.card.preprocess
        inside = [row for row in images if row.split == "train"]
        vectors = _embedded(
            engine, [preprocess(read_image(row.image, intensity=spec.intensity), spec) for row in inside]
        )
        for row in images:
            if row.split != "train":
                pixels = read_image(row.image, intensity=spec.intensity).pixels
                for name, change in QUERIES.items():
                    groups[name].append((np.ascontiguousarray(change(pixels)), row.patient_id))
        for number in IMPOSTORS:
            groups[f"drawn: {KINDS[number % len(KINDS)].__name__}"].append((impostor(number), ""))
        for kind, pixels in _dicom(Path(dicom)):
            groups[kind].append((pixels, ""))
        noise = np.random.default_rng(0).integers(0, 256, (20, 300, 300), dtype=np.uint8)
        groups["noise"] = [(image, "") for image in noise]

        with Gallery.create(Path(folder) / "gallery", engine.card, images.labels) as gallery:
            gallery.add([Entry(f"{n}", "", row.patient_id) for n, row in enumerate(inside)], vectors)
            usual = [_measured(gallery, vector, row.patient_id)[1] for vector, row in zip(vectors, inside, strict=True)]
            limit = float(np.quantile(usual, QUANTILE))
            click.echo(f"Gallery: {len(inside)} images of {len({row.patient_id for row in inside})} patients. Flagged: "
                       f"past the gallery's own 99th percentile. AUC: against chests as they are.\n")  # fmt: skip
            base: tuple[Values, Values] | None = None
            rows = []
            for name, items in groups.items():
                found = _embedded(engine, [preprocess(pixels, spec) for pixels, _ in items])
                answers = [_measured(gallery, vector, of) for vector, (_, of) in zip(found, items, strict=True)]
                mixture = np.array([novelty.distance for novelty, _ in answers])
                mean = np.array([distance for _, distance in answers])
                base = base or (mixture, mean)
                flagged = np.mean([novelty.flagged for novelty, _ in answers])
                aucs = [f"{_auc(*pair):.2f}" for pair in zip(base, (mixture, mean), strict=True)]
                doubted = np.mean([bool(check_picture(Radiograph(pixels, name, ""))) for pixels, _ in items])
                rows.append((name, f"{len(items)}", f"{flagged:.1%}", aucs[0], f"{np.mean(mean > limit):.1%}", aucs[1],
                             f"{doubted:.1%}"))  # fmt: skip
    header = ("queries", "n", "mixture of 50: flagged", "AUC", "mean distance to 10: flagged", "AUC", "picture doubted")
    click.echo(table(header, rows))


def _embedded(engine: Engine, crops: list[Pixels]) -> NDArray[np.float32]:
    parts = [np.stack(crops[at : at + 16])[:, None] for at in range(0, len(crops), 16)]
    return np.concatenate([engine.run(part).embedding for part in parts])


def _measured(gallery: Gallery, query: NDArray[np.float32], patient: str) -> tuple[Novelty, float]:
    """Return the novelty of a query, and its mean cosine distance to the nearest images of other patients."""
    others = gallery.search(query, NEAREST, filter=Filter(exclude_patients=frozenset({patient}))).vectors
    novelty = score_novelty(query, others, gallery.reference_distances)
    if novelty is None:
        raise click.ClickException(f"expected {FEWEST} training images or more, found {len(gallery)}")
    return novelty, float(1 - (others[:_MEAN_OF] @ query).mean())


def _auc(usual: Values, strange: Values) -> float:
    """Return the probability that a strange image is farther away than a usual one."""
    above = (strange[:, None] > usual).mean() + 0.5 * (strange[:, None] == usual).mean()
    return float(above)


def _dicom(folder: Path) -> Iterator[tuple[str, Pixels]]:
    """Yield kind and pixels of the files that can be decoded, with bright bone. Some files show the same picture."""
    for path in sorted(folder.glob("*.dcm")):
        kind = {"nonchest": path.stem.split("_")[1], "lut": "testpattern"}.get(path.stem.split("_")[0], "other chests")
        try:
            dataset, buffer = parse_dicom(path.read_bytes(), path.name, ImageLimits())
            frame = find_frame(Tags(dataset, path.name), buffer)
            stored = frame.values()[frame.decode()]
        except ImageError as error:
            click.echo(f"{path.name}: left out ({type(error).__name__})", err=True)
            continue
        low, high = np.percentile(stored, [0.5, 99.5])
        grey = (255 * np.clip((stored - low) / (high - low), 0, 1)).astype(np.uint8)
        yield f"DICOM: {kind}", 255 - grey if frame.photometric == "MONOCHROME1" else grey


if __name__ == "__main__":
    main(*sys.argv[1:])
