"""The result: its JSON, and the evidence that it gives on request."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cbmir.errors import UserError
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
        agreement=(LabelAgreement("Mass", 1, 0, 0, 0, 1.0), LabelAgreement("Nodule", 0, 0, 0, 1, None)),
        novelty=Novelty(0.25, 99.5, True),
        known=("b",),
    )


def test_json_has_the_promised_keys_and_plain_values(analysis: Analysis) -> None:
    assert json.loads(json.dumps(analysis.to_json())) == {
        "image": "chest.png",
        "known": ["b"],
        "operating_point": "balanced",
        "findings": [
            {"label": "Mass", "score": 0.75, "probability": None, "predicted": True, "threshold": 0.5},
            {"label": "Nodule", "score": 0.25, "probability": 0.125, "predicted": None, "threshold": None},
        ],
        "rank": "nearness",
        "neighbours": [
            {
                "id": "a", "image": "/x/a.png", "patient_id": "7", "distance": 0.5, "cosine": 0.875,
                "labels": ["Mass", "Nodule"], "shared": ["Mass"], "report": "A report.", "uncertain": ["Nodule"],
                "boxes": [{"label": "Mass", "left": 0.25, "top": 0, "width": 0.5, "height": 1}],
            }
        ],
        "agreement": [
            {"label": "Mass", "positive": 1, "negative": 0, "uncertain": 0, "unknown": 0, "share": 1.0},
            {"label": "Nodule", "positive": 0, "negative": 0, "uncertain": 0, "unknown": 1, "share": None},
        ],
        "novelty": {"distance": 0.25, "percentile": 99.5, "flagged": True},
        "warnings": ["Careful."],
    }  # fmt: skip


def test_evidence(analysis: Analysis) -> None:
    contrast = analysis.evidence_for_finding("Mass")
    np.testing.assert_allclose(contrast, [[3 / np.sqrt(10), -1 / np.sqrt(10)]], atol=1e-6)
    np.testing.assert_array_equal(analysis.evidence_for_finding("Nodule"), -contrast)
    np.testing.assert_allclose(analysis.evidence_for_neighbour("a"), [[0, 1 / np.sqrt(10)]], atol=1e-6)


def test_evidence_for_what_is_not_there(analysis: Analysis) -> None:
    with pytest.raises(UserError, match=r"a finding of this analysis \(Mass, Nodule\), found 'Hernia'"):
        analysis.evidence_for_finding("Hernia")
    with pytest.raises(UserError, match="a neighbour of this analysis"):
        analysis.evidence_for_neighbour("b")


def test_the_order_for_people() -> None:
    """A score of .9 is no probability: it does not stand above a calibrated .2."""
    findings = [
        Finding("Mass", 0.9, None, True, 0.5),
        Finding("Edema", 0.3, 0.2, False, 0.5),
        Finding("Hernia", 0.95, None, None, None),
        Finding("Effusion", 0.1, 0.7, True, 0.05),
        Finding("Atelectasis", 0.3, 0.2, False, 0.5),
    ]
    ordered = [finding.label for finding in most_probable_first(findings)]
    assert ordered == ["Effusion", "Atelectasis", "Edema", "Hernia", "Mass"]
