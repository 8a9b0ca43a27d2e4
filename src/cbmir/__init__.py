"""cbmir finds similar chest X-rays, and says which findings they show.

>>> import cbmir
>>> finder = cbmir.load("model.onnx", gallery="gallery/")        # doctest: +SKIP
>>> result = finder.analyze("chest.png", k=10)                    # doctest: +SKIP

Research use only: cbmir is not a medical device.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from cbmir.runtime.finder import Finder

# Since 1.29 ONNX Runtime reports sessions and models to Microsoft unless this is set before its import
# (microsoft/onnxruntime#27379). A hospital's machine must not send data unasked.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.2.0"
__all__ = ["__version__", "load"]


def load(model: str | Path, gallery: str | Path | None = None, **options: Any) -> Finder:
    """Open an exported model, and a gallery if you want neighbours.

    Args:
        model: A model file, a folder that `cbmir export` wrote, or `starter`, the model that comes with cbmir.
        gallery: A gallery's folder, or a `milvus:` address.
        **options: See `cbmir.runtime.Finder.open`, which also lists the errors.
    """
    from cbmir.runtime.finder import Finder

    return Finder.open(model, gallery, **options)
