"""One cell: train the model or load the finished one, search the gallery with the queries, and save each query's
values."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from cbmir.card import Calibration
from cbmir.errors import RunError
from cbmir.fields import from_json
from cbmir.files import replacing, write_json
from cbmir.input_file import open_input, read_json
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime.imaging.preprocess import centre_crop
from cbmir.training.comparison.methods.registry import METHODS, Given, MethodAnswer
from cbmir.training.comparison.plan import Cell, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.config import RESUMABLE_CHANGES, TrainConfig
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, split_rows, split_targets
from cbmir.training.evaluate import Evaluation, Vectors, embed, evaluate, on_fastest_device
from cbmir.training.harness import first_process, train
from cbmir.training.losses import HASHING_LOSSES
from cbmir.training.metrics import QUERIES, RETRIEVAL_METRICS, RetrievalValues, inner_products
from cbmir.training.run import RunFolder, build_model, load_model

FACTS, VALUES, VECTORS, LOG, FAILED = "cell.json", "answers.npz", "vectors.npz", "log.txt", "failed.json"
#: Fields of a network's card that cell.json keeps for the figures.
_DECISIONS = ("thresholds", "calibration")
#: Options about paths and devices, which cell.json omits; the selection's fingerprint identifies the images.
_PLACES = (*RESUMABLE_CHANGES, "manifest_fingerprint", "labels")
#: Most bytes of a cell's unpacked arrays: enough for a million embeddings of 2,048 numbers.
_MOST_ARRAYS = 2**33
_DEFAULTS = {one.name: one.default for one in fields(TrainConfig) if one.name not in _PLACES}


class _Facts(TypedDict, total=False):
    """The fields of cell.json that are read."""

    seconds: float
    training_images: int
    proxies_per_class: tuple[int, ...]
    best_epoch: int
    options: dict[str, Any]
    thresholds: tuple[float | None, ...]
    calibration: tuple[Calibration | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class CellAnswers(Evaluation):
    """One method's results for the queries of one part, and the queries' views and sources (empty if unknown).

    `facts` is cell.json: run time in seconds, counts, and figures of the training run.
    """

    facts: dict[str, Any]
    views: Sequence[str]
    sources: Sequence[str]


def write_answers(folder: Path, evaluation: Evaluation, facts: dict[str, Any]) -> None:
    """Write answers.npz, then cell.json, which marks the cell as finished.

    The files only contain data that the part's selection lacks: scores and values as float32, and the neighbours.
    """
    smallest = np.min_scalar_type(-1 - len(evaluation.gallery.patients))  # signed, since -1 pads short lists
    arrays = {"scores": evaluation.query.scores, "neighbours": evaluation.neighbours.astype(smallest)}
    arrays |= {
        f"{column}/{metric}": getattr(evaluation.retrieval[column], metric).astype(np.float32)
        for column in QUERIES for metric in RETRIEVAL_METRICS
    }  # fmt: skip
    with replacing(folder / VALUES) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    write_json(folder / FACTS, facts)


def read_answers(report: Path, plan: Plan, cell: Cell) -> CellAnswers:
    """Read the answers of a finished cell. Raises RunError if they are damaged or from another version of cbmir."""
    folder, selection = cell_folder(report, cell), read_manifest(selection_path(report, cell.part))
    facts, arrays = _read_facts(folder), _read_arrays(folder / VALUES)
    queries, none, images = selection.split("test").rows, np.empty(0, np.float32), len(selection.split("train"))
    try:
        retrieval = {
            column: RetrievalValues(*(arrays[f"{column}/{m}"].astype(np.float64) for m in RETRIEVAL_METRICS))
            for column in QUERIES
        }
        scores, neighbours = arrays["scores"].astype(np.float32), arrays["neighbours"].astype(np.intp)
        lengths, kind = {len(one) for one in arrays.values()}, (neighbours.ndim, arrays["neighbours"].dtype.kind)
        if lengths != {len(queries)} or scores.shape[1:] != (len(selection.labels),) or kind != (2, "i"):
            raise ValueError("arrays of other images")
        if not ((neighbours >= -1) & (neighbours < images)).all():
            raise ValueError("neighbours that the gallery does not have")
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(folder / VALUES, f"no {error}" if isinstance(error, KeyError) else error) from error
    if not {len(facts.get(name, ())) for name in _DECISIONS} <= {0, len(selection.labels)}:
        raise _unreadable(folder / FACTS, "thresholds or calibration of other labels")
    query, gallery = Vectors.of_split(selection, "test", none, scores), Vectors.of_split(selection, "train", none)
    return CellAnswers(
        selection.labels.names, PROTOCOLS[plan.protocol].k, query, gallery, neighbours, retrieval,
        facts.get("thresholds", ()), [one and Calibration(**one) for one in facts.get("calibration", ())],
        facts=facts, views=[row.view for row in queries], sources=[row.source for row in queries],
    )  # fmt: skip


def write_vectors(folder: Path, query: NDArray[np.float32], gallery: NDArray[np.float32], **more: Any) -> None:
    """Write vectors.npz, which the t-SNE maps and the methods without a network read."""
    with replacing(folder / VECTORS) as temporary, temporary.open("wb") as stream:
        np.savez(stream, query=query, gallery=gallery, **more)


def read_vectors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Read `query` [Q, D], `gallery` [G, D] and `scores` [Q, C]. Raises RunError for any other file."""
    arrays = _read_arrays(folder / VECTORS)
    if not {"query", "gallery"} <= arrays.keys() or {one.ndim for one in arrays.values()} != {2}:
        raise _unreadable(folder / VECTORS, f"arrays {', '.join(arrays)}")
    return arrays


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of an untrusted .npz file."""
    try:
        with open_input(file) as stream, zipfile.ZipFile(stream) as members:
            if sum(member.file_size for member in members.infolist()) > _MOST_ARRAYS:
                raise ValueError(f"arrays of more than {_MOST_ARRAYS:,} bytes")
            stream.seek(0)
            with np.load(stream) as data:
                arrays = dict(data)
        if strange := [name for name, one in arrays.items() if not isinstance(one, np.ndarray)]:
            raise ValueError(f"no array in {strange[0]}")
        return arrays
    except Exception as error:  # zipfile and numpy may raise anything for a damaged file
        raise _unreadable(file, error) from error


def _read_facts(folder: Path) -> dict[str, Any]:
    """Read the untrusted cell.json of a finished cell: the fields of `_Facts`, which are checked, and others."""
    try:
        facts: dict[str, Any] = read_json(folder / FACTS)
        from_json(_Facts, facts)
        if missing := [name for name in ("seconds", "training_images") if name not in facts]:
            raise ValueError(f"no {missing[0]}")
        return facts
    except (OSError, ValueError) as error:
        raise _unreadable(folder / FACTS, error) from error


def _unreadable(file: Path, found: object) -> RunError:
    return RunError(
        f"{file}: expected a file of a finished cell, as this version of cbmir writes it, found {found}; remove its "
        f"{FACTS}, and run with --resume"
    )


def cell_folder(report: Path, cell: Cell) -> Path:
    """Return the folder of a cell in the report."""
    return report / "cells" / cell.name


def is_finished(report: Path, cell: Cell) -> bool:
    """Return whether a cell is finished."""
    return (cell_folder(report, cell) / FACTS).exists()


def shown_cells(report: Path, plan: Plan, methods: Collection[str]) -> dict[str, Cell]:
    """Return the finished cells of the first part of the shown size that has any, by method, ordered as `methods`."""
    for part in plan.parts():
        if part.size == plan.shown_size:
            cells = [Cell(part, name, plan.shown_proxies if METHODS[name].many_proxies else "") for name in methods]
            found = {cell.method: cell for cell in cells if is_finished(report, cell)}
            if found:
                return found
    return {}


def check_finished(report: Path, plan: Plan) -> None:
    """Raise RunError for a finished cell with other images or options, such as one copied from another machine."""
    for part in plan.parts():
        path = selection_path(report, part)
        selection = read_manifest(path)
        for cell in plan.cells():
            if cell.part != part or not is_finished(report, cell):
                continue
            file = cell_folder(report, cell) / FACTS
            facts = _read_facts(file.parent)
            facts["options"] = _DEFAULTS | facts.get("options", {})  # options added later had their defaults
            wanted = _origin(selection, plan.config(cell, selection, path))
            other = [
                f"{name}: {facts.get(name)} -> {value}" for name, value in wanted.items() if facts.get(name) != value
            ]
            if other:
                raise RunError(f"{file}: expected a cell of this benchmark, found {'; '.join(other)}; remove it, and "
                               f"--resume runs it")  # fmt: skip


def _origin(selection: Manifest, config: TrainConfig) -> dict[str, Any]:
    """Return the origin of a cell's answers for cell.json: the selection and the training options."""
    options = {name: value for name, value in asdict(config).items() if name not in _PLACES}
    return {"selection": selection.fingerprint, "options": options | {"weights": Path(config.weights).name}}


