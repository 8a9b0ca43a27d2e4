"""Phantoms as files: PNG or DICOM images, drawn in several processes, and their manifest."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from cbmir import __version__
from cbmir.errors import UserError, require
from cbmir.files import replacing
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.runtime.imaging.radiograph import PHANTOM
from cbmir.training.phantom.anatomy import Array
from cbmir.training.phantom.patients import PHANTOM_LABELS, Phantom, describe
from cbmir.training.phantom.picture import draw, render
from cbmir.training.phantom.reports import report
from cbmir.training.splits import assign_splits

_SUFFIXES = {"png": ".png", "dicom": ".dcm"}
_MIN_SIZE = 64
_WORTH_A_PROCESS = 100  # images; fewer are drawn before another process has started

# Stored values of black and white, and the window that maps them to the ends of the display (PS3.3, C.11.2.1.2).
_LOW, _HIGH = 200, 3800
_WINDOW_CENTER, _WINDOW_WIDTH = (_LOW + _HIGH) / 2 + 0.5, _HIGH - _LOW + 1


def generate(
    folder: Path, *, count: int, seed: int = 0, image_format: str = "png", size: int = 512, progress: bool = True
) -> Path:
    """Draw phantoms into `folder/images` and write `folder/manifest.csv`. Splits are by patient, 70:10:20.

    The n-th image depends only on `seed` and `size`, not on `count` or the number of processes. The same arguments
    always write the same bytes.

    Args:
        image_format: png (8 bit) or dicom (12 bit, CR).
        size: Width and height in pixels.

    Returns:
        The path of the manifest.

    Raises:
        UserError: An argument is out of range.
        SplitError: The images are of fewer than three patients.
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
    paths = [images / f"{study_id(phantom)}{_SUFFIXES[image_format]}" for phantom in phantoms]
    inverted = [index % 2 == 1 for index in range(count)]
    write = partial(_write, size, seed)
    with ExitStack() as stack:
        written: Iterable[None] = map(write, phantoms, paths, inverted)
        processes = min(os.cpu_count() or 1, count // _WORTH_A_PROCESS)
        if processes > 1:
            # Spawned, not forked: a fork would break the caller's threads (torch, BLAS).
            pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
            written = stack.enter_context(pool).map(write, phantoms, paths, inverted, chunksize=16)
        for _ in tqdm(written, total=count, desc="phantoms", unit="image", disable=None if progress else True):
            pass
    rows = tuple(
        Row(
            path, phantom.patient_id, phantom.labels, study_id(phantom), phantom.view, split, report(phantom),
            date=study_date(phantom).isoformat(),
        )
        for phantom, path, split in zip(phantoms, paths, splits, strict=True)
    )  # fmt: skip
    about = {"reader": "phantom", "seed": seed, "count": count, "size": size, "format": image_format}
    path = folder / "manifest.csv"
    write_manifest(Manifest(LabelSet(PHANTOM_LABELS), rows, {**about, "cbmir": __version__}), path)
    return path


def _write(size: int, seed: int, phantom: Phantom, path: Path, inverted: bool) -> None:
    with replacing(path) as temporary:
        if path.suffix == ".png":
            about = PngInfo()
            about.add_text("Source", PHANTOM)
            # Noise has no repetitions, so Huffman coding alone gives the same size in a third of the time.
            picture = Image.fromarray(draw(phantom, size))
            picture.save(temporary, format="PNG", compress_type=zlib.Z_HUFFMAN_ONLY, pnginfo=about)
        else:
            write_dicom(temporary, render(phantom, size), phantom, seed=seed, inverted=inverted)


def write_dicom(path: Path, grey: Array, phantom: Phantom, *, seed: int, inverted: bool) -> None:
    """Write `grey` (f32[H, W] in [0, 1], air dark) as MONOCHROME2, or as MONOCHROME1 if `inverted`.

    The file depends only on the arguments: UIDs are derived from phantom and seed (PS3.5, B.2: 2.25 and an integer).
    Raises MissingDependencyError without pydicom.
    """
    pydicom = require("pydicom", "dicom")
    stored = np.rint(_LOW + (_HIGH - _LOW) * (1 - grey if inverted else grey)).astype("<u2")
    study = study_id(phantom)
    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID = pydicom.uid.ComputedRadiographyImageStorage
    meta.MediaStorageSOPInstanceUID = _uid(seed, study, "instance")
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    ds = pydicom.Dataset()
    ds.file_meta = meta
    ds.ImageType = ["DERIVED", "PRIMARY"]
    ds.SOPClassUID = meta.MediaStorageSOPClassUID
    ds.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    ds.StudyInstanceUID = _uid(seed, study, "study")
    ds.SeriesInstanceUID = _uid(seed, study, "series")
    ds.StudyDate = study_date(phantom).strftime("%Y%m%d")
    ds.StudyTime = "120000"
    ds.Modality = "CR"
    ds.Manufacturer = PHANTOM
    ds.PatientName = f"Phantom^{phantom.patient_id.removeprefix('phantom-')}"
    ds.PatientID = phantom.patient_id
    ds.StudyID = study
    ds.SeriesNumber = ds.InstanceNumber = 1
    ds.BodyPartExamined = "CHEST"
    ds.ViewPosition = phantom.view
    ds.PatientOrientation = ["L", "F"]  # rows run to the patient's left, columns to the feet
    ds.ImageComments = "synthetic phantom, not a patient"
    for keyword in ("AccessionNumber", "ReferringPhysicianName", "PatientBirthDate", "PatientSex", "Laterality"):
        setattr(ds, keyword, "")
    ds.BurnedInAnnotation = "NO"
    ds.SamplesPerPixel = 1
    ds.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    ds.Rows, ds.Columns = stored.shape
    ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, 12, 11, 0
    ds.WindowCenter, ds.WindowWidth = _WINDOW_CENTER, _WINDOW_WIDTH
    ds.PixelData = stored.tobytes()
    ds["PixelData"].VR = "OW"
    ds.save_as(path, enforce_file_format=True)


def study_date(phantom: Phantom) -> date:
    """Return the date of a phantom's study. A patient's studies are 90 days apart."""
    return date(2020, 1, 1) + timedelta(days=90 * phantom.study)


def _uid(seed: int, study: str, kind: str) -> str:
    digest = hashlib.sha256(f"cbmir phantom {seed} {study} {kind}".encode()).digest()
    return f"2.25.{int.from_bytes(digest[:16], 'big')}"


def study_id(phantom: Phantom) -> str:
    """Return the id of a phantom's study, used in its file's name and header and in the manifest."""
    return f"{phantom.patient_id}-{phantom.study}"
