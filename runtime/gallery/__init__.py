"""The gallery: labelled images and their embeddings in one folder, searched for neighbours.

`gallery.sqlite` holds all data (`gallery`); the search files beside it are derived from it (`index_files`).
A gallery belongs to one embedding space, identified by the model card's fingerprint. If one machine is not enough,
Milvus can store a gallery (`milvus`) with the same protocol (`protocol`).

A gallery is patient data, because chest radiographs identify patients. Only its owner can read its folder.
"""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports
from cbmir.runtime.gallery.entry import Entry, Hit, SearchResult
from cbmir.runtime.gallery.filters import Filter

if TYPE_CHECKING:
    from cbmir.runtime.gallery.gallery import Gallery

# Gallery is loaded lazily, since predicting findings does not need it.
__getattr__ = lazy_imports(__name__, {"Gallery": "cbmir.runtime.gallery.gallery"})

__all__ = ["Entry", "Filter", "Gallery", "Hit", "SearchResult"]
