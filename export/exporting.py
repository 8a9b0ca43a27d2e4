"""`cbmir export`: the best model of a run as ONNX files, each let in only when it answers as PyTorch does."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ManifestError, ModelError, ParityError, RunError, UserError
from cbmir.export.graph import Precision, to_onnx
from cbmir.export.parity import LIMITS, NEIGHBOURS, Parity, compare
from cbmir.files import replacing, write_json
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engine import Outputs
from cbmir.runtime.onnx_engine import OnnxEngine
from cbmir.training.config import TrainConfig
from cbmir.training.data import cached_images, evaluation_batches
from cbmir.training.evaluation import embed
from cbmir.training.model import RetrievalModel
from cbmir.training.run import load_model, training_manifest

log = logging.getLogger("cbmir")

#: At most so many images are compared: queries from val and test, and training images for them to find.
QUERIES, GALLERY = 256, 512
REPORT = "parity.json"
_BATCH = 32
_ADVICE = {
    "float32": "That is a fault of the exporter: please report it.",
    "float16": "This model needs float32: export it without --fp16.",
}


@dataclass(frozen=True, eq=False)
class ParityImages:
    """Real images, uint8 [M, 1, S, S], of which the first `queries` search the others, and PyTorch's answers."""

    pixels: NDArray[np.uint8]
    queries: int
    reference: Outputs


def export_run(run: Path, output: str | Path, *, fp16: bool = False, images: Path | None = None) -> list[Path]:
    """Export the best model of a finished run; returns the files written.

    `output` is a file that ends in .onnx, or a folder for `model.onnx`; `fp16` adds `NAME.fp16.onnx`. Figures go to
    `parity.json` beside them. The files are compared with PyTorch on the run's own images, or on those of the
    manifest `images`. Raises RunError (unfinished run, images no longer there), ManifestError, EncoderError, and
    ParityError for a file beyond its limits, which is not left behind; an older file of that name stays, and the
    message says so.
    """
    target = output_file(output)
    report = read_report(target.parent / REPORT)
    model, card, config = load_model(run)
    manifest, queries = parity_manifest(config, images)
    pixels = _read_images(manifest, card.preprocess, own=images is None)
    embedding, scores = embed(model, _batches(pixels, "PyTorch"))
    sample = ParityImages(pixels, queries, Outputs(embedding, scores))
    wanted: dict[Path, Precision] = {target: "float32"}
    if fp16:
        wanted[target.with_suffix(".fp16.onnx")] = "float16"
    for path, precision in wanted.items():
        parity = _export(model, card, precision, path, sample, older=_older(path, card, report))
        report[path.name] = _facts(path, precision, card, parity)
        write_json(target.parent / REPORT, report)
        log.info("%s: %s, %.1f MB; %s.", path.name, precision, path.stat().st_size / 1e6, parity)
    return list(wanted)


def output_file(output: str | Path) -> Path:
    """Where the float32 file goes: `output` itself, or `model.onnx` in it when it is (or reads as) a folder.

    Makes the folder. Raises UserError when that cannot be, and for a suffix other than .onnx.
    """
    path = Path(output)
    is_folder = path.is_dir() or str(output).endswith(("/", os.sep)) or not path.suffix
    if not is_folder and path.suffix.lower() != ".onnx":
        raise UserError(
            f"{output}: expected a file that ends in .onnx, or a folder, found the suffix {path.suffix!r}; "
            f"for a folder of that name write {output}/"
        )
    file = path / "model.onnx" if is_folder else path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{file.parent}: expected a folder to write to ({error.strerror}); choose another -o"
        ) from error
    return file


