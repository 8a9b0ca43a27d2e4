"""Counting what a manifest holds: for its sidecar and for `cbmir data check`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cbmir.manifest import Manifest

#: What a label's value is called in counts.
VALUE_NAMES: dict[int | None, str] = {1: "positive", 0: "negative", -1: "uncertain", None: "unknown"}


def summarise(manifest: Manifest) -> dict[str, Any]:
    """Images and patients in all and by split, images by view, and each label's values by split.

    Rows without a split count under `unassigned`, rows without a view under `unknown`; only splits and views that
    occur are listed. `labels` is {label: {split: {positive, negative, uncertain, unknown}}}.
    """
    splits = [name for name in ("train", "val", "test", "") if any(row.split == name for row in manifest)]
    parts = {name or "unassigned": manifest.split(name) for name in splits}
    return {
        "images": len(manifest),
        "patients": len({row.patient_id for row in manifest}),
        "splits": {
            name: {"images": len(part), "patients": len({row.patient_id for row in part})}
            for name, part in parts.items()
        },
        "views": dict(sorted(Counter(row.view or "unknown" for row in manifest).items())),
        "labels": {
            label: {name: _values(part, position) for name, part in parts.items()}
            for position, label in enumerate(manifest.labels.names)
        },
    }


def _values(manifest: Manifest, position: int) -> dict[str, int]:
    counts = Counter(row.labels[position] for row in manifest)
    return {name: counts[value] for value, name in VALUE_NAMES.items()}
