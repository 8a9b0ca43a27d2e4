"""What `cbmir benchmark --dry-run` prints: which images would train and ask, and what would be run."""

from __future__ import annotations

from collections import Counter

from cbmir.manifest import Manifest
from cbmir.training.benchmark.methods import METHODS
from cbmir.training.benchmark.plan import Part, Plan
from cbmir.training.benchmark.protocols import PROTOCOLS
from cbmir.training.splits import patients_in_two_splits


def preview(plan: Plan, selections: dict[Part, Manifest]) -> str:
    """Selections, methods and number of cells, as text."""
    protocol = PROTOCOLS[plan.protocol]
    lines = [f"{protocol.title}; nDCG@{protocol.k}", ""]
    rows = [("selection", "training", "validation", "queries", "patients", "in two splits", "fingerprint")]
    for part, selection in selections.items():
        count = Counter(row.split for row in selection)
        patients = {row.patient_id for row in selection if row.split}
        shared = patients_in_two_splits(selection)
        train, val, test = (f"{count[split]:,}" for split in ("train", "val", "test"))
        rows.append((part.name, train, val, test, f"{len(patients):,}", f"{len(shared)}", selection.fingerprint[:12]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    cells = Counter(cell.method for cell in plan.cells())
    lines += ["", f"{sum(cells.values())} cells:"]
    lines += [f"  {count:>3}  {name:<15} {METHODS[name].title}" for name, count in cells.items()]
    return "\n".join(lines)
