"""The protocol of every gallery, wherever it is stored, and how to open one by its place.

A place is a folder (`cbmir.runtime.gallery.gallery.Gallery`) or a Milvus collection
(`cbmir.runtime.gallery.milvus.gallery.MilvusGallery`): `milvus://HOST:19530/NAME`, `milvus+https://HOST:443/NAME`, or
`milvus:./file.db` for an embedded one. The same tests check both.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.cells import CellCodec
from cbmir.runtime.gallery.entry import Added, Entry, SearchResult
from cbmir.runtime.gallery.filters import EVERY, Filter
from cbmir.runtime.gallery.pseudonyms import Pseudonyms

#: Other schemes of Milvus are taken for a place too, and refused there: a folder of that name would be made else.
_MILVUS = re.compile(r"milvus(\+\w+)?:", re.IGNORECASE)


class SearchableGallery(Protocol):
    """Labelled images with their embeddings, in one embedding space. Many threads can use it at once.

    Every method may raise GalleryError: the gallery is closed, damaged, or cannot be reached, or its store does not
    support the operation.

    Attributes:
        card: Of the model whose embeddings these are.
        labels: Those of the entries.
    """

    card: ModelCard
    labels: LabelSet

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the gallery is, for messages."""

    @property
    @abstractmethod
    def finds_patients(self) -> bool:
        """Whether patients can be looked up by id: not if it keeps pseudonyms and was opened without their key."""

    @property
    @abstractmethod
    def reference_distances(self) -> NDArray[np.float32]:
        """float32 [m], sorted: `novelty.reference_distances` of the entries; empty if there are too few."""

    @property
    @abstractmethod
    def label_shares(self) -> dict[str, float | None]:
        """For each of `labels`, the share in [0, 1] of the entries that have it (1 or -1) among those for which it is
        known; None where it is known for none."""

    def check_model(self, card: ModelCard) -> None:
        """Raise GalleryError unless the embeddings are of this model's space."""
        if card.fingerprint != self.card.fingerprint:
            raise GalleryError(
                f"{self.place}: expected a gallery of this model (fingerprint {card.fingerprint}), found one of "
                f"another (fingerprint {self.card.fingerprint}); their distances mean nothing. Build it again with "
                f"'cbmir index build'"
            )

    def search(
        self, embedding: NDArray[np.float32], k: int, *, filter: Filter = EVERY, exact: bool | None = None,
        vectors: int = 0, cells: bool = False,
    ) -> SearchResult:  # fmt: skip
        """The k nearest of the entries that pass the filter, nearest first; all if fewer pass.

        Distances are exact and float64, equal ones in the order of their ids.

        Args:
            embedding: A unit vector, float32 [D].
            exact: Compare every entry. Else only those that an approximate index proposes, if there is one; among equal
                images it may not propose the first by id.
            vectors: If > k, the embeddings of this many nearest entries are returned, at a fraction of the cost of this
                many hits.
            cells: Answer the codes of the hits' cells too, where the gallery keeps them.

        Raises:
            GalleryError: The query has another size or norm, or NaN; k < 0; the filter does not fit the gallery's
                labels; or an entry that was found is damaged.
        """
        return self.search_many(embedding[None], k, filters=[filter], exact=exact, vectors=vectors, cells=cells)[0]

    @abstractmethod
    def search_many(
        self, embeddings: NDArray[np.float32], k: int, *, filters: Sequence[Filter] | None = None,
        exact: bool | None = None, vectors: int = 0, cells: bool = False,
    ) -> list[SearchResult]:  # fmt: skip
        """`search` for several queries, all answered together.

        Args:
            embeddings: Unit vectors, float32 [M, D].
            filters: M of them; by default no entry is left out.

        Returns:
            An answer for each query, in their order.

        Raises:
            GalleryError: As `search` does.
        """

    @abstractmethod
    def search_by_agreement(
        self, embedding: NDArray[np.float32], probabilities: Mapping[str, float], k: int, *, filter: Filter = EVERY
    ) -> SearchResult:
        """The k of all entries that pass the filter whose labels agree most with what is expected of the query.

        By `cbmir.runtime.gallery.search.expected_agreement` + 0.1 * cosine, in falling order. Equal ones are in the
        order of their distances, then of their ids.

        Args:
            probabilities: The query's, for some of the gallery's labels; the others are left out.

        Raises:
            RankError: The gallery would have to read every entry.
            GalleryError: As `search`; or no probability, or one of a label that is not the gallery's.
        """

    @abstractmethod
    def count(self, filter: Filter) -> int:
        """How many entries pass the filter. Raises GalleryError where it does not fit the gallery's labels."""

    @abstractmethod
    def entries(self, ids: Sequence[str]) -> list[Entry]:
        """The entries with these ids, in their order. Raises GalleryError for one that does not exist."""

    def entry(self, id: str) -> Entry:
        """The entry with this id. Raises GalleryError if it does not exist."""
        return self.entries([id])[0]

    @abstractmethod
    def every_entry(self) -> Iterator[Entry]:
        """All entries, in the order of `ids`, read lazily."""

    @abstractmethod
    def ids(self) -> list[str]:
        """Every id: in the order of adding if the gallery knows it, else sorted."""

    @abstractmethod
    def find(self, sha256: str) -> list[Entry]:
        """Every entry made from a file with this digest, in the order of `ids`."""

    @abstractmethod
    def case_id(self, id: str) -> str:
        """`case-` and 16 hexadecimal digits that stand for an entry in results: HMAC-SHA256 under a key of the gallery.

        Without the gallery, or a copy of it, the entry cannot be identified.
        """

    @abstractmethod
    def find_case(self, case: str) -> Entry | None:
        """The entry of a case id, or None."""

    @abstractmethod
    def has_patient(self, patient_id: str) -> bool:
        """Whether an entry is of this patient."""

    @abstractmethod
    def vector(self, id: str) -> NDArray[np.float32]:
        """float32 [D], unit norm. Raises GalleryError for an unknown id."""

    @property
    @abstractmethod
    def cell_codec(self) -> CellCodec | None:
        """How the cells of its images are coded; None if it keeps none."""

    @abstractmethod
    def thumbnails(self, ids: Sequence[str]) -> list[bytes | None]:
        """JPEG of about 256 pixels for each id, None where none was stored. Raises GalleryError for an unknown id."""

    def thumbnail(self, id: str) -> bytes | None:
        """As `thumbnails`, of one id."""
        return self.thumbnails([id])[0]

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """A description of the gallery and its content, in plain values for JSON."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class EditableGallery(SearchableGallery, Protocol):
    """A gallery whose entries can be changed: every gallery that cbmir builds."""

    @abstractmethod
    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None,
        cells: NDArray[np.float32] | None = None,
    ) -> Added:  # fmt: skip
        """Add N entries; an entry whose content (`sha256`) is already in the gallery is left out and reported.

        Args:
            embeddings: float32 [N, D] of unit norm.
            thumbnails: N JPEG files.
            cells: Feature maps float32 [N, D, h, w], where the gallery keeps cells.

        Raises:
            GalleryError: An id exists with other content, embeddings are invalid, labels are not the gallery's, or
                cells are missing or not expected. Nothing is added then.
        """

    @abstractmethod
    def update(self, entries: Sequence[Entry]) -> int:
        """Replace the data of entries (except content, embedding and thumbnail), by their ids.

        Returns:
            How many changed.

        Raises:
            GalleryError: An id does not exist, or exists with other content. Nothing is changed then.
        """

    @abstractmethod
    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries with all their data; unknown ids are ignored.

        Args:
            ids: Of entries.
            patient_ids: Of patients, all of whose entries are removed.
            study_ids: Of studies; with `patient_ids`, only these studies of these patients.

        Returns:
            The removed ids, sorted.

        Raises:
            GalleryError: A study id given without a patient belongs to several patients. Nothing is removed then.
        """


def is_milvus(place: str | Path) -> bool:
    """Whether a place is a Milvus collection. Raises GalleryError for one in a Path, which loses a slash of it."""
    if isinstance(place, Path):
        if _MILVUS.match(str(place)):
            raise GalleryError("expected the place of a Milvus collection as text, found it as a Path")
        return False
    return _MILVUS.match(place) is not None


def open_gallery(place: str | Path, *, pseudonyms: Pseudonyms | None = None) -> EditableGallery:
    """Open a gallery by its folder or `milvus:…` place (see the module); `pseudonyms` is as in `Gallery.open`.

    Raises:
        GalleryError: It is missing, damaged, of another schema, or cannot be reached.
        MissingDependencyError: pymilvus is needed and not installed.
    """
    if is_milvus(place):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        return MilvusGallery.open(str(place), pseudonyms=pseudonyms)
    from cbmir.runtime.gallery.gallery import Gallery

    return Gallery.open(place, pseudonyms=pseudonyms)
