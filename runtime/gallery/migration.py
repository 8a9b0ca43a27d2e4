"""From schema 1 to the present one, in one transaction: a gallery that cannot be migrated stays as it was."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from cbmir.card import ModelCard
from cbmir.errors import CardError, GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.database import Connections
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.pseudonyms import Keys
from cbmir.runtime.gallery.schema import Meta, check_schema, find_schema, write_meta
from cbmir.runtime.gallery.writer import Writer

log = logging.getLogger("cbmir")

_BATCH = 256
_KEPT = ("gallery", "created", "card", "labels")
_ROWS = """SELECT id, image, patient_id, study_id, view, split, report, labels, sha256, embedding, jpeg
FROM old_entry LEFT JOIN old_thumbnail USING (number) ORDER BY number"""


def migrate(connections: Connections) -> None:
    """Bring a gallery of schema 1 to the present one. Raises GalleryError where it is damaged or not writable."""
    path = connections.folder
    if not connections.writable:
        check_schema(1, path)
    with connections.use("migrate") as database:
        database.execute("BEGIN IMMEDIATE").close()
        if find_schema(database, path) == 1:  # another process may have been first
            log.info("%s: migrating the gallery to schema %d", path, schema.SCHEMA)
            _migrate(database, connections)
            database.execute("COMMIT").close()
    for name in schema.DERIVED_OF_SCHEMA_1:  # they would keep embeddings that are removed
        (path / name).unlink(missing_ok=True)


def _migrate(database: sqlite3.Connection, connections: Connections) -> None:
    path = connections.folder
    old = dict(database.execute("SELECT key, value FROM meta").fetchall())
    try:
        values: dict[str, Any] = {key: old[key] for key in _KEPT}
        labels = LabelSet.from_json(json.loads(old["labels"]))
        card = ModelCard.loads(old["card"], source=str(path))
        generation = int(old["generation"])
    except (KeyError, ValueError, CardError) as error:
        raise GalleryError(f"{path}: expected a whole gallery of schema 1, found {type(error).__name__}: {error}; "
                           f"build it again")  from error  # fmt: skip
    (count,) = database.execute("SELECT count(*) FROM entry").fetchall()[0]
    database.execute("DROP INDEX IF EXISTS entry_sha256").close()
    for table in ("thumbnail", "entry", "meta"):
        database.execute(f"ALTER TABLE {table} RENAME TO old_{table}").close()
    schema.create_tables(database)
    write_meta(database, values | {"schema": schema.SCHEMA, "pseudonyms": "", "index": "auto",
                                   "generation": generation, "count": 0, "pruned": generation})  # fmt: skip
    meta = Meta(path, old["gallery"], old["created"], card, labels, schema.LabelCodec(labels), Keys(path, "", None))
    writer = Writer(meta, database)
    with closing(database.execute(_ROWS)) as rows:
        while batch := rows.fetchmany(_BATCH):
            if any(len(row[-2]) != 4 * card.embedding_dim for row in batch):
                raise GalleryError(f"{path}: expected embeddings of {card.embedding_dim} values, found others; "
                                   f"build the gallery again")  # fmt: skip
            vectors = np.frombuffer(b"".join(row[-2] for row in batch), "<f4").astype(np.float32, copy=False)
            entries = [_entry(path, row) for row in batch]
            writer.keep(entries, vectors.reshape(len(batch), -1), [row[-1] for row in batch])
    writer.finish()
    if writer.count != count:
        raise GalleryError(f"{path}: expected {count} entries, found {writer.count}; build the gallery again")
    for table in ("thumbnail", "entry", "meta"):
        database.execute(f"DROP TABLE old_{table}").close()


def _entry(path: Path, row: Sequence[Any]) -> Entry:
    name, image, patient, study, view, split, report, labels, sha256 = row[:-2]
    try:
        values = json.loads(labels)
    except ValueError as error:
        raise GalleryError(f"{path}: expected labels of the entry {name!r} in JSON, found others; build the gallery "
                           f"again") from error  # fmt: skip
    return Entry(name, image, patient, study, view=view, split=split, report=report, labels=values, sha256=sha256)
