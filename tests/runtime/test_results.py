"""The result: its JSON, and evidence on request."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cbmir.card import ModelCard, OperatingPoint
from cbmir.errors import UserError
from cbmir.labels import LabelSet
from cbmir.manifest import Box
from cbmir.runtime import Analysis, Finding, LabelAgreement, Neighbour, Novelty
from cbmir.runtime.results import most_probable_first


@pytest.fixture
def analysis() -> Analysis:
    feature_map = np.array([[[3, 0]], [[0, 1]]], np.float32)
    return Analysis(
        image="chest.png",
        findings=(Finding("Mass", 0.75, None, True, 0.5), Finding("Nodule", 0.25, 0.125, None, None)),
        neighbours=(
            Neighbour(
                "a",
                "/x/a.png",
                "7",
                0.5,
                0.875,
                ("Mass", "Nodule"),
                ("Mass",),
                "A report.",
                ("Nodule",),
                (Box("Mass", 0.25, 0, 0.5, 1),),
            ),
        ),
        warnings=("Careful.",),
        embedding=(np.array([3, 1]) / np.sqrt(10)).astype(np.float32),
        feature_map=feature_map,
        finding_vectors={"Mass": np.array([1, 0], np.float32), "Nodule": np.array([0, 1], np.float32)},
        neighbour_vectors={"a": np.array([0, 1], np.float32)},
        query=(np.array([3, 1]) / np.sqrt(10)).astype(np.float32),
        query_labels=("Mass",),
        patients=frozenset({"patient 7"}),
        agreement=(LabelAgreement("Mass", 1, 0, 0, 0, 1.0), LabelAgreement("Nodule", 0, 0, 0, 1, None)),
        novelty=Novelty(0.25, 99.5, True),
        known=("b",),
    )


def test_json_has_the_documented_keys_and_plain_values(analysis: Analysis) -> None:
    assert json.loads(json.dumps(analysis.to_json())) == {
        "image": "chest.png",
        "known": ["b"],
        "operating_point": "balanced",
        "findings": [
            {"label": "Mass", "score": 0.75, "probability": None, "predicted": True, "threshold": 0.5},
            {"label": "Nodule", "score": 0.25, "probability": 0.125, "predicted": None, "threshold": None},
        ],
        "rank": "nearness",
        "region": None,
        "refinement": None,
        "neighbours": [
            {
                "id": "a", "image": "/x/a.png", "patient_id": "7", "distance": 0.5, "cosine": 0.875,
                "labels": ["Mass", "Nodule"], "shared": ["Mass"], "report": "A report.", "uncertain": ["Nodule"],
                "boxes": [{"label": "Mass", "left": 0.25, "top": 0, "width": 0.5, "height": 1}],
                "place": None,
                "view": "", "source": "", "date": "",
            }
        ],
        "agreement": [
            {"label": "Mass", "positive": 1, "negative": 0, "uncertain": 0, "unknown": 0, "share": 1.0,
             "gallery": None, "above_chance": False},
            {"label": "Nodule", "positive": 0, "negative": 0, "uncertain": 0, "unknown": 1, "share": None,
             "gallery": None, "above_chance": False},
        ],
        "novelty": {"distance": 0.25, "percentile": 99.5, "flagged": True},
        "warnings": ["Careful."],
    }  # fmt: skip


def test_evidence(analysis: Analysis) -> None:
    np.testing.assert_allclose(analysis.evidence_for_finding("Mass"), [[3 / np.sqrt(10), 0]], atol=1e-6)
    np.testing.assert_allclose(analysis.evidence_for_finding("Nodule"), [[0, 1 / np.sqrt(10)]], atol=1e-6)
    np.testing.assert_allclose(analysis.evidence_for_neighbour("a"), [[0, 1 / np.sqrt(10)]], atol=1e-6)


def test_evidence_for_unknown_findings_and_neighbours(analysis: Analysis) -> None:
    with pytest.raises(UserError, match=r"a finding of this analysis \(Mass, Nodule\), found 'Hernia'"):
        analysis.evidence_for_finding("Hernia")
    with pytest.raises(UserError, match="a neighbour of this analysis"):
        analysis.evidence_for_neighbour("b")


POINTS = {
    "sensitive": (OperatingPoint(0.1, 0.95, 0.4, 0.5, 0.9), OperatingPoint(0.2, 0.9, 0.5, 0.2, None)),
    "specific": (OperatingPoint(0.8, 0.4, 0.95, 0.9, 0.6), None),
}


def test_another_operating_point_changes_the_decisions(analysis: Analysis, tiny_card: ModelCard) -> None:
    card = tiny_card.with_(
        labels=LabelSet(("Mass", "Nodule")), thresholds=(0.5, None), calibration=(None, None),
        proxies_per_class=(1, 1, 1), operating_points=POINTS,
    )  # fmt: skip
    analysis = replace(analysis, known=())
    sensitive = analysis.at(card, "sensitive")
    assert [(one.predicted, one.threshold) for one in sensitive.findings] == [(True, 0.1), (True, 0.2)]
    assert (sensitive.operating_point, sensitive.query_labels) == ("sensitive", ("Mass", "Nodule"))
    assert sensitive.neighbours[0].shared == ("Mass", "Nodule")
    specific = sensitive.at(card, "specific")
    assert [(one.predicted, one.threshold) for one in specific.findings] == [(False, 0.8), (None, None)]
    assert (specific.query_labels, specific.neighbours[0].shared) == ((), ())
    assert specific.at(card, "balanced").findings == analysis.findings
    # known labels stay
    known = replace(analysis, known=("b",)).at(card, "specific")
    assert (known.query_labels, known.neighbours[0].shared) == (("Mass",), ("Mass",))
    with pytest.raises(UserError, match="expected an operating point of this model"):
        analysis.at(card, "perfect")


def test_order_for_display() -> None:
    """A score of .9 is not a probability: it does not rank above a calibrated .2."""
    findings = [
        Finding("Mass", 0.9, None, True, 0.5),
        Finding("Edema", 0.3, 0.2, False, 0.5),
        Finding("Hernia", 0.95, None, None, None),
        Finding("Effusion", 0.1, 0.7, True, 0.05),
        Finding("Atelectasis", 0.3, 0.2, False, 0.5),
    ]
    ordered = [finding.label for finding in most_probable_first(findings)]
    assert ordered == ["Effusion", "Atelectasis", "Edema", "Hernia", "Mass"]
