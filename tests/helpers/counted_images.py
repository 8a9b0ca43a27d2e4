"""Count the images that go through an engine, and make manifests of drawn images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from cbmir.manifest import Manifest


@dataclass
class CountedImages:
    """The number of images that went through the engine; beyond `limit`, KeyboardInterrupt is raised."""

    limit: int = 10**9
    images: int = 0


def drawn_manifest(folder: Path, manifest: Manifest, make_xray: Callable[..., np.ndarray], count: int) -> Manifest:
    """A manifest of `count` different images in `folder`, each of a different patient."""
    rows = []
    for n in range(count):
        image = folder / f"drawn_{n:03}.png"
        Image.fromarray(make_xray(1000 + n)).save(image)
        rows.append(replace(manifest.rows[n % 24], image=image, patient_id=f"p{n}", split="train"))
    return replace(manifest, rows=tuple(rows))
