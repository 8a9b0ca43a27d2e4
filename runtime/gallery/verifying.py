"""Looks through a whole gallery for damage, and says what is affected and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import derived
from cbmir.runtime.gallery.connections import DAMAGE, DATABASE, SEE_VERIFY, is_passing, said
from cbmir.runtime.gallery.meta import SchemaError
from cbmir.runtime.gallery.reader import Reader
from cbmir.runtime.gallery.store import Store

_COPY = "bring back a copy of the gallery, or build it again"
_REPLACE = "remove these entries and add their images again, or bring back a copy of the gallery"
_COMPACT = "'cbmir index compact' makes the database's indexes anew"
_REBUILD = "nothing is lost: it is made again when it is needed, or now by 'cbmir index rebuild'"
_OF_INDEX = re.compile(r"(row \d+ missing from|wrong # of entries in|non-unique entry in) index")
_MOST = 100  # complaints of SQLite's own, each of which may follow from the one before


@dataclass(frozen=True)
class Problem:
    """Something damaged: what it is, the ids of the entries that it affects (none: all of them, or none), a remedy."""

    what: str
    affected: tuple[str, ...]
    remedy: str


def verify(path: str | Path) -> list[Problem]:
    """All that is damaged in the gallery at `path`; empty where nothing is.

    Looks at the structure of the database, at every row by its digest, at norms, references and counts, and at the
    digests of what is derived. Reads all of the gallery's files and changes nothing. Raises GalleryError where there is
    no gallery at all or one of another schema, and where it cannot be read at this moment.
    """
    try:
        store = Store.open(path, read_only=True)
    except GalleryError as error:
        if isinstance(error, SchemaError) or is_passing(error) or not (Path(path) / DATABASE).is_file():
            raise
        return [_problem(error)]
    with store:
        derivations = [Problem(what, (), _REBUILD) for what in derived.problems(store.path, store.uuid)]
        return verify_database(store) + derivations


def verify_database(store: Store) -> list[Problem]:
    """As `verify`, without what is derived."""
    try:
        with store.reading() as reader:
            return _Check(reader).problems()
    except GalleryError as error:
        if is_passing(error):
            raise
        return [_problem(error)]


def _problem(error: GalleryError) -> Problem:
    return Problem(str(error).partition(SEE_VERIFY)[0], (), _COPY)  # without the advice to do what has been done


class _Check:
    """Of one moment of a gallery's database."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._found: dict[tuple[str, str], set[str]] = {}

    def problems(self) -> list[Problem]:
        for line in self._structure():
            if line != "ok":
                what = f"the database's structure is damaged: {line}"
                self._note(what, _COMPACT if _OF_INDEX.search(line) else _COPY)
        numbers, names = self._numbers()
        for number in sorted(numbers):
            self._entry(number, names.get(number, f"number {number}"))
        if len(numbers) != self._reader.count:
            self._note(f"expected {self._reader.count} entries, found {len(numbers)}", _COPY)
        if self._reader.changes_since(self._reader.pruned) is None:
            self._note("the record of changes is damaged", _COMPACT)
        self._references()
        return [Problem(what, tuple(sorted(ids)), remedy) for (what, remedy), ids in self._found.items()]

    def _note(self, what: str, remedy: str, *ids: str) -> None:
        self._found.setdefault((what, remedy), set()).update(ids)

    def _rows(self, sql: str) -> Iterator[tuple[object, ...]]:
        """As many as can be read: damage ends the iteration, and is noted."""
        try:
            yield from self._reader.database.execute(sql)
        except DAMAGE as error:
            if is_passing(error):
                raise
            self._note(f"the database cannot be read through ({said(error)})", _COPY)

    def _structure(self) -> Iterator[str]:
        for (line,) in self._rows(f"PRAGMA integrity_check({_MOST})"):
            yield str(line).replace("*** in database main ***\n", "")

    def _numbers(self) -> tuple[set[int], dict[int, str]]:
        """Every entry that any table or index knows of, and the ids as the index has them: it may outlive its entry."""
        numbers: set[int] = set()
        names: dict[int, str] = {}
        for number, name in self._rows("SELECT number, id FROM entry INDEXED BY entry_id WHERE id > ''"):
            names[int(str(number))] = str(name)
        numbers |= names.keys()
        for table in ("entry NOT INDEXED", "embedding"):
            numbers |= {int(str(number)) for (number,) in self._rows(f"SELECT number FROM {table}")}
        return numbers, names

    def _entry(self, number: int, name: str) -> None:
        """Its parts, up to the first that is damaged."""
        for what, read in (
            ("the entry", self._reader.entries),
            ("the embedding", self._reader.vectors),
            ("the thumbnail", self._reader.thumbnails),
        ):
            try:
                read([number])
            except (GalleryError, *DAMAGE) as error:
                if is_passing(error):
                    raise
                self._note(f"{what} is missing or damaged", _REPLACE, name)
                return

    def _references(self) -> None:
        for table, number, parent, _ in self._rows("PRAGMA foreign_key_check"):
            self._note(f"{table} {number} refers to a {parent} that is not there", _REPLACE)
