"""One cell: train or take what is there, let the queries ask the gallery, and write down a value for each query."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
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
from cbmir.runtime.imaging.preprocess import centre_crop
from cbmir.training.comparison.methods.registry import METHODS, Given, MethodAnswer
from cbmir.training.comparison.plan import Cell, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, split_rows, split_targets
from cbmir.training.evaluate import Vectors, embed, evaluate, on_fastest_device
from cbmir.training.harness import first_process, train
from cbmir.training.metrics import RETRIEVAL_METRICS, RetrievalValues, Similarity, inner_products, patient_codes
from cbmir.training.run import RunFolder, build_model

COLUMNS = ("positive queries", "all queries", "random, positive queries", "random, all queries")
FACTS, VALUES, VECTORS, LOG, FAILED = "cell.json", "answers.npz", "vectors.npz", "log.txt", "failed.json"
_ARRAYS = ("patients", "views", "sources", "labels", "scores", "neighbours")
#: So many neighbours of each query are kept for the page of examples.
NEIGHBOURS = 10


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


def write_answers(folder: Path, answers: CellAnswers) -> None:
    """Write answers.npz, then cell.json, whose presence says that the cell is finished."""
    arrays = {name: np.asarray(getattr(answers, name)) for name in _ARRAYS}
    arrays |= {f"{c}/{metric}": getattr(answers.retrieval[c], metric) for c in COLUMNS for metric in RETRIEVAL_METRICS}
    with replacing(folder / VALUES) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    write_json(folder / FACTS, answers.facts)


def read_answers(folder: Path) -> CellAnswers:
    """The answers of a finished cell."""
    with np.load(folder / VALUES) as data:
        arrays = dict(data)
    own: dict[str, Any] = {n: arrays[n].tolist() if arrays[n].dtype.kind == "U" else arrays[n] for n in _ARRAYS}
    retrieval = {c: RetrievalValues(*(arrays[f"{c}/{m}"] for m in RETRIEVAL_METRICS)) for c in COLUMNS}
    return CellAnswers(json.loads((folder / FACTS).read_text("utf-8")), **own, retrieval=retrieval)


def write_vectors(folder: Path, query: NDArray[np.float32], gallery: NDArray[np.float32], **more: Any) -> None:
    """Write vectors.npz: what the t-SNE maps show, and methods without a network work on."""
    with replacing(folder / VECTORS) as temporary, temporary.open("wb") as stream:
        np.savez(stream, query=query, gallery=gallery, **more)


def read_vectors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """`query` [Q, D] and `gallery` [G, D], and `scores` [Q, C]."""
    with np.load(folder / VECTORS) as data:
        return dict(data)


def cell_folder(report: Path, cell: Cell) -> Path:
    """Where a cell lies in the report."""
    return report / "cells" / cell.name


def is_finished(report: Path, cell: Cell) -> bool:
    """Whether a cell has all of its answers."""
    return (cell_folder(report, cell) / FACTS).exists()


def shown_cells(report: Path, plan: Plan, methods: Collection[str]) -> dict[str, Cell]:
    """The finished cells of one part by method, in the order of `methods`: the first part that has any."""
    for part in plan.parts():
        if part.size == plan.shown_size:
            cells = [Cell(part, name, plan.shown_proxies if METHODS[name].many_proxies else "") for name in methods]
            found = {cell.method: cell for cell in cells if is_finished(report, cell)}
            if found:
                return found
    return {}


def run_cell(report: Path, plan: Plan, cell: Cell) -> None:
    """Run a cell to its end; a finished one is left alone, and training that was stopped goes on.

    Raises what training raises, and RunError where the code length does not fit a method or BCE has failed.
    """
    folder = cell_folder(report, cell)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock") if first_process() else nullcontext():  # a second benchmark waits for the first
        if not is_finished(report, cell):
            _run(report, plan, cell, folder)


def _run(report: Path, plan: Plan, cell: Cell, folder: Path) -> None:
    method, path = METHODS[cell.method], selection_path(report, cell.part)
    selection = read_manifest(path)
    config = plan.config(cell, selection, path)

    def images() -> NDArray[np.uint8]:
        return cached_images(selection, config.preprocess, cache_folder(path))

    def batches(split: str) -> Iterator[NDArray[np.uint8]]:
        return evaluation_batches(images(), split_rows(selection, split), config.preprocess)

    facts: dict[str, Any] = {}
    if method.answer is None:
        run = train(config, folder / "run", resume=True)
        if not first_process():
            return
        began = time.time()
        model, _ = build_model(config, split_targets(selection, "train"), weights="none")
        model.load_state_dict(run.best_state())
        on_fastest_device(model)
        query, scores = embed(model, batches("test"))
        gallery, _ = embed(model, batches("train"))
        answer, facts = MethodAnswer(query, gallery, inner_products(query, gallery), scores), _facts(run)
    else:
        began = time.time()
        given = Given(
            bce=_bce(report, cell) if method.needs_bce else {},
            targets=split_targets(selection, "train"),
            images=lambda split: centre_crop(images()[split_rows(selection, split)], config.preprocess),
            bits=config.code_bits,
            seed=config.seed,
        )
        answer = method.answer(given)
    _write(folder, plan, selection, answer, facts, began)


def _bce(report: Path, cell: Cell) -> dict[str, NDArray[np.float32]]:
    """The vectors of the BCE network on the same part."""
    bce = Cell(cell.part, "bce")
    if not is_finished(report, bce):
        raise RunError(f"{cell.name} works on the BCE network's features, and {bce.name} is not finished")
    return read_vectors(cell_folder(report, bce))


def _facts(run: RunFolder) -> dict[str, Any]:
    card = run.read_card()
    return {
        "negative_proxies": card.negative_proxies, "proxies_per_class": list(card.proxies_per_class),
        "best_epoch": card.training["best_epoch"], "precision": card.training["precision"],
        "training_seconds": card.training["seconds"],
    }  # fmt: skip


def _write(
    folder: Path, plan: Plan, selection: Manifest, answer: MethodAnswer, facts: dict[str, Any], began: float
) -> None:
    queries = selection.split("test").rows
    scores = answer.scores
    if scores is None:
        scores = np.full((len(queries), len(selection.labels)), np.nan, np.float32)
    query = Vectors.of_split(selection, "test", answer.query, scores)
    gallery = Vectors.of_split(selection, "train", answer.gallery)
    k, names = PROTOCOLS[plan.protocol].k, selection.labels.names
    evaluation = evaluate(query, gallery, names, k=k, similarity=answer.similarity)
    neighbours = nearest(answer.similarity, query.patients, gallery.patients)
    views, sources = [row.view for row in queries], [row.source for row in queries]
    write_vectors(folder, answer.query, answer.gallery, scores=scores)
    facts = {"training_images": len(gallery.patients), "queries": len(queries)} | facts
    facts["seconds"] = round(facts.get("training_seconds", 0) + time.time() - began, 2)
    answers = CellAnswers(facts, query.patients, views, sources, query.labels, scores, neighbours, evaluation.retrieval)
    write_answers(folder, answers)


def nearest(similarity: Similarity, query_patients: Sequence[str], gallery_patients: Sequence[str]) -> NDArray[np.intp]:
    """The 10 nearest gallery positions of each query, its own patient left out; [Q, 10], -1 where there are no more."""
    own, others = patient_codes(query_patients, gallery_patients)
    found = np.full((len(query_patients), NEIGHBOURS), -1, dtype=np.intp)
    for row in range(len(query_patients)):
        allowed = np.flatnonzero(others != own[row])
        ranked = allowed[np.argsort(-similarity(row)[allowed], kind="stable")[:NEIGHBOURS]]
        found[row, : len(ranked)] = ranked
    return found
