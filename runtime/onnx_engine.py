"""ONNX Runtime. One session serves any number of threads.

File contract: input `image` uint8 [N,1,S,S] with dynamic N; outputs `embedding` float32 [N,D], `scores` float32 [N,C],
`feature_map` float32 [N,D,h,w]; metadata `cbmir.card` (JSON) and `cbmir.head` (base64 of little-endian float32 [P,D]).
"""

from __future__ import annotations

import base64
import binascii
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, EngineError, ModelError, require
from cbmir.runtime.engine import EngineHealth, Outputs, available_threads

log = logging.getLogger("cbmir")

# Each list ends in the CPU, which takes the operators that the others lack.
_PROVIDERS = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
    "tensorrt": ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
}
_NAMES = {providers[0]: name for name, providers in _PROVIDERS.items()}
_OUTPUTS = ("embedding", "scores", "feature_map")
_CHUNK = 32  # bounds the memory of activations; larger batches gain nothing on a CPU
_FATAL = 4  # what goes wrong is raised, so ONNX Runtime need not print it as well


class OnnxEngine:
    """An ONNX file of cbmir in an ONNX Runtime session. See `open_engine` for the errors."""

    def __init__(
        self, path: str | Path, *, provider: str = "cpu", threads: int | None = None, allow_fallback: bool = False
    ) -> None:
        ort = require("onnxruntime", "cpu" if provider == "cpu" else "gpu")
        self._errors = _ort_errors()
        self._requested = provider
        self._threads = threads or available_threads()
        self._version: str = ort.__version__
        self._warnings: tuple[str, ...] = ()

        session, why = self._load(ort, path)
        # ONNX Runtime goes on without a provider that it cannot load: what counts is what the session has.
        self._provider: str = session.get_providers()[0]
        if self._provider != _PROVIDERS[provider][0]:
            usable = ", ".join(name for ep, name in _NAMES.items() if ep in ort.get_available_providers())
            found = f"provider {provider!r} was asked for, but cannot be used here (installed: {usable}){why}"
            if not allow_fallback:
                raise EngineError(
                    f'{found}. Install it with: pip install "cbmir[gpu]" (in place of onnxruntime, on a machine with '
                    f"an NVIDIA driver), or choose a provider that is there"
                )
            self._warnings = (f"{found}. Running on {_NAMES[self._provider]} instead.",)
            log.warning("%s", self._warnings[0])

        metadata = session.get_modelmeta().custom_metadata_map
        if CARD_KEY not in metadata:
            raise CardError(f"{path}: expected a model card inside the ONNX file ({CARD_KEY}), found none; "
                            f"only files written by 'cbmir export' can be used")  # fmt: skip
        self.card = ModelCard.loads(metadata[CARD_KEY], source=str(path))
        self.head = _decode_head(metadata.get(HEAD_KEY, ""), self.card, path)
        _check_graph(session, self.card, path)
        self._session: Any = session

    def _load(self, ort: Any, path: str | Path) -> tuple[Any, str]:
        """A session with the provider asked for, or one on the CPU and why."""
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.enable_cpu_mem_arena = False
        options.intra_op_num_threads = self._threads
        options.log_severity_level = _FATAL
        available = ort.get_available_providers()
        wanted = [name for name in _PROVIDERS[self._requested] if name in available]
        why = ""
        for providers in dict.fromkeys((tuple(wanted), ("CPUExecutionProvider",))):
            try:
                return ort.InferenceSession(str(path), options, providers=providers, enable_fallback=False), why
            except self._errors as error:
                why = f": {error}"
        raise ModelError(f"{path}: expected an ONNX model written by 'cbmir export', ONNX Runtime cannot load it{why}")

    def run(self, batch: NDArray[np.uint8], *, feature_map: bool = False) -> Outputs:
        """Run uint8 [N, 1, S, S]; N may be 0, and a large N is run in pieces. Raises EngineError."""
        session = self._session  # a local name, so that `close` in another thread does not pull it away
        if session is None:
            raise EngineError("the engine is closed; open the model again")
        size = self.card.preprocess.crop
        if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != (1, size, size):
            raise EngineError(
                f"expected a batch uint8 [N, 1, {size}, {size}], found {batch.dtype} {list(batch.shape)}; "
                f"cbmir.runtime.preprocess makes the images of one"
            )
        names = _OUTPUTS if feature_map else _OUTPUTS[:2]
        if not len(batch):
            dim, labels = self.card.embedding_dim, len(self.card.labels)
            empty = [np.empty(shape, np.float32) for shape in ((0, dim), (0, labels), (0, dim, 0, 0))]
            return Outputs(*empty[: len(names)])
        pieces = []
        for start in range(0, len(batch), _CHUNK):
            piece = np.ascontiguousarray(batch[start : start + _CHUNK])
            try:
                pieces.append(session.run(names, {"image": piece}))
            except self._errors as error:
                raise EngineError(f"ONNX Runtime failed on {_NAMES[self._provider]}: {error}") from error
        outputs = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
        for name, array in zip(names, outputs, strict=True):
            if not np.isfinite(array).all():
                raise EngineError(
                    f"expected finite values of {name!r}, found NaN or infinity; this model file "
                    f"({self.card.precision}) overflows: export it in float32"
                )
        return Outputs(*outputs)

    def health(self) -> EngineHealth:
        provider = _NAMES[self._provider]
        return EngineHealth(
            engine="onnxruntime",
            requested=self._requested,
            provider=provider,
            device="cpu" if provider == "cpu" else "cuda:0",
            precision=self.card.precision,
            threads=self._threads,
            version=self._version,
            warnings=self._warnings,
        )

    def close(self) -> None:
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ort_errors() -> tuple[type[Exception], ...]:
    """The exceptions of ONNX Runtime, which have no base class of their own but Exception."""
    state = require("onnxruntime.capi.onnxruntime_pybind11_state", "cpu")
    found = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*found, RuntimeError)


