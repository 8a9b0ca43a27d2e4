"""The page about the model."""

from __future__ import annotations

import html
import re

from cbmir.card import NOT_A_DEVICE, ModelCard, OperatingPoint
from cbmir.demo.page.about import card_html

NASTY = "<script>alert('x')</script> {{constructor}} ${1+1}"


def text_of(page: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", page))


def test_card_page_has_intervals_and_leaves_out_what_is_not_known(tiny_card: ModelCard) -> None:
    card = tiny_card.with_(
        metrics={"val auc": {"value": 0.71, "low": 0.6, "high": 0.8}, "val all queries": {
            "queries": 3, "ndcg": {"value": 0.3, "low": 0.2, "high": 0.4},
            "corrected_ndcg": {"value": 0.1, "low": None, "high": None},
            "acg": {"value": None, "low": None, "high": None}}},
        training={"source": NASTY, "images": {"train": 1237}, "labels": {"Mass": {"positive": 5, "negative": 7}}},
    )  # fmt: skip
    text = text_of(card_html(card))
    for part in (NOT_A_DEVICE, "AUC, validation0.7100.600 to 0.800", "nDCG, validation, all queries0.300", NASTY,
                 "nDCG corrected for chance, validation, all queries0.100not available",
                 "train 1,237", "Mass57", "Limits"):  # fmt: skip
        assert part in text
    assert "Epochs" not in text and "ACG" not in text
    assert "no metrics" in card_html(tiny_card)


def test_card_page_lists_operating_points(tiny_card: ModelCard) -> None:
    assert "Operating pointsThe card has none." in text_of(card_html(tiny_card))
    points = {
        "sensitive": (OperatingPoint(0.25, 0.9, 0.4, 0.31, None), None, None),
        "specific": (OperatingPoint(0.75, 0.5, 0.92, 0.6, 0.8), None, None),
    }
    text = text_of(card_html(tiny_card.with_(operating_points=points)))
    assert "Effusion, sensitive0.25090%40%31%not availableEffusion, specific0.75050%92%60%80%" in text
    assert "Mass, s" not in text
