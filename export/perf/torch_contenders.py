"""What `cbmir speed` compares with in PyTorch: the model by hand, eager, and the attained peak of matrix products.

torch is imported when one is opened, so that its loading time counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import require
from cbmir.export.perf.contenders import Answer, Contender, peer_health
from cbmir.process import available_threads
from cbmir.runtime.engines.base import EngineHealth


@dataclass(frozen=True)
class TorchPeer(Contender):
    """The same architecture in inference mode, eager, float32. Random weights do not change the speed."""

    has_weights = False

    card: ModelCard
    channels_last: bool = False
    threads: int | None = None

    def open(self) -> tuple[Answer, EngineHealth]:
        torch = require("torch", "train")
        from cbmir.training.encoder import encoder_of
        from cbmir.training.model import LinearHead, ProxyHead, RetrievalModel

        torch.set_num_threads(self.threads or available_threads())
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        dim, labels = self.card.embedding_dim, len(self.card.labels)
        proxies = self.card.head == "proxy"
        head = ProxyHead(dim, self.card.proxies_per_class, labels) if proxies else LinearHead(dim, labels)
        model = RetrievalModel(encoder_of(self.card), head).eval().to(memory_format=layout)

        def answer(batch: NDArray[np.uint8]) -> NDArray[np.float32]:
            with torch.inference_mode():
                embedding, _, _ = model(torch.from_numpy(batch).contiguous(memory_format=layout))
            return np.asarray(embedding)

        name = "channels_last" if self.channels_last else "NCHW"
        return answer, peer_health("torch", torch.__version__, self.threads, f"eager, {name}, random weights")


@dataclass(frozen=True)
class MatrixPeak(Contender):
    """No model: one matrix product an image, with as many operations as the model has. Its time is the floor that the
    processor's arithmetic sets, so a model's share of the attained peak is this time by its own."""

    has_weights = False

    flops: int
    precision: Literal["float32", "bfloat16"]
    threads: int | None = None

    def open(self) -> tuple[Answer, EngineHealth]:
        torch = require("torch", "train")
        torch.set_num_threads(self.threads or available_threads())
        inner = 1024
        rows = max(1, round(self.flops / (2 * inner * inner)))
        dtype = getattr(torch, self.precision)
        left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, inner, dtype=dtype)
        product = torch.empty(rows, inner, dtype=dtype)

        def answer(batch: NDArray[np.uint8]) -> NDArray[np.float32]:
            for _ in range(len(batch)):
                torch.mm(left, right, out=product)
            return np.empty((len(batch), 0), np.float32)

        reason = f"matrix products of [{rows}, {inner}] by [{inner}, {inner}]"
        return answer, peer_health("torch", torch.__version__, self.threads, reason, self.precision)


def torch_peers(card: ModelCard, threads: int | None) -> tuple[TorchPeer, TorchPeer]:
    """The plain one, and the one in channels_last."""
    return (
        TorchPeer("peer torch", card, threads=threads),
        TorchPeer("peer torch channels_last", card, channels_last=True, threads=threads),
    )
