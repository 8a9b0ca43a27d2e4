"""An image of a gallery, its id, and the results of searches and additions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.manifest import Box, Row


@dataclass(frozen=True)
class Entry:
    """An image of the gallery. `image` is an absolute path; `labels` are 1, 0, -1 (uncertain) or None (unknown);
    `boxes` are where some of them are in the image.

    `source` is the hospital or data set, or empty; `date` the study's, YYYY-MM-DD or empty. Where the image came from a
    PACS, `sop_instance_uid` names it there and `study_id` is the Study Instance UID. `warnings` are the kinds of those
    that reading it gave (`kinds_text`).
    """

    id: str
    image: str
    patient_id: str
    study_id: str = ""
    sop_instance_uid: str = ""
    view: str = ""
    source: str = ""
    date: str = ""
    split: str = ""
    report: str = ""
    labels: dict[str, int | None] | None = None
    sha256: str = ""
    warnings: str = ""
    boxes: tuple[Box, ...] = ()

    @property
    def positive(self) -> tuple[str, ...]:
        """Labels that are positive or uncertain, which count in retrieval (METHOD, "Loss")."""
        return tuple(name for name, value in (self.labels or {}).items() if value in (1, -1))

    @property
    def without_positive(self) -> str:
        """What is said of an entry without positive labels: whether all of them are known to be absent."""
        return "no finding" if self.labels and None not in self.labels.values() else "no finding known"


@dataclass(frozen=True)
class Hit:
    """A neighbour: `distance` is Euclidean between unit vectors, in [0, 2]; `cosine` in [-1, 1]. Of a search by region
    in a gallery that keeps cells they are those of its best-matching `place`, (x0, y0, x1, y1) in fractions."""

    entry: Entry
    distance: float
    cosine: float
    place: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class SearchResult:
    """A search's answer: neighbours in the requested order, from one generation of the gallery, and how they were
    found. Where an index proposed them, those of equal distance are in the order of their ids among those that it
    found.

    vectors: float32 [n, D], unit norm: the hits' own embeddings, and after them those of the next nearest, where more
    vectors than hits were asked for.
    cells: int8 [hits, h, w, d], the codes of the hits' cells, where they were asked for and the gallery keeps them.
    """

    generation: int
    hits: tuple[Hit, ...]
    method: str
    vectors: NDArray[np.float32] = field(repr=False, compare=False)
    cells: NDArray[np.int8] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Added:
    """Ids that went in, and (id, id of the entry there with the same content) of each that did not.

    `renamed`: (id, its id now) of those that went in under a longer id, since theirs was another image's.
    """

    ids: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def with_row(entry: Entry, row: Row, names: Mapping[str, str], absent: Collection[str] = ()) -> Entry:
    """An entry with what a manifest's row says of it, where it says something; `names`: the manifest's labels in order,
    and what the gallery calls them. An empty split, report or boxes cell counts, unless the manifest has no such column
    (`absent`)."""
    boxes = tuple(replace(box, label=names.get(box.label, box.label)) for box in row.boxes)
    return replace(
        entry,
        image=str(row.image),
        patient_id=row.patient_id,
        study_id=row.study_id or entry.study_id,
        view=row.view or entry.view,
        source=row.source or entry.source,
        date=row.date or entry.date,
        split=entry.split if "split" in absent else row.split,
        report=entry.report if "report" in absent else row.report,
        labels=(entry.labels or {}) | dict(zip(names.values(), row.labels, strict=True)),
        boxes=entry.boxes if "boxes" in absent else boxes,
    )


def entry_ids(rows: Sequence[Row], taken: Collection[str] = frozenset()) -> list[str]:
    """An id for each row: the image's name, with as many of its folders as tell it from the others.

    `patient00001/study1/view1_frontal`, say. File suffixes are left out, unless they alone tell two images apart. The
    folder in which all of them lie plays no part, but for an image whose id would be one of `taken`: that one gets as
    many more folders as it needs. Raises GalleryError where the same file is listed twice, and where even a whole path
    is taken.
    """
    if not rows:
        return []
    paths = [row.image.as_posix() for row in rows]
    path, count = Counter(paths).most_common(1)[0]
    if count > 1:
        raise GalleryError(f"expected each image once, found {path} more than once; 'cbmir data check' lists them all")
    root = os.path.commonpath([path[: path.rfind("/") + 1] for path in paths])
    names = [path[len(root) :].lstrip("/") for path in paths]
    stems = [name.removesuffix(row.image.suffix) for name, row in zip(names, rows, strict=True)]
    parts = [name.split("/") for name in (stems if len(set(stems)) == len(stems) else names)]
    ids = [""] * len(parts)
    undecided, depth = list(range(len(parts))), 1
    while undecided:
        for row in undecided:
            ids[row] = "/".join(parts[row][-depth:])
        counts = Counter(ids[row] for row in undecided)
        undecided = [row for row in undecided if counts[ids[row]] > 1]
        depth += 1
    return _free(ids, paths, taken) if taken else ids


def longer_ids(id: str, path: str) -> Iterator[str]:
    """Ends of an image's path with more folders than its id has, the shortest first; with its suffix if the id has."""
    suffix = PurePosixPath(path).suffix
    parts = (path if id.endswith(suffix) else path.removesuffix(suffix)).split("/")
    return ("/".join(parts[-depth:]) for depth in range(id.count("/") + 2, len(parts) + 1))


def _free(ids: list[str], paths: list[str], taken: Collection[str]) -> list[str]:
    """The same ids, with more of their paths where they are taken."""
    used = set(ids)
    for row, name in enumerate(ids):
        if name not in taken:
            continue
        free = next((one for one in longer_ids(name, paths[row]) if one not in taken and one not in used), None)
        if free is None:
            raise GalleryError(f"expected an image whose id is free, found {paths[row]} taken by another; "
                               f"remove that one first, or rename the image")  # fmt: skip
        used.add(free)
        ids[row] = free
    return ids
