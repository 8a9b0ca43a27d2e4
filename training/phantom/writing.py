"""Phantoms as files: images, by several processes, and the manifest that names them."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from cbmir import __version__
from cbmir.errors import UserError
from cbmir.files import replacing
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.training.phantom.dicom import study_date, write_dicom
from cbmir.training.phantom.drawing import draw, render
from cbmir.training.phantom.patients import PHANTOM_LABELS, Phantom, describe
from cbmir.training.phantom.reports import report
from cbmir.training.splits import assign_splits

_SUFFIXES = {"png": ".png", "dicom": ".dcm"}
_MIN_SIZE = 64
_WORTH_A_PROCESS = 100  # images: fewer are drawn before another process has started


@dataclass(frozen=True)
class _Job:
    """One image to write. `index` is its number among all images of the seed."""

    phantom: Phantom
    path: Path
    size: int
    seed: int
    index: int


def generate(
    folder: Path, *, count: int, seed: int = 0, image_format: str = "png", size: int = 512, progress: bool = True
) -> Path:
    """Draw `count` phantoms of `size` x `size` pixels into `folder/images`, and return the path of their manifest.csv.

    The n-th image depends on `seed` and `size` only, not on `count` or on the number of processes; the same arguments
    write the same bytes again. `image_format` is png (8 bit) or dicom (12 bit, CR). Splits are by patient, 70:10:20.
    Raises UserError for arguments out of range, SplitError for so few images that they hold under three patients.
    """
    if count < 1 or size < _MIN_SIZE or image_format not in _SUFFIXES:
        raise UserError(
            f"phantoms: expected count >= 1, size >= {_MIN_SIZE} and format png or dicom, "
            f"found count={count}, size={size}, format={image_format!r}"
        )
    folder = Path(folder)
    phantoms = list(describe(count, seed))
    splits = assign_splits([phantom.patient_id for phantom in phantoms], seed=seed)
    images = folder.resolve() / "images"
    images.mkdir(parents=True, exist_ok=True)
    suffix = _SUFFIXES[image_format]
    jobs = [
        _Job(phantom, images / f"{_study_id(phantom)}{suffix}", size, seed, index)
        for index, phantom in enumerate(phantoms)
    ]
    with _written(jobs) as written:
        for _ in tqdm(written, total=count, desc="phantoms", unit="image", disable=None if progress else True):
            pass
    rows = tuple(_row(job, split) for job, split in zip(jobs, splits, strict=True))
    about = {"reader": "phantom", "seed": seed, "count": count, "size": size, "format": image_format}
    path = folder / "manifest.csv"
    write_manifest(Manifest(LabelSet(PHANTOM_LABELS), rows, {**about, "cbmir": __version__}), path)
    return path


@contextmanager
def _written(jobs: list[_Job]) -> Iterator[Iterator[None]]:
    """Write the jobs, here or by a pool; yields an iterator that advances with each finished image."""
    processes = min(os.cpu_count() or 1, len(jobs) // _WORTH_A_PROCESS)
    if processes < 2:
        yield map(_write, jobs)
        return
    # Spawned, not forked: the caller may hold threads (torch, BLAS) that a fork would break.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool.map(_write, jobs, chunksize=16)


def _write(job: _Job) -> None:
    with replacing(job.path) as temporary:
        if job.path.suffix == ".png":
            # Noise holds no repetitions to look for: Huffman coding alone makes the same size, in a third of the time.
            Image.fromarray(draw(job.phantom, job.size)).save(
                temporary, format="PNG", compress_type=zlib.Z_HUFFMAN_ONLY
            )
        else:
            grey = render(job.phantom, job.size)
            write_dicom(temporary, grey, job.phantom, seed=job.seed, inverted=job.index % 2 == 1)


def _row(job: _Job, split: str) -> Row:
    phantom = job.phantom
    return Row(
        image=job.path,
        patient_id=phantom.patient_id,
        labels=phantom.labels,
        study_id=_study_id(phantom),
        view=phantom.view,
        split=split,
        report=report(phantom),
        date=study_date(phantom).isoformat(),
    )


def _study_id(phantom: Phantom) -> str:
    return f"{phantom.patient_id}-{phantom.study}"
