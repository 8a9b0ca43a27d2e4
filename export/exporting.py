"""`cbmir export`: the best model of a run as files, each let in only when it answers as PyTorch does."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ModelError, ParityError, UserError
from cbmir.export.graph import to_onnx
from cbmir.export.parity import LIMITS, Parity, compare
from cbmir.export.samples import Sample, calibration_pixels, run_sample
from cbmir.files import write_json
from cbmir.runtime.engine import Outputs
from cbmir.runtime.openvino_module import import_openvino
from cbmir.training.report import opened_model
from cbmir.training.run import load_model

log = logging.getLogger("cbmir")

REPORT = "parity.json"
#: How many layers of an int8 file are left in float, tried in this order until it holds its limits.
KEPT = (0, 2, 4, 8, 16, 24)
_ADVICE = {
    "float32": "That is a fault of the exporter: please report it.",
    "float16": "This model needs float32: export it without --fp16.",
    "bfloat16": "This model needs float32: export it without --openvino bf16.",
    "int8": "Give more images by --calibrate and --calibration-images, or export it without int8.",
}
_PACKAGES = ("torch", "onnx", "onnxruntime", "openvino", "nncf")


@dataclass(frozen=True)
class ExportOptions:
    """What is wanted beside the float32 file. See `cbmir export --help`.

    `openvino` holds bf16 and int8, `targets` TensorRT targets (sm86 …, or current). `images` and `calibrate` are
    manifests in place of the run's own; `percentile` cuts the activations' range in calibration. `tolerances` are
    NAME=NUMBER for `Limits.changed`; with `accept_parity_loss` a file beyond its limits is written all the same.
    """

    fp16: bool = False
    int8: bool = False
    openvino: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    max_batch: int = 32
    images: Path | None = None
    calibrate: Path | None = None
    calibration_images: int = 96
    percentile: float | None = None
    tolerances: tuple[str, ...] = ()
    accept_parity_loss: bool = False


def export_run(run: Path, output: str | Path, options: ExportOptions | None = None) -> list[Path]:
    """Export the best model of a finished run; returns the files written.

    `output` is a file that ends in .onnx, or a folder for `model.onnx`; other files stand beside it, with endings of
    their own, and the figures of all in `parity.json`. Raises RunError (unfinished run, images no longer there),
    ManifestError, EncoderError, and ParityError for a file beyond its limits, which is not left behind; an older file
    of that name stays, and the message says so.
    """
    options = options or ExportOptions()
    _check_possible(options)
    target = output_file(output)
    report = read_report(target.parent / REPORT)
    model, card, config = load_model(run)
    sample = run_sample(config, card, options.images)
    with opened_model(run) as (_, embedder):
        job = _Job(target, card, options, sample, sample.answers(embedder, "PyTorch"), report)

    exact = to_onnx(model, card)
    job.add(".onnx", "float32", lambda path: path.write_bytes(exact))
    half = to_onnx(model, card, "float16") if options.fp16 else None
    if half is not None:
        job.add(".fp16.onnx", "float16", lambda path: path.write_bytes(half))
    if options.int8 or "int8" in options.openvino:
        pixels = calibration_pixels(config, card, options.calibrate, options.calibration_images)
        job.calibration_images = len(pixels)
    if options.int8:
        from cbmir.export.int8 import sensitive_layers, to_int8

        job.add_quantised(
            ".int8.onnx",
            lambda path, keep: path.write_bytes(to_int8(exact, pixels, keep=keep, percentile=options.percentile)),
            lambda: sensitive_layers(exact, pixels, percentile=options.percentile),
        )
    if options.openvino:
        from cbmir.export import openvino

        if "bf16" in options.openvino:
            job.add(".openvino-bf16.xml", "bfloat16", lambda path: openvino.write_openvino(exact, path, "bfloat16"))
        if "int8" in options.openvino:
            job.add_quantised(
                ".openvino-int8.xml",
                lambda path, keep: openvino.write_openvino(
                    exact, path, "int8", pixels, keep=keep, percentile=options.percentile
                ),
                lambda: list(openvino.sensitive_layers(exact, pixels, percentile=options.percentile)),
            )
    if options.targets:
        from cbmir.export.tensorrt import resolve_target, write_plan

        precision, source = ("float32", exact) if half is None else ("float16", half)
        for name in map(resolve_target, options.targets):
            job.add_plan(
                f".{name}.plan", precision, partial(write_plan, source, target=name, max_batch=options.max_batch)
            )
    return job.written


def _check_possible(options: ExportOptions) -> None:
    """Refuse what cannot be had before the long work: tolerances, packages that are missing, unknown GPUs."""
    LIMITS["float32"].changed(*options.tolerances)
    if options.openvino:
        import_openvino()
    if "int8" in options.openvino:
        from cbmir.export.openvino import import_nncf

        import_nncf()
    if options.targets:
        from cbmir.export.tensorrt import resolve_target

        for target in options.targets:
            resolve_target(target)


@dataclass(eq=False)
class _Job:
    """One export: where it goes, what it is compared with, and what has been written."""

    target: Path
    card: ModelCard
    options: ExportOptions
    sample: Sample
    reference: Outputs
    report: dict[str, Any]

    def __post_init__(self) -> None:
        self.written: list[Path] = []
        self.calibration_images = 0

    def add(self, ending: str, precision: str, write: Callable[[Path], object]) -> None:
        """Let in one file, and what belongs to it. Raises ParityError where it is beyond its limits."""
        path = self._path(ending)
        with self._staging() as folder:
            staged = Path(folder) / path.name
            write(staged)
            parity = self._compare(staged, precision)
            if parity.failures and not self.options.accept_parity_loss:
                raise self._refusal(path, precision, parity)
            self._let_in(staged, path, precision, parity, ())

    def add_quantised(
        self, ending: str, write: Callable[[Path, Sequence[str]], object], rank: Callable[[], Sequence[str]]
    ) -> None:
        """Let in an int8 file, with as few layers left in float as its limits allow, those that hurt most first."""
        path = self._path(ending)
        with self._staging() as folder:
            staged = Path(folder) / path.name
            ranked: Sequence[str] = ()
            for count in KEPT:
                if count and not ranked:
                    ranked = rank()
                kept = tuple(ranked[:count])
                write(staged, kept)
                parity = self._compare(staged, "int8")
                if not parity.failures:
                    break
                log.info("%s with %d layers in float: %s", path.name, len(kept), "; ".join(parity.failures))
            if parity.failures and not self.options.accept_parity_loss:
                raise self._refusal(path, "int8", parity)
            self._let_in(staged, path, "int8", parity, kept)

    def add_plan(self, ending: str, precision: str, write: Callable[[Path], object]) -> None:
        """Let in a TensorRT plan. It is compared where its GPU is here; elsewhere the report says that it was not."""
        path = self._path(ending)
        with self._staging() as folder:
            staged = Path(folder) / path.name
            write(staged)
            try:
                parity = self._compare(staged, precision)
            except EngineError as error:
                self._let_in(staged, path, precision, f"not compared, since its GPU is not here: {error}", ())
                return
            if parity.failures and not self.options.accept_parity_loss:
                raise self._refusal(path, precision, parity)
            self._let_in(staged, path, precision, parity, ())

    def _path(self, ending: str) -> Path:
        return self.target.with_name(self.target.stem + ending)

    def _staging(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(dir=self.target.parent, prefix=".export-", suffix=".part")

    def _compare(self, staged: Path, precision: str) -> Parity:
        try:
            with opened_model(staged) as (_, embedder):
                found = self.sample.answers(embedder, staged.name)
        except EngineError as error:
            if staged.suffix == ".plan":
                raise
            raise ParityError(f"{staged.name} was not written: {error}.{self._older(staged.name)}") from error
        limits = LIMITS[precision].changed(*self.options.tolerances)
        return compare(self.reference, found, self.sample.cases, limits)

    def _refusal(self, path: Path, precision: str, parity: Parity) -> ParityError:
        return ParityError(
            f"{path} was not written, since it answers differently from PyTorch: expected "
            f"{'; '.join(parity.failures)}. {_ADVICE[precision]} --accept-parity-loss writes it all the same."
            f"{self._older(path.name)}"
        )

    def _let_in(self, staged: Path, path: Path, precision: str, parity: Parity | str, kept: Sequence[str]) -> None:
        facts = {
            "precision": precision,
            "sha256": hashlib.sha256(staged.read_bytes()).hexdigest(),
            "fingerprint": self.card.fingerprint,
            **({"not_compared": parity} if isinstance(parity, str) else parity.to_json()),
            "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        }
        if precision == "int8":
            facts |= {"calibration_images": self.calibration_images, "kept_in_float": list(kept)}
        if isinstance(parity, Parity) and parity.failures:
            facts["accepted"] = list(parity.failures)
            log.warning("%s answers differently from PyTorch, as was accepted: %s.", path, "; ".join(parity.failures))
        files = sorted(staged.parent.iterdir(), key=lambda file: file == staged)
        size = sum(file.stat().st_size for file in files)
        for file in files:  # what belongs to the file first, so that the file is never there without it
            file.replace(path.with_name(file.name))
        self.report[path.name] = facts
        write_json(path.with_name(REPORT), self.report)
        self.written.append(path)
        log.info("%s: %s, %.1f MB; %s.", path.name, precision, size / 1e6, parity)

    def _older(self, name: str) -> str:
        """A sentence about the file that stays where the one to replace it is not let in; "" where there is none."""
        if not self.target.with_name(name).exists():
            return ""
        fingerprint = self.report.get(name, {}).get("fingerprint")
        another = f"another model (fingerprint {fingerprint})" if fingerprint else "an unknown model"
        whose = "this model" if fingerprint == self.card.fingerprint else another
        return f" An older {name}, of {whose}, was left as it was."


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
