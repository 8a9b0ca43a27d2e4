"""The gallery: labelled images to find neighbours among, with their embeddings, in one folder.

`gallery.sqlite` holds all data (`gallery`); the search files beside it are derived from it (`index_files`).
A gallery belongs to one embedding space, named by the model card's fingerprint. If one machine is not enough, Milvus
can store a gallery (`milvus`) with the same protocol (`protocol`).

A gallery is patient data: chest radiographs identify patients. Its folder is readable by its owner only.
"""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports
from cbmir.runtime.gallery.entry import Entry, Hit, SearchResult
from cbmir.runtime.gallery.filters import Filter

if TYPE_CHECKING:
    from cbmir.runtime.gallery.gallery import Gallery

# Findings need no gallery.
__getattr__ = lazy_imports(__name__, {"Gallery": "cbmir.runtime.gallery.gallery"})

__all__ = ["Entry", "Filter", "Gallery", "Hit", "SearchResult"]
