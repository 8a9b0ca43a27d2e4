"""OpenVINO on a CPU: the files of `cbmir export --openvino`, and cbmir's float32 .onnx files.

An .xml file follows the contract of `cbmir.runtime.engines.ort`; its weights are in the .bin file beside it. The card
and the head are in rt_info `framework`, where OpenVINO keeps an ONNX file's metadata. So is the SHA-256 of the weights,
because OpenVINO silently accepts the weights of another model of the same shape.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.choices import Mode
from cbmir.errors import CardError, EngineError, ModelError, require
from cbmir.input_file import MOST_MODEL, read_input
from cbmir.process import available_threads
from cbmir.runtime.engines.base import Engine, Runner, check_graph, decode_head

WEIGHTS_KEY = "cbmir.weights"  # rt_info key of the .bin file's SHA-256
_LOCK = threading.RLock()  # held while `hidden` changes sys.modules


def import_openvino() -> ModuleType:
    """Import `openvino`, ready for use by several threads. Raises MissingDependencyError.

    `openvino.tools.ovc` is left out: it reports the import to Google Analytics, writes an identifier into the home
    folder, and doubles the import time.
    """
    with hidden("openvino.tools.ovc"):
        openvino = require("openvino", "openvino")
        # Two threads that use their first type at the same time deadlock (seen with 2026.4.1).
        openvino.Type.u8.to_dtype()
        return openvino


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Make imports of these modules fail within the block, which only one thread at a time can enter."""
    with _LOCK:
        before = {name: sys.modules[name] for name in names if name in sys.modules}
        sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None makes the import fail
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)
            sys.modules.update(before)


def check(engine: str) -> str:
    """Return OpenVINO's name and version. Raises CbmirError if it cannot run here."""
    openvino = import_openvino()
    if "CPU" not in (found := openvino.Core().available_devices):
        others = ", ".join(found) or "nothing"
        raise EngineError(f"OpenVINO finds no CPU that it can use, only {others}; reinstall its wheel")
    return f"OpenVINO {openvino.__version__}"


def why_no_bfloat16() -> str:
    """Return why OpenVINO cannot compute in bfloat16 on this processor, in one sentence; "" if it can."""
    core = import_openvino().Core()
    if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return ""
    return (f"expected a processor with bfloat16 arithmetic (AVX512-BF16 or AMX), found "
            f"{core.get_property('CPU', 'FULL_DEVICE_NAME')}, which would only emulate it; open the float32 .onnx file "
            f"or an int8 one")  # fmt: skip


