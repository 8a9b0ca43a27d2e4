"""Maintenance of galleries: find damage, merge, copy (also de-identified), and apply a corrected manifest."""

from __future__ import annotations

import re
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbmir.errors import GalleryError
from cbmir.input_file import input_digest
from cbmir.manifest import Manifest
from cbmir.runtime.gallery import database, index_files
from cbmir.runtime.gallery.build.shard import Shard
from cbmir.runtime.gallery.cells import CellCodec
from cbmir.runtime.gallery.database import DAMAGE, DATABASE, is_passing
from cbmir.runtime.gallery.entry import Added, Entry, with_row
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.protocol import EditableGallery
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.reader import Reader
from cbmir.runtime.gallery.schema import SchemaError
from cbmir.runtime.imaging.radiograph import ImageLimits

if TYPE_CHECKING:
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

_COPY = "restore a copy of the gallery, or build it again"
_REPLACE = "remove these entries and add their images again, or restore a copy of the gallery"
_COMPACT = "'cbmir index compact' rebuilds the database's indexes"
_REBUILD = "nothing is lost: it is rebuilt when needed, or immediately by 'cbmir index rebuild'"
_OF_INDEX = re.compile(r"(row \d+ missing from|wrong # of entries in|non-unique entry in) index")
_MOST = 100  # maximum number of problems from SQLite, since one may cause the next
_BLOCK = 1024  # entries in memory at a time, with their embeddings and thumbnails


@dataclass(frozen=True)
class GalleryProblem:
    """A description of damage, the ids of the affected entries (empty if it affects all or none), and a remedy."""

    what: str
    affected: tuple[str, ...]
    remedy: str


def verify(path: str | Path) -> list[GalleryProblem]:
    """Find all damage in the gallery at `path`.

    This checks the structure of the database, the digest of every row, norms, references and counts, and the digests of
    the derived files. It reads all of the gallery's files and changes nothing.

    Raises:
        GalleryError: The gallery is missing, has another schema, or cannot be read at the moment.
    """
    try:
        gallery = Gallery.open(path, read_only=True)
    except GalleryError as error:
        there = (database.live_folder(Path(path)) / DATABASE).is_file()
        if isinstance(error, SchemaError) or is_passing(error) or not there:
            raise
        return [_problem(error)]
    with gallery:
        derived = [GalleryProblem(what, (), _REBUILD) for what in index_files.problems(gallery.home, gallery.uuid)]
        return verify_database(gallery) + derived


def verify_database(gallery: Gallery) -> list[GalleryProblem]:
    """Find all damage in a gallery's database, as `verify` does, without the derived files."""
    try:
        with gallery.reading() as reader:
            return _Check(reader).problems()
    except GalleryError as error:
        if is_passing(error):
            raise
        return [_problem(error)]


def _problem(error: GalleryError) -> GalleryProblem:
    return GalleryProblem(str(error).partition(database.SEE_VERIFY)[0], (), _COPY)  # no advice to verify


class _Check:
    """A check of a gallery's database at one moment."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._found: dict[tuple[str, str], set[str]] = {}

    def problems(self) -> list[GalleryProblem]:
        for (text,) in self._rows(f"PRAGMA integrity_check({_MOST})"):
            if text != "ok":
                line = str(text).replace("*** in database main ***\n", "")
                remedy = _COMPACT if _OF_INDEX.search(line) else _COPY
                self._note(f"the database's structure is damaged: {line}", remedy)
        # Every number in any table or index, and the ids from the index, where an id may outlive its entry.
        by_id = self._rows("SELECT number, id FROM entry INDEXED BY entry_id WHERE id > ''")
        names = {int(number): str(name) for number, name in by_id}
        numbers = set(names)
        for table in ("entry NOT INDEXED", "embedding"):
            numbers |= {int(number) for (number,) in self._rows(f"SELECT number FROM {table}")}
        for number in sorted(numbers):
            self._entry(number, names.get(number, f"number {number}"))
        if len(numbers) != self._reader.count:
            self._note(f"expected {self._reader.count} entries, found {len(numbers)}", _COPY)
        if self._reader.changes_since(self._reader.pruned) is None:
            self._note("the record of changes is damaged", _COMPACT)
        for table, number, parent, _ in self._rows("PRAGMA foreign_key_check"):
            self._note(f"{table} {number} refers to a {parent} that does not exist", _REPLACE)
        return [GalleryProblem(what, tuple(sorted(ids)), remedy) for (what, remedy), ids in self._found.items()]

    def _note(self, what: str, remedy: str, *ids: str) -> None:
        self._found.setdefault((what, remedy), set()).update(ids)

    def _rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield as many rows as can be read; damage ends the iteration and is noted."""
        try:
            yield from self._reader.database.execute(sql)
        except DAMAGE as error:
            if is_passing(error):
                raise
            self._note(f"the database cannot be read completely ({database.said(error)})", _COPY)

    def _entry(self, number: int, name: str) -> None:
        """Check the parts of an entry, up to the first damaged one."""
        reader = self._reader
        parts: dict[str, Callable[[list[int]], object]] = {
            "the entry": reader.entries, "the embedding": reader.vectors, "the thumbnail": reader.thumbnails,
        }  # fmt: skip
        if reader.meta.cells is not None:
            parts["the cells"] = reader.cells
        for what, read in parts.items():
            try:
                read([number])
            except (GalleryError, *DAMAGE) as error:
                if is_passing(error):
                    raise
                self._note(f"{what} {'are' if what == 'the cells' else 'is'} missing or damaged", _REPLACE, name)
                return