def _decode_head(text: str, card: ModelCard, path: str | Path) -> NDArray[np.float32]:
    rows = sum(card.proxies_per_class) if card.head == "proxy" else len(card.labels)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CardError(f"{path}: expected base64 in {HEAD_KEY}, found {error}; export the model again") from error
    expected = rows * card.embedding_dim * 4
    if len(data) != expected:
        raise CardError(
            f"{path}: expected {HEAD_KEY} to hold float32 [{rows}, {card.embedding_dim}] ({expected} bytes), "
            f"found {len(data)} bytes; export the model again"
        )
    head = np.frombuffer(data, "<f4").reshape(rows, card.embedding_dim).astype(np.float32)
    if not np.isfinite(head).all():
        raise CardError(f"{path}: expected finite values in {HEAD_KEY}, found NaN or infinity; export the model again")
    return head


def _check_graph(session: Any, card: ModelCard, path: str | Path) -> None:
    size, dim = card.preprocess.crop, card.embedding_dim
    expected = {
        "image": ("tensor(uint8)", [None, 1, size, size]),
        "embedding": ("tensor(float)", [None, dim]),
        "scores": ("tensor(float)", [None, len(card.labels)]),
        "feature_map": ("tensor(float)", [None, dim, None, None]),
    }
    found = {node.name: (node.type, node.shape) for node in (*session.get_inputs(), *session.get_outputs())}
    if set(expected) != set(found) or len(session.get_inputs()) != 1:
        raise ModelError(f"{path}: expected the input image and the outputs {', '.join(_OUTPUTS)}, "
                         f"found {', '.join(found)}; export the model again")  # fmt: skip
    for name, (kind, shape) in expected.items():
        found_kind, found_shape = found[name]
        fits = len(shape) == len(found_shape) and not isinstance(found_shape[0], int)
        # A dimension that the file leaves open (a name or None) is known only when it runs.
        fits &= all(b == a or not isinstance(b, int) for a, b in zip(shape, found_shape, strict=False) if a is not None)
        if found_kind != kind or not fits:
            text = ", ".join("any" if side is None else str(side) for side in shape)
            raise ModelError(f"{path}: expected {name} {kind} [{text}] with an open batch size, "
                             f"found {found_kind} {found_shape}; export the model again")  # fmt: skip
