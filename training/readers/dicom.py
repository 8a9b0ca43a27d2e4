"""Studies in a folder or DICOMDIR: the files that are chest radiographs, with the data in their headers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tqdm import tqdm

from cbmir.errors import DamagedImageError, DicomImageError, ImageError, ManifestError, NotAnImageError, require
from cbmir.files import write_csv
from cbmir.input_file import open_input
from cbmir.labels import NIH_14, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged, read_errors
from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_dicom
from cbmir.runtime.imaging.image_warning import ImageWarning, count_kinds, kinds_text
from cbmir.runtime.imaging.radiograph import ImageLimits, collected_warnings
from cbmir.runtime.imaging.reader import file_bytes, read_image
from cbmir.runtime.imaging.workers import work_through
from cbmir.training.readers.common import finish

DICOMDIR = "DICOMDIR"
_DIRECTORY = "1.2.840.10008.1.3.10"  # Media Storage Directory Storage
_MOST_READS = 2**28  # for a DICOMDIR, whose image records have about 15 elements each


@dataclass(frozen=True)
class LeftOut:
    """A file that is not in the manifest, and the reason; `damaged` if it could not be read."""

    path: Path
    reason: str
    damaged: bool = False


def read_dicom_studies(
    place: Path, *, labels: Sequence[str] = NIH_14, allow_lateral: bool = False, intensity: str = "header",
    workers: int | None = None, seed: int = 0,
) -> tuple[Manifest, tuple[LeftOut, ...], dict[Path, tuple[ImageWarning, ...]]]:  # fmt: skip
    """Read the chest radiographs in a folder and its subfolders, or those listed in a DICOMDIR, into a manifest.

    Each file is decoded once, so every image in the manifest is readable. Patient and study ids, view and date come
    from the header. All `labels` are unknown. Three or more patients are split 70:10:20 by `seed`.

    Args:
        place: The folder, or the DICOMDIR file.
        allow_lateral: Include lateral views, as LATERAL.
        intensity: The policy of PreprocessSpec; a file may be blank, or its window damaged, with only one of them.
        workers: Number of decoding processes (`work_through`).

    Returns:
        The manifest; the files left out, with the reason: not DICOM, not a chest radiograph, damaged, without a patient
        id, or a copy of another file's object; and the warnings of the included images.

    Raises:
        ManifestError: `place` is not a folder or DICOMDIR, or no file is left.
    """
    require("pydicom", "dicom")
    names = LabelSet(tuple(labels))
    files, absent = _of_directory(place) if place.is_file() else _of_folder(place)
    read = partial(_read, (None,) * len(labels), allow_lateral, intensity)
    rows, left_out, warned = _read_all(files, read, workers)
    left_out = [*absent, *left_out]
    if not rows:
        reasons = "; ".join(sorted({entry.reason for entry in left_out})[:3]) or "it has no files"
        raise ManifestError(f"{place}: expected chest radiographs in DICOM files, found none: {reasons}")
    manifest = finish(
        Manifest(names, tuple(rows), {"warnings": count_kinds(map(kinds_text, warned.values()))}),
        "dicom", [place], seed,
        splits=None if len({row.patient_id for row in rows}) >= 3 else "not assigned: fewer than three patients",
        policies={"labels": "all unknown", "allow_lateral": allow_lateral, "intensity": intensity,
                  "left_out": len(left_out)}
    )  # fmt: skip
    return manifest, tuple(left_out), warned


def write_left_out(left_out: Sequence[LeftOut], manifest: Path) -> Path:
    """Write `manifest.left-out.csv` beside `manifest.csv`, or delete it if no file was left out; return its path."""
    path = manifest.with_suffix(".left-out.csv")
    path.unlink(missing_ok=True)
    if left_out:
        rows = ((os.fsencode(entry.path).decode("utf-8", "backslashreplace"),
                 "damaged" if entry.damaged else "refused", entry.reason) for entry in left_out)  # fmt: skip
        write_csv(path, [("file", "kind", "reason"), *rows], private=True)
    return path


def _read_all(
    files: Sequence[Path], read: Callable[[Path], tuple[Row, str, tuple[ImageWarning, ...]]], workers: int | None
) -> tuple[list[Row], list[LeftOut], dict[Path, tuple[ImageWarning, ...]]]:
    rows: list[Row] = []
    warned: dict[Path, tuple[ImageWarning, ...]] = {}
    left_out: list[LeftOut] = []
    first: dict[str, Path] = {}
    with closing(work_through(read, files, workers=workers)) as results:
        bar = tqdm(zip(files, results, strict=True), total=len(files), unit="file", desc="reading", disable=None)
        for path, result in bar:
            if isinstance(result, ImageError):
                damaged = not isinstance(result, DicomImageError | NotAnImageError)
                left_out.append(LeftOut(path, str(result).removeprefix(f"{path}: "), damaged))
                continue
            row, instance, warnings = result
            same = first.setdefault(instance, path) if instance else path
            if same != path:
                left_out.append(LeftOut(path, f"the same object as {same}"))
            elif not row.patient_id:
                left_out.append(LeftOut(path, "PatientID (0010,0020) is missing: splits must keep patients apart"))
            else:
                rows.append(row)
                if warnings:
                    warned[path] = warnings
    return rows, left_out, warned


def _read(
    labels: tuple[None, ...], allow_lateral: bool, intensity: str, path: Path
) -> tuple[Row, str, tuple[ImageWarning, ...]]:
    """Return the file's row, SOP Instance UID and warnings. Raises ImageError if it cannot be used."""
    try:
        with open_input(path) as stream:
            start = stream.read(132)
    except OSError as error:
        raise DamagedImageError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_dicom(start):
        raise NotAnImageError(f"{path}: not a DICOM file")
    if os.fsencode(path).decode("utf-8", "ignore") != str(path):
        raise DamagedImageError(f"{path}: expected a name in UTF-8, as a manifest can hold; rename the file")
    radiograph = read_image(path, intensity=intensity, allow_lateral=allow_lateral)
    row = Row(path, radiograph.patient_id, labels, radiograph.study_id, radiograph.view, date=radiograph.date)
    return row, radiograph.sop_instance_uid, radiograph.warnings


