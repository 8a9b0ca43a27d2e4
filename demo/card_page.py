"""The model's card as a page: what it was made from, how well it does with intervals, what it is for and what not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbmir.card import NOT_A_DEVICE, ModelCard
from cbmir.demo.markup import escape, table
from cbmir.labels import readable

_LIMITS = (
    "It knows frontal chest X-rays of adults like those it was trained on. Of others, its numbers mean nothing; the "
    "flag above the findings catches most, not all of them.",
    "A probability is calibrated on validation images of the same source: elsewhere findings are rarer or more common, "
    "and it is off accordingly.",
    "Labels of public data sets are often read from reports by a program, and are wrong at times; so are look-alikes' "
    "labels where the gallery comes from such a set.",
    "Evidence says which parts of the image a number is made of. It does not say that the finding is there.",
    "A finding that is not listed is not looked for.",
)


def card_html(card: ModelCard) -> str:
    """Sections of plain facts; what the card does not say is left out."""
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in _LIMITS)
    return (
        f'<p class="device">{escape(NOT_A_DEVICE)}</p><h3>Intended use</h3><p>{escape(card.intended_use)}</p>'
        f"<h3>Limits</h3><ul>{limits}</ul><h3>How well it does</h3>{_metrics(card.metrics)}"
        f"<h3>Training data</h3>{_training(card)}<h3>Model</h3>{_facts(_model(card))}"
    )


def _model(card: ModelCard) -> dict[str, str]:
    return {
        "Encoder": card.encoder, "Precision": card.precision, "Head": f"{card.head}, sigma {card.sigma:g}",
        "Input": f"{card.preprocess.crop} x {card.preprocess.crop} pixels of {card.preprocess.resize}",
        "Licence": card.licence, "Fingerprint": card.fingerprint,
        "Made with": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
    }  # fmt: skip


def _metrics(metrics: Mapping[str, Any]) -> str:
    rows = _metric_rows(metrics, "")
    if not rows:
        return "<p>The card has no metrics: how well this model does is not known.</p>"
    return table(("Metric", "Value", "95% interval"), rows)


def _metric_rows(metrics: Mapping[str, Any], above: str) -> list[tuple[str, str, str]]:
    """Metrics may stand in groups; what has no interval is a count, and no metric."""
    rows: list[tuple[str, str, str]] = []
    for name, value in metrics.items():
        if not isinstance(value, Mapping):
            continue
        if "value" in value:
            interval = f"{value['low']:.3f} to {value['high']:.3f}" if "low" in value else "not available"
            rows.append((escape(_metric_name(above, name)), f"{value['value']:.3f}", interval))
        else:
            rows += _metric_rows(value, f"{above} {name}".strip())
    return rows


def _metric_name(group: str, name: str) -> str:
    """A metric as people write it: "nDCG, validation, positive queries"."""
    first, _, rest = f"{group} {name}".strip().partition(" ")
    split = {"val": "validation", "test": "test", "train": "training"}.get(first)
    if split is None:
        group, metric = "", f"{first} {rest}".strip()
    else:
        group, _, metric = rest.rpartition(" ")
    spelled = {"ndcg": "nDCG", "acg": "ACG", "auc": "AUC", "precision": "Precision"}.get(metric, metric)
    return ", ".join(part for part in (spelled, split, group) if part)


def _training(card: ModelCard) -> str:
    training = card.training
    facts = {
        "Source": training.get("source"), "Patients": training.get("patients"), "Loss": training.get("loss"),
        "Epochs": training.get("epochs"),
        "Images": ", ".join(f"{split} {count:,}" for split, count in _mapping(training.get("images")).items()),
    }  # fmt: skip
    rows = [
        (escape(readable(label)), f"{count.get('positive', 0):,}", f"{count.get('negative', 0):,}")
        for label, count in _mapping(training.get("labels")).items()
    ]
    known = _facts({name: str(value) for name, value in facts.items() if value not in (None, "")})
    counts = table(("Finding", "With it", "Without"), rows) if rows else ""
    return (known or "<p>The card does not say.</p>") + counts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    return f"<dl>{items}</dl>" if items else ""
