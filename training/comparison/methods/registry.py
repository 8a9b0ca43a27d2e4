"""The compared methods: those of the paper's Table 1, in its order, then others.

A method either trains the shared encoder with its own loss (`training`), or computes its answer (`answer`) from the
features of the BCE network or from the images. All share selections, image sizes, augmentation and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbmir.training.comparison.methods.binary_codes import ITQ, SemiSupervisedHashing
from cbmir.training.comparison.methods.community import CommunityGraph
from cbmir.training.comparison.methods.texture import TextureDescriptor, texture_similarity
from cbmir.training.losses.targets import with_negative_class
from cbmir.training.metrics import Similarity, inner_products


@dataclass(frozen=True, eq=False)
class Given:
    """The input of a method without its own network: the BCE network's vectors, or the images.

    If the method needs `bce`, it has `query` float32 [Q, D] with `scores` [Q, C], and `gallery` [G, D]; else it is
    empty. `targets` are the gallery's, [G, C] in {0, 1, NaN}; the queries' labels are withheld. `images` returns the
    centre crops of a split (`test` for queries, `train` for the gallery), uint8 [N, S, S].
    """

    bce: Mapping[str, NDArray[np.float32]]
    targets: Tensor
    images: Callable[[str], NDArray[np.uint8]]
    bits: int
    seed: int


@dataclass(frozen=True, eq=False)
class MethodAnswer:
    """A method's vectors, float32 [Q, D] and [G, D], its scores [Q, C] (None if it has no scores) and similarity."""

    query: NDArray[np.float32]
    gallery: NDArray[np.float32]
    similarity: Similarity
    scores: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Method:
    """A compared method.

    Attributes:
        paper: The paper's own figures, protocol -> metric -> value.
        training: Changes to TrainConfig. The protocol decides on negative proxies unless stated here.
        answer: Computes the answer without training a network.
        many_proxies: Whether the number of proxies per class is an option.
        chosen: Our choices of details that the method's source leaves open.
    """

    name: str
    title: str
    source: str
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    answer: Callable[[Given], MethodAnswer] | None = None
    needs_bce: bool = False
    many_proxies: bool = False
    chosen: str = ""


def _community(given: Given) -> MethodAnswer:
    query, gallery = given.bce["query"], given.bce["gallery"]
    graph = CommunityGraph(gallery, seed=given.seed)
    return MethodAnswer(query, gallery, lambda row: graph.similarity(query[row]), given.bce["scores"])


def _itq(given: Given) -> MethodAnswer:
    return _hamming(given, ITQ(given.bce["gallery"], bits=given.bits, seed=given.seed))


def _ssh(given: Given) -> MethodAnswer:
    targets = with_negative_class(given.targets).numpy()
    return _hamming(given, SemiSupervisedHashing(given.bce["gallery"], targets, bits=given.bits, seed=given.seed))


def _hamming(given: Given, hashing: ITQ | SemiSupervisedHashing) -> MethodAnswer:
    query, gallery = hashing.codes(given.bce["query"]), hashing.codes(given.bce["gallery"])
    return MethodAnswer(query, gallery, inner_products(query, gallery))


def _texture(given: Given) -> MethodAnswer:
    images = given.images("train")
    descriptor = TextureDescriptor(images, seed=given.seed)
    query, gallery = descriptor.describe(given.images("test")), descriptor.describe(images)
    return MethodAnswer(query, gallery, lambda row: texture_similarity(query[row], gallery))


def _ndcg(value: float) -> dict[str, dict[str, float]]:
    return {"nih": {"ndcg": value}}


def _both(ndcg: float, *chexpert: float) -> dict[str, dict[str, float]]:
    return _ndcg(ndcg) | {"chexpert": dict(zip(("auc", "ndcg", "acg", "precision"), chexpert, strict=True))}