class OpenVinoEngine(Engine):
    """An .xml or .onnx file of cbmir in OpenVINO. Arguments are as in `open_engine`.

    Images run one by one: a fixed shape needs a third of the memory of a dynamic one, and streams of single images are
    the fastest way to run a batch.
    """

    def __init__(
        self, path: str | Path, *, threads: int | None = None, mode: Mode = "auto", cache: Path | None = None
    ) -> None:
        ov = import_openvino()
        self._path, self._version = Path(path), ov.__version__.split("-")[0]
        self._core = ov.Core()
        if cache is not None:
            self._core.set_property({"CACHE_DIR": str(cache)})
        self._model = _read(self._core, self._path)
        card = ModelCard.loads(_metadata(self._model, CARD_KEY, self._path), source=str(path))
        head = decode_head(_metadata(self._model, HEAD_KEY, self._path), card, path)
        super().__init__(card, head, threads=threads, mode=mode)
        if self.threads > available_threads():  # OpenVINO would not use more
            self.warn(f"{self.threads} threads were requested; OpenVINO uses the {available_threads()} available")
            self.threads = available_threads()
        if self._path.suffix.lower() == ".onnx" and card.precision not in ("float32", "bfloat16"):
            raise EngineError(f"{path}: expected an .onnx file in float32 for OpenVINO, found one in {card.precision}, "
                              f"in which it would not compute; open model.onnx")  # fmt: skip
        types, found = {"u8": "uint8", "f32": "float32"}, {}
        for port in (*self._model.inputs, *self._model.outputs):
            kind, sides = port.element_type.to_string(), list(port.partial_shape)[1:]
            lengths = [None if side.is_dynamic else int(side.get_length()) for side in sides]
            found[port.get_any_name()] = types.get(kind, kind), [None, *lengths]  # the batch size is set to one below
        check_graph(path, card, len(self._model.inputs), found)
        self._model.reshape([1, 1, card.preprocess.crop, card.preprocess.crop])
        self._precision = "bf16" if card.precision == "bfloat16" else "f32"
        if self._precision == "bf16" and (why := why_no_bfloat16()):
            raise EngineError(f"{path}: {why}")
        self._runner(1 if mode == "throughput" else self.threads)  # compiled now, so that opening reports errors

    def close(self) -> None:
        super().close()
        self._model = None

    def _open(self, threads: int) -> Runner:
        """Compile one stream with all threads, or one stream per thread."""
        streams = self.threads // threads
        asked = {"INFERENCE_PRECISION_HINT": self._precision, "INFERENCE_NUM_THREADS": self.threads,
                 "NUM_STREAMS": streams}  # fmt: skip
        try:
            # Pinned threads of two processes would share one core while another is idle.
            compiled = self._core.compile_model(self._model, "CPU", asked | {"ENABLE_CPU_PINNING": False})
        except RuntimeError as error:
            raise ModelError(f"{self._path}: OpenVINO cannot compile this model: {error}") from error
        found = {name: compiled.get_property(name) for name in asked}
        found["INFERENCE_PRECISION_HINT"] = found["INFERENCE_PRECISION_HINT"].to_string()
        if found["INFERENCE_PRECISION_HINT"] != self._precision:
            raise EngineError(f"{self._path}: expected OpenVINO to compute in {self._precision}, found {found}")
        if found != asked:
            self.warn(f"OpenVINO was asked for {asked} and used {found}")
        if self._mode != "auto" or self.threads == 1 or self._runners:  # nothing more will be compiled
            self._model = None
        return _runner_of([compiled.create_infer_request() for _ in range(streams)])

    def _describe(self) -> tuple[str, str, str]:
        return "openvino", "cpu", self._version


def _runner_of(requests: Sequence[Any]) -> Runner:
    """Make a runner that waits for an idle request and gives it the images."""
    idle: SimpleQueue[Any] = SimpleQueue()
    for request in requests:
        idle.put(request)

    def run(batch: NDArray[np.uint8], names: Sequence[str]) -> Sequence[NDArray[np.float32]]:
        request = idle.get()
        try:
            answers = []
            for image in batch:
                found = request.infer([image[None]], share_inputs=True, share_outputs=True)
                answers.append([found[name].copy() for name in names])
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed: {error}") from error
        finally:
            idle.put(request)
        return [np.concatenate(arrays) for arrays in zip(*answers, strict=True)]

    return run


def _read(core: Any, path: Path) -> Any:
    """Read the model of an .xml or .onnx file, without compiling it. Raises ModelError and CardError."""
    beside = path.with_suffix(".bin") if path.suffix.lower() == ".xml" else None
    try:
        weights = read_input(beside, MOST_MODEL) if beside else b""
        # As bytes: OpenVINO tries a file that it does not recognise as a TensorFlow model, and prints messages.
        model = core.read_model(read_input(path, MOST_MODEL), weights)
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{path}: expected a model written by 'cbmir export', OpenVINO cannot read it: "
                         f"{error}") from error  # fmt: skip
    if beside and hashlib.sha256(weights).hexdigest() != _metadata(model, WEIGHTS_KEY, path):
        raise ModelError(f"{path}: expected the weights that belong to it in {beside.name}, found others (by their "
                         f"SHA-256); copy both files again, or export the model again")  # fmt: skip
    return model


def _metadata(model: Any, key: str, path: Path) -> str:
    where = ["framework", key]
    if not model.has_rt_info(where):
        raise CardError(f"{path}: expected {key} inside the file, found none; only files written by 'cbmir export' can "
                        f"be used")  # fmt: skip
    return str(model.get_rt_info(where).astype(str))
