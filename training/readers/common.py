"""Common parts of the readers: source tables, missing images, views, boxes, selected findings, splits, the sidecar."""

from __future__ import annotations

import ast
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from cbmir.errors import ManifestError, SplitError
from cbmir.input_file import parse_json, read_input, read_unpacked
from cbmir.labels import LabelSet
from cbmir.manifest import LABEL_VALUES, Box, Manifest, Row, is_date
from cbmir.text_table import TextTable, read_table
from cbmir.training.manifest_check import summarise
from cbmir.training.splits import assign_splits, check_splits, shuffle_patients

Missing = Literal["error", "skip"]
#: Values of a label cell: those of a manifest, and words that certainly mean the same.
CERTAIN_VALUES = LABEL_VALUES | {"true": 1, "false": 0, "yes": 1, "no": 0}
_VAL_SHARE = 8
MOST_REPORT = 2**20  # bytes
_LONGEST_LIST = 2**16  # characters in a cell
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom")
logger = logging.getLogger("cbmir")


def read_source(
    path: Path, required: Iterable[str], what: str, optional: Iterable[str] | None = (), *, even: bool = False
) -> TextTable:
    """Read the given columns of a data set's table; all of them if `optional` is None. Raises ManifestError if the
    table is missing, empty or lacks a required column, and with `even` if a row is longer than the header."""
    if not path.is_file():
        raise ManifestError(f"{path}: expected {what}, found {'a folder' if path.is_dir() else 'no such file'}")
    required = list(required)
    table = read_table(path, None if optional is None else {*required, *optional}, even=even)
    absent = [name for name in required if name not in table.columns]
    if absent:
        raise ManifestError(
            f"{path}: expected {what} with the column{'s' * (len(absent) > 1)} {', '.join(absent)}; "
            f"found {', '.join(table.columns) or 'no columns'}"
        )
    if not len(table):
        raise ManifestError(f"{path}: expected {what} with a row for each image, found only the header")
    return table


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a text file (also .gz). Raises ManifestError if it cannot be read."""
    try:
        text = read_unpacked(path).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: expected a text file with a name per line, found {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def read_report(path: Path) -> str:
    """Read the report in a text file; empty if there is no file. Raises ManifestError if it cannot be read."""
    try:
        return read_input(path, MOST_REPORT).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ManifestError(f"{path}: expected a report, found one that cannot be read: {error.strerror}") from error


def check_folder(folder: Path, what: str) -> None:
    """Raise ManifestError unless `folder` is a folder."""
    if not folder.is_dir():
        raise ManifestError(f"{folder}: expected {what}, found {'a file' if folder.exists() else 'nothing'}")


def find_file(folder: Path, patterns: Sequence[str], what: str) -> Path:
    """Find the only file in a folder or its direct subfolders that matches a pattern; x.csv is preferred to x.csv.gz.

    Raises ManifestError unless there is exactly one.
    """
    found = find_optional_file(folder, patterns, what)
    if found is None:
        raise ManifestError(f"{folder}: expected a file {' or '.join(patterns)} ({what}), found none")
    return found


def find_optional_file(folder: Path, patterns: Sequence[str], what: str) -> Path | None:
    """Find a file as `find_file` does, but return None if the folder has no such file."""
    check_folder(folder, f"the folder with {what}")
    found = sorted({path for one in patterns for level in (one, f"*/{one}") for path in folder.glob(level)})
    packed = [path for path in found if path.suffix == ".gz" and path.with_suffix("") in found]
    for path in packed:
        logger.info("%s: not read, since the unpacked file beside it is", path)
    found = [path for path in found if path not in packed]
    if len(found) > 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in found[:3])
        raise ManifestError(f"{folder}: expected one file {' or '.join(patterns)} ({what}), found {names}")
    return found[0] if found else None


def cell(record: Mapping[str, str], column: str, where: str) -> str:
    """Return a record's value, stripped. Raises ManifestError if the row ends before the column."""
    value = record.get(column)
    if value is None:
        raise ManifestError(f"{where}: the row ends before column {column!r}")
    return value.strip()


def number(record: Mapping[str, str], column: str, where: str) -> float:
    """Return a record's value as a finite number. Raises ManifestError for anything else."""
    text = cell(record, column, where)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ManifestError(f"{where}: expected a number in column {column!r}, found {text!r}")
    return value