_XING = "Y. Xing et al., Multimorbidity Content-Based Medical Image Retrieval Using Proxies, IEEE Access 2023"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "ssh", "Wang et al. (SSH)",
            "J. Wang, S. Kumar, S.-F. Chang, Semi-Supervised Hashing for Large-Scale Search, TPAMI 2012",
            _ndcg(0.15), answer=_ssh, needs_bce=True,
            chosen="On the BCE network's embeddings; the sequential variant; pairs of at most 5,000 training images.",
        ),
        Method(
            "itq", "Gong et al. (ITQ)",
            "Y. Gong, S. Lazebnik, A. Gordo, F. Perronnin, Iterative Quantization, TPAMI 2013",
            _ndcg(0.16), answer=_itq, needs_bce=True,
            chosen="On the BCE network's embeddings, which were trained on labels; the original method needs none.",
        ),
        Method(
            "sdh", "Erin Liong et al. (SDH)",
            "V. Erin Liong et al., Deep Hashing for Compact Binary Codes Learning, CVPR 2015",
            _ndcg(0.19), {"loss": "sdh"},
            chosen="The network is the shared encoder with one hashing layer; statistics are those of a batch.",
        ),
        Method(
            "dsh", "Liu et al. (DSH)",
            "H. Liu, R. Wang, S. Shan, X. Chen, Deep Supervised Hashing for Fast Image Retrieval, CVPR 2016",
            _ndcg(0.17), {"loss": "dsh"},
            chosen="Pairs are all those of a batch; the margin is twice the code length.",
        ),
        Method(
            "osdh", "Chen et al. (OSDH)",
            "Z. Chen et al., Order-Sensitive Deep Hashing for Multimorbidity Medical Image Retrieval, MICCAI 2018",
            _ndcg(0.24), {"loss": "osdh"},
            chosen="All triplets of a batch, weighted by their difference in gain; margin and weights of the terms are "
            "chosen here.",
        ),
        Method(
            "texture", "Lan et al. (texture)",
            "R. Lan et al., A Simple Texture Feature for Retrieval of Medical Images, Multimedia Tools and "
            "Applications 2018",
            _ndcg(0.15), answer=_texture,
            chosen="Gabor and Schmid filters, patches, a bag of words, as its abstract says; numbers chosen here.",
        ),
        Method(
            "community", "Haq et al. (community graph)",
            "N. F. Haq, M. Moradi, Z. J. Wang, A Deep Community Based Approach for Large Scale Content Based X-ray "
            "Image Retrieval, Medical Image Analysis 2021",
            _ndcg(0.31), answer=_community, needs_bce=True,
            chosen="A graph of 10 nearest neighbours; communities are visited in order of their centroids until 300 "
            "images are seen. Its scores are BCE's.",
        ),
        Method("bce", "BCE", f"baseline of {_XING}", _both(0.31, 0.69, 0.21, 0.37, 0.71), {"loss": "bce"}),
        Method(
            "ml-proxy-nca", "ML-ProxyNCA", f"baseline of {_XING}",
            _both(0.32, 0.64, 0.20, 0.36, 0.72), {"loss": "ml-proxy-nca"},
            chosen="Images without a finding, if they take part, are a separate class.",
        ),
        Method(
            "proxy", "Xing et al. (proxies)", _XING,
            _both(0.38, 0.74, 0.28, 0.46, 0.80), {"loss": "proxy", "negative_proxies": False}, many_proxies=True,
        ),
        Method(
            "proxy-negative", "Xing et al. (with negative proxies)", _XING,
            {"chexpert": {"auc": 0.77, "ndcg": 0.30, "acg": 0.48, "precision": 0.82}},
            {"loss": "proxy", "negative_proxies": True}, many_proxies=True,
        ),
        Method(
            "proxy-auto", "proxies by frequency", f"future work of {_XING}",
            training={"loss": "proxy", "proxies_per_class": "auto"},
            chosen="One proxy, plus one for each doubling of a class's images from 64, at most 8; negative proxies.",
        ),
        Method(
            "proxy-anchor", "Proxy Anchor, multi-label",
            "S. Kim, D. Kim, M. Cho, S. Kwak, Proxy Anchor Loss for Deep Metric Learning, CVPR 2020",
            training={"loss": "proxy-anchor"},
            chosen="One proxy per class; images without a finding are one more class.",
        ),
        Method(
            "soft-ndcg", "proxies and smooth nDCG",
            "E. Ramzi et al., Optimization of Rank Losses for Image Retrieval, TPAMI 2025",
            training={"loss": "soft-ndcg"},
            chosen="Half the smooth nDCG of a batch, half the proxy loss with negative proxies.",
        ),
        Method(
            "proxy-fitted", "Xing et al., and a linear fit", f"the network of {_XING}",
            training={"loss": "proxy", "linear_fit": True},
            chosen="The paper's network, with negative proxies if the protocol has images without a finding; "
            "embedding and scores are those of a linear fit.",
        ),
        Method(
            "fitted", "BCE, and a linear fit", "the recipe fitted of cbmir train",
            training={"loss": "bce", "linear_fit": True},
            chosen="The BCE network; embedding and scores are ridge regressions of the labels on its features.",
        ),
    )
}  # fmt: skip

#: The default methods of a sweep: those of the paper's figures.
SWEPT = ("bce", "proxy", "proxy-negative")


def methods_of(negatives: bool) -> tuple[str, ...]:
    """Return all methods of a protocol; `proxy-negative` needs images without a finding."""
    return tuple(name for name in METHODS if negatives or name != "proxy-negative")
