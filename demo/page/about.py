"""The page about the model: its card in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbmir.card import NOT_A_DEVICE, WITHOUT_FINDINGS, ModelCard
from cbmir.demo.page.markup import escape, table

_LIMITS = (
    "It knows frontal chest X-rays of adults like those it was trained on. For other images its numbers mean nothing; "
    "the warning above the findings catches most of these, but not all.",
)
_LIMITS_OF_FINDINGS = (
    "Probabilities are calibrated on validation images of the same source. Elsewhere findings are rarer or more "
    "common, and the probabilities are too high or too low.",
    "Labels of public data sets are often extracted from reports by a program, and some are wrong. This also applies "
    "to similar images of a gallery that was built from such a data set.",
    "Evidence shows which parts of the image contribute to a number. It does not show that the finding is present.",
    "The model does not look for findings that are not listed.",
)
_SPELLED = {"val": "validation", "ndcg": "nDCG", "acg": "ACG", "auc": "AUC", "jaccard_ndcg": "Jaccard nDCG",
            "corrected_ndcg": "nDCG corrected for chance",
            "corrected_jaccard_ndcg": "Jaccard nDCG corrected for chance"}  # fmt: skip


def card_html(card: ModelCard) -> str:
    """Render the card as sections of facts. Missing facts are left out."""
    stated = (*_LIMITS, *_LIMITS_OF_FINDINGS) if card.has_findings else (*_LIMITS, WITHOUT_FINDINGS)
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in stated)
    return (
        f'<p class="device">{escape(NOT_A_DEVICE)}</p><h3>Intended use</h3><p>{escape(card.intended_use)}</p>'
        f"<h3>Limits</h3><ul>{limits}</ul><h3>Performance</h3>{_metrics(card.metrics)}"
        f"<h3>Training data</h3>{_training(card)}<h3>Model</h3>{_facts(_model(card))}"
    )


def _model(card: ModelCard) -> dict[str, str]:
    return {
        "Encoder": card.encoder, "Precision": card.precision,
        "Head": f"{card.head}, sigma {card.sigma:g}" if card.has_findings else "none: it scores no findings",
        "Input": f"{card.preprocess.crop} x {card.preprocess.crop} pixels of {card.preprocess.resize}",
        "Licence": card.licence, "Fingerprint": card.fingerprint,
        "Made with": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
    }  # fmt: skip


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = _metric_rows(metrics, "")
    if not rows:
        return "<p>The card has no metrics, so this model's performance is not known.</p>"
    return table(("Metric", "Value", "95% interval"), rows)


def _metric_rows(metrics: Mapping[str, Any], above: str) -> list[tuple[str, str, str]]:
    """Make the rows of a table. Metrics may be grouped; plain numbers are counts, and left out."""
    rows: list[tuple[str, str, str]] = []
    for name, value in metrics.items():
        if not isinstance(value, Mapping) or value.get("value", 0) is None:
            continue
        if "value" in value:
            known = value.get("low") is not None
            interval = f"{value['low']:.3f} to {value['high']:.3f}" if known else "not available"
            spelled = " ".join(_SPELLED.get(word, word) for word in f"{above} {name}".split())
            rows.append((escape(spelled), f"{value['value']:.3f}", interval))
        else:
            rows += _metric_rows(value, f"{above} {name}".strip())
    return rows


def _training(card: ModelCard) -> str:
    training = card.training
    facts = {
        "Source": training.get("source"), "Patients": training.get("patients"), "Loss": training.get("loss"),
        "Epochs": training.get("epochs"), "Published weights": "" if card.has_findings else training.get("weights"),
        "Images": ", ".join(f"{split} {count:,}" for split, count in _mapping(training.get("images")).items()),
    }  # fmt: skip
    return _facts({name: str(value) for name, value in facts.items() if value not in (None, "")}) or (
        "<p>The card does not say.</p>"
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    return f"<dl>{items}</dl>" if items else ""
