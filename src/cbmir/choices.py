"""What may be chosen on the command line and in Python alike, without the libraries that carry it out."""

from __future__ import annotations

from typing import Literal

#: What runs a model. `auto` picks one that this machine really has, and says why.
ENGINES = ("auto", "onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "tensorrt")
Mode = Literal["auto", "latency", "throughput"]
#: How an engine uses its threads: all of them for a batch at once, or one for each of its images.
MODES: tuple[Mode, ...] = ("auto", "latency", "throughput")
#: The losses of `cbmir train --loss`, each with the options that mean nothing with it.
TRAINING_LOSSES: dict[str, tuple[str, ...]] = {
    "proxy": (),
    "bce": ("sigma", "proxies_per_class", "negative_proxies"),
    "ml-proxy-nca": ("proxies_per_class", "class_weights"),
    "proxy-anchor": ("proxies_per_class", "class_weights"),
    "soft-ndcg": (),
}
#: How a gallery is searched: image by image, or by an index of vectors in one of two widths.
INDEX_SETTINGS = ("auto", "exact", "bf16", "int8")
#: Which of a model's thresholds decide (`cbmir.training.metrics.operating_points` chooses them).
OPERATING_POINTS = ("sensitive", "balanced", "specific")
#: The order of an answer's neighbours: by distance, or by expected agreement with the query's findings.
Rank = Literal["nearness", "findings"]
RANKS: tuple[Rank, ...] = ("nearness", "findings")
