"""A small finished REPORT with made-up vectors, since figures need no trained network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.training.comparison.cells import cell_folder, write_answers, write_vectors
from cbmir.training.comparison.plan import Cell, Plan, selection_path
from cbmir.training.dataset import label_array
from cbmir.training.evaluate import Vectors, evaluate

#: The last one looks like markup to XML and like a formula to matplotlib.
LABELS = LabelSet(("Effusion", "Mass", "<b>$\\x$&"))


@pytest.fixture(scope="session")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """BCE and both proxy methods, one seed, all finished."""
    report = tmp_path_factory.mktemp("pictures") / "report"
    plan = Plan("table", "manifest.csv", "", ("bce", "proxy", "proxy-negative"), seeds=1, training={"weights": "none"})
    selection = _selection(report.parent)
    write_manifest(selection, selection_path(report, plan.parts()[0]))
    for cell in plan.cells():
        _write_cell(report, cell, selection)
    return report, plan


def _selection(folder: Path) -> Manifest:
    """48 images of 24 patients, 6 of them in the test split; labels have all values except unknown."""
    rng, rows = np.random.default_rng(0), []
    for number in range(48):
        path = folder / f"secret-{number:02}.png"
        Image.fromarray(rng.integers(0, 256, (40, 48)).astype(np.uint8)).save(path)
        labels = [int(value) for value in rng.integers(0, 2, 3)]
        labels[0] = -1 if number % 11 == 0 else labels[0]
        patient = number // 2
        rows.append(Row(path, f"patient-{patient}", tuple(labels), split="train" if patient % 4 else "test"))
    return Manifest(LABELS, tuple(rows))


def _write_cell(report: Path, cell: Cell, selection: Manifest) -> None:
    """Write a cell with vectors that correlate with the labels, and their answers."""
    rng = np.random.default_rng(len(cell.name))

    def vectors(split: str) -> Vectors:
        labels = label_array(selection.split(split))
        found = labels @ np.eye(3, 6) + rng.normal(0, 0.4, (len(labels), 6))
        unit = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
        return Vectors(unit, unit[:, :3], labels, [row.patient_id for row in selection.split(split)])

    query, gallery = vectors("test"), vectors("train")
    folder = cell_folder(report, cell)
    folder.mkdir(parents=True)
    write_vectors(folder, query.embedding, gallery.embedding, scores=query.scores)
    facts = {"seconds": 1.0, "training_images": len(gallery.patients)}
    write_answers(folder, evaluate(query, gallery, LABELS.names, k=10), facts)