def merge(target: Gallery | MilvusGallery, source: Gallery) -> Added:
    """Add all entries of `source` to `target`, in one transaction; to a Milvus collection in batches.

    An entry whose content is already in `target` is left out. An entry whose id belongs to another image there gets a
    longer id with more of its path, as when it is added. Ids of patients become pseudonyms if `target` stores these and
    was opened with their key. Cells are recoded with the codec of `target`, and left out if it stores none.

    The log of `target` grows by everything that is added, so twice the space is needed until the end. If a merge into a
    Milvus collection is stopped, complete batches stay and the same call continues; ids are never changed there.

    Raises:
        GalleryError: The galleries are of different models, `target` lacks a label, only `target` stores cells, their
            pseudonyms differ, or an id is taken and its longer forms are too, or a file's digest is missing. In these
            cases nothing is changed, except in a collection.
    """
    target.check_model(source.card)
    missing = [name for name in source.labels.names if name not in target.labels.names]
    if missing:
        raise GalleryError(f"{target.place}: expected labels among {', '.join(target.labels.names)}; found "
                           f"{', '.join(missing)} in {source.path}")  # fmt: skip
    if source.pseudonym_check not in ("", target.pseudonym_check):
        raise GalleryError(f"{source.path} keeps pseudonyms, and {target.place} "
                           f"{'others' if target.pseudonym_check else 'none'}: one patient would count as two; merge "
                           "only galleries whose pseudonyms come from one key")  # fmt: skip
    if target.cell_codec is not None and source.cell_codec is None:
        raise GalleryError(f"{target.place} keeps cells, and {source.path} none: build that one again with --cells")
    if not isinstance(target, Gallery):
        return _merge(source, target.add, None)
    with target.writing() as writer:
        return _merge(source, partial(writer.add, renaming=True), target.cell_codec)


def _merge(source: Gallery, add: Callable[..., Added], codec: CellCodec | None) -> Added:
    ids, duplicates, renamed = list[str](), list[tuple[str, str]](), list[tuple[str, str]]()
    with source.reading() as reader:
        for block in reader.columns(size=_BLOCK):
            cells = None
            if codec is not None and source.cell_codec is not None:
                cells = codec.recoded(reader.cells(block.numbers), source.cell_codec)
            added = add(reader.entries(block.numbers), block.vectors, reader.thumbnails(block.numbers), cells)
            ids += added.ids
            duplicates += added.duplicates
            renamed += added.renamed
    return Added(tuple(ids), tuple(duplicates), tuple(renamed))


def export(source: Gallery, path: str | Path) -> None:
    """Copy a gallery, as it is at one moment, into a new or empty folder. Other processes may keep writing to it.

    The copy is an independent gallery with a new uuid; a copy of a shard is the same shard. Raises GalleryError if
    `path` is not a new or empty folder, or if anything in the gallery is damaged.
    """
    shard = Shard.load(source.home)
    with _new_folder(Path(path)) as part:
        file = part / DATABASE
        database.new_file(file, database.GALLERY)
        translated = database.translated(database.GALLERY, part, "write to")
        with source.reading() as reader, translated, closing(sqlite3.connect(file)) as copy:
            reader.copy(copy)
        with Gallery.open(part) as made, made.reading() as reader:  # opening gives it a new uuid
            for _ in reader.columns():  # raises for a damaged row, which must not be found only when a copy is needed
                pass
        if shard is not None:
            shard.save(part)


