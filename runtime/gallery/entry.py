"""The entries of a gallery, their ids, and the results of searching and adding."""

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
    """An image of the gallery.

    `image` is an absolute path; `labels` are 1, 0, -1 (uncertain) or None (unknown), and `boxes` locate some of them in
    the image. `source` is the hospital or data set, or empty; `date` is the study date, YYYY-MM-DD or empty. A DICOM
    image has a `sop_instance_uid`, and its Study Instance UID as `study_id` unless the manifest has a study id.
    `warnings` are the kinds of warnings from reading the image (`kinds_text`).
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
        """Labels that are positive or uncertain; both count as positive in retrieval (docs/metrics.md)."""
        return tuple(name for name, value in (self.labels or {}).items() if value in (1, -1))

    @property
    def without_positive(self) -> str:
        """The text for an entry without positive labels: "no finding" if all labels are known to be negative."""
        return "no finding" if self.labels and None not in self.labels.values() else "no finding known"


@dataclass(frozen=True)
class Hit:
    """A neighbour: `distance` is the Euclidean distance between unit vectors, in [0, 2]; `cosine` is in [-1, 1].

    In a search by region, if the gallery stores cells, both refer to the best-matching part of the image, `place`: (x0,
    y0, x1, y1) as fractions of its width and height."""

    entry: Entry
    distance: float
    cosine: float
    place: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class SearchResult:
    """Neighbours in the requested order, from one generation of the gallery, and the search method.

    Ties are ordered by id among the entries that the search found; an index may miss some.

    vectors: float32 [n, D], unit norm: the hits' embeddings, then those of the next nearest entries if more were
    requested.
    cells: int8 [hits, h, w, d], the codes of the hits' cells if they were requested and the gallery stores them.
    """

    generation: int
    hits: tuple[Hit, ...]
    method: str
    vectors: NDArray[np.float32] = field(repr=False, compare=False)
    cells: NDArray[np.int8] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Added:
    """The ids that were added, and (id, id of the existing entry with the same content) for each one left out.

    `renamed` has (requested id, new id) for each entry that got a longer id because another image had the requested id.
    """

    ids: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def with_row(entry: Entry, row: Row, names: Mapping[str, str], absent: Collection[str] = ()) -> Entry:
    """Return the entry with the values of a manifest row.

    An empty study, view, source or date keeps the entry's value; any other empty cell clears it, except in columns that
    the manifest lacks (`absent`). `names` maps the manifest's labels, in order, to the gallery's names for them."""
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
    """Return an id for each row: the image's name, preceded by as many of its folders as make it unique.

    An example is `patient00001/study1/view1_frontal`. File suffixes are left out unless two images differ only in them.
    The folder that contains all images is left out too, but an id in `taken` is extended by as many more folders as
    necessary. Raises GalleryError if a file is listed twice, or if even its whole path is taken.
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
    """Return longer ids from an image's path, the shortest first, with the file suffix if `id` has it."""
    suffix = PurePosixPath(path).suffix
    parts = (path if id.endswith(suffix) else path.removesuffix(suffix)).split("/")
    return ("/".join(parts[-depth:]) for depth in range(id.count("/") + 2, len(parts) + 1))


def _free(ids: list[str], paths: list[str], taken: Collection[str]) -> list[str]:
    """Return the ids, extending those that are taken by more folders of their paths."""
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
