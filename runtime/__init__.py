"""cbmir.runtime: from an image to findings, neighbours and evidence, without PyTorch.

::

    read_image -> preprocess -> Engine -> Gallery.search -> Analysis
    \\________________________ Finder.analyze ______________________/

>>> from cbmir.runtime import Finder
>>> with Finder.open("model.onnx", "gallery/") as finder:          # doctest: +SKIP
...     analysis = finder.analyze("chest.png", k=10)
...     analysis.findings[0].probability, analysis.neighbours[0].report
...     analysis.evidence_for_finding("Effusion")                  # float32 [h, w]
"""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports
from cbmir.runtime.engines.base import Engine, EngineHealth, Outputs
from cbmir.runtime.engines.registry import open_engine
from cbmir.runtime.evidence import evidence_map
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Entry, Filter, Hit, SearchResult
from cbmir.runtime.gallery.protocol import EditableGallery, SearchableGallery, open_gallery
from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.reader import ImageLimits, Radiograph, read_image, thumbnail_jpeg
from cbmir.runtime.novelty import Novelty
from cbmir.runtime.results import Analysis, Finding, LabelAgreement, Neighbour

if TYPE_CHECKING:
    from cbmir.runtime.gallery.build import IndexReport, add_to_gallery, build_gallery
    from cbmir.runtime.gallery.gallery import Gallery
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms
    from cbmir.runtime.hot_reload import ReloadableFinder

# Imported on first use: findings need no gallery, and a search does not need the code that builds one.
__getattr__ = lazy_imports(
    __name__,
    {
        "Gallery": "cbmir.runtime.gallery.gallery",
        "IndexReport": "cbmir.runtime.gallery.build",
        "ReloadableFinder": "cbmir.runtime.hot_reload",
        "Pseudonyms": "cbmir.runtime.gallery.pseudonyms",
        "add_to_gallery": "cbmir.runtime.gallery.build",
        "build_gallery": "cbmir.runtime.gallery.build",
    },
)

__all__ = [
    "Analysis", "EditableGallery", "Engine", "EngineHealth", "Entry", "Filter", "Finder", "Finding", "Gallery", "Hit",
    "ImageLimits", "ImageWarning", "IndexReport", "LabelAgreement", "Neighbour", "Novelty", "Outputs", "Pseudonyms",
    "Radiograph", "ReloadableFinder", "SearchResult", "SearchableGallery", "add_to_gallery", "build_gallery",
    "evidence_map", "open_engine", "open_gallery", "preprocess", "read_image", "thumbnail_jpeg",
]  # fmt: skip
