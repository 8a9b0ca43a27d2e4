"""The protocols of galleries, wherever they are stored, and a function that opens a gallery by its place.

A place is a folder (`cbmir.runtime.gallery.gallery.Gallery`) or a Milvus collection
(`cbmir.runtime.gallery.milvus.gallery.MilvusGallery`): `milvus://HOST:19530/NAME`, `milvus+https://HOST:443/NAME`, or
`milvus:./file.db` for an embedded one. The same tests cover both.
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

#: Also matches unknown schemes like `milvus+foo:`. Parsing them raises an error; otherwise they would become folders.
_MILVUS = re.compile(r"milvus(\+\w+)?:", re.IGNORECASE)


class SearchableGallery(Protocol):
    """Labelled images with their embeddings, in one embedding space. Thread-safe.

    Every method may raise GalleryError if the gallery is closed, damaged or cannot be reached, or if its storage does
    not support the operation.

    Attributes:
        card: Card of the model that computed the embeddings.
        labels: Labels of the entries.
    """

    card: ModelCard
    labels: LabelSet

    @property
    @abstractmethod
    def place(self) -> str:
        """The gallery's folder or Milvus address, for messages."""

    @property
    @abstractmethod
    def finds_patients(self) -> bool:
        """Whether patients can be looked up by id. False if the gallery stores pseudonyms and their key is missing."""

    @property
    @abstractmethod
    def reference_distances(self) -> NDArray[np.float32]:
        """float32 [m], sorted: `novelty.reference_distances` of the entries; empty if there are too few."""

    @property
    @abstractmethod
    def label_shares(self) -> dict[str, float | None]:
        """For each label, the share in [0, 1] of positive or uncertain entries among the entries with a known value;
        None if no entry has one."""

    def check_model(self, card: ModelCard) -> None:
        """Raise GalleryError unless the embeddings are in this model's embedding space."""
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
        """Return the k nearest entries that pass the filter, nearest first, or all of them if fewer pass.

        Distances are exact and float64. Ties are ordered by id.

        Args:
            embedding: A unit vector, float32 [D].
            exact: Compare every entry. Otherwise an approximate index, if there is one, chooses the entries to compare;
                among equal images it may miss the one with the first id.
            vectors: If > k, return the embeddings of this many nearest entries. This costs much less than as many hits.
            cells: Also return the codes of the hits' cells, if the gallery stores them.

        Raises:
            GalleryError: The query has the wrong size or norm, or contains NaN; k < 0; the filter's expression is
                invalid or has a label that the gallery lacks; or a hit is damaged.
        """
        return self.search_many(embedding[None], k, filters=[filter], exact=exact, vectors=vectors, cells=cells)[0]

    @abstractmethod
    def search_many(
        self, embeddings: NDArray[np.float32], k: int, *, filters: Sequence[Filter] | None = None,
        exact: bool | None = None, vectors: int = 0, cells: bool = False,
    ) -> list[SearchResult]:  # fmt: skip
        """Run `search` for several queries together.

        Args:
            embeddings: Unit vectors, float32 [M, D].
            filters: One filter per query; by default every entry passes.

        Returns:
            One result per query, in the same order.

        Raises:
            GalleryError: As in `search`.
        """

    @abstractmethod
    def search_by_agreement(
        self, embedding: NDArray[np.float32], probabilities: Mapping[str, float], k: int, *, filter: Filter = EVERY
    ) -> SearchResult:
        """Return the k entries that pass the filter and whose labels best match the query's probabilities.

        They are ordered by `cbmir.runtime.gallery.search.expected_agreement` + 0.1 * cosine, highest first; ties by
        distance, then by id.

        Args:
            probabilities: The query's probabilities of some of the gallery's labels; the other labels are ignored.

        Raises:
            RankError: The gallery would have to read every entry.
            GalleryError: As in `search`; or `probabilities` is empty, or has a label that the gallery does not have.
        """

    @abstractmethod
    def count(self, filter: Filter) -> int:
        """Count the entries that pass the filter. Raises GalleryError for an invalid expression, as `search` does."""

    @abstractmethod
    def entries(self, ids: Sequence[str]) -> list[Entry]:
        """Return the entries with these ids, in the same order. Raises GalleryError for an unknown id."""

    def entry(self, id: str) -> Entry:
        """Return the entry with this id. Raises GalleryError for an unknown id."""
        return self.entries([id])[0]

    @abstractmethod
    def every_entry(self) -> Iterator[Entry]:
        """Iterate over all entries in the order of `ids`, reading them lazily."""

    @abstractmethod
    def ids(self) -> list[str]:
        """Return every id, in the order in which they were added if the gallery records it, else sorted."""

    @abstractmethod
    def find(self, sha256: str) -> list[Entry]:
        """Return every entry made from a file with this SHA-256 digest, in the order of `ids`."""

    @abstractmethod
    def case_id(self, id: str) -> str:
        """Return the case id that represents an entry in results: `case-` and 16 hexadecimal digits.

        It is an HMAC-SHA256 under the gallery's key. The entry can only be identified with the gallery or a copy of it.
        """

    @abstractmethod
    def find_case(self, case: str) -> Entry | None:
        """Return the entry with this case id, or None."""

    @abstractmethod
    def has_patient(self, patient_id: str) -> bool:
        """Return whether any entry belongs to this patient."""

    @abstractmethod
    def vector(self, id: str) -> NDArray[np.float32]:
        """Return an entry's embedding: float32 [D], unit norm. Raises GalleryError for an unknown id."""

    @property
    @abstractmethod
    def cell_codec(self) -> CellCodec | None:
        """The codec of the images' cells; None if the gallery stores no cells."""

    @abstractmethod
    def thumbnails(self, ids: Sequence[str]) -> list[bytes | None]:
        """Return a JPEG of about 256 pixels per id, None if none was stored. Raises GalleryError for an unknown id."""

    def thumbnail(self, id: str) -> bytes | None:
        """Return the thumbnail of one id, as in `thumbnails`."""
        return self.thumbnails([id])[0]

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Describe the gallery and its contents in values that JSON can represent."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Close the gallery. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class EditableGallery(SearchableGallery, Protocol):
    """A gallery whose entries can be changed, like every gallery that cbmir builds."""

    @abstractmethod
    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None,
        cells: NDArray[np.float32] | None = None,
    ) -> Added:  # fmt: skip
        """Add N entries. An entry whose content (`sha256`) is already in the gallery is left out and reported.

        Args:
            embeddings: float32 [N, D] of unit norm.
            thumbnails: N JPEG files.
            cells: Feature maps float32 [N, D, h, w], required if the gallery stores cells.

        Raises:
            GalleryError: An id already exists with different content, embeddings are invalid, the gallery lacks a
                label, or cells are missing or unexpected. In these cases nothing is added.
        """

    @abstractmethod
    def update(self, entries: Sequence[Entry]) -> int:
        """Replace the data of existing entries, matched by id, except content, embedding and thumbnail.

        Returns:
            The number of entries that changed.

        Raises:
            GalleryError: An id does not exist, or exists with different content. In these cases nothing is changed.
        """

    @abstractmethod
    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries with all their data. Unknown ids are ignored.

        Args:
            ids: Entry ids.
            patient_ids: Patients whose entries are all removed.
            study_ids: Studies to remove; with `patient_ids`, only these studies of these patients are removed.

        Returns:
            The removed entries' ids, sorted.

        Raises:
            GalleryError: Without `patient_ids`, a study id belongs to several patients. Then nothing is removed.
        """


def is_milvus(place: str | Path) -> bool:
    """Return whether a place is a Milvus collection. Raises GalleryError for one in a Path, which drops a slash."""
    if isinstance(place, Path):
        if _MILVUS.match(str(place)):
            raise GalleryError("expected the place of a Milvus collection as text, found it as a Path")
        return False
    return _MILVUS.match(place) is not None


def open_gallery(place: str | Path, *, pseudonyms: Pseudonyms | None = None) -> EditableGallery:
    """Open a gallery by its folder or `milvus:…` place (see the module); `pseudonyms` is as in `Gallery.open`.

    Raises:
        GalleryError: The gallery is missing, damaged, has another schema, or cannot be reached.
        MissingDependencyError: pymilvus is needed but not installed.
    """
    if is_milvus(place):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        return MilvusGallery.open(str(place), pseudonyms=pseudonyms)
    from cbmir.runtime.gallery.gallery import Gallery

    return Gallery.open(place, pseudonyms=pseudonyms)
