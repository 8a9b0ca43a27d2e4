"""The model card: JSON there and back, and every way in which it can be wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from cbmir.card import SCHEMA, Calibration, ModelCard, OperatingPoint
from cbmir.errors import CardError, UserError
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec

CARD = ModelCard(
    labels=LabelSet(("Effusion", "Mass", "Ödem")),
    preprocess=PreprocessSpec.for_image_size(64),
    encoder="resnet18",
    embedding_dim=512,
    head="proxy",
    sigma=0.7,
    proxies_per_class=(2, 3, 1, 2),
    negative_proxies=True,
    thresholds=(0.25, None, 0.125),
    calibration=(Calibration(4.5, -2.0), None, Calibration(0.0, 1.0)),
    fingerprint="abc",
    training={"images": 560, "known": {"Mass": 12}},
    metrics={"ndcg": {"value": 0.5, "low": 0.4, "high": 0.6}},
    versions={"torch": "2.6"},
    operating_points={
        "sensitive": (OperatingPoint(0.1, 1.0, 0.0, 0.5, None), None, OperatingPoint(0.1, 0.9, 0.5, 0.4, 0.8)),
        "balanced": (OperatingPoint(0.25, 0.8, 0.75, 0.5, 0.9), None, OperatingPoint(0.125, 0.7, 0.8, 0.5, 0.7)),
    },
)


def test_json_round_trip() -> None:
    assert ModelCard.loads(CARD.dumps()) == CARD
    linear = CARD.with_(head="linear", proxies_per_class=(), negative_proxies=False)
    assert ModelCard.loads(linear.dumps()) == linear
    assert linear != CARD


def test_text_is_plain_json() -> None:
    data = json.loads(CARD.dumps())
    assert data["labels"] == ["Effusion", "Mass", "Ödem"]
    assert data["thresholds"] == [0.25, None, 0.125]
    assert data["schema"] == SCHEMA
    assert "not a medical device" in data["intended_use"]


def test_an_operating_point_changes_the_thresholds_alone() -> None:
    assert CARD.at("balanced") == CARD.at("sensitive").at("balanced") == CARD
    assert CARD.at("sensitive") == CARD.with_(thresholds=(0.1, None, 0.1))
    with pytest.raises(UserError, match=r"of this model \(balanced, sensitive\), found 'specific'"):
        CARD.at("specific")


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        CARD.with_(metrics={"auc": math.nan}).dumps()


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        del data[name]

    return change


def _with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(schema=SCHEMA + 1), f"schema {SCHEMA}, found schema {SCHEMA + 1}; upgrade with"),
        (_without("schema"), "expected a cbmir model card in JSON, found KeyError"),
        (_without("sigma"), r"missing \['sigma'\], unknown \[\]"),
        (_with(colour="blue"), r"missing \[\], unknown \['colour'\]"),
        (_with(head="tree"), "expected head 'proxy', 'linear', 'hash' or 'none', found 'tree'"),
        (_with(thresholds=[0.5]), "expected 3 thresholds, one a label, found 1"),
        (_with(calibration=[None] * 4), "expected 3 calibration, one a label, found 4"),
        (_with(calibration=[{"slant": 1}, None, None]), "damaged model card"),
        (_with(thresholds=5), "damaged model card"),
        (_with(operating_points={"sensitive": [None]}), "expected 3 sensitive, one a label, found 1"),
        (_with(operating_points={"sensitive": [{"threshold": 1}] * 3}), "damaged model card"),
        (_with(operating_points=[None]), "damaged model card"),
        (_with(proxies_per_class=[2, 2, 2]), "proxies_per_class for 4 classes, found 3"),
        (_with(preprocess={"crop": 4}), "image-size of at least 32"),
    ],
)
def test_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = json.loads(CARD.dumps())
    change(data)
    with pytest.raises(CardError, match=message):
        ModelCard.loads(json.dumps(data), "model.onnx")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"card"', "3", CARD.dumps()[:-20]])
def test_damaged_json(text: str) -> None:
    with pytest.raises(CardError, match=r"^model\.onnx: expected a cbmir model card"):
        ModelCard.loads(text, "model.onnx")


@pytest.mark.parametrize(
    ("slope", "intercept", "score", "expected"),
    [
        (0.0, 0.0, 0.3, 0.5),
        (1.0, 0.0, math.log(3), 0.75),
        (1.0, 0.0, -math.log(3), 0.25),
        (2.0, -1.0, 0.5, 0.5),
        (1e6, 0.0, 1.0, 1.0),
        (1e6, -2e6, 1.0, 0.0),
    ],
)
def test_calibration(slope: float, intercept: float, score: float, expected: float) -> None:
    assert Calibration(slope, intercept).probability(score) == pytest.approx(expected, abs=1e-12)
