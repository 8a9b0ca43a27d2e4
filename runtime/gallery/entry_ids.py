"""An id for each image of a gallery: the shortest end of its path that tells it from the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from cbmir.errors import GalleryError
from cbmir.manifest import Row


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
