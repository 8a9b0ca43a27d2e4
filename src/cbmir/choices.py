"""Choices of the command line and the Python API, here so that they do not need the libraries behind them."""

from __future__ import annotations

from typing import Literal

#: Engines that run a model. `auto` picks one that works on this machine, and reports why.
ENGINES = ("auto", "onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "tensorrt")
Mode = Literal["auto", "latency", "throughput"]
#: How an engine uses its threads: all for one batch (latency), or one per image of the batch (throughput).
MODES: tuple[Mode, ...] = ("auto", "latency", "throughput")
#: The losses of `cbmir train --loss`, each with the options that have no effect with it.
TRAINING_LOSSES: dict[str, tuple[str, ...]] = {
    "proxy": (),
    "bce": ("sigma", "proxies_per_class", "negative_proxies"),
    "ml-proxy-nca": ("proxies_per_class", "class_weights"),
    "proxy-anchor": ("proxies_per_class", "class_weights"),
    "soft-ndcg": (),
}
#: The recipes of `cbmir train --recipe`, sets of options. The first is the default.
RECIPES: dict[str, dict[str, object]] = {
    "fitted": {
        "loss": "bce", "linear_fit": True, "epochs": 15, "patience": 15, "batch_size": 32, "lr": 6e-4,
        "weight_decay": 0.05, "schedule": "cosine", "average": 0.99, "augment": "full", "head_rate": 10.0,
    },
    "paper": {
        "loss": "proxy", "linear_fit": False, "epochs": 50, "patience": 10, "batch_size": 48, "lr": 1e-4,
        "weight_decay": 0.0, "schedule": "constant", "average": 0.0, "augment": "crop", "head_rate": 1.0,
    },
}  # fmt: skip
#: How a gallery is searched: by comparing every image, or with an index of bf16 or int8 vectors.
INDEX_SETTINGS = ("auto", "exact", "bf16", "int8")
#: Sets of a model's thresholds (`cbmir.training.metrics.operating_points` computes them).
OPERATING_POINTS = ("sensitive", "balanced", "specific")
#: The order of an answer's neighbours: by distance, or by expected agreement with the query's findings.
Rank = Literal["nearness", "findings"]
RANKS: tuple[Rank, ...] = ("nearness", "findings")