def label_value(record: Mapping[str, str], column: str, where: str) -> int | None:
    """Return 1, 0, -1 (uncertain) or None (empty). Raises ManifestError, with row and column, for other values."""
    text = cell(record, column, where)
    if text not in CERTAIN_VALUES and text.lower() not in CERTAIN_VALUES:
        raise ManifestError(
            f"{where}: expected 1, 0, -1 (uncertain) or empty (unknown) in label column {column!r}, found {text!r}"
        )
    return CERTAIN_VALUES[text.lower()]


def read_day(text: str, *formats: str) -> str | None:
    """Convert YYYY-MM-DD, YYYYMMDD or a date in one of `formats` (`strptime`) to YYYY-MM-DD; None for other text."""
    day = f"{text[:4]}-{text[4:6]}-{text[6:]}" if re.fullmatch(r"\d{8}", text, re.ASCII) else text
    if is_date(day):
        return day
    for one in formats:
        with suppress(ValueError):
            return datetime.strptime(text, one).date().isoformat()
    return None


@dataclass
class Days:
    """A reader of a table's dates. It returns text in other formats as empty, and counts it in `not_read`."""

    formats: tuple[str, ...] = ()
    not_read: int = 0

    def read(self, text: str) -> str:
        """Return a date as YYYY-MM-DD, or empty."""
        day = read_day(text, *self.formats)
        self.not_read += day is None
        return day or ""


def listed_labels(text: str) -> list[str] | None:
    """Parse a list of strings in Python's or JSON's notation; [] for an empty cell, None for anything else, or for a
    cell so long that Python's parser would need a lot of memory."""
    if not text or text.lower() == "nan":
        return []
    if len(text) > _LONGEST_LIST:
        return None
    try:
        listed = parse_json(text)  # first, since Python's parser reads JSON's escapes differently
    except ValueError:
        try:
            listed = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        return None
    return [name for part in listed if (name := part.strip())]


def mapped_labels(found: Collection[str], names: Mapping[str, Collection[str]]) -> tuple[int, ...]:
    """Return 1 for each label if one of the publisher's names for it was found, else 0."""
    return tuple(int(any(name in found for name in of_label)) for of_label in names.values())