def _of_folder(folder: Path) -> tuple[list[Path], list[LeftOut]]:
    """Return all files below a folder except DICOMDIRs, sorted, and unreadable places. Linked folders are read once."""
    if not folder.is_dir():
        raise ManifestError(f"{folder}: expected a folder of DICOM files or a DICOMDIR, found nothing")
    files: list[Path] = []
    left_out: list[LeftOut] = []
    seen: set[Path] = set()

    def closed(error: OSError) -> None:
        left_out.append(LeftOut(Path(error.filename), f"the folder cannot be read: {error.strerror}", damaged=True))

    for place, folders, names in os.walk(folder.resolve(), onerror=closed, followlinks=True):
        real = Path(place).resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for path in (Path(place, name) for name in names if name.upper() != DICOMDIR):
            try:
                is_file = stat.S_ISREG(path.stat().st_mode)
            except OSError as error:  # e.g. a broken link
                left_out.append(LeftOut(path, f"cannot be read: {error.strerror}", damaged=True))
                continue
            if is_file:
                files.append(path)
            else:
                left_out.append(LeftOut(path, "a device or pipe"))
    return sorted(files), left_out


def _of_directory(path: Path) -> tuple[list[Path], list[LeftOut]]:
    """Return the image files that a DICOMDIR lists (PS3.3 annex F), and those missing. Raises ManifestError if it
    cannot be read."""
    limits, base = ImageLimits(), path.resolve().parent
    try:
        with collected_warnings(), pydicom_unlogged():
            data = file_bytes(path, limits)
            dataset, _ = parse_dicom(data, str(path), limits, large=len(data), most_reads=_MOST_READS)
            if dataset.file_meta.get("MediaStorageSOPClassUID") != _DIRECTORY:
                raise ManifestError(f"{path}: expected a folder or a DICOMDIR, found another file")
            ids = list(_file_ids(dataset.get("DirectoryRecordSequence") or ()))
    except ManifestError:
        raise
    except read_errors():
        raise ManifestError(f"{path}: expected a DICOMDIR, found a file that cannot be read") from None
    except ImageError as error:
        raise ManifestError(f"{path}: expected a DICOMDIR; {str(error).removeprefix(f'{path}: ')}") from None
    files, absent = [], []
    names = cache(_plain_names)
    for parts in dict.fromkeys(ids):
        file = _on_medium(base, parts, names)
        if not file.resolve().is_relative_to(base):
            absent.append(LeftOut(path, "lists a file outside of its folder", damaged=True))
        elif not file.is_file():
            absent.append(LeftOut(file, f"listed in {path.name}, but missing", damaged=True))
        else:
            files.append(file.resolve())
    return files, absent


def _on_medium(base: Path, parts: Sequence[str], names: Callable[[Path], dict[str, Path]]) -> Path:
    """Return the file of a DICOMDIR's record. A system may show its name in lower case, or with "." or ";1" added (ISO
    9660)."""
    path = base
    for part in parts:
        exact = path / part
        path = exact if exact.exists() else names(path).get(_plain(part), exact)
    return path


def _plain_names(folder: Path) -> dict[str, Path]:
    return {_plain(path.name): path for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def _plain(name: str) -> str:
    return name.partition(";")[0].removesuffix(".").upper()


def _file_ids(records: Iterable[object]) -> Iterator[tuple[str, ...]]:
    """Yield the parts of each image record's path, from ReferencedFileID."""
    for record in records:
        names = record.get("ReferencedFileID") if record.get("DirectoryRecordType") == "IMAGE" else None  # type: ignore[attr-defined]
        if names:
            yield (names,) if isinstance(names, str) else tuple(map(str, names))
