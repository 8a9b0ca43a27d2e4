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

from cbmir.runtime.engine import Engine, EngineHealth, Outputs
from cbmir.runtime.evidence import evidence_map
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Gallery, Hit
from cbmir.runtime.indexing import IndexReport, build_gallery
from cbmir.runtime.opening import open_engine
from cbmir.runtime.preprocess import preprocess
from cbmir.runtime.reading import Limits, Radiograph, read_image
from cbmir.runtime.result import Analysis, Finding, Neighbour
from cbmir.runtime.store import Entry
from cbmir.runtime.thumbnail import thumbnail_jpeg

__all__ = [
    "Analysis",
    "Engine",
    "EngineHealth",
    "Entry",
    "Finder",
    "Finding",
    "Gallery",
    "Hit",
    "IndexReport",
    "Limits",
    "Neighbour",
    "Outputs",
    "Radiograph",
    "build_gallery",
    "evidence_map",
    "open_engine",
    "preprocess",
    "read_image",
    "thumbnail_jpeg",
]
