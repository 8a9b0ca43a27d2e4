"""What every gallery can do, wherever it is kept, and how one is opened by its place.

A place is a folder (`cbmir.runtime.gallery.gallery.Gallery`) or a Milvus collection
(`cbmir.runtime.gallery.milvus.gallery.MilvusGallery`): `milvus://HOST:19530/NAME`, `milvus+https://HOST:443/NAME`, or
`milvus:./file.db` for an embedded one. One set of tests holds both to what is written here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.entry import Added, Entry, SearchResult
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.pseudonyms import Pseudonyms

#: Other schemes of Milvus are taken for a place too, and refused there: a folder of that name would be made else.
_MILVUS = re.compile(r"milvus(\+\w+)?:", re.IGNORECASE)


class SearchableGallery(Protocol):
    """Labelled images with their embeddings, of one embedding space. All of it is safe from many threads.

    Every method may raise GalleryError: for a gallery that is closed, damaged, or cannot be reached.
    """

    @property
    def card(self) -> ModelCard:
        """Of the model whose embeddings these are."""
        ...

    @property
    def labels(self) -> LabelSet:
        """Those of the entries."""
        ...

    @property
    def reference_distances(self) -> NDArray[np.float32]:
        """float32 [m], sorted: `novelty.reference_distances` of the entries; empty where they are too few."""
        ...

    @property
    def finds_patients(self) -> bool:
        """Whether patients can be looked up by id: not where it keeps pseudonyms and was opened without their key."""
        ...

    def check_model(self, card: ModelCard) -> None:
        """Raise GalleryError unless the embeddings are of this model's space."""
        ...

    def search(
        self,
        embedding: NDArray[np.float32],
        k: int,
        *,
        filter: Filter = ...,  # noqa: A002 - the field's own name
        exact: bool | None = None,
        vectors: int = 0,
    ) -> SearchResult:
        """The k nearest of the entries that pass the filter, nearest first; all where fewer pass.

        Args:
            embedding: A unit vector, float32 [D].
            exact: Compare every entry; None lets the gallery choose an approximate index. Distances are exact either
                way, and equal ones in the order of their ids.
            vectors: Where > k, the embeddings of so many nearest are answered.

        Raises:
            GalleryError: k < 0, or the query has another size or norm, or NaN.
        """
        ...

    def search_many(
        self,
        embeddings: NDArray[np.float32],
        k: int,
        *,
        filters: Sequence[Filter] | None = None,
        exact: bool | None = None,
        vectors: int = 0,
    ) -> list[SearchResult]:
        """`search` for each of float32 [M, D], with a filter each."""
        ...

    def entry(self, id: str) -> Entry:  # noqa: A002
        """Raises GalleryError for an id that is not there."""
        ...

    def every_entry(self) -> Iterator[Entry]:
        """All entries, in the order of `ids`, read as they are asked for."""
        ...

    def ids(self) -> list[str]:
        """Every id: in the order of adding where the gallery knows it, else sorted."""
        ...

    def find(self, sha256: str) -> list[Entry]:
        """Every entry made from a file with this digest."""
        ...

    def case_id(self, id: str) -> str:  # noqa: A002
        """`case-` and 16 hexadecimal digits that stand for an entry in results; they tell nothing by themselves."""
        ...

    def find_case(self, case: str) -> Entry | None:
        """The entry that a case id stands for; None where there is none."""
        ...

    def has_patient(self, patient_id: str) -> bool:
        """Whether an entry is of this patient."""
        ...

    def vector(self, id: str) -> NDArray[np.float32]:  # noqa: A002
        """float32 [D], unit norm. Raises GalleryError for an id that is not there."""
        ...

    def thumbnail(self, id: str) -> bytes | None:  # noqa: A002
        """JPEG of about 256 pixels, or None where none was stored. Raises GalleryError for an id that is not there."""
        ...

    def info(self) -> dict[str, Any]:
        """What the gallery is and holds, in plain values for JSON."""
        ...

    def __len__(self) -> int: ...

    def close(self) -> None:
        """May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EditableGallery(SearchableGallery, Protocol):
    """One whose entries can be changed: every gallery that is built by cbmir."""

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None
    ) -> Added:
        """Add N entries with embeddings float32 [N, D] of unit norm, and JPEG thumbnails.

        An entry whose content (`sha256`) is there already is skipped and reported. Raises GalleryError, and adds
        nothing, for an id that is there with other content, and for unfit embeddings.
        """
        ...

    def update(self, entries: Sequence[Entry]) -> int:
        """Replace what is said of entries (all but content, embedding and thumbnail) by their ids: how many.

        Raises GalleryError, and changes nothing, for an id that is not there.
        """
        ...

    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries with all that belongs to them: the ids that went, sorted. What is not there is passed over.

        With `patient_ids` and `study_ids`, only these studies of these patients. Raises GalleryError, and removes
        nothing, for a study id alone that several patients have.
        """
        ...


def is_milvus(place: str | Path) -> bool:
    """Whether a place is a Milvus collection. Raises GalleryError for one in a Path, which loses a slash of it."""
    if isinstance(place, Path):
        if _MILVUS.match(str(place)):
            raise GalleryError("expected the place of a Milvus collection as text, found it as a Path")
        return False
    return _MILVUS.match(place) is not None


def open_gallery(place: str | Path, *, pseudonyms: Pseudonyms | None = None) -> EditableGallery:
    """Open a gallery by its folder or `milvus:…` place (see the module); `pseudonyms` is as `Gallery.open` has it.

    Raises GalleryError; MissingDependencyError where pymilvus is needed and not installed.
    """
    if is_milvus(place):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        return MilvusGallery.open(str(place), pseudonyms=pseudonyms)
    from cbmir.runtime.gallery.gallery import Gallery

    return Gallery.open(place, pseudonyms=pseudonyms)
