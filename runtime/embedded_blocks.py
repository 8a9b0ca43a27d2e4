"""Embeddings of a manifest's images as files, `part-000012.npz` for each 1,024 rows, that shards and later runs share.

A file is written under a temporary name and renamed, so one that is there is whole, and work on it is never done twice.
Its arrays, for n rows (a row that could not be read has empty values):

=================  =============================================================================
embedding          float32 [n, D], unit norm
sha256             bytes of 64 hexadecimal digits [n], of the image file
error              text [n]: why an image could not be read, empty where it was
thumbnail          uint8, the JPEG files one after the other; `thumbnail_end` int64 [n] says where each ends
study_uid, sop_instance_uid, view, date      text [n]: what DICOM files say of themselves
stamp              JSON: which model, which images in which order, which block
=================  =============================================================================
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, ImageError
from cbmir.files import replacing
from cbmir.manifest import Row
from cbmir.runtime.gallery.pictures import Picture

log = logging.getLogger("cbmir")

#: Rows of a file. Batches are cut inside of a block, so that its bytes do not depend on who embeds the others.
BLOCK = 1024
SCHEMA = 1
_TEXTS = ("study_uid", "sop_instance_uid", "view", "date")
_NAME = re.compile(r"part-(\d{6,})\.npz")


@dataclass(frozen=True)
class Blocks:
    """The files of one model and one list of images in a folder, which need not be there yet."""

    folder: Path
    count: int  # images
    dim: int
    stamp: dict[str, Any]

    @classmethod
    def of(cls, folder: str | Path, card: ModelCard, rows: Sequence[Row], *, reduced_jpeg2000: bool = False) -> Blocks:
        """Those of a manifest's rows in `folder`. Images count by their order and names, so that a data set may move
        and its labels be corrected."""
        stamp = {
            "schema": SCHEMA,
            "fingerprint": card.fingerprint,
            "precision": card.precision,  # files of another have the same fingerprint, and other values
            "images": _images_digest(rows),
            "count": len(rows),
            "block_size": BLOCK,
            "reduced_jpeg2000": reduced_jpeg2000,
        }
        return cls(Path(folder).resolve(), len(rows), card.embedding_dim, stamp)

    @property
    def size(self) -> int:
        """Rows of each block but the last."""
        return int(self.stamp["block_size"])

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def path(self, block: int) -> Path:
        return self.folder / f"part-{block:06}.npz"

    def rows(self, block: int) -> range:
        """The rows of the manifest that a block holds."""
        return range(block * self.size, min((block + 1) * self.size, self.count))

    def shard(self, number: int, of: int) -> range:
        """Blocks of shard `number` (1 to `of`): every `of`-th."""
        return range(number - 1, len(self), of)

    def check_folder(self) -> None:
        """Raise GalleryError where the folder holds a block that is not one of these; a glance at the names."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise GalleryError(f"{self.folder}: expected a folder for the embeddings, found a file; choose another -o")
        if os.name == "posix" and self.folder.stat().st_mode & 0o077:
            log.warning("%s: others can look into this folder, and embeddings are patient data; chmod 700 closes it",
                        self.folder)  # fmt: skip
        for file in sorted(self.folder.iterdir()):
            match = _NAME.fullmatch(file.name)
            if match and int(match[1]) >= len(self):
                raise GalleryError(
                    f"{file}: expected {len(self)} blocks of {self.count} images, found one more: the folder is of "
                    f"another manifest; choose another -o"
                )

    def is_there(self, block: int) -> bool:
        """Whether a block has been written. Raises GalleryError for one of another model or other images."""
        if not self.path(block).exists():
            return False
        with _opened(self.path(block)) as arrays:
            self._check(block, arrays)
        return True

    def write(self, block: int, pictures: Sequence[Picture | ImageError], embeddings: NDArray[np.float32]) -> None:
        """Write a block of n rows; `embeddings` float32 [m, D] are those of its m pictures that are no error."""
        seen = [Picture("") if isinstance(picture, ImageError) else picture for picture in pictures]
        errors = [str(picture) if isinstance(picture, ImageError) else "" for picture in pictures]
        every = np.zeros((len(pictures), self.dim), np.float32)
        every[[not error for error in errors]] = embeddings
        texts: dict[str, Any] = {
            name: np.array([getattr(picture, name) for picture in seen], np.str_) for name in _TEXTS
        }
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # patient data
        with replacing(self.path(block)) as temporary, open(temporary, "wb", opener=_for_owner) as stream:
            np.savez(
                stream,
                embedding=every,
                sha256=np.array([picture.sha256 for picture in seen], "S64"),
                error=np.array(errors, np.str_),
                thumbnail=np.frombuffer(b"".join(picture.thumbnail for picture in seen), np.uint8),
                thumbnail_end=np.cumsum([len(picture.thumbnail) for picture in seen], dtype=np.int64),
                stamp=np.array(json.dumps(self.stamp | {"block": block})),
                **texts,
            )
            stream.flush()
            os.fsync(stream.fileno())  # the name must not outlive the content

    def errors(self, block: int) -> list[str]:
        """Of each row, why its image could not be read; empty where it was."""
        with _opened(self.path(block)) as arrays:
            return [str(error) for error in arrays["error"]]

    def read(self, block: int) -> list[Picture | ImageError]:
        """The rows of a block. Raises GalleryError for one that is missing, damaged or of something else."""
        with _opened(self.path(block)) as arrays:
            self._check(block, arrays)
            values = {name: arrays[name] for name in arrays.files if name != "stamp"}
        count = len(self.rows(block))
        lengths = {name: len(value) for name, value in values.items() if name not in ("thumbnail", "embedding")}
        if values["embedding"].shape != (count, self.dim) or set(lengths.values()) != {count}:
            raise _damaged(self.path(block), f"embeddings {list(values['embedding'].shape)}")
        pictures: list[Picture | ImageError] = []
        start = 0
        for row, end in enumerate(values["thumbnail_end"].tolist()):
            error = str(values["error"][row])
            texts: dict[str, Any] = {name: str(values[name][row]) for name in _TEXTS}
            pictures.append(
                ImageError(error)
                if error
                else Picture(
                    values["sha256"][row].decode(),
                    values["thumbnail"][start:end].tobytes(),
                    **texts,
                    embedding=values["embedding"][row],
                )
            )
            start = end
        return pictures

    def read_all(self, rows: Sequence[int]) -> Generator[Picture | ImageError, None, None]:
        """Those rows, ascending, block by block. Raises GalleryError where one of their blocks is missing."""
        missing = [block for block in sorted({row // self.size for row in rows}) if not self.path(block).exists()]
        if missing:
            raise GalleryError(
                f"{self.folder}: expected the embeddings of every image, found {len(missing)} of {len(self)} blocks "
                f"missing, {self.path(missing[0]).name} first; 'cbmir embed' with the same manifest goes on"
            )
        return self._read_all(rows)

    def _read_all(self, rows: Sequence[int]) -> Generator[Picture | ImageError, None, None]:
        held, pictures = -1, list[Picture | ImageError]()
        for row in rows:
            if row // self.size != held:
                held = row // self.size
                pictures = self.read(held)
            yield pictures[row % self.size]

    def _check(self, block: int, arrays: Any) -> None:
        path = self.path(block)
        try:
            found = json.loads(str(arrays["stamp"]))
        except (KeyError, ValueError) as error:
            raise _damaged(path, type(error).__name__) from error
        wanted = self.stamp | {"block": block}
        for name, meaning in (
            ("fingerprint", "this model"),
            ("precision", "a model file of this precision"),
            ("images", "these images"),
        ):
            if found.get(name) != wanted[name]:
                raise GalleryError(f"{path}: expected embeddings of {meaning} ({name} {wanted[name]}), found those of "
                                   f"others ({found.get(name)}); choose another folder")  # fmt: skip
        if found != wanted:
            raise GalleryError(f"{path}: expected a block made with {wanted}, found {found}; choose another folder")


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _images_digest(rows: Sequence[Row]) -> str:
    """Of the images' paths below the folder in which all of them lie, in their order."""
    paths = [row.image.as_posix() for row in rows]
    root = os.path.commonpath([path[: path.rfind("/") + 1] for path in paths])
    return hashlib.sha256("\n".join(path[len(root) :] for path in paths).encode("utf-8", "surrogateescape")).hexdigest()


_DAMAGE = (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file's arrays; whatever is wrong with the file becomes GalleryError, also while they are read."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            yield arrays
    except _DAMAGE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, found: str) -> GalleryError:
    return GalleryError(f"{path}: expected a whole block of embeddings, found {found}; delete it and run 'cbmir embed' "
                        f"again")  # fmt: skip
