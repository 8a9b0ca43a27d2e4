"""What a gallery says of itself: the table `meta`, each value with its digest."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cbmir.card import ModelCard
from cbmir.errors import CardError, GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.pseudonyms import Keys, Pseudonyms
from cbmir.runtime.gallery.schema import SCHEMA, LabelCodec, digest

#: How a gallery may be searched: as its size asks for, exactly, or by an index in either type.
INDEX_SETTINGS = ("auto", "exact", "bf16", "int8")


@dataclass(frozen=True, eq=False)
class Meta:
    """What does not change while a gallery is open."""

    path: Path
    uuid: str
    created: str
    card: ModelCard
    labels: LabelSet
    codec: LabelCodec
    keys: Keys

    @classmethod
    def load(cls, database: sqlite3.Connection, path: Path, pseudonyms: Pseudonyms | None) -> Self:
        """Raises GalleryError for another schema, and where something is missing or damaged."""
        found = read_meta(database, path)
        try:
            labels = LabelSet.from_json(json.loads(found["labels"]))
            card = ModelCard.loads(found["card"], source=str(path))
            keys = Keys(path, found["pseudonyms"], pseudonyms)
            return cls(path, found["gallery"], found["created"], card, labels, LabelCodec(labels), keys)
        except (KeyError, ValueError, CardError) as error:
            raise GalleryError(
                f"{path}: expected a whole gallery of this cbmir, found {type(error).__name__}: {error}; build it again"
            ) from error


def first_values(card: ModelCard, labels: LabelSet, pseudonyms: Pseudonyms | None, index: str) -> dict[str, object]:
    """Of an empty gallery."""
    return {
        "schema": SCHEMA,
        "gallery": uuid.uuid4().hex,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card.dumps(),
        "labels": json.dumps(labels.to_json(), ensure_ascii=False),
        "pseudonyms": pseudonyms.check if pseudonyms else "",
        "index": index,
        "generation": 0,
        "count": 0,
        "pruned": 0,
    }


def find_schema(database: sqlite3.Connection, path: Path) -> int:
    """The number of a gallery's schema, of whatever version. Raises GalleryError where there is none."""
    rows = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall()
    if len(rows) != 1 or not str(rows[0][0]).isdecimal():
        raise GalleryError(f"{path}: expected a gallery that states its schema, found none; build it again with "
                           f"'cbmir index build'")  # fmt: skip
    return int(rows[0][0])


class SchemaError(GalleryError):
    """A gallery, whole or not, of another schema."""


def check_schema(schema: int, path: Path) -> None:
    """Raise SchemaError for another schema than the present one."""
    if schema == 1:
        raise SchemaError(f"{path}: expected a gallery of schema {SCHEMA}, found schema 1; open it once where it may "
                          f"be written to, to migrate it: 'cbmir index info' does")  # fmt: skip
    if schema != SCHEMA:
        raise SchemaError(f"{path}: this cbmir reads galleries of schema {SCHEMA}, found schema {schema}; "
                          f"upgrade cbmir, or build the gallery again with 'cbmir index build'")  # fmt: skip


def read_meta(database: sqlite3.Connection, path: Path, *keys: str) -> dict[str, str]:
    """The values of some keys, or of all. Raises GalleryError for a key that is missing and a damaged value."""
    where = f"WHERE key IN ({', '.join('?' * len(keys))})" if keys else ""
    values = {}
    for key, value, found in database.execute(f"SELECT key, value, digest FROM meta {where}", keys).fetchall():
        if digest((key, value)) != found:
            raise GalleryError(f"{path}: the gallery's {key!r} is damaged; bring back a copy, or build it again")
        values[key] = value
    missing = sorted(set(keys) - values.keys())
    if missing:
        raise GalleryError(f"{path}: expected {missing[0]!r} in the gallery, found none; it is damaged: bring back a "
                           f"copy, or build it again")  # fmt: skip
    return values


def write_meta(database: sqlite3.Connection, values: Mapping[str, object]) -> None:
    rows = [(key, str(value), digest((key, value))) for key, value in values.items()]
    database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows)


def check_index(setting: str) -> None:
    """Raise GalleryError for a way to search that is none of `INDEX_SETTINGS`."""
    if setting not in INDEX_SETTINGS:
        raise GalleryError(f"expected an index setting of {', '.join(INDEX_SETTINGS)}; found {setting!r}")
