"""metrics.csv, a row an epoch, and curves.png made from it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from cbmir.errors import require
from cbmir.files import replacing

COLUMNS = ("epoch", "train_loss", "val_ndcg", "val_auc", "lr", "seconds")


def append_epoch(path: Path, values: dict[str, Any]) -> None:
    """Add the row of one epoch; rows of this and later epochs, left by a run that was stopped, are replaced."""
    rows = [row for row in read_epochs(path) if int(row["epoch"]) < values["epoch"]] if path.exists() else []
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows([*rows, values])


def read_epochs(path: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def draw_curves(metrics: Path, picture: Path) -> None:
    """Loss, and validation nDCG and AUC, over epochs; the best epoch by nDCG is marked."""
    require("matplotlib", "train")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_epochs(metrics)
    epochs = [int(row["epoch"]) for row in rows]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(epochs, [float(row["train_loss"]) for row in rows], "k.-")
    left.set(xlabel="epoch", ylabel="training loss")
    ndcg = [float(row["val_ndcg"]) for row in rows]
    right.plot(epochs, ndcg, "k.-", label="nDCG")
    right.plot(epochs, [float(row["val_auc"]) for row in rows], "s--", color="tab:blue", ms=3, label="AUC")
    best = max(range(len(rows)), key=lambda i: ndcg[i])
    right.axvline(epochs[best], color="grey", lw=0.8)
    note = f"best nDCG {ndcg[best]:.3f}"
    right.annotate(note, (epochs[best], ndcg[best]), textcoords="offset points", xytext=(4, -12))
    right.set(xlabel="epoch", ylabel="on the validation split", ylim=(0, 1))
    right.legend(loc="lower right")
    with replacing(picture) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
