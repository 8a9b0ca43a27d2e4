"""A cache of decoded images, so that training does not wait for decoding, and the dataset that reads it."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from tqdm import tqdm

from cbmir.errors import ImageError, ManifestError
from cbmir.files import replacing
from cbmir.manifest import Manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.preprocess import centre_crop, resize_square
from cbmir.runtime.imaging.reader import read_image

log = logging.getLogger("cbmir")


def label_array(manifest: Manifest) -> NDArray[np.float32]:
    """Return the labels, float32 [N, C]: 1, 0, -1 (uncertain), NaN (unknown)."""
    values = [[np.nan if v is None else v for v in row.labels] for row in manifest]
    return np.array(values, dtype=np.float32).reshape(len(manifest), len(manifest.labels))


_DECODING = 2  # part of the cache's key: raise it whenever an image file gives other pixels


def split_rows(manifest: Manifest, *splits: str) -> list[int]:
    """Return the positions of the rows in the given splits."""
    return [position for position, row in enumerate(manifest.rows) if row.split in splits]


def split_targets(manifest: Manifest, *splits: str) -> Tensor:
    """Return the training targets of the given splits, float32 [N, C] in {0, 1, NaN}."""
    return training_targets(label_array(manifest)[split_rows(manifest, *splits)])


def cache_folder(manifest: str | Path) -> Path:
    """Return the folder for a manifest's decoded images: `.cbmir-cache` beside it."""
    return Path(manifest).resolve().parent / ".cbmir-cache"


def cached_images(manifest: Manifest, spec: PreprocessSpec, folder: Path) -> NDArray[np.uint8]:
    """Return every image of the manifest, decoded and resized: uint8 [N, R, R], memory-mapped from `folder`.

    Only images missing from the cache are decoded, so an interrupted run continues. The cache key covers the paths,
    sizes and modification times of the files, and the spec with its intensity policy. A lateral DICOM file is accepted
    if the manifest marks it as lateral. Raises ManifestError, which names the images that cannot be read.
    """
    digest = hashlib.sha256(f"{_DECODING} {spec!r}".encode())
    for row in manifest:
        try:
            stat = row.image.stat()
        except OSError as error:
            raise ManifestError(f"{row.image}: {error.strerror}; 'cbmir data check' lists all such images") from error
        digest.update(f"{row.image}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # earlier versions made it readable by others
    folder = folder / digest.hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):  # if two runs start together, only one decodes
        if not (folder / "images.npy").exists():  # deleted by hand
            (folder / "done.npy").unlink(missing_ok=True)
        images: NDArray[np.uint8] = _memmap(folder / "images.npy", np.uint8, (len(manifest), spec.resize, spec.resize))
        done: NDArray[np.bool_] = _memmap(folder / "done.npy", np.bool_, (len(manifest),))
        _decode(manifest, spec, images, done)
    return images


def _decode(manifest: Manifest, spec: PreprocessSpec, images: NDArray[np.uint8], done: NDArray[np.bool_]) -> None:
    waiting = np.flatnonzero(np.logical_not(done))
    broken: list[str] = []

    def decode(position: int) -> None:
        try:
            row = manifest.rows[position]
            radiograph = read_image(row.image, intensity=spec.intensity, allow_lateral=row.view == "LATERAL")
            images[position] = resize_square(radiograph.pixels, spec)
            done[position] = True
        except ImageError as error:
            broken.append(str(error))

    if len(waiting):
        with ThreadPoolExecutor() as pool:
            list(tqdm(pool.map(decode, waiting), total=len(waiting), desc="decoding", unit="image", disable=None))
    if broken:
        shown = "\n  ".join(sorted(broken)[:10])
        raise ManifestError(
            f"{len(broken)} of {len(manifest)} images cannot be read; remove them from the manifest or repair them:\n"
            f"  {shown}"
        )


def _memmap(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    if not path.exists():
        with replacing(path) as temporary:
            array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            if sys.platform == "linux":  # a full disk raises an error now, instead of SIGBUS later
                with temporary.open("r+b") as stream:
                    os.posix_fallocate(stream.fileno(), 0, array.offset + array.nbytes)
    return np.lib.format.open_memmap(path, mode="r+")


class TrainingImages(Dataset[tuple[Tensor, Tensor]]):
    """Random views of images: (uint8 [1, S, S], float32 [C] in {0, 1, NaN}).

    A view is a crop or, with `full` augmentation, a `full_view`. It depends only on seed, epoch and image, so a resumed
    run sees the same views as an uninterrupted one.
    """

    def __init__(
        self, images: NDArray[np.uint8], rows: NDArray[np.intp], labels: NDArray[np.float32], spec: PreprocessSpec,
        seed: int, *, full: bool = False,
    ) -> None:  # fmt: skip
        self.images, self.rows, self.spec, self.seed, self.full = images, rows, spec, seed, full
        self.targets = training_targets(labels[rows])
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        draw = np.random.default_rng((self.seed, self.epoch, item))
        if self.full:
            return full_view(self.images[self.rows[item]], self.spec.crop, draw), self.targets[item]
        slack = self.spec.resize - self.spec.crop
        top, left = draw.integers(0, slack + 1, size=2)
        crop = self.images[self.rows[item], top : top + self.spec.crop, left : left + self.spec.crop]
        return torch.from_numpy(np.array(crop))[None], self.targets[item]


def full_view(image: NDArray[np.uint8], crop: int, draw: np.random.Generator) -> Tensor:
    """Return a random crop of a grey image [R, R] as uint8 [1, S, S], rotated by up to 10 degrees, scaled by up to 12%
    (plus up to 6% per axis), with random gamma, contrast and brightness, and black outside the image. It is never
    mirrored, because the heart is on the left."""
    resize = len(image)
    angle = math.radians(draw.uniform(-10, 10))
    scale, aspect = math.exp(draw.uniform(-0.12, 0.12)) * crop / resize, math.exp(draw.uniform(-0.06, 0.06))
    x, y = draw.uniform(-1, 1, size=2) * (1 - crop / resize)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    matrix = torch.tensor([[[cos * aspect, -sin, x], [sin, cos / aspect, y]]], dtype=torch.float32)
    grid = functional.affine_grid(matrix, [1, 1, crop, crop], align_corners=False)
    grey = torch.from_numpy(np.array(image))[None, None].float() / 255
    view = functional.grid_sample(grey, grid, align_corners=False)[0]
    gamma, contrast, brightness = math.exp(draw.uniform(-0.3, 0.3)), draw.uniform(0.8, 1.2), draw.uniform(-0.08, 0.08)
    return (255 * ((view**gamma - 0.5) * contrast + 0.5 + brightness)).round().clamp(0, 255).to(torch.uint8)


def training_targets(labels: NDArray[np.float32]) -> Tensor:
    """Return training targets, float32 [N, C] in {0, 1, NaN}: uncertain labels (-1) count as unknown."""
    return torch.from_numpy(np.where(labels == -1, np.float32(np.nan), labels))


def evaluation_batches(
    images: NDArray[np.uint8], rows: Sequence[int] | NDArray[np.intp], spec: PreprocessSpec, size: int = 64
) -> Iterator[NDArray[np.uint8]]:
    """Yield centre crops in batches, uint8 [<= size, 1, S, S], in the order of `rows`."""
    for start in range(0, len(rows), size):
        yield centre_crop(images[np.asarray(rows[start : start + size])], spec)[:, None]
