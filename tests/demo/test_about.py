"""The page about the model."""

from __future__ import annotations

import html
import re

from cbmir.card import NOT_A_DEVICE, ModelCard
from cbmir.demo.page.about import card_html

NASTY = "<script>alert('x')</script> {{constructor}} ${1+1}"


def text_of(page: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", page))


def test_card_page_has_intervals_and_leaves_out_unknown_values(tiny_card: ModelCard) -> None:
    card = tiny_card.with_(
        metrics={"val auc": {"value": 0.71, "low": 0.6, "high": 0.8}, "val all queries": {
            "queries": 3, "ndcg": {"value": 0.3, "low": 0.2, "high": 0.4},
            "corrected_ndcg": {"value": 0.1, "low": None, "high": None},
            "acg": {"value": None, "low": None, "high": None}}},
        training={"source": NASTY, "images": {"train": 1237}, "labels": {"Mass": {"positive": 5, "negative": 7}}},
    )  # fmt: skip
    text = text_of(card_html(card))
    for part in (NOT_A_DEVICE, "validation AUC0.7100.600 to 0.800", "validation all queries nDCG0.300", NASTY,
                 "validation all queries nDCG corrected for chance0.100not available",
                 "train 1,237", "Limits"):  # fmt: skip
        assert part in text
    assert "Epochs" not in text and "ACG" not in text
    assert "no metrics" in card_html(tiny_card)
