"""The data model of a Milvus collection: its fields, entries as rows, and filters as Milvus expressions.

Values that filters use are Milvus fields. The rest of an entry is JSON in one text on disk (mmap), so that a cluster
keeps only what searches need in memory. A text in Milvus has at most 65,535 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError, ManifestError
from cbmir.fields import from_json
from cbmir.input_file import parse_json
from cbmir.labels import LabelSet
from cbmir.manifest import boxes_text, parse_boxes
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.filters import AllOf, Condition, Filter, HasLabel, parse
from cbmir.runtime.gallery.pseudonyms import Keys
from cbmir.runtime.gallery.schema import day_number

LONGEST = 65_535
#: Text fields and their maximum length in bytes: a server counts bytes, Milvus Lite characters.
TEXTS = {
    "id": 512,
    "case_id": 32,
    "patient": 256,
    "study": 256,
    "view": 64,
    "source": 256,
    "split": 64,
    "sha256": 64,
    "entry": LONGEST,
}
#: Fields with an index. The arrays have none, because Milvus Lite cannot index them.
INDEXED = ("case_id", "patient", "study", "view", "source", "split", "sha256", "date")
_MOST_LABELS = 1024

#: Milvus's index type and parameters for each index setting. There is no refiner, which would keep every vector in
#: memory a second time: candidates are ranked by their vectors here anyway.
INDEXES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("FLAT", {}),
    "auto": ("HNSW", {"M": 16, "efConstruction": 200}),
    "bf16": ("HNSW_SQ", {"M": 16, "efConstruction": 200, "sq_type": "BF16"}),
    "int8": ("HNSW_SQ", {"M": 16, "efConstruction": 200, "sq_type": "SQ8"}),
}


def collection(dim: int, index: str) -> tuple[Any, Any]:
    """Return pymilvus's schema and indexes of a collection for embeddings of `dim` values."""
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    for name, longest in TEXTS.items():
        on_disk = {"mmap_enabled": True} if name == "entry" else {}
        schema.add_field(name, DataType.VARCHAR, max_length=longest, is_primary=name == "id", **on_disk)
    schema.add_field("date", DataType.INT32)
    for name in ("positive", "negative"):
        schema.add_field(name, DataType.ARRAY, element_type=DataType.INT16, max_capacity=_MOST_LABELS)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    indexes = MilvusClient.prepare_index_params()
    kind, parameters = INDEXES[index]
    indexes.add_index("vector", index_type=kind, metric_type="COSINE", params=parameters)
    for name in INDEXED:
        indexes.add_index(name, index_type="INVERTED")
    return schema, indexes


def texts_collection() -> tuple[Any, Any]:
    """Return pymilvus's schema and indexes of texts by key. Milvus requires a vector in every collection."""
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", DataType.VARCHAR, max_length=TEXTS["id"], is_primary=True)
    schema.add_field("value", DataType.VARCHAR, max_length=LONGEST, mmap_enabled=True)
    schema.add_field("unused", DataType.FLOAT_VECTOR, dim=2)
    indexes = MilvusClient.prepare_index_params()
    indexes.add_index("unused", index_type="FLAT", metric_type="COSINE")
    return schema, indexes


def row(entry: Entry, case: str, vector: NDArray[np.float32]) -> dict[str, Any]:
    """Convert an entry with all labels, in order, to a Milvus row. Raises GalleryError for a text that is too long."""
    values = (entry.labels or {}).values()
    made: dict[str, Any] = {
        "id": entry.id,
        "case_id": case,
        "patient": entry.patient_id,
        "study": entry.study_id,
        "view": entry.view.casefold(),
        "source": entry.source.casefold(),
        "split": entry.split,
        "sha256": entry.sha256,
        "entry": json.dumps(asdict(entry) | {"boxes": boxes_text(entry.boxes)}),
        "date": day_number(entry.date),
        "positive": [index for index, value in enumerate(values) if value in (1, -1)],
        "negative": [index for index, value in enumerate(values) if value == 0],
        "vector": vector.tolist(),
    }
    for name, longest in TEXTS.items():
        check_length(name, made[name], longest)
    return made


def entry_of(row: dict[str, Any]) -> Entry:
    """Convert a row back to its entry. Raises GalleryError for a row that was not made from one."""
    try:
        values = from_json(dict[str, Any], parse_json(row["entry"], "surrogateescape"))
        boxes = parse_boxes(from_json(str, values.pop("boxes", "")))
        return replace(from_json(Entry, values), boxes=boxes)
    except (ValueError, ManifestError) as error:
        raise GalleryError(f"expected an entry of a gallery in Milvus, found another record: {error}") from error


def expression(filter: Filter, labels: LabelSet, keys: Keys) -> str:
    """Convert a filter to a Milvus expression, empty if all entries pass. Raises GalleryError as `filters.parse`."""
    patients = {keys.patient(patient) for patient in filter.exclude_patients if patient}
    studies = {keys.study(study) for study in filter.exclude_studies if study}
    parts = []
    if patients:
        parts.append(f"patient not in {texts(patients)}")
    if studies:
        parts.append(f"study not in {texts(studies)}")
    if filter.only_patients:
        parts.append(f"patient in {texts({keys.patient(patient) for patient in filter.only_patients})}")
    named = {"view": filter.view, "source": filter.source}
    parts += [f"{field} == {text(name.casefold())}" for field, name in named.items() if name]
    if filter.since or filter.until:
        parts.append(f"date >= {max(filter.first_day, 1)} and date <= {filter.last_day}")  # 0 means unknown
    if filter.where:
        parts.append(_condition(parse(filter.where, labels)))
    return " and ".join(parts)


def _condition(condition: Condition) -> str:
    if isinstance(condition, HasLabel):
        return f"array_contains({'positive' if condition.present else 'negative'}, {condition.index})"
    joint = " and " if isinstance(condition, AllOf) else " or "
    return f"({joint.join(map(_condition, condition.parts))})"


def text(value: str) -> str:
    """Quote a text for an expression. Raises GalleryError for invalid Unicode and for a text that is too long."""
    check_length("text", value, LONGEST)
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        value = value.replace(plain, escaped)
    return f'"{value}"'


def texts(values: Iterable[str]) -> str:
    """Quote texts as a sorted list for an expression."""
    return f"[{', '.join(map(text, sorted(values)))}]"


def check_length(name: str, value: str, longest: int) -> None:
    """Raise GalleryError for a text that is too long for Milvus, or not valid Unicode."""
    try:
        length = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise GalleryError(f"expected a {name} in Unicode for Milvus, found {error.reason}") from error
    if length > longest:
        raise GalleryError(f"expected at most {longest:,} bytes for {name} in Milvus, found {length:,}")