def keep_labels(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """Return the manifest with only the labels `names`, in this order, and their boxes.

    An image that shows only other findings then has every label 0 and counts as the negative class, although it is not
    healthy. `about["left_out"]` lists these findings and the number of such images.
    """
    places = [manifest.labels.index(name) for name in names]
    kept = {manifest.labels.names[place]: name for place, name in zip(places, names, strict=True)}
    out = [place for place in range(len(manifest.labels)) if place not in places]
    rows = tuple(
        replace(
            row,
            labels=tuple(row.labels[place] for place in places),
            boxes=tuple(replace(box, label=kept[box.label]) for box in row.boxes if box.label in kept),
        )
        for row in manifest
    )
    only = sum(
        not any(new.labels) and None not in new.labels and any(old.labels[place] for place in out)
        for old, new in zip(manifest, rows, strict=True)
    )
    left_out = {"findings": [manifest.labels.names[place] for place in out], "images_with_only_these": only}
    about = manifest.about | ({"left_out": left_out} if out else {})
    return Manifest(LabelSet(tuple(names)), rows, about)


@dataclass
class ViewChoice:
    """The views of a data set that its manifest includes, and the number of images with other views.

    Attributes:
        names: The publisher's name of a view -> PA, AP, LATERAL, or FRONTAL (PA or AP, not known which). Other views
            (oblique, images of ribs) are never included.
        frontal_only: Leave out lateral views, and images without a view.
    """

    names: Mapping[str, str]
    frontal_only: bool = True
    left_out: Counter[str] = field(default_factory=Counter)

    def choose(self, name: str) -> str | None:
        """Return the manifest's view, or None for an image that is left out."""
        view = self.names.get(name.upper())
        if view in ("PA", "AP") or (view == "LATERAL" and not self.frontal_only):
            return view
        if view == "FRONTAL" or not (name or self.frontal_only):
            return ""
        self.left_out[name or "not given"] += 1
        return None

    def policies(self, rows: Collection[Row], where: Path) -> dict[str, Any]:
        """Return the sidecar's entries about views. Raises ManifestError if no image is left."""
        if not rows:
            raise ManifestError(
                f"{where}: expected frontal images, found only others ({', '.join(self.left_out) or 'none'}); "
                f"use --all-views to keep lateral ones"
            )
        views = "frontal only" if self.frontal_only else "frontal and lateral"
        return {"views": views, "left_out_by_view": dict(self.left_out.most_common())}


def fraction_box(label: str, edges: tuple[float, float, float, float], size: tuple[int, int], where: str) -> Box:
    """Convert a box in pixels to fractions of the image, clipped to the image.

    Args:
        edges: Left edge, upper edge, width and height.
        size: Width and height of the annotated image.
        where: File and row, for messages.

    Raises:
        ManifestError: The box is outside the image.
    """
    left, top, width, height = edges
    across = [min(max(edge, 0), size[0]) / size[0] for edge in (left, left + width)]
    down = [min(max(edge, 0), size[1]) / size[1] for edge in (top, top + height)]
    if not (across[0] < across[1] and down[0] < down[1]):
        raise ManifestError(
            f"{where}: expected a box inside an image of {size[0]} by {size[1]} pixels, found {label} at {left:g}, "
            f"{top:g}, {width:g} wide and {height:g} high"
        )
    fractions = (across[0], down[0], across[1] - across[0], down[1] - down[0])
    return Box(label, *(round(fraction, 6) for fraction in fractions))


def index_images(folder: Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> dict[str, Path]:
    """Find every image below a folder, by its name without the extension; hidden files and folders are skipped.

    Raises ManifestError if there are no images, or if a name occurs twice.
    """
    check_folder(folder, "the folder of the X-rays")
    index: dict[str, Path] = {}
    for place, folders, names in os.walk(folder.resolve(), followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            stem, suffix = os.path.splitext(name)  # noqa: PTH122 - a Path for each of 400,000 files takes seconds
            if suffix.lower() not in suffixes or name.startswith("."):
                continue
            path = Path(place, name)
            if stem in index:
                raise ManifestError(
                    f"{folder}: expected each image once, found {stem} twice: {index[stem]} and {path}; remove one"
                )
            index[stem] = path
    if not index:
        raise ManifestError(f"{folder}: expected X-rays ({', '.join(suffixes)}) here or in subfolders, found none")
    return index


def locate(
    rows: Iterable[Row], find: Callable[[Row], Path | None], missing: Missing, where: Path
) -> tuple[list[Row], dict[str, Any]]:
    """Find each row's image file; return the rows that have one, and the policies, with the number of missing files.

    If files are missing, `error` raises ManifestError; `skip` leaves out their rows and logs the number.
    """
    located, absent = [], []
    for row in rows:
        found = find(row)
        if found is None:
            absent.append(row.image.as_posix())
        else:
            located.append(row if found is row.image else replace(row, image=found))
    if absent:
        named = ", ".join(absent[:3]) + (", …" if len(absent) > 3 else "")
        message = f"{len(absent):,} of {len(absent) + len(located):,} images of the table are not in {where}: {named}"
        if missing == "error" or not located:
            raise ManifestError(f"{message}; correct the folder" + (", or use --missing skip" if located else ""))
        logger.warning("%s; left out", message)
    return located, {"missing": missing, "missing_images": len(absent)}


def with_validation(rows: Sequence[Row], seed: int) -> list[Row]:
    """Move one in eight of the training patients, drawn by `seed`, to val: the same share as in 70:10:20."""
    patients = shuffle_patients((row.patient_id for row in rows if row.split == "train"), seed=seed)
    val = set(patients[: max(round(len(patients) / _VAL_SHARE), 1)])
    return [replace(row, split="val") if row.split == "train" and row.patient_id in val else row for row in rows]


def finish(
    manifest: Manifest, reader: str, sources: Collection[Path], seed: int, *, policies: dict[str, Any],
    splits: str | None = None,
) -> Manifest:  # fmt: skip
    """Add splits and sidecar, in the same way for every reader.

    `splits` describes the source of the rows' splits; with None they are assigned by patient and `seed`.
    Raises ManifestError for an image listed twice, SplitError for a patient in two splits.
    """
    seen: set[str] = set()
    for row in manifest:
        path = str(row.image)
        if path in seen:
            raise ManifestError(f"expected each image once, found {path} in two rows of the table")
        seen.add(path)
    if splits is None:
        try:
            manifest = manifest.with_splits(assign_splits([row.patient_id for row in manifest], seed=seed))
        except SplitError as error:
            raise SplitError(f"{reader}: {error}") from error
    else:
        check_splits(manifest)
    boxes = sum(len(row.boxes) for row in manifest)
    about = {
        "reader": reader,
        "sources": [path.name for path in sources],
        "policies": policies | ({"boxes": boxes} if boxes else {}),
        "splits": splits or "assigned by patient, 70:10:20",
        "seed": seed if splits is None else None,
        **manifest.about,
        "counts": summarise(manifest),
    }
    return replace(manifest, about=about)
