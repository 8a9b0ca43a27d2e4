"""The paper's model: encoder -> global mean -> unit embedding -> scores, in one graph that takes uint8 images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.card import ModelCard


class ProxyHead(nn.Module):
    """Proxies of C labels and, optionally, of the negative class (the last one).

    `weight` is float [P, D], class-major; class j has `counts[j]` proxies. Proxies are normalised on each use.
    """

    kind = "proxy"

    def __init__(self, dim: int, counts: Sequence[int], labels: int, sigma: float = 0.7) -> None:
        super().__init__()
        self.counts, self.labels, self.sigma = tuple(counts), labels, sigma
        self.weight = nn.Parameter(torch.randn(sum(counts), dim) / dim**0.5)
        # [K, m] positions of each class's proxies; short rows repeat their first one, so that one gather suffices.
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        widest = torch.arange(max(counts))
        own = widest < torch.tensor(self.counts)[:, None]
        self.register_buffer("index", torch.where(own, starts[:, None] + widest, starts[:, None]), persistent=False)
        self.register_buffer("own", own, persistent=False)
        self.index: Tensor
        self.own: Tensor

    def log_similarity(self, embedding: Tensor) -> Tensor:
        """Return log g(v, p) = -|v - p|^2 / 2 sigma^2 for unit vectors: [N, D] -> [N, K, m], padded with repeats."""
        cosine = embedding @ functional.normalize(self.weight, dim=1).T
        # Rounding can make the squared distance slightly negative.
        log_g = -(2 - 2 * cosine).clamp(min=0) / (2 * self.sigma**2)
        return log_g.index_select(1, self.index.flatten()).view(-1, *self.index.shape)

    def log_mean_similarity(self, embedding: Tensor) -> Tensor:
        """Return log S_j for training, where S_j is the mean over the proxies of class j: [N, D] -> [N, K]."""
        log_g = self.log_similarity(embedding).masked_fill(~self.own, -torch.inf)
        return torch.logsumexp(log_g, dim=2) - self.own.sum(dim=1).log()

    def forward(self, pooled: Tensor, embedding: Tensor) -> Tensor:
        """Return score_j = max_i g(v, p_ij) in [0, 1] (paper, "Multi-label classification"): [N, D] -> [N, C]."""
        return self.log_similarity(embedding).amax(dim=2)[:, : self.labels].exp()

    def rows(self) -> Tensor:
        """Return the unit proxies that evidence maps compare with, float32 [P, D]."""
        return functional.normalize(self.weight.detach().float(), dim=1)


class LinearHead(nn.Module):
    """A conventional classifier on the pooled features (the paper's "DenseNet w/ BCE")."""

    kind = "linear"

    def __init__(self, dim: int, labels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, labels)

    def logits(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.linear(pooled)
        return logits

    def forward(self, pooled: Tensor, embedding: Tensor) -> Tensor:
        """Return the sigmoid of the logits: pooled [N, D] -> [N, C] in [0, 1]."""
        return self.logits(pooled).sigmoid()

    def rows(self) -> Tensor:
        """Return the classifier's weights that evidence maps compare with, float32 [C, D]."""
        return self.linear.weight.detach().float()


class HashHead(nn.Module):
    """A layer that computes binary codes for retrieval by Hamming distance, optionally with a classifier on top."""

    kind = "hash"

    def __init__(self, dim: int, bits: int, labels: int, *, classifier: bool) -> None:
        super().__init__()
        self.labels = labels
        self.linear = nn.Linear(dim, bits)
        self.classifier = nn.Linear(bits, labels) if classifier else None

    def relaxed(self, pooled: Tensor) -> Tensor:
        """Return the real values that training uses; their signs are the code: [N, D] -> [N, bits]."""
        relaxed: Tensor = self.linear(pooled)
        return relaxed

    def codes(self, pooled: Tensor) -> Tensor:
        """Return binary codes, float32 [N, bits] in {-1, 1}; their inner product is bits - 2 * Hamming distance."""
        return torch.where(self.relaxed(pooled) >= 0, 1.0, -1.0)

    def logits(self, pooled: Tensor) -> Tensor:
        """Classify the codes, relaxed by tanh: [N, D] -> [N, C]. Only with a classifier."""
        assert self.classifier is not None
        logits: Tensor = self.classifier(self.relaxed(pooled).tanh())
        return logits

    def forward(self, pooled: Tensor, embedding: Tensor) -> Tensor:
        """Return the sigmoid of the logits, [N, D] -> [N, C]; NaN without a classifier."""
        if self.classifier is None:
            return pooled.new_full((len(pooled), self.labels), torch.nan)
        return self.logits(pooled).sigmoid()


class NoHead(nn.Module):
    """The head of an embedding model: no findings, so scores are [N, 0]."""

    kind = "none"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, pooled: Tensor, embedding: Tensor) -> Tensor:
        return pooled[:, :0]

    def rows(self) -> Tensor:
        """Return an empty tensor, float32 [0, D]."""
        return torch.empty(0, self.dim)


Head = ProxyHead | LinearHead | HashHead | NoHead


def head_of(card: ModelCard) -> ProxyHead | LinearHead | NoHead:
    """Build the head that a card describes, with random weights. Hashing heads are not supported."""
    dim, labels = card.embedding_dim, len(card.labels)
    if card.head == "none":
        return NoHead(dim)
    return (
        LinearHead(dim, labels) if card.head == "linear" else ProxyHead(dim, card.proxies_per_class, labels, card.sigma)
    )


class RetrievalModel(nn.Module):
    """uint8 image [N, 1, S, S] -> embedding [N, D] of unit length, scores [N, C], feature map [N, D, h, w].

    The encoder may be in half precision; everything after it is float32. The scaling to [-1, 1] is not folded into the
    first convolution, because its zero padding would then stand for a different grey value.
    """

    def __init__(self, encoder: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def features(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embedding, the pooled features (mean over the cells, not normalised) and the feature map."""
        feature_map = self.encoder(self.scaled(image)).float()
        pooled = feature_map.mean(dim=(2, 3))
        # functional.normalize would export a Shape of the uint8 input, which TensorRT refuses.
        return pooled / pooled.norm(dim=1, keepdim=True).clamp(min=1e-12), pooled, feature_map

    def scaled(self, image: Tensor) -> Tensor:
        """Scale to [-1, 1], in the encoder's precision."""
        return (image.float() / 127.5 - 1).to(next(self.encoder.parameters()).dtype)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedding, pooled, feature_map = self.features(image)
        return embedding, self.head(pooled, embedding), feature_map


class HashingModel(RetrievalModel):
    """A RetrievalModel whose embeddings are binary codes, float32 [N, bits] in {-1, 1}."""

    head: HashHead

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedding, pooled, feature_map = self.features(image)
        return self.head.codes(pooled), self.head(pooled, embedding), feature_map
