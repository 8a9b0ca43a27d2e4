"""The rows of a Milvus collection: found by their fields, or as candidates near a query; written; removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import milvus_rows as rows
from cbmir.runtime.gallery.milvus_place import Connection
from cbmir.runtime.gallery.schema import are_unit

#: Milvus gives at most so many neighbours, and so many rows of a query.
MOST = 16_384
#: Rows of one answer with all that they hold: 7 MB at most.
HEAVY = 100
_AT_ONCE = 1000  # ids in one expression
_MORE = 8  # candidates beyond k: they show that no tie is cut, and let float64 decide the order
_TIMES, _AND = 4, 24  # so many times k, and some more, where the index knows vectors by coarse codes only
_SLACK = 1e-6  # by so much may two cosines of one pair differ in float32
_BYTES = 16 * 2**20  # of one request or answer: a server takes 64 MB, and an entry with its report is 4 KB or more


class Collection:
    """An entry a row, as `milvus_rows` has them; `index` is the gallery's setting. Every method raises GalleryError
    where the server does not answer as it should."""

    def __init__(self, connection: Connection, index: str) -> None:
        self._connection = connection
        self._place = connection.place
        self.index_type = rows.INDEXES[index][0]
        self._consistency = {"consistency_level": self._place.consistency.capitalize()}

    @staticmethod
    def make(connection: Connection, dim: int, index: str) -> None:
        """A new one, loaded, for embeddings of `dim` values."""
        _make(connection, connection.place.name, *rows.collection(dim, index))

    def query(self, expression: str, fields: Sequence[str], **options: int | str) -> list[dict[str, Any]]:
        """Rows that pass, no more than `MOST`."""
        found: list[dict[str, Any]] = self._connection.call(
            "query", self._place.name, filter=expression, output_fields=list(fields), **self._consistency, **options
        )
        return found

    def by(self, field: str, values: Sequence[str], *fields: str) -> Iterator[dict[str, Any]]:
        """Rows whose field has one of these values."""
        for some in parts(sorted(set(values)), _AT_ONCE if set(fields) <= {"id", "sha256"} else HEAVY):
            yield from self.query(f"{field} in {rows.texts(some)}", fields)

    def scan(self, expression: str, *fields: str) -> Iterator[dict[str, Any]]:
        """All rows that pass, however many, in the order of their ids; `id` must be among the fields.

        As pymilvus's own iterator asks for pages, which does not escape the ids between them: with a backslash in one
        it would go on for ever.
        """
        size = 10_000 if set(fields) <= {"id"} else HEAVY
        paged = f"({expression})" if expression else 'id != ""'
        while page := self.query(paged, fields, limit=size, iterator="True", reduce_stop_for_best="True"):
            yield from page
            after = f"id > {rows.text(page[-1]['id'])}"
            paged = f"{after} and ({expression})" if expression else after

    def count(self, expression: str) -> int:
        """How many rows pass."""
        return int(self.query(expression, ["count(*)"])[0]["count(*)"])

    def nearest(
        self, queries: NDArray[np.float32], k: int, expression: str, *fields: str
    ) -> list[list[dict[str, Any]]]:
        """For each of float32 [M, D] the k nearest of the rows that pass, or all where there are fewer: with `distance`
        and `cosine`, both of float64, ties in the order of ids."""
        if k == 0 or not len(queries):
            return [[] for _ in queries]
        limit = min(k + _MORE if self.index_type != "HNSW_SQ" else _TIMES * k + _AND, MOST)
        answers = []
        for query, found in zip(queries, self.candidates(queries, expression, limit, *fields), strict=True):
            hits, fetched = found, limit
            if len(hits) < limit and (count := self.count(expression)) > len(hits):  # a graph may not reach them all
                if count > MOST and len(hits) < k:
                    raise GalleryError(f"{self._place.text}: the index found {len(hits)} of {k} neighbours under this "
                                       f"filter; build the gallery with --index exact")  # fmt: skip
                if count <= MOST:
                    hits = self._ranked(query, list(self.scan(expression, "id", "vector", *fields)))
            while len(hits) == fetched > k and hits[k - 1]["cosine"] - hits[-1]["cosine"] < _SLACK and fetched < MOST:
                fetched = min(2 * fetched, MOST)  # equal ones may go on beyond the last
                (hits,) = self.candidates(query[None], expression, fetched, *fields)
            answers.append(hits[:k])
        return answers

    def candidates(
        self, queries: NDArray[np.float32], expression: str, limit: int, *fields: str
    ) -> list[list[dict[str, Any]]]:
        """For each query, rows of about the `limit` nearest with their distance and cosine, in the final order."""
        size = limit * (4 * queries.shape[1] + 4096 * len(fields))
        found = []
        for some in parts(queries, max(1, _BYTES // size)):
            answers = self._connection.call(
                "search", self._place.name, list(some), filter=expression, limit=limit,
                search_params={"params": self._parameters(limit)}, output_fields=["id", "vector", *fields],
                anns_field="vector", **self._consistency,
            )  # fmt: skip
            for query, answer in zip(some, answers, strict=True):
                found.append(self._ranked(query, [dict(hit["entity"]) | {"id": hit["id"]} for hit in answer]))
        return found

    def _parameters(self, limit: int) -> dict[str, int]:
        if self.index_type == "FLAT":
            return {}
        return {"ef": max(64, 2 * limit)}

    def _ranked(self, query: NDArray[np.float32], hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not hits:
            return []
        vectors = np.array([hit["vector"] for hit in hits], np.float32)
        if not are_unit(vectors).all():
            raise GalleryError(f"{self._place.text}: expected embeddings of norm 1, found others; build it again")
        exactly, own = vectors.astype(np.float64), query.astype(np.float64)
        differences = exactly - own
        distances = np.sqrt(np.vecdot(differences, differences))
        cosines = np.vecdot(exactly, own)
        order = np.lexsort((np.array([hit["id"] for hit in hits]), distances))
        return [hits[at] | {"distance": float(distances[at]), "cosine": float(cosines[at])} for at in order]

    def upsert(self, made: Sequence[dict[str, Any]]) -> None:
        """Not inserted: of what was sent twice, Milvus would keep both."""
        batch: list[dict[str, Any]] = []
        size = 0
        for row in made:
            own = 4 * len(row["vector"]) + len(row["entry"]) + 1000
            if batch and size + own > _BYTES:
                self._connection.call("upsert", self._place.name, batch)
                batch, size = [], 0
            batch.append(row)
            size += own
        if batch:
            self._connection.call("upsert", self._place.name, batch)

    def delete(self, ids: Sequence[str]) -> None:
        """Rows of these ids."""
        for some in parts(ids, _AT_ONCE):
            self._connection.call("delete", self._place.name, filter=f"id in {rows.texts(some)}")


class Texts:
    """Texts by key, in a collection of their own beside the rows: what a gallery says of itself, and thumbnails, which
    would make the segments, each with a graph of its own, hold fewer rows."""

    def __init__(self, connection: Connection, suffix: str, consistency: str) -> None:
        self._connection = connection
        self._consistency = {"consistency_level": consistency.capitalize()}
        self.name = f"{connection.place.name}_{suffix}"

    def make(self) -> None:
        """A new one, empty."""
        _make(self._connection, self.name, *rows.texts_collection())

    def read(self, key: str | None = None) -> dict[str, str]:
        """The text of a key, where there is one, or all."""
        which = 'key != ""' if key is None else f"key == {rows.text(key)}"
        fields = ["key", "value"]
        found = self._connection.call("query", self.name, filter=which, output_fields=fields, **self._consistency)
        return {row["key"]: row["value"] for row in found}

    def write(self, values: dict[str, str]) -> None:
        """Add them, or put them in the place of what is there. Raises GalleryError for one that is too long."""
        for key, value in values.items():
            rows.check_length(key, value, rows.LONGEST)
        for some in parts(list(values.items()), max(1, _BYTES // rows.LONGEST)):
            made = [{"key": key, "value": value, "unused": [1.0, 0.0]} for key, value in some]
            self._connection.call("upsert", self.name, made)

    def delete(self, keys: Sequence[str]) -> None:
        """Those of them that are there."""
        for some in parts(keys, _AT_ONCE):
            self._connection.call("delete", self.name, filter=f"key in {rows.texts(some)}")


def _make(connection: Connection, name: str, schema: Any, indexes: Any) -> None:
    place = connection.place
    connection.call(
        "create_collection", name, schema=schema, num_shards=place.shards,
        consistency_level=place.consistency.capitalize(),
    )  # fmt: skip
    connection.call("create_index", name, indexes, sync=False)  # it is empty: no need to ask twice a second until done
    connection.load(name)


def parts(values: Any, size: int) -> Iterator[Any]:
    """A sequence or array in pieces of `size`, the last one shorter."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
