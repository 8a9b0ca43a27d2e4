"""The base of all engines: a batch of preprocessed images goes in, and embeddings and scores come out.

Any number of threads can use one engine, but only in the process that opened it, because a fork loses the libraries'
threads. Open the model again in each process, and start processes with `spawn` or `forkserver`.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import logging
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cbmir.card import HEAD_KEY, ModelCard
from cbmir.choices import Mode
from cbmir.errors import CardError, EngineError, ModelError
from cbmir.process import Closing, available_threads

log = logging.getLogger("cbmir")

OUTPUTS = ("embedding", "scores", "feature_map")


def outputs_of(card: ModelCard) -> tuple[str, ...]:
    """Return the names of a model file's outputs: no `scores` without findings. The feature map is last."""
    return OUTPUTS if card.has_findings else (OUTPUTS[0], OUTPUTS[2])


#: Runs a batch uint8 [n, 1, S, S] and returns the outputs with these names. Several threads may call it.
Runner = Callable[[NDArray[np.uint8], Sequence[str]], Sequence[NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class Outputs:
    """A model's outputs for N images.

    Attributes:
        embedding: float32 [N, D], unit norm.
        scores: float32 [N, C] in [0, 1], in the card's label order; C is 0 if the model has no findings.
        feature_map: float32 [N, D, h, w]; None if not requested. Its normalised mean over the cells is the embedding.
    """

    embedding: NDArray[np.float32]
    scores: NDArray[np.float32]
    feature_map: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EngineHealth:
    """The state of an engine. `requested` is the requested engine, and `reason` says why this one was chosen;
    `precision` is float32, float16, bfloat16 or int8; `mode` is always latency with one thread or on a GPU."""

    engine: str
    requested: str
    reason: str
    device: str
    precision: str
    threads: int
    mode: Mode
    version: str
    warnings: tuple[str, ...] = ()


class Engine(Closing):
    """A loaded model. A subclass implements `_open`, which makes a runner, and `_describe`.

    On a CPU (`streams`), mode `latency` runs the whole batch on all threads; `throughput` runs single images on streams
    of one thread each, which gives more images per second but a longer wait for each image. `auto` uses `latency` for
    one image and `throughput` for more. A GPU only has `latency`.
    """

    streams = True
    max_batch = 32  # images per run in mode latency: limits the memory for activations
    requested, reason = "", ""  # the requested engine, and why this one was chosen; `open_engine` sets both

    def __init__(
        self, card: ModelCard, head: NDArray[np.float32], *, threads: int | None = None, mode: Mode = "auto"
    ) -> None:
        """Subclasses read the card and the head from their file, then call this.

        Args:
            head: float32 [P, D]: the unit proxies, grouped by class in label order, the negative class last; or the C
                weight rows of a linear head; no rows for an embedding model.
            threads: None means all processors that this process may use.
        """
        self.card, self.head = card, head
        self.threads = threads or available_threads()
        self.warnings: tuple[str, ...] = ()
        self._mode = mode
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()  # guards the runners, the pool and `_closed`
        self._runners: dict[int, Runner] = {}
        self._pool: ThreadPoolExecutor | None = None

    @abstractmethod
    def _open(self, threads: int) -> Runner:
        """Create a runner whose calls use `threads` threads each. Raises ModelError or EngineError."""

    @abstractmethod
    def _describe(self) -> tuple[str, str, str]:
        """Return the engine (one of ENGINES), the device, and the library's version."""

    def run(self, batch: NDArray[np.uint8], *, feature_map: bool = False) -> Outputs:
        """Run the model. Apart from rounding, an image's outputs do not depend on the rest of the batch.

        Args:
            batch: uint8 [N, 1, S, S], made by `preprocess`; N may be 0.

        Raises:
            EngineError: An invalid batch, outputs that are not finite, a closed engine, or a forked process.
        """
        self._check_usable()
        size, dim, labels = self.card.preprocess.crop, self.card.embedding_dim, len(self.card.labels)
        if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != (1, size, size):
            raise EngineError(
                f"expected a batch uint8 [N, 1, {size}, {size}], found {batch.dtype} {list(batch.shape)}; "
                f"cbmir.runtime.imaging.preprocess makes its images"
            )
        if not len(batch):
            empty = [np.empty(shape, np.float32) for shape in ((0, dim), (0, labels), (0, dim, 0, 0))]
            return Outputs(*empty[: 3 if feature_map else 2])
        names = outputs_of(self.card) if feature_map else outputs_of(self.card)[:-1]
        pieces = self._run(np.ascontiguousarray(batch), names)
        outputs = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
        for name, array in zip(names, outputs, strict=True):
            if not np.isfinite(array).all():
                raise EngineError(
                    f"expected finite values of {name!r}, found NaN or infinity; this model file "
                    f"({self.card.precision}) overflows: export it in float32"
                )
        found = dict(zip(names, outputs, strict=True))
        return Outputs(**{"scores": np.empty((len(batch), 0), np.float32)} | found)

    def _run(self, batch: NDArray[np.uint8], names: Sequence[str]) -> list[Sequence[NDArray[np.float32]]]:
        spread = self._mode == "throughput" or (self._mode == "auto" and len(batch) > 1)
        if not (spread and self.streams and self.threads > 1):
            runner = self._runner(self.threads)
            starts = range(0, len(batch), self.max_batch)
            return [runner(batch[start : start + self.max_batch], names) for start in starts]
        runner = self._runner(1)
        with self._lock:  # `close` takes it too, then waits for everything that was submitted
            self._check_usable()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="stream")
            answers = self._pool.map(lambda start: runner(batch[start : start + 1], names), range(len(batch)))
        return list(answers)

    def warm_up(self, *batch_sizes: int) -> None:
        """Run a batch of black images of each size (by default 1), so that no request waits for initialisation."""
        size = self.card.preprocess.crop
        for count in batch_sizes or (1,):
            self.run(np.zeros((count, 1, size, size), np.uint8))

    def warn(self, text: str) -> None:
        """Log a warning and add it to `health`."""
        self.warnings += (text,)
        log.warning("%s", text)

    def health(self) -> EngineHealth:
        engine, device, version = self._describe()
        mode = self._mode if self.streams and self.threads > 1 else "latency"
        return EngineHealth(
            engine=engine, requested=self.requested or engine, reason=self.reason, device=device,
            precision=self.card.precision, threads=self.threads, mode=mode, version=version, warnings=self.warnings,
        )  # fmt: skip

    def close(self) -> None:
        """Free the memory; running calls in other threads finish normally. May be called again."""
        if os.getpid() != self._process:  # forked, perhaps while another thread held the lock
            self._closed = True
            return
        with self._lock:
            self._closed = True
            self._runners.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def __reduce__(self) -> NoReturn:
        raise EngineError("an engine cannot be pickled or sent to another process; open the model there")

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(
                f"this engine was opened in process {self._process} and cannot be used after a fork; open the model "
                f"in this process ({os.getpid()}), or start it with 'spawn'"
            )
        if self._closed:
            raise EngineError("the engine is closed; open the model again")

    def _runner(self, threads: int) -> Runner:
        with self._lock:
            self._check_usable()
            if threads not in self._runners:
                self._runners[threads] = self._open(threads)
            return self._runners[threads]


def give_back_freed_memory() -> None:
    """Return freed memory from glibc to the system: loading a model takes several times its size."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))


def check_graph(path: str | Path, card: ModelCard, inputs: int, found: Mapping[str, tuple[str, Sequence[Any]]]) -> None:
    """Raise ModelError if a file's graph is not one of cbmir's. `inputs` is its number of inputs; `found` maps each
    input and output to its type and shape, in which open dimensions are not ints."""
    size, dim = card.preprocess.crop, card.embedding_dim
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "image": ("uint8", (None, 1, size, size)),
        "embedding": ("float32", (None, dim)),
        "scores": ("float32", (None, len(card.labels))),
        "feature_map": ("float32", (None, dim, None, None)),
    }
    if not card.has_findings:
        del expected["scores"]
    if set(found) != set(expected) or inputs != 1:
        raise ModelError(f"{path}: expected the input image and the outputs {', '.join(outputs_of(card))}, "
                         f"found {', '.join(found)}; export the model again")  # fmt: skip
    for name, (kind, shape) in expected.items():
        found_kind, sides = found[name][0], [side if isinstance(side, int) else None for side in found[name][1]]
        fits = len(sides) == len(shape) and sides[0] is None
        # Other open dimensions are only known when the model runs.
        fits &= all(None in (side, wanted) or side == wanted for side, wanted in zip(sides, shape, strict=False))
        if found_kind != kind or not fits:
            wanted, having = (", ".join("any" if side is None else str(side) for side in of) for of in (shape, sides))
            raise ModelError(f"{path}: expected {name} {kind} [{wanted}] with an open batch size, found {found_kind} "
                             f"[{having}]; export the model again")  # fmt: skip


def encode_head(head: NDArray[np.float32]) -> str:
    """Encode a head as text for a model file's metadata: base64 of little-endian float32 [P, D]."""
    return base64.b64encode(head.astype("<f4").tobytes()).decode("ascii")


def decode_head(text: str, card: ModelCard, path: str | Path) -> NDArray[np.float32]:
    """Decode `encode_head`'s text to float32 [P, D]. Raises CardError for a wrong size, damage or non-finite values."""
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
