"""What a Milvus collection holds of a gallery: its fields, entries as rows, and filters as Milvus expressions.

Fields that filters ask for are Milvus's own. The rest of an entry is JSON in one text, which lies on disk (mmap): a
cluster keeps in memory what searches need. A text ends at 65,535 bytes in Milvus.
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
#: Texts, and their longest in bytes: a server counts bytes, Milvus Lite characters.
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
#: Texts and the date are found by an index. Arrays would be too, but Milvus Lite has none for them.
INDEXED = ("case_id", "patient", "study", "view", "source", "split", "sha256", "date")
_MOST_LABELS = 1024

#: An index setting -> Milvus's index type and parameters. No refiner: it would keep every vector in memory once more,
#: and candidates are ranked here by their vectors anyway.
INDEXES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("FLAT", {}),
    "auto": ("HNSW", {"M": 16, "efConstruction": 200}),
    "bf16": ("HNSW_SQ", {"M": 16, "efConstruction": 200, "sq_type": "BF16"}),
    "int8": ("HNSW_SQ", {"M": 16, "efConstruction": 200, "sq_type": "SQ8"}),
}


def collection(dim: int, index: str) -> tuple[Any, Any]:
    """pymilvus's schema and indexes of a collection for embeddings of `dim` values."""
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
    """pymilvus's schema and indexes of texts by key. Milvus asks for a vector in every collection."""
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", DataType.VARCHAR, max_length=TEXTS["id"], is_primary=True)
    schema.add_field("value", DataType.VARCHAR, max_length=LONGEST, mmap_enabled=True)
    schema.add_field("unused", DataType.FLOAT_VECTOR, dim=2)
    indexes = MilvusClient.prepare_index_params()
    indexes.add_index("unused", index_type="FLAT", metric_type="COSINE")
    return schema, indexes


def row(entry: Entry, case: str, vector: NDArray[np.float32]) -> dict[str, Any]:
    """An entry whose labels are all named, in their order, as Milvus keeps it. Raises GalleryError for a text that is
    too long."""
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
    """The entry that a row was made of."""
    try:
        values = from_json(dict[str, Any], parse_json(row["entry"], "surrogateescape"))
        boxes = parse_boxes(from_json(str, values.pop("boxes", "")))
        return replace(from_json(Entry, values), boxes=boxes)
    except (ValueError, ManifestError) as error:
        raise GalleryError(f"expected an entry of a gallery in Milvus, found another record: {error}") from error


def expression(filter: Filter, labels: LabelSet, keys: Keys) -> str:
    """A filter in Milvus's language; empty where it lets all pass. Raises GalleryError as `filters.parse`."""
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
        parts.append(f"date >= {max(filter.first_day, 1)} and date <= {filter.last_day}")  # 0: not known
    if filter.where:
        parts.append(_condition(parse(filter.where, labels)))
    return " and ".join(parts)


def _condition(condition: Condition) -> str:
    if isinstance(condition, HasLabel):
        return f"array_contains({'positive' if condition.present else 'negative'}, {condition.index})"
    joint = " and " if isinstance(condition, AllOf) else " or "
    return f"({joint.join(map(_condition, condition.parts))})"


def text(value: str) -> str:
    """A text in an expression. Raises GalleryError for invalid Unicode."""
    check_length("text", value, LONGEST)
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        value = value.replace(plain, escaped)
    return f'"{value}"'


def texts(values: Iterable[str]) -> str:
    """A list of texts in an expression, in a fixed order."""
    return f"[{', '.join(map(text, sorted(values)))}]"


def check_length(name: str, value: str, longest: int) -> None:
    """Raise GalleryError for a text that Milvus has no room for."""
    try:
        length = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise GalleryError(f"expected a {name} in Unicode for Milvus, found {error.reason}") from error
    if length > longest:
        raise GalleryError(f"expected at most {longest:,} bytes for {name} in Milvus, found {length:,}")
