"""`cbmir export`: write the best model of a run, an untrained encoder or a converted file, and check its answers."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ModelError, ParityError, UserError
from cbmir.export import openvino, quantize_ort, tensorrt
from cbmir.export.compare import Sample, calibration_of, calibration_pixels, run_sample, sample_from
from cbmir.export.graph_rewrite import encoder_nodes, read_graph
from cbmir.export.onnx_graph import to_onnx
from cbmir.export.options import ExportOptions, check_possible
from cbmir.export.parity import LIMITS, Parity, measure_parity
from cbmir.files import write_json
from cbmir.input_file import read_json
from cbmir.machine import describe_machine, versions
from cbmir.manifest import read_manifest
from cbmir.runtime.engines.base import Outputs
from cbmir.runtime.engines.registry import why_not
from cbmir.runtime.engines.tensorrt import read_plan_info
from cbmir.training.embedding_model import embedding_model
from cbmir.training.evaluate import embed, on_fastest_device, opened_model
from cbmir.training.model import RetrievalModel
from cbmir.training.run import load_model

log = logging.getLogger("cbmir")

REPORT = "parity.json"
#: Numbers of first layers to keep in float in a bfloat16 or int8 file, tried in this order until the file is within
#: its limits. Rounding the first layers changes the embedding most (docs/starter.md).
FLOAT_LAYERS = (0, 2, 4, 8, 16, 32)
_ADVICE = {
    "float32": "A network that has hardly learnt may be this sensitive to rounding. Otherwise this is a bug in the "
    "exporter: please report it.",
    "float16": "This model needs float32: export it without --fp16.",
    "bfloat16": "This model needs float32: export it without --openvino bf16.",
    "int8": "Give more images with --calibrate and --calibration-images, or export it without int8.",
}
#: Writes a file. The number is that of first layers in float, for bfloat16 and int8.
Write = Callable[[Path, int], object]


def export_run(run: Path, output: str | Path, options: ExportOptions | None = None) -> list[Path]:
    """Export the best model of a finished run.

    A file that misses its limits is not kept; an older file of that name stays, and the message says so.

    Args:
        run: The folder of a finished run.
        output: A file that ends in .onnx, or a folder for `model.onnx`. The other files are written beside it with
            other endings, and the figures of all files to `parity.json`.

    Returns:
        The paths of the written files.

    Raises:
        RunError: The run is not finished, or its images are missing.
        ManifestError, EncoderError: See the message.
        ParityError: Files miss their limits; the others are written.
    """
    options = options or ExportOptions()
    target = _target(output, options)
    model, card, config = load_model(run)
    sample = run_sample(config, card, options.images)
    pixels = None
    if options.quantises:
        pixels = calibration_pixels(config, card, options.calibrate, options.calibration_images, sample.cases.asking)
    with opened_model(run) as (_, embedder):
        reference = sample.answers(embedder, "PyTorch")
    return _write_all(model, _Export(target, card, options, sample, reference), pixels)


def export_file(model: Path, output: str | Path, options: ExportOptions) -> list[Path]:
    """Convert a float32 file of cbmir, such as the starter, to other files, which are compared with it.

    Args:
        model: The file, which is not copied (`runtime.models.catalog.find_model` gives that of the starter).
        output: As in `export_run`.
        options: `images` is required: the files are compared on them. `fp16` needs the run.

    Raises:
        UserError: No images, no file to write, `fp16`, or not a float32 file.
        ModelError: The file cannot be read.
        ManifestError, SplitError: The images cannot be used.
        ParityError: Files miss their limits; the others are written.
    """
    if options.fp16:
        raise UserError(f"expected a RUN for --fp16, found {model}; export the run that it was made from")
    if not (options.quantises or options.openvino or options.targets):
        raise UserError("expected files to convert to, found none; give --openvino, --int8 or --tensorrt")
    wanted = f"expected a float32 .onnx file of cbmir, such as model.onnx, found {model}"
    if model.suffix != ".onnx":
        raise UserError(wanted)
    target = _target(output, options)
    with opened_model(model) as (card, embedder):
        if card.precision != "float32":
            raise UserError(f"{wanted}, which is {card.precision}")
        sample, pixels = _given_images(card, options)
        reference = sample.answers(embedder, model.name)
    exact = model.read_bytes()
    _check_encoder(exact, options)
    return _write(exact, None, _Export(target, card, options, sample, reference, model.name), pixels)


def export_encoder(
    encoder: str, weights: str, output: str | Path, options: ExportOptions, *, image_size: int | None = None,
    grey_range: str = "own", intensity: str = "header",
) -> list[Path]:  # fmt: skip
    """Export an encoder with published weights as an embedding model: no training, no findings, no scores.

    Args:
        encoder: Its name for `build_encoder`.
        weights: A file, or `imagenet`.
        output: As in `export_run`.
        options: `images` is required: the files are compared with PyTorch on them.
        image_size: None means that of the published weights.
        grey_range: `own`, `signed` or MEAN,STD (`grey_range_of`).
        intensity: How stored values become grey (`PreprocessSpec`).

    Raises:
        UserError: No weights or no images were given.
        EncoderError: The encoder is unknown, or some of its weights are missing.
        ManifestError, SplitError: The images cannot be used.
        ParityError: Files miss their limits; the others are written.
    """
    target = _target(output, options)
    model, card = embedding_model(encoder, weights, image_size=image_size, grey_range=grey_range, intensity=intensity)
    sample, pixels = _given_images(card, options)
    network = copy.deepcopy(model)
    on_fastest_device(network)
    reference = sample.answers(partial(embed, network), "PyTorch")
    return _write_all(model, _Export(target, card, options, sample, reference), pixels)


def _target(output: str | Path, options: ExportOptions) -> Path:
    """Check that the export is possible, and return the path of the float32 file."""
    check_possible(options)
    target = output_file(output)
    read_report(target.parent / REPORT)  # fail now if the older report is damaged
    return target


def _given_images(card: ModelCard, options: ExportOptions) -> tuple[Sample, NDArray[np.uint8] | None]:
    """Read the images of `options.images` to compare files on, and those to calibrate int8 on if any file is int8."""
    if options.images is None:
        raise UserError("expected images to compare files on, found none; give a manifest with --images")
    sample = sample_from(options.images, card)
    if not options.quantises:
        return sample, None
    table = read_manifest(options.calibrate or options.images)
    return sample, calibration_of(table, card, options.calibration_images, sample.cases.asking)


def _check_encoder(exact: bytes, options: ExportOptions) -> None:
    if options.int8 and any(node.op_type == "MatMul" for node in encoder_nodes(read_graph(exact))):
        raise UserError("expected a convolutional encoder for --int8, found a transformer, which ONNX Runtime would "
                        "still run almost entirely in float; use --openvino int8 or bf16, or --fp16")  # fmt: skip


def _write_all(model: RetrievalModel, export: _Export, pixels: NDArray[np.uint8] | None) -> list[Path]:
    """Write the float32 file of a model, and the other files."""
    exact = to_onnx(model, export.card)
    _check_encoder(exact, export.options)
    export.add(".onnx", lambda path, _: path.write_bytes(exact))
    half = to_onnx(model, export.card, "float16") if export.options.fp16 else None
    return _write(exact, half, export, pixels)


def _write(exact: bytes, half: bytes | None, export: _Export, pixels: NDArray[np.uint8] | None) -> list[Path]:
    """Write all other files, which are made from the float32 file `exact`. `pixels` are for calibrating int8."""
    layers = sum(node.op_type == "Conv" for node in encoder_nodes(read_graph(exact)))
    steps = [count for count in FLOAT_LAYERS if count < layers]
    refused = []
    for ending, write, in_steps in _others(export.options, exact, half, pixels):
        try:
            export.add(ending, write, steps if in_steps else None, 0 if pixels is None else len(pixels))
        except ParityError as error:
            refused.append(str(error))
    export.warn_of_older()
    if refused:
        raise ParityError("\n".join(refused))
    return export.written


def _others(
    options: ExportOptions, exact: bytes, half: bytes | None, pixels: NDArray[np.uint8] | None
) -> Iterator[tuple[str, Write, bool]]:
    """Yield, for each file except the first: ending, writer, and whether it may keep layers in float. Slowest last."""
    percentile = options.percentile

    def plan(target: str) -> Write:
        return lambda path, _: tensorrt.write_plan(half or exact, path, target=target, max_batch=options.max_batch)

    if half is not None:
        yield ".fp16.onnx", lambda path, _: path.write_bytes(half), False
    if "bf16" in options.openvino:
        yield (
            ".openvino-bf16.xml",
            lambda path, kept: openvino.write_openvino(exact, path, "bfloat16", float_layers=kept),
            True,
        )
    for target in map(tensorrt.resolve_target, options.targets):
        yield f".{target}.plan", plan(target), False
    if options.int8 and pixels is not None:
        yield (
            ".int8.onnx",
            lambda path, kept: path.write_bytes(
                quantize_ort.to_int8(exact, pixels, float_layers=kept, percentile=percentile)
            ),
            True,
        )
    if "int8" in options.openvino and pixels is not None:
        yield (
            ".openvino-int8.xml",
            lambda path, kept: openvino.write_openvino(
                exact, path, "int8", pixels, float_layers=kept, percentile=percentile
            ),
            True,
        )


@dataclass(eq=False)
class _Export:
    """The target of an export, the answers to compare with and whose they are, and the files written so far."""

    target: Path
    card: ModelCard
    options: ExportOptions
    sample: Sample
    reference: Outputs
    source: str = "PyTorch"
    written: list[Path] = field(default_factory=list)

    def add(self, ending: str, write: Write, steps: Sequence[int] | None = None, calibrated_on: int = 0) -> None:
        """Write a file, compare it, and keep it if it is within its limits. Raises ParityError.

        A TensorRT plan that cannot run here is kept, and the report says why it was not compared. `steps` are numbers
        of layers in float; the first with which the file is within its limits is kept. If no step is enough and parity
        loss is accepted, the first one is kept. None: the file has no such layers.
        """
        path = self.target.with_name(self.target.stem + ending)
        tries = []
        with TemporaryDirectory(dir=path.parent, prefix=".export-", suffix=".part") as folder:
            for kept in steps or (0,):
                staged = Path(folder, str(kept), path.name)
                staged.parent.mkdir()
                write(staged, kept)
                if staged.suffix == ".plan" and (why := why_not("tensorrt") or read_plan_info(staged).why_not()):
                    self._let_in(staged, read_plan_info(staged).card, why)
                    return
                card, parity = self._compare(staged)
                tries.append((staged, card, parity, kept))
                if not parity.failures:
                    break
                if steps:
                    log.info("%s with %d layers in float: %s", path.name, kept, "; ".join(parity.failures))
            if parity.failures and not self.options.accept_parity_loss:
                raise ParityError(
                    f"{path} was not written, since it answers differently from {self.source}: expected "
                    f"{'; '.join(parity.failures)}. {_ADVICE[card.precision]} --accept-parity-loss writes it all the "
                    f"same.{self._older(path.name)}"
                )
            staged, card, parity, kept = tries[0 if parity.failures else -1]
            facts: dict[str, Any] = {"float_layers": kept} if steps else {}
            if card.precision == "int8":
                facts |= {"calibration_images": calibrated_on, "percentile": self.options.percentile}
            self._let_in(staged, card, parity, facts)

    def warn_of_older(self) -> None:
        """Warn about files of another model in the same folder, which stay."""
        report = read_report(self.target.with_name(REPORT))
        older = [
            name
            for name, facts in report.items()
            if name.startswith(f"{self.target.stem}.") and facts.get("weights") != self.card.weights
            if self.target.with_name(name).exists()
        ]
        if older:
            log.warning("Files of another model stay beside %s: %s.", self.target, ", ".join(older))

    def _compare(self, staged: Path) -> tuple[ModelCard, Parity]:
        try:
            with opened_model(staged) as (card, embedder):
                found = self.sample.answers(embedder, staged.name)
        except EngineError as error:
            raise ParityError(f"{staged.name} was not written: {error}.{self._older(staged.name)}") from error
        limits = LIMITS[card.precision].for_images(card, self.sample.cases).changed(*self.options.tolerances)
        return card, measure_parity(self.reference, found, self.sample.cases, limits)

    def _let_in(self, staged: Path, card: ModelCard, found: Parity | str, more: Mapping[str, Any] = {}) -> None:
        """Keep a file. `found` is the comparison, or the reason why it is missing; `more` is added to the report."""
        path = self.target.with_name(staged.name)
        machine = describe_machine()
        facts = {
            "precision": card.precision,
            "sha256": hashlib.sha256(staged.read_bytes()).hexdigest(),
            "fingerprint": card.fingerprint,
            "weights": card.weights,
            "compared_with": self.source,
            **({"not_compared": found} if isinstance(found, str) else found.to_json()),
            **more,
            "processor": " ".join([machine["processor"], *machine["features"]]),
            "versions": versions("torch", "onnx", "onnxruntime", "openvino", "nncf"),
        }
        if isinstance(found, Parity) and found.failures:
            facts["accepted"] = list(found.failures)
            log.warning(
                "%s answers differently from %s, as was accepted: %s.", path, self.source, "; ".join(found.failures)
            )
        files = sorted(staged.parent.iterdir(), key=lambda file: file == staged)
        size = sum(file.stat().st_size for file in files)
        for file in files:  # companions first, so that the file never exists without them
            file.replace(path.with_name(file.name))
        report = path.with_name(REPORT)
        write_json(report, read_report(report) | {path.name: facts})  # read again: another export may have written it
        self.written.append(path)
        words = f"not compared here: {found}" if isinstance(found, str) else str(found)
        in_float = f", {more['float_layers']} layers in float" if "float_layers" in more else ""
        log.info("%s: %s%s, %.1f MB; %s.", path.name, card.precision, in_float, size / 1e6, words)

    def _older(self, name: str) -> str:
        """Return a sentence about the older file of that name, which is kept; "" without one."""
        if not self.target.with_name(name).exists():
            return ""
        weights = read_report(self.target.with_name(REPORT)).get(name, {}).get("weights")
        another = f"another model (fingerprint {weights})" if weights else "an unknown model"
        whose = "this model" if weights == self.card.weights else another
        return f" An older {name}, of {whose}, was left as it was."


def output_file(output: str | Path) -> Path:
    """Return the path of the float32 file: `output`, or `model.onnx` in it if it is a folder or has no suffix.

    Creates the folder. Raises UserError if that fails, or if the suffix is not .onnx.
    """
    path = Path(output)
    is_folder = path.is_dir() or str(output).endswith(("/", os.sep)) or not path.suffix
    if not is_folder and path.suffix.lower() != ".onnx":
        raise UserError(f"{output}: expected a file that ends in .onnx, or a folder, found the suffix {path.suffix!r}; "
                        f"for a folder of that name write {output}/")  # fmt: skip
    file = path / "model.onnx" if is_folder else path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{file.parent}: expected a folder to write to ({error.strerror}); choose another -o"
        raise UserError(why) from error
    return file


def read_report(path: Path) -> dict[str, Any]:
    """Read the figures of earlier exported files, by file name. Raises ModelError for a damaged report."""
    if not path.exists():
        return {}
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        why = f"{path}: expected the report of an earlier export, found {error}; delete it to continue"
        raise ModelError(why) from error
