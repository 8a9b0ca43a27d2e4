"""What a gallery is at this moment, cheaply: asked for at every request and check of health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.gallery.store import Store


@dataclass(frozen=True)
class GalleryState:
    """How many images, and as of which generation; None where a gallery counts none (Milvus)."""

    images: int
    generation: int | None

    @classmethod
    def of(cls, gallery: AnyGallery) -> Self:
        """Raises GalleryError where the gallery cannot be read, or was replaced."""
        if not isinstance(gallery, Store):
            return cls(len(gallery), None)
        with gallery.reading() as reader:
            return cls(reader.count, reader.generation)


def generation_of(gallery: AnyGallery) -> int | None:
    """`GalleryState.generation` alone, for which Milvus, over its network, is not asked anything."""
    return GalleryState.of(gallery).generation if isinstance(gallery, Store) else None