def export_deidentified(source: Gallery, path: str | Path) -> int:
    """Copy what a search needs, and nothing that names a patient, into a new or empty folder.

    The copy contains embeddings, labels, views and splits. Entries get random ids in a random order. Patients and
    studies get pseudonyms under a key that is thrown away, so images of one patient still belong together. Such a copy
    cannot be merged with other galleries, since one patient would count as two. Paths, UIDs, dates, reports,
    thumbnails, cells and files' digests are left out; so are sources, since a hospital's name narrows down the
    patients, and boxes, which could be looked up in the data set's list.

    **The embeddings themselves may still identify patients**: images of one patient are close together, so anyone who
    has one can find the others (chest radiographs re-identify patients with an AUC of 0.99, PMC9434540). De-identified
    does not mean anonymous: do not make such a copy public.

    Returns the number of entries. Raises GalleryError for damage, for a shard, and if `path` is not new or empty.
    """
    if Shard.load(source.home) is not None:
        raise GalleryError(f"{source.path}: expected a whole gallery to de-identify, found a shard of a build; merge "
                           f"all shards with 'cbmir index merge' first")  # fmt: skip
    key = Pseudonyms.throw_away()
    with _new_folder(Path(path)) as part, source.reading() as reader:
        numbers = np.concatenate([np.empty(0, np.int64), *(block.numbers for block in reader.columns(size=_BLOCK))])
        numbers = np.random.default_rng(secrets.randbits(128)).permutation(numbers)
        with Gallery.create(part, source.card, source.labels, pseudonyms=key) as target, target.writing() as writer:
            for start in range(0, len(numbers), _BLOCK):
                chosen = numbers[start : start + _BLOCK]
                entries = [_deidentified(entry, key) for entry in reader.entries(chosen)]
                writer.add(entries, reader.vectors(chosen))
    return len(numbers)


def _deidentified(entry: Entry, key: Pseudonyms) -> Entry:
    return Entry(
        id=secrets.token_hex(8),
        image="",
        # The space makes sure that an existing pseudonym is hashed again; unchanged, it would link the two galleries.
        patient_id=key.patient(f"{entry.patient_id} ") if entry.patient_id else "",
        # Hashed with the patient, so that equal study ids of several patients cannot be recognised.
        study_id=key.study(f"{entry.patient_id}\0{entry.study_id}") if entry.study_id else "",
        view=entry.view,
        split=entry.split,
        labels=entry.labels,
    )


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path`, a new or empty folder, which it replaces when the block ends without an error."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise GalleryError(f"{path}: expected a new or empty folder for the copy, found something there")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            yield part
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise GalleryError(f"{path}: cannot write the copy there ({error}); choose another folder") from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of an image file in hexadecimal; empty if it cannot be read (`read_image` says why)."""
    try:
        return input_digest(path, ImageLimits.max_bytes)
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class UpdateReport:
    """The number of entries in the manifest, how many of them changed, and the images that the gallery lacks."""

    found: int
    changed: int
    absent: tuple[Path, ...]


def update_gallery(gallery: EditableGallery, manifest: Manifest, *, splits: Sequence[str] = ("all",)) -> UpdateReport:
    """Update path, patient, study, view, source, date, split, report, labels and boxes of entries from a manifest.

    A row matches the entry with the same image path, or else (if the images were moved) an entry with the same file
    content, never one with only the same name. Only rows of `splits` are used. An empty study, view, source or date
    keeps the old value, which may come from the DICOM file; an empty split, report or boxes cell clears it. Values
    without a column in the manifest stay, and so do boxes if no row has any. The update is one transaction.

    Raises:
        GalleryError: Two rows match the same entry.
        ManifestError: The gallery lacks a label of the manifest.
    """
    names = {name: gallery.labels.names[gallery.labels.index(name)] for name in manifest.labels.names}
    absent_columns = (*manifest.absent, *(() if any(row.boxes for row in manifest) else ("boxes",)))
    by_image: dict[str, Entry | None] = {}
    for one in gallery.every_entry():
        by_image[one.image] = None if one.image in by_image else one  # a merge may keep two: their content tells
    updated: dict[str, Entry] = {}
    absent: list[Path] = []
    for row in manifest:
        if "all" not in splits and row.split not in splits:
            continue
        entry = by_image.get(str(row.image)) or next(iter(gallery.find(file_digest(row.image))), None)
        if entry is None:
            absent.append(row.image)
        elif entry.id in updated:
            raise GalleryError(f"expected one row per entry, found two for {entry.id!r}: {updated[entry.id].image} "
                               f"and {row.image}; nothing was changed")  # fmt: skip
        else:
            updated[entry.id] = with_row(entry, row, names, absent_columns)
    changed = gallery.update(list(updated.values())) if updated else 0
    return UpdateReport(len(updated), changed, tuple(absent))
