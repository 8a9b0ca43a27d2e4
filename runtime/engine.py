"""The engine protocol: a batch of preprocessed images in, embeddings and scores out, whatever does the arithmetic."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ModelError

#: What can be asked for; every one of them is checked after loading.
PROVIDERS = ("cpu", "cuda", "tensorrt")


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model says of N images.

    embedding: float32 [N, D], unit norm. scores: float32 [N, C] in [0, 1], in the card's label order.
    feature_map: float32 [N, D, h, w], or None if not asked for; its mean over the cells, normed, is the embedding.
    """

    embedding: NDArray[np.float32]
    scores: NDArray[np.float32]
    feature_map: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EngineHealth:
    """What really runs: `provider` is the one in use, `requested` the one asked for."""

    engine: str
    requested: str
    provider: str
    device: str
    precision: str
    threads: int
    version: str
    warnings: tuple[str, ...] = ()


class Engine(Protocol):
    """A loaded model. `run` may be called from many threads at once."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def head(self) -> NDArray[np.float32]:
        """float32 [P, D]: the unit proxies, class-major in label order with the negative class last; or the C weight
        rows of a linear head."""
        ...

    def run(self, batch: NDArray[np.uint8], *, feature_map: bool = False) -> Outputs:
        """Run uint8 [N, 1, S, S]. Raises EngineError for another dtype or shape and for outputs not finite."""
        ...

    def health(self) -> EngineHealth: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def available_threads() -> int:
    """Processors that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_engine(
    path: str | Path, *, provider: str = "cpu", threads: int | None = None, allow_fallback: bool = False
) -> Engine:
    """Load a model file by its suffix. `threads` None means every processor that this process may use.

    Raises ModelError for a file that is not cbmir's, CardError for one without a usable card, EngineError for a
    provider that is not there (unless `allow_fallback`, which then warns and says so in `health()`).
    """
    path = Path(path)
    if provider not in PROVIDERS:
        raise EngineError(f"expected provider {', '.join(PROVIDERS)}; found {provider!r}")
    if threads is not None and threads < 1:
        raise EngineError(f"expected at least 1 thread, found {threads}")
    try:
        exists = path.exists()
    except OSError as error:
        raise ModelError(f"{path}: cannot look for the model file ({error.strerror})") from error
    if not exists:
        raise ModelError(f"{path}: no such model file; make one with 'cbmir export RUN -o model.onnx'")
    if path.suffix.lower() != ".onnx" or not path.is_file():
        found = "a folder" if path.is_dir() else f"the suffix {path.suffix!r}"
        raise ModelError(f"{path}: expected a model file (.onnx), found {found}; 'cbmir export' writes one")
    from cbmir.runtime.onnx_engine import OnnxEngine

    return OnnxEngine(path, provider=provider, threads=threads, allow_fallback=allow_fallback)
