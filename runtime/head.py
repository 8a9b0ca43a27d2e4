"""The head beside the graph: what evidence maps are drawn against, as text in a model file's metadata."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.card import HEAD_KEY, ModelCard
from cbmir.errors import CardError


def encode_head(head: NDArray[np.float32]) -> str:
    """Base64 of little-endian float32 [P, D]."""
    return base64.b64encode(head.astype("<f4").tobytes()).decode("ascii")


def decode_head(text: str, card: ModelCard, path: str | Path) -> NDArray[np.float32]:
    """float32 [P, D] of a card's model. Raises CardError for another size, damaged text, or values not finite."""
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