def read_report(path: Path) -> dict[str, Any]:
    """The figures of the files already beside, by file name. Raises ModelError for a damaged report."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path}: expected the report of an earlier export, found {error}; delete it to go on"
        ) from error


def parity_manifest(config: TrainConfig, images: Path | None) -> tuple[Manifest, int]:
    """The images to compare on, and how many of them, at the front, are queries.

    Queries come from val and test (from every row where the table has neither), the rest from train; both evenly
    spread. Raises RunError when the run's own table is gone or changed, ManifestError for too few images.
    """
    if images is not None:
        manifest = read_manifest(images)
    else:
        try:
            manifest = training_manifest(config)
        except (ManifestError, RunError) as error:
            raise _images_gone(error) from error
    queries, gallery = manifest.split("val", "test").rows, manifest.split("train").rows
    if not queries:
        queries, gallery = manifest.rows, ()
    queries, gallery = _evenly(queries, QUERIES), _evenly(gallery, GALLERY)
    if len(queries) + len(gallery) <= NEIGHBOURS:
        raise ManifestError(
            f"expected more than {NEIGHBOURS} images to compare the exported file on, found "
            f"{len(queries) + len(gallery)}; give a manifest with more by --images manifest.csv"
        )
    return Manifest(manifest.labels, queries + gallery), len(queries)


def _evenly(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """At most so many rows, spread over all of them."""
    return rows if len(rows) <= most else tuple(rows[i * len(rows) // most] for i in range(most))


def _read_images(manifest: Manifest, spec: PreprocessSpec, *, own: bool) -> NDArray[np.uint8]:
    with TemporaryDirectory() as folder:
        try:
            squares = cached_images(manifest, spec, Path(folder))
        except ManifestError as error:
            raise (_images_gone(error) if own else error) from error
        return np.concatenate(list(evaluation_batches(squares, range(len(manifest)), spec)))


def _images_gone(error: Exception) -> RunError:
    return RunError(
        f"{error}. An exported file is compared with PyTorch on real images, at first those of the run: "
        f"bring them back, or give others by --images manifest.csv"
    )


def _older(path: Path, card: ModelCard, report: dict[str, Any]) -> str:
    """A sentence about the file that stays where the one to replace it is not let in; "" where there is none."""
    if not path.exists():
        return ""
    fingerprint = report.get(path.name, {}).get("fingerprint")
    another = f"another model (fingerprint {fingerprint})" if fingerprint else "an unknown model"
    whose = "this model" if fingerprint == card.fingerprint else another
    return f" An older {path.name}, of {whose}, was left as it was."


def _export(
    model: RetrievalModel, card: ModelCard, precision: Precision, path: Path, sample: ParityImages, *, older: str
) -> Parity:
    """Write one file under a temporary name, compare, and rename it only when it is within its limits."""
    with replacing(path) as temporary:
        temporary.write_bytes(to_onnx(model, card, precision))
        try:
            with OnnxEngine(temporary) as engine:
                # The feature maps are asked for so that the engine refuses them where half precision overflows.
                answers = [engine.run(batch, feature_map=True) for batch in _batches(sample.pixels, path.name)]
        except EngineError as error:
            raise ParityError(f"{path} was not written: {error}.{older}") from error
        found = Outputs(np.concatenate([a.embedding for a in answers]), np.concatenate([a.scores for a in answers]))
        parity = compare(sample.reference, found, queries=sample.queries, limits=LIMITS[precision])
        if parity.failures:
            raise ParityError(
                f"{path} was not written, since it answers differently from PyTorch: expected "
                f"{'; '.join(parity.failures)}. {_ADVICE[precision]}{older}"
            )
    return parity


def _batches(pixels: NDArray[np.uint8], what: str) -> Iterator[NDArray[np.uint8]]:
    for start in tqdm(range(0, len(pixels), _BATCH), desc=what, unit="batch", disable=None):
        yield pixels[start : start + _BATCH]


def _facts(path: Path, precision: Precision, card: ModelCard, parity: Parity) -> dict[str, Any]:
    return {
        "precision": precision,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "fingerprint": card.fingerprint,
        **parity.to_json(),
        "versions": {name: version(name) for name in ("torch", "onnx", "onnxruntime")},
    }
