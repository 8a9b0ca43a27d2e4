"""cbmir.runtime: an image in; findings, neighbours and evidence out. No PyTorch.

::

    read_image -> preprocess -> Engine -> Gallery.search -> Analysis
    \\________________________ Finder.analyze ______________________/

>>> from cbmir.runtime import Finder
>>> with Finder.open("model.onnx", "gallery/") as finder:          # doctest: +SKIP
...     analysis = finder.analyze("chest.png", k=10)
...     analysis.findings[0].probability, analysis.neighbours[0].report
...     analysis.evidence_for_finding("Effusion")                  # float32 [h, w]
"""

from importlib import import_module
from typing import TYPE_CHECKING

from cbmir.runtime.agreement import LabelAgreement
from cbmir.runtime.engine import Engine, EngineHealth, Outputs
from cbmir.runtime.evidence import evidence_map
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Entry, Filter, Found, Hit
from cbmir.runtime.gallery.protocol import AnyGallery, open_gallery
from cbmir.runtime.novelty import Novelty
from cbmir.runtime.opening import open_engine
from cbmir.runtime.preprocess import preprocess
from cbmir.runtime.reading import Limits, Radiograph, read_image
from cbmir.runtime.result import Analysis, Finding, Neighbour
from cbmir.runtime.thumbnail import thumbnail_jpeg

if TYPE_CHECKING:
    from cbmir.runtime.gallery.building import IndexReport, add_to_gallery, build_gallery
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms
    from cbmir.runtime.gallery.searching import Gallery
    from cbmir.runtime.live import LiveFinder

#: Imported when asked for: findings need no gallery, and an answer builds none.
_LATER = {
    "Gallery": "cbmir.runtime.gallery.searching",
    "IndexReport": "cbmir.runtime.gallery.building",
    "LiveFinder": "cbmir.runtime.live",
    "Pseudonyms": "cbmir.runtime.gallery.pseudonyms",
    "add_to_gallery": "cbmir.runtime.gallery.building",
    "build_gallery": "cbmir.runtime.gallery.building",
}

__all__ = [
    "Analysis",
    "AnyGallery",
    "Engine",
    "EngineHealth",
    "Entry",
    "Filter",
    "Finder",
    "Finding",
    "Found",
    "Gallery",
    "Hit",
    "IndexReport",
    "LabelAgreement",
    "Limits",
    "LiveFinder",
    "Neighbour",
    "Novelty",
    "Outputs",
    "Pseudonyms",
    "Radiograph",
    "add_to_gallery",
    "build_gallery",
    "evidence_map",
    "open_engine",
    "open_gallery",
    "preprocess",
    "read_image",
    "thumbnail_jpeg",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_LATER[name]), name)
    return found
