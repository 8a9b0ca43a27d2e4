"""What a cell leaves behind: a value a query, from which every figure of the report is made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.files import replacing, write_json
from cbmir.training.evaluation import Evaluation
from cbmir.training.metrics import RETRIEVAL_METRICS, RetrievalValues

COLUMNS = ("positive queries", "all queries", "random, positive queries", "random, all queries")
FACTS, VALUES, VECTORS, LOG, FAILED = "cell.json", "answers.npz", "vectors.npz", "log.txt", "failed.json"


@dataclass(frozen=True, eq=False)
class Answers:
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


def read_answers(folder: Path) -> Answers:
    """The answers of a finished cell."""
    with np.load(folder / VALUES) as data:
        arrays = dict(data)
    return Answers(
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
