"""One cell: train or take what is there, let the queries ask the gallery, and write down the answers.

What a cell leaves behind: a value a query, from which every figure of the report is made.

What `cbmir benchmark --dry-run` prints: which images would train and ask, and what would be run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from cbmir.errors import RunError
from cbmir.files import replacing, write_json
from cbmir.manifest import Manifest, read_manifest
from cbmir.training.comparison.methods.registry import METHODS, Answer, Given
from cbmir.training.comparison.plan import Cell, Part, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.config import TrainConfig
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, label_array
from cbmir.training.evaluate import Evaluation, Vectors, embed, evaluate, on_fastest_device
from cbmir.training.harness import first_process, train
from cbmir.training.metrics import RETRIEVAL_METRICS, RetrievalValues, Similarity, inner_products, patient_codes
from cbmir.training.run import RunFolder, best_state, build_model, split_rows, split_targets
from cbmir.training.splits import patients_in_two_splits

COLUMNS = ("positive queries", "all queries", "random, positive queries", "random, all queries")
FACTS, VALUES, VECTORS, LOG, FAILED = "cell.json", "answers.npz", "vectors.npz", "log.txt", "failed.json"


@dataclass(frozen=True, eq=False)
class CellAnswers:
    """One method's answers to the queries of one part.

    `labels` and `scores` are float32 [Q, C] as in Vectors, `neighbours` [Q, 10] positions among the part's training
    images, nearest first (-1: there are no more); `views` and `sources` are empty strings where they are not known.
    `facts` is cell.json: seconds, counts, and what the training run says of itself.
    """

    facts: dict[str, Any]
    patients: Sequence[str]
    views: Sequence[str]
    sources: Sequence[str]
    labels: NDArray[np.float32]
    scores: NDArray[np.float32]
    neighbours: NDArray[np.intp]
    retrieval: dict[str, RetrievalValues]


def write_answers(
    folder: Path,
    evaluation: Evaluation,
    *,
    views: Sequence[str],
    sources: Sequence[str],
    neighbours: NDArray[np.intp],
    facts: dict[str, Any],
) -> None:
    """Write answers.npz, then cell.json, whose presence says that the cell is finished."""
    values = {
        f"{column}/{metric}": getattr(evaluation.retrieval[column], metric)
        for column in COLUMNS
        for metric in RETRIEVAL_METRICS
    }
    query = evaluation.query
    with replacing(folder / VALUES) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(
            stream, patients=np.array(query.patients), views=np.array(views), sources=np.array(sources),
            labels=query.labels, scores=query.scores, neighbours=neighbours, **values,
        )  # fmt: skip
    write_json(folder / FACTS, facts)


def read_answers(folder: Path) -> CellAnswers:
    """The answers of a finished cell."""
    with np.load(folder / VALUES) as data:
        arrays = dict(data)
    return CellAnswers(
        facts=json.loads((folder / FACTS).read_text("utf-8")),
        patients=arrays["patients"].tolist(),
        views=arrays["views"].tolist(),
        sources=arrays["sources"].tolist(),
        labels=arrays["labels"],
        scores=arrays["scores"],
        neighbours=arrays["neighbours"],
        retrieval={c: RetrievalValues(*(arrays[f"{c}/{m}"] for m in RETRIEVAL_METRICS)) for c in COLUMNS},
    )


def write_vectors(folder: Path, query: NDArray[np.float32], gallery: NDArray[np.float32], **more: Any) -> None:
    """Write vectors.npz: what the t-SNE pictures show, and methods without a network work on."""
    with replacing(folder / VECTORS) as temporary, temporary.open("wb") as stream:
        np.savez(stream, query=query, gallery=gallery, **more)


def read_vectors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """`query` [Q, D] and `gallery` [G, D], and `scores` [Q, C]."""
    with np.load(folder / VECTORS) as data:
        return dict(data)


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


#: So many neighbours of each query are kept for the page of examples.
NEIGHBOURS = 10


def cell_folder(report: Path, cell: Cell) -> Path:
    """Where a cell lies in the report."""
    return report / "cells" / cell.name


def run_cell(report: Path, plan: Plan, cell: Cell) -> None:
    """Run a cell to its end; a finished one is left alone, and training that was stopped goes on.

    Raises what training raises, and RunError where the code length does not fit a method or BCE has failed.
    """
    folder = cell_folder(report, cell)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock") if first_process() else nullcontext():  # a second benchmark waits for the first
        if not (folder / FACTS).exists():
            _run(report, plan, cell, folder)


def _run(report: Path, plan: Plan, cell: Cell, folder: Path) -> None:
    method, path = METHODS[cell.method], selection_path(report, cell.part)
    selection = read_manifest(path)
    part = _Part(selection, plan.config(cell, selection, path), cache_folder(path))
    if method.answer is None:
        train(part.config, folder / "run", resume=True)
        if not first_process():
            return
        began = time.time()
        answer, facts = _network(part, folder / "run"), _facts(folder / "run")
    else:
        began = time.time()
        answer, facts = method.answer(_given(part, _bce(report, cell) if method.needs_bce else {})), {}
    scores = answer.scores
    if scores is None:
        scores = np.full((len(part.rows("test")), len(selection.labels)), np.nan, np.float32)
    query, gallery = part.vectors("test", answer.query, scores), part.vectors("train", answer.gallery)
    evaluation = evaluate(
        query, gallery, selection.labels.names, k=PROTOCOLS[plan.protocol].k, similarity=answer.similarity
    )
    write_vectors(folder, answer.query, answer.gallery, scores=scores)
    rows = [selection.rows[row] for row in part.rows("test")]
    write_answers(
        folder, evaluation,
        views=[row.view for row in rows], sources=[row.source for row in rows],
        neighbours=nearest(answer.similarity, query.patients, gallery.patients),
        facts={
            "training_images": len(gallery.patients),
            "queries": len(rows),
            **facts,
            "seconds": round(facts.get("training_seconds", 0) + time.time() - began, 2),
        },
    )  # fmt: skip


def _bce(report: Path, cell: Cell) -> dict[str, NDArray[np.float32]]:
    """The vectors of the BCE network on the same part."""
    bce = Cell(cell.part, "bce")
    if not (cell_folder(report, bce) / FACTS).exists():
        raise RunError(f"{cell.name} works on the BCE network's features, and {bce.name} is not finished")
    return read_vectors(cell_folder(report, bce))


@dataclass(frozen=True)
class _Part:
    """The images of one part; `test` asks, `train` is the gallery."""

    selection: Manifest
    config: TrainConfig
    cache: Path

    def rows(self, split: str) -> list[int]:
        return split_rows(self.selection, split)

    def batches(self, split: str) -> Iterator[NDArray[np.uint8]]:
        images = cached_images(self.selection, self.config.preprocess, self.cache)
        return evaluation_batches(images, self.rows(split), self.config.preprocess)

    def vectors(self, split: str, embedding: NDArray[np.float32], scores: NDArray[np.float32] | None = None) -> Vectors:
        """With labels and patients; the gallery needs no scores."""
        rows = self.rows(split)
        patients = [self.selection.rows[row].patient_id for row in rows]
        none = np.empty((len(rows), 0), np.float32)
        return Vectors(embedding, none if scores is None else scores, label_array(self.selection)[rows], patients)


def _network(part: _Part, run: Path) -> Answer:
    """What the best model of the run answers."""
    model, _ = build_model(part.config, split_targets(part.selection, "train"), weights="none")
    model.load_state_dict(best_state(RunFolder(run)))
    on_fastest_device(model)
    query, scores = embed(model, part.batches("test"))
    gallery, _ = embed(model, part.batches("train"))
    return Answer(query, gallery, inner_products(query, gallery), scores)


def _facts(run: Path) -> dict[str, Any]:
    card = RunFolder(run).read_card()
    return {
        "negative_proxies": card.negative_proxies,
        "proxies_per_class": list(card.proxies_per_class),
        "best_epoch": card.training["best_epoch"],
        "precision": card.training["precision"],
        "training_seconds": card.training["seconds"],
    }


def _given(part: _Part, bce: dict[str, NDArray[np.float32]]) -> Given:
    none, side = np.empty((0, 0), np.float32), part.config.preprocess.crop

    def crops(split: str) -> NDArray[np.uint8]:
        images, filled = np.empty((len(part.rows(split)), side, side), np.uint8), 0
        for batch in part.batches(split):
            images[filled : filled + len(batch)] = batch[:, 0]
            filled += len(batch)
        return images

    return Given(
        query=bce.get("query", none),
        scores=bce.get("scores", none),
        gallery=bce.get("gallery", none),
        targets=split_targets(part.selection, "train"),
        images=crops,
        bits=part.config.code_bits,
        seed=part.config.seed,
    )


def nearest(similarity: Similarity, query_patients: Sequence[str], gallery_patients: Sequence[str]) -> NDArray[np.intp]:
    """The 10 nearest gallery positions of each query, its own patient left out; [Q, 10], -1 where there are no more."""
    own, others = patient_codes(query_patients, gallery_patients)
    found = np.full((len(query_patients), NEIGHBOURS), -1, dtype=np.intp)
    for row in range(len(query_patients)):
        allowed = np.flatnonzero(others != own[row])
        ranked = allowed[np.argsort(-similarity(row)[allowed], kind="stable")[:NEIGHBOURS]]
        found[row, : len(ranked)] = ranked
    return found