def run_cell(report: Path, plan: Plan, cell: Cell) -> None:
    """Run a cell, unless it is finished; resume its training if it was stopped.

    Raises the errors of training, and RunError if the code length does not fit a method or BCE has not finished.
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
    origin = _origin(selection, config)
    if method.answer is None:
        run = train(config, folder / "run", resume=True)
        if not first_process():
            return
        began = time.time()
        if config.loss in HASHING_LOSSES:  # `load_model` does not load them
            model, _ = build_model(config, split_targets(selection, "train"), weights="none")
            model.load_state_dict(run.best_state())
        else:
            model, _, _ = load_model(run.path)
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
        if answer.scores is not None and answer.scores is given.bce.get("scores"):
            bce = _read_facts(cell_folder(report, Cell(cell.part, "bce")))
            facts = {name: bce[name] for name in _DECISIONS if name in bce}
    _write(folder, plan, selection, answer, origin | facts, began)


def _bce(report: Path, cell: Cell) -> dict[str, NDArray[np.float32]]:
    """Read the vectors of the BCE network on the same part."""
    bce = Cell(cell.part, "bce")
    if not is_finished(report, bce):
        raise RunError(f"{cell.name} works on the BCE network's features, but {bce.name} is not finished")
    folder = cell_folder(report, bce)
    if not (folder / VECTORS).exists():
        why = f"{cell.name} works on the BCE network's features, which {folder} lacks: it was copied from elsewhere"
        raise RunError(f"{why}; remove its {FACTS}, and --resume runs it")
    return read_vectors(folder)


def _facts(run: RunFolder) -> dict[str, Any]:
    card = run.read_card()
    return {
        "negative_proxies": card.negative_proxies, "proxies_per_class": list(card.proxies_per_class),
        "best_epoch": card.training["best_epoch"], "precision": card.training["precision"],
        "training_seconds": card.training["seconds"],
    } | {name: asdict(card)[name] for name in _DECISIONS}  # fmt: skip


def _write(
    folder: Path, plan: Plan, selection: Manifest, answer: MethodAnswer, facts: dict[str, Any], began: float
) -> None:
    scores = answer.scores
    if scores is None:
        scores = np.full((len(answer.query), len(selection.labels)), np.nan, np.float32)
    query = Vectors.of_split(selection, "test", answer.query, scores)
    gallery = Vectors.of_split(selection, "train", answer.gallery)
    k, names = PROTOCOLS[plan.protocol].k, selection.labels.names
    evaluation = evaluate(query, gallery, names, k=k, similarity=answer.similarity)
    write_vectors(folder, answer.query, answer.gallery, scores=scores)
    facts = {"training_images": len(gallery.patients), "queries": len(query.patients)} | facts
    facts["seconds"] = round(facts.get("training_seconds", 0) + time.time() - began, 2)
    write_answers(folder, evaluation, facts)
