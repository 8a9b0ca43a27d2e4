"""Small galleries on disk and in Milvus, for tests of the protocol that both follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.manifest import Box
from cbmir.runtime import EditableGallery, Entry, Gallery
from cbmir.runtime.gallery.protocol import is_milvus

COUNT, DIM = 120, 8
Vectors = NDArray[np.float32]
MakeGallery = Callable[..., EditableGallery]


def unit(rng: np.random.Generator, count: int) -> Vectors:
    """Random unit vectors [count, DIM]."""
    vectors = rng.normal(size=(count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def entry(n: int) -> Entry:
    """An entry with a value in every field; labels take all values."""
    return Entry(
        id=f"folder/e{n:03}",
        image=f"/images/{n}.png",
        patient_id=f"p{n % 12}" if n % 10 else "",
        study_id=f"s{n % 30}",
        sop_instance_uid=f"1.2.{n}",
        view=("PA", "AP", "")[n % 3],
        source=("", 'St. "Süd"', "NIH")[n // 2 % 3],
        date="" if n % 7 == 0 else f"20{10 + n % 12}-{n % 12 + 1:02}-{n % 28 + 1:02}",
        split=("train", "val")[n % 2],
        report=f'Report {n}: "größer" \\ {{$1}}\n2nd line.',
        labels={"Effusion": (1, 0, -1, None)[n % 4], "Mass": (0, 1, None)[n % 3], "Nodule": n % 2},
        sha256=f"digest{n}",
        boxes=(Box("Mass", 0.25, n / COUNT / 2, 1 / 3, 0.5), Box('"Größe"', 0, 0, 1, 1)) if n % 3 == 1 else (),
    )


def address_in(folder: Path, kind: str) -> str | Path:
    return folder / "gallery" if kind == "folder" else f"milvus:{folder}/gallery.db"


def create(address: str | Path, card: ModelCard, labels: LabelSet | None = None, **options: object) -> EditableGallery:
    if is_milvus(address):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        return MilvusGallery.create(str(address), card, labels, **options)  # type: ignore[arg-type]
    return Gallery.create(address, card, labels, **options)  # type: ignore[arg-type]


def fill(gallery: EditableGallery, vectors: Vectors) -> None:
    """Add COUNT entries; the even ones have a thumbnail."""
    jpegs = [f"jpeg{n}".encode() if n % 2 == 0 else None for n in range(COUNT)]
    gallery.add([entry(n) for n in range(COUNT)], vectors, jpegs)  # type: ignore[arg-type]


def has(of: Entry, label: str) -> bool:
    return (of.labels or {}).get(label) in (1, -1)
