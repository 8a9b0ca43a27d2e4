"""`cbmir pacs analyze`: analyse DICOM files, and write results as DICOM or FHIR."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import NOT_A_DEVICE
from cbmir.cli import options
from cbmir.cli.options import PATH, command, log, option
from cbmir.errors import ImageError
from cbmir.files import replacing, write_json
from cbmir.input_file import open_input
from cbmir.manifest import Row

if TYPE_CHECKING:
    from cbmir.runtime.dicom_output import Results


@command(
    "cbmir pacs analyze chest.dcm -o results --model model.onnx --gallery gallery",
    "cbmir pacs analyze a.dcm studies/ -o results --model model.onnx --gallery gallery --sr --sc --kos --fhir",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PATH)
@option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder to write the results to.")
@options.model_option
@options.gallery_option("findings only")
@option("--sr", is_flag=True, help="Structured report (TID 1500), NAME.sr.dcm. The default.")
@option("--sc", is_flag=True, help="Picture of the results (Secondary Capture), NAME.sc.dcm, with the dates of the "
        "patient's own similar priors.")  # fmt: skip
@option("--kos", is_flag=True, help="Selection of the patient's own similar priors, NAME.kos.dcm, and a copy for each "
        "of their studies, NAME.kos-2.dcm …")  # fmt: skip
@option("--fhir", is_flag=True, help="FHIR R4 Bundle, NAME.fhir.json.")
@options.finder_options
@options.json_option
def analyze(
    files: tuple[Path, ...], output: Path, model: Path, gallery: str | None, sr: bool, sc: bool, kos: bool, fhir: bool,
    as_json: bool, **opening: Any,
) -> None:  # fmt: skip
    """Analyse DICOM files, and write the results of each into a folder.

    FILE may be a folder: its DICOM files and those of its subfolders are analysed, except cbmir's own results. A file
    that cannot be analysed gets an error line and the others are still analysed; the exit code is then 2. The results
    hold data of the image's own patient and of no other patient.

    Research use only. Not a medical device, not for diagnosis.
    """
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from cbmir.runtime.dicom_output import KINDS, make_results
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.gallery.entry import entry_ids
    from cbmir.runtime.imaging.reader import file_bytes

    kinds = [kind for kind, wanted in zip(KINDS, (sr, sc, kos, fhir), strict=True) if wanted] or ["sr"]
    images = list(dict.fromkeys(one.resolve() for given in files for one in _images(given)))
    done: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    without = 0
    # Name each image by its file, with as many parent folders as make it unique.
    names = entry_ids([Row(image=path, patient_id="", labels=()) for path in images])
    with Finder.open(model, gallery, **opening) as finder, logging_redirect_tqdm():
        for path, name in tqdm(list(zip(images, names, strict=True)), "Analysing", unit="image", disable=None):
            try:
                data = file_bytes(path)  # read once: the file may be replaced meanwhile
                image = finder.read(data)
                results = make_results(data, finder.analyze(image), finder, kinds=kinds, image=image)
            except ImageError as error:
                log.error("Error: %s", error if str(path) in str(error) else f"{path}: {error}")
                failed.append({"image": path, "error": str(error)})
                continue
            for warning in results.warnings:
                log.debug("%s: %s", path, warning)
            without += kos and results.kos is None
            written = write_results(results, output / name)
            done.append({"image": path, "results": written, "warnings": results.warnings})
    if without:
        log.warning("%d images have no similar prior of their patient in the gallery: no selection written.", without)
    text = "\n".join((f"{output}: results of {len(done)} of {len(images)} images", *finder.card.notes, NOT_A_DEVICE))
    options.print_answer(as_json, {"analysed": done, "failed": failed, "notice": NOT_A_DEVICE}, text)
    if failed or not images:
        sys.exit(2)


def write_results(results: Results, stem: Path) -> list[Path]:
    """Write each result to `stem` plus the ending of its kind, readable by its owner only, and return the paths."""
    stem.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for name, dataset in results.named():
        written.append(stem.with_name(f"{stem.name}.{name}.dcm"))
        with replacing(written[-1], private=True) as temporary:
            dataset.save_as(temporary, enforce_file_format=True)
    if results.fhir is not None:
        written.append(stem.with_name(f"{stem.name}.fhir.json"))
        write_json(written[-1], results.fhir, private=True)
    return written


def _images(given: Path) -> Iterator[Path]:
    """Yield the given path, or the DICOM files in a folder, except a DICOMDIR and cbmir's own results."""
    if not given.is_dir():
        yield given
        return
    for path in sorted(given.rglob("*")):
        is_hidden = path.name.startswith(".") or path.name.upper() == "DICOMDIR"
        if not is_hidden and path.is_file() and _is_image(path):
            yield path


def _is_image(path: Path) -> bool:
    """Return whether a file is DICOM and not made by cbmir, or unreadable, so that the analysis reports why."""
    from cbmir.runtime.dicom_output import is_own_result
    from cbmir.runtime.imaging.dicom_header import pydicom_unlogged, read_errors
    from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_header
    from cbmir.runtime.imaging.radiograph import collected_warnings

    errors: tuple[type[Exception], ...] = (ImageError, OSError, *read_errors())
    try:
        with open_input(path) as stream, collected_warnings(), pydicom_unlogged():
            return is_dicom(stream.read(132)) and not is_own_result(parse_header(stream, str(path)))
    except errors:
        return True
