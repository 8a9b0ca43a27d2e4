"""An image of a manifest on its way into a gallery: read in a worker process, then embedded in small batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.manifest import Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.reader import read_image, thumbnail_jpeg

#: Images that go to the engine at once.
BATCH = 32


@dataclass(frozen=True, eq=False)
class Picture:
    """What is kept of an image file, and the model's input `crop` (uint8 [S, S]).

    `sha256` is that of the file. `study_uid`, `sop_instance_uid`, `view` and
    `date` (YYYY-MM-DD) are what a DICOM file says of itself, empty where it does not.
    """

    sha256: str
    thumbnail: bytes = b""
    study_uid: str = ""
    sop_instance_uid: str = ""
    view: str = ""
    date: str = ""
    crop: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Source:
    """An image file to read: a DICOM file of a lateral view where the manifest says that it is `lateral`. One whose
    content is `known`, by its SHA-256, need not be decoded."""

    path: Path
    lateral: bool = False
    known: str = ""

    @classmethod
    def of(cls, row: Row, known: str = "") -> Source:
        return cls(row.image, row.view == "LATERAL", known)


def read_picture(spec: PreprocessSpec, reduced_for: PreprocessSpec | None, source: Source) -> Picture:
    """Read an image; one whose content is as known comes back with its digest alone.

    `reduced_for` is as `read_image` has it, which names the errors.
    """
    if source.known and file_digest(source.path) == source.known:
        return Picture(source.known)
    radiograph = read_image(
        source.path, intensity=spec.intensity, allow_lateral=source.lateral, reduced_for=reduced_for
    )
    return Picture(
        radiograph.sha256,
        thumbnail_jpeg(radiograph.pixels),
        radiograph.study_id,
        radiograph.sop_instance_uid,
        radiograph.view,
        radiograph.date,
        crop=preprocess(radiograph, spec),
    )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits; empty where it cannot be read: `read_image` says why."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def embed_pictures(engine: Engine, pictures: Sequence[Picture]) -> NDArray[np.float32]:
    """float32 [N, D], unit norm: the engine's embeddings of the pictures' crops.

    A CPU engine of one thread gets them one by one, as streams of one thread do: the values are then the same, whatever
    the number of threads, for an engine opened in mode throughput.
    """
    crops = np.stack([picture.crop for picture in pictures if picture.crop is not None])[:, None]
    size = 1 if engine.streams and engine.threads == 1 else len(crops)
    return np.concatenate([engine.run(crops[at : at + size]).embedding for at in range(0, len(crops), size)])
