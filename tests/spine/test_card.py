"""The model card: the JSON round trip, and all kinds of errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbmir.card import SCHEMA, Calibration, ModelCard, OperatingPoint
from cbmir.demo.page.about import card_html
from cbmir.errors import CardError, UserError
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from json_values import PROPERTY, VALUES, places, with_value

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
    training={
        "images": {"train": 560},
        "known": {"Mass": 12},
        "labels": {"Mass": {"positive": 12, "negative": 3}},
        "grey_range": {"mean": [0.5], "std": [0.25]},
        "patients": 9,
        "epochs": 3,
    },
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


def test_an_operating_point_changes_only_the_thresholds() -> None:
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
        (_with(schema=SCHEMA + 1), f"schema {SCHEMA}, found schema {SCHEMA + 1}; a newer schema needs"),
        (_without("schema"), "expected a cbmir model card in JSON, found KeyError"),
        (_without("sigma"), r"missing \['sigma'\], unknown \[\]"),
        (_with(colour="blue"), r"missing \[\], unknown \['colour'\]"),
        (_with(head="tree"), "expected head 'proxy', 'linear', 'hash' or 'none', found 'tree'"),
        (_with(thresholds=[0.5]), "expected 3 thresholds, one per label, found 1"),
        (_with(calibration=[None] * 4), "expected 3 calibration, one per label, found 4"),
        (_with(calibration=[{"slant": 1}, None, None]), "damaged model card"),
        (_with(thresholds=5), "damaged model card"),
        (_with(operating_points={"sensitive": [None]}), "expected 3 sensitive, one per label, found 1"),
        (_with(operating_points={"sensitive": [{"threshold": 1}] * 3}), "damaged model card"),
        (_with(operating_points=[None]), "damaged model card"),
        (_with(proxies_per_class=[2, 2, 2]), "proxies_per_class for 4 classes, found 3"),
        (_with(preprocess={"crop": 4}), "image-size from 32 to 8192"),
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


_JSON = CARD.to_json() | {"labels": list(CARD.labels.names)}
_JSON = json.loads(json.dumps(_JSON))


@PROPERTY
@given(st.sampled_from(sorted(places(_JSON), key=str)), VALUES)
def test_any_value_in_any_place_is_a_card_or_a_card_error(place: tuple[Any, ...], value: Any) -> None:
    try:
        card = ModelCard.loads(json.dumps(with_value(_JSON, place, value)))
    except CardError:
        return
    assert ModelCard.loads(card.dumps()) == card
    card_html(card)
    assert all(0 <= one.probability(0.5) <= 1 for one in card.calibration if one)


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (("thresholds", 0), "0.5", r"thresholds\[0\]: expected a finite number, found '0.5'"),
        (("thresholds", 2), math.nan, r"thresholds\[2\]: expected a finite number, found nan"),
        (("sigma",), "0.7", "sigma: expected a finite number, found '0.7'"),
        (("sigma",), math.inf, "sigma: expected a finite number, found inf"),
        (("sigma",), 0, r"sigma: expected a number from 1e-06 to 1e\+06, found 0"),
        (("sigma",), 10**400, "sigma: expected a finite number, found inf"),
        (("embedding_dim",), True, "embedding_dim: expected a whole number, found True"),
        (("embedding_dim",), 0, "embedding_dim: expected a number from 1 to 65536, found 0"),
        (("calibration", 0, "slope"), -1, r"calibration\[0\].slope: expected a number from 0, found -1"),
        (("calibration", 0), {"slope": 1}, r"calibration\[0\].intercept: expected a value, found none"),
        (("operating_points", "sensitive", 0, "sensitivity"), 1.5, r"sensitive\[0\].sensitivity: expected a number"),
        (("preprocess", "resize"), "70", "preprocess.resize: expected a whole number"),
        (("preprocess", "resize"), 10**9, "crop <= resize"),
        (("labels", 0), 5, r"labels\[0\]: expected text, found 5"),
        (("labels", 0), " ", "a name of each label"),
        (("labels", 1), "effusion", "differ in more than case"),
        (("versions", "torch"), 2.6, "versions.torch: expected text"),
        (("metrics", "ndcg", "low"), "a", "metrics.ndcg.low: expected a finite number"),
        (("metrics", "ndcg", "low"), None, "metrics.ndcg: expected both ends of an interval"),
        (("training", "images"), {"train": "many"}, "training.images.train: expected a whole number"),
        (("training", "known", "Mass"), math.nan, "training.known.Mass: expected a finite number"),
        (("training",), [[]], "training: expected an object"),
        ((), [], "expected a cbmir model card in JSON"),
    ],
)
def test_the_message_names_the_field(place: tuple[Any, ...], value: Any, found: str) -> None:
    with pytest.raises(CardError, match=found) as caught:
        ModelCard.loads(json.dumps(with_value(_JSON, place, value)), source="my.onnx")
    assert str(caught.value).startswith("my.onnx: ")


def test_a_card_that_is_nested_too_deeply_is_refused() -> None:
    for text in ("[" * 200_000 + "]" * 200_000, json.dumps(_JSON).replace("560", "[" * 900 + "]" * 900)):
        with pytest.raises(CardError, match="nested more than 64 deep"):
            ModelCard.loads(text)
