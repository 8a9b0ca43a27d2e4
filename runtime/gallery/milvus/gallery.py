"""A gallery in Milvus, for more images than one machine can hold: `EditableGallery` implemented with pymilvus.

NAME has one row per entry (`records`), NAME_pictures the thumbnails, NAME_about the gallery's description.
Milvus finds the candidates. Their cosines are computed here in float64 from the vectors that it sends, so results are
those of a gallery on disk. Unlike there:

- there are no transactions: a call that fails halfway leaves some of its rows. Adding again continues, since existing
  content is skipped; the caller must prevent two programs from adding the same content at the same time;
- there are no generations: `SearchResult.generation` is 0. The consistency level in the address decides which writes a
  search sees; by default it sees all that finished before it began.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections import defaultdict
from collections.abc import Collection as Several
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import CardError, GalleryError, RankError
from cbmir.input_file import parse_json
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.entry import Added, Entry, Hit, SearchResult
from cbmir.runtime.gallery.filters import EVERY, Filter
from cbmir.runtime.gallery.milvus import records as rows
from cbmir.runtime.gallery.milvus.calibration import label_shares, reference_distances
from cbmir.runtime.gallery.milvus.client import MOST, Collection, Connection, MilvusAddress, Texts
from cbmir.runtime.gallery.protocol import EditableGallery
from cbmir.runtime.gallery.pseudonyms import Keys, Pseudonyms, case_id
from cbmir.runtime.gallery.schema import LabelCodec, check_entry, check_index
from cbmir.runtime.gallery.writer import check_batch, check_one_patient_each, check_several, check_vectors

SCHEMA = 3
_SPLITS = ("", "train", "val", "test")


class MilvusGallery(EditableGallery):
    """A gallery in Milvus, made by `create` or `open`. Thread-safe."""

    def __init__(self, connection: Connection, about: dict[str, str], pseudonyms: Pseudonyms | None) -> None:
        self._connection = connection
        self._address = connection.address
        try:
            if about["schema"] != str(SCHEMA):
                raise GalleryError(f"{self._address.text}: this cbmir reads Milvus galleries of schema {SCHEMA}, found "
                                   f"schema {about['schema']}; upgrade cbmir, or build it again")  # fmt: skip
            self.card = ModelCard.loads(about["card"], source=self._address.text)
            self.labels = LabelSet.from_json(parse_json(about["labels"]))
            self.created = about["created"]
            self.index_setting = about["index"]
            own = base64.b64decode(about.get("reference_distances", ""), validate=True)
            self._reference = np.frombuffer(own, "<f4").astype(np.float32)
            self._shares: dict[str, float | None] = dict.fromkeys(self.labels.names)
            self._shares |= json.loads(about.get("label_shares", "{}"))
            self._keys = Keys(Path(self._address.name), about["pseudonyms"], pseudonyms)
            self._case_key = about["case_key"]
        except (KeyError, ValueError, CardError) as error:
            raise GalleryError(f"{self._address.text}: expected a whole gallery of this cbmir, found "
                               f"{type(error).__name__}: {error}; build it again") from error  # fmt: skip
        self._codec = LabelCodec(self.labels)
        self._rows = Collection(connection, self.index_setting)
        self._pictures = _pictures(connection)

    @classmethod
    def create(
        cls, place: str, card: ModelCard, labels: LabelSet | None = None, *, pseudonyms: Pseudonyms | None = None,
        index: str = "auto",
    ) -> Self:  # fmt: skip
        """Create an empty gallery. `labels` (default: the model's) are those of its entries; `index` is "auto" (HNSW),
        "exact", "bf16" or "int8". Raises GalleryError if a collection with this name exists."""
        check_index(index)
        connection = Connection(MilvusAddress.parse(place), make=True)
        try:
            for name in _names(connection):
                if connection.call("has_collection", name):
                    raise GalleryError(f"{place}: expected a new gallery, found the collection {name} there; drop it, "
                                       f"or choose another name")  # fmt: skip
            Collection.make(connection, card.embedding_dim, index)
            for texts in (_pictures(connection), about := _about(connection)):
                texts.make()
            values = {
                "schema": str(SCHEMA),
                "card": card.dumps(),
                "labels": json.dumps((labels or card.labels).to_json()),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "index": index,
                "pseudonyms": pseudonyms.check if pseudonyms is not None else "",
                "case_key": secrets.token_hex(16),
            }
            about.write(values)  # last: without it, a gallery is incomplete
            return cls(connection, values, pseudonyms)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open(cls, place: str, *, pseudonyms: Pseudonyms | None = None) -> Self:
        """Open a gallery. Raises GalleryError if it is missing or cannot be reached, or the key is not its own."""
        connection = Connection(MilvusAddress.parse(place))
        try:
            for name in _names(connection):
                if not connection.call("has_collection", name):
                    raise GalleryError(f"{place}: expected a gallery's collections, found no {name}; make them with "
                                       f"'cbmir index build MODEL MANIFEST -o {place}'")  # fmt: skip
                connection.load(name)
            return cls(connection, _about(connection).read(), pseudonyms)
        except BaseException:
            connection.close()
            raise

    @property
    def place(self) -> str:
        return self._address.text

    @property
    def finds_patients(self) -> bool:
        return self._keys.fits

    @property
    def pseudonym_check(self) -> str:
        """As `Gallery.pseudonym_check`."""
        return self._keys.check

    # -- writing

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32],
        thumbnails: Sequence[bytes | None] | None = None, cells: NDArray[np.float32] | None = None,
    ) -> Added:  # fmt: skip
        """Add entries as in `EditableGallery`. Also raises GalleryError for cells and long texts (docs/milvus.md)."""
        if cells is not None:
            raise GalleryError(f"{self._address.text}: expected no cells, since a Milvus collection keeps none; build "
                               f"a folder for them")  # fmt: skip
        check_batch(entries, embeddings, thumbnails, self.card.embedding_dim)
        with self._connection.writing:
            by_content, content = self._there(entries)
            made, duplicates, pictures = [], [], {}
            for position, entry in enumerate(entries):
                check_entry(entry)
                there = entry.id if entry.id in content else by_content.get(entry.sha256 or None)
                if entry.id in content and not (entry.sha256 and content[entry.id] == entry.sha256):
                    raise GalleryError(f"{self._address.text}: expected new ids, each once, found {entry.id!r}, which "
                                       f"exists with other content; nothing was added")  # fmt: skip
                if there is not None:
                    duplicates.append((entry.id, there))
                    continue
                content[entry.id] = entry.sha256
                by_content[entry.sha256 or None] = entry.id
                by_content.pop(None, None)
                made.append(self._row_of(self._kept(entry), embeddings[position]))
                jpeg = None if thumbnails is None else thumbnails[position]
                if jpeg is not None:
                    pictures[entry.id] = base64.b64encode(jpeg).decode("ascii")
            self._pictures.write(pictures)  # first: an entry with a row would not be added again
            self._rows.upsert(made)
        return Added(tuple(row["id"] for row in made), tuple(duplicates))

    def update(self, entries: Sequence[Entry]) -> int:
        with self._connection.writing:
            found = {row["id"]: row for row in self._rows.by("id", [e.id for e in entries], "id", "entry", "vector")}
            made = []
            for entry in entries:
                check_entry(entry)
                if entry.id not in found:
                    raise self._unknown(entry.id)
                row = found[entry.id]
                old = rows.entry_of(row)
                if entry.sha256 not in ("", old.sha256):
                    raise GalleryError(f"{self._address.text}: expected the stored content of the entry {entry.id!r}, "
                                       f"found other content; remove the entry, then add the new one")  # fmt: skip
                new = self._kept(replace(entry, sha256=old.sha256))
                if new != old:
                    made.append(self._row_of(new, np.array(row["vector"], np.float32)))
            self._rows.upsert(made)
        return len(made)

    def remove(
        self, *, ids: Several[str] = (), patient_ids: Several[str] = (), study_ids: Several[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries as in `EditableGallery`. A server deletes the bytes when it next compacts (docs/milvus.md)."""
        check_several(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
        with self._connection.writing:
            gone = {row["id"] for row in self._rows.by("id", list(ids), "id")}
            conditions = [
                f"{field} in {rows.texts(keys)}" for field, keys in (
                    ("patient", [self._keys.patient(patient) for patient in patient_ids if patient]),
                    ("study", [self._keys.study(study) for study in study_ids if study]),
                ) if keys
            ]  # fmt: skip
            if conditions and len(conditions) == bool(patient_ids) + bool(study_ids):
                found = list(self._rows.scan(" and ".join(conditions), "id", "patient", "study"))
                if not patient_ids:
                    check_one_patient_each([(row["study"], row["patient"]) for row in found], self._address.text)
                gone |= {row["id"] for row in found}
            self._pictures.delete(sorted(gone.union(ids)))  # first: a retry finds entries by their rows
            self._rows.delete(sorted(gone))
        return tuple(sorted(gone))

    def calibrate(self, *, sample: int = 1000, seed: int = 0) -> None:
        """Measure and store `reference_distances` and `label_shares`. Call this after building, and after the gallery
        has grown a lot."""
        values = reference_distances(self._rows, sample=sample, seed=seed).astype("<f4")
        shares = label_shares(self._rows, self.labels)
        with self._connection.writing:
            _about(self._connection).write({
                "reference_distances": base64.b64encode(values.tobytes()).decode(), "label_shares": json.dumps(shares),
            })  # fmt: skip
        self._reference, self._shares = values.astype(np.float32), shares

    # -- searching

    def search_many(
        self, embeddings: NDArray[np.float32], k: int, *, filters: Sequence[Filter] | None = None,
        exact: bool | None = None, vectors: int = 0, cells: bool = False,
    ) -> list[SearchResult]:  # fmt: skip
        """Search as in `SearchableGallery`; queries with the same filter are sent together. Also raises GalleryError
        for k > `MOST`, and for `exact` if the gallery was not created with the index "exact", without which Milvus
        cannot compare all entries."""
        check_vectors(embeddings, len(embeddings), self.card.embedding_dim)
        filters = [Filter()] * len(embeddings) if filters is None else filters
        if len(filters) != len(embeddings):
            raise GalleryError(f"expected a filter for each of {len(embeddings)} queries, found {len(filters)}")
        if not 0 <= k <= MOST or vectors > MOST:
            raise GalleryError(f"expected 0 <= k <= {MOST:,} neighbours, found {max(k, vectors)}")
        kind = self._rows.index_type
        if exact and kind != "FLAT":
            raise GalleryError(f"{self._address.text}: expected a gallery made for exact search, found one with the "
                               f"index {kind}; build it with --index exact")  # fmt: skip
        together: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(filters):
            together[rows.expression(one, self.labels, self._keys)].append(number)
        found: dict[int, SearchResult] = {}
        for expression, numbers in together.items():
            for number, near in zip(
                numbers, self._rows.nearest(embeddings[numbers], max(k, vectors), expression, "entry"), strict=True
            ):
                hits = tuple(Hit(rows.entry_of(row), row["distance"], row["cosine"]) for row in near[:k])
                own = np.array([row["vector"] for row in near], np.float32).reshape(len(near), embeddings.shape[1])
                found[number] = SearchResult(0, hits, f"milvus {'exact' if kind == 'FLAT' else kind.lower()}", own)
        return [found[number] for number in range(len(embeddings))]

    def search_by_agreement(
        self, embedding: NDArray[np.float32], probabilities: Mapping[str, float], k: int, *, filter: Filter = EVERY
    ) -> SearchResult:
        raise RankError("expected a gallery in a folder to rank by findings, found a Milvus collection: every entry's "
                        "labels are compared, and Milvus would have to send all of them; rank by nearness")  # fmt: skip

    # -- looking up

    @property
    def reference_distances(self) -> NDArray[np.float32]:
        """The result of the last `calibrate`, by this object or before it was opened; empty without one."""
        return self._reference

    @property
    def label_shares(self) -> dict[str, float | None]:
        """The result of the last `calibrate`, by this object or before it was opened; None per label without one."""
        return self._shares

    def entries(self, ids: Sequence[str]) -> list[Entry]:
        found = {row["id"]: rows.entry_of(row) for row in self._rows.by("id", ids, "id", "entry")}
        if missing := [id for id in ids if id not in found]:
            raise self._unknown(missing[0])
        return [found[id] for id in ids]

    def count(self, filter: Filter) -> int:
        return self._rows.count(rows.expression(filter, self.labels, self._keys))

    def every_entry(self) -> Iterator[Entry]:
        return (rows.entry_of(row) for row in self._rows.scan("", "id", "entry"))

    def find(self, sha256: str) -> list[Entry]:
        found = self._rows.by("sha256", [sha256], "entry") if sha256 else []
        return sorted((rows.entry_of(row) for row in found), key=lambda entry: entry.id)

    def vector(self, id: str) -> NDArray[np.float32]:
        return np.array(self._row(id, "vector")["vector"], np.float32)

    cell_codec = None

    def thumbnails(self, ids: Sequence[str]) -> list[bytes | None]:
        found = self._pictures.read(ids)
        there = {row["id"] for row in self._rows.by("id", [id for id in ids if id not in found], "id")} | found.keys()
        if missing := [id for id in ids if id not in there]:
            raise self._unknown(missing[0])
        return [base64.b64decode(found[id], validate=True) if id in found else None for id in ids]

    def ids(self) -> list[str]:
        return sorted(row["id"] for row in self._rows.scan("", "id"))

    def case_id(self, id: str) -> str:
        return case_id(self._case_key, id)

    def find_case(self, case: str) -> Entry | None:
        return next((rows.entry_of(row) for row in self._rows.by("case_id", [case], "entry")), None)

    def has_patient(self, patient_id: str) -> bool:
        key = self._keys.patient(patient_id)
        return bool(key) and bool(self._rows.query(f"patient == {rows.text(key)}", ["id"], limit=1))

    def info(self) -> dict[str, Any]:
        """Describe the gallery as `SearchableGallery.info` does. Milvus cannot count distinct values, so patients and
        warnings are not counted, and splits that cbmir does not define are counted as "other"."""
        splits = {name: self._rows.count(f"split == {rows.text(name)}") for name in _SPLITS}
        splits["other"] = self._rows.count(f"split not in {rows.texts(_SPLITS)}")
        return {
            "path": self._address.text,
            "schema": SCHEMA,
            "fingerprint": self.card.fingerprint,
            "encoder": self.card.encoder,
            "dim": self.card.embedding_dim,
            "crop": self.card.preprocess.crop,
            "created": self.created,
            "images": len(self),
            "splits": {name: count for name, count in splits.items() if count},
            "labels": {
                name: self._rows.count(f"array_contains(positive, {index})")
                for index, name in enumerate(self.labels.names)
            },
            "pseudonyms": bool(self._keys.check),
            "index": self.index_setting,
            "search": f"milvus {self._rows.index_type.lower()}",
            "consistency": self._address.consistency,
            "server": self._connection.call("get_server_version"),
        }

    def __len__(self) -> int:
        return self._rows.count("")

    def close(self) -> None:
        self._connection.close()

    # -- rows

    def _kept(self, entry: Entry) -> Entry:
        """Return the entry as it is stored: with pseudonyms if the gallery uses them, and with every label."""
        return replace(
            entry, patient_id=self._keys.patient(entry.patient_id), study_id=self._keys.study(entry.study_id),
            labels=self._codec.decode(self._codec.encode(entry.labels)),
        )  # fmt: skip

    def _row_of(self, entry: Entry, vector: NDArray[np.float32]) -> dict[str, Any]:
        return rows.row(entry, self.case_id(entry.id), vector)

    def _there(self, entries: Sequence[Entry]) -> tuple[dict[str | None, str], dict[str, str]]:
        """Return what exists of these entries, as content -> id and as id -> content."""
        by_content: dict[str | None, str] = {}
        for row in self._rows.by("sha256", [entry.sha256 for entry in entries if entry.sha256], "id", "sha256"):
            by_content[row["sha256"]] = min(row["id"], by_content.get(row["sha256"], row["id"]))
        content = {row["id"]: row["sha256"] for row in self._rows.by("id", [e.id for e in entries], "id", "sha256")}
        return by_content, content

    def _row(self, id: str, field: str) -> dict[str, Any]:
        found = list(self._rows.by("id", [id], field))
        if not found:
            raise self._unknown(id)
        return found[0]

    def _unknown(self, key: str) -> GalleryError:
        return GalleryError(f"{self._address.text}: expected the id of an entry of this gallery, found {key!r}")


def _about(connection: Connection) -> Texts:
    return Texts(connection, "about", "strong")


def _pictures(connection: Connection) -> Texts:
    return Texts(connection, "pictures", connection.address.consistency)


def _names(connection: Connection) -> tuple[str, ...]:
    return connection.address.name, _pictures(connection).name, _about(connection).name
