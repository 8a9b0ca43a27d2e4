"""`cbmir data`: make manifests of data sets, and check them."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import click

from cbmir.cli.commands import CommandGroup
from cbmir.cli.options import PATH, command, examples, json_option, log, option, print_answer, tell_warnings, together
from cbmir.labels import NIH_14
from cbmir.manifest import Manifest, check_name, read_manifest, write_manifest
from cbmir.preprocessing import INTENSITIES

data = CommandGroup(
    name="data",
    sections={
        "Public data sets": dict.fromkeys((
            "nih", "chexpert", "mimic", "brax", "padchest", "vindr", "rsna", "siim", "openi", "covid", "ralo",
            "tuberculosis", "tbx11k", "object-cxr"), "data_sets"),
        "Your own images": dict.fromkeys(("table", "dicom"), "data"),
        "More": dict.fromkeys(("phantom", "check"), "data"),
    },
    help="""Make a manifest of a data set, or check one.

    A manifest is one table with one row per image: image, patient_id, study_id, view, split, report, and a column for
    each finding that holds 1, 0, -1 (uncertain) or nothing (unknown). All other commands read this table.
    """,
    epilog=examples(
        "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv -o manifest.csv",
        "cbmir data check manifest.csv",
    ),
)  # fmt: skip

#: Options that all readers share.
writes_manifest = together(
    option("--seed", type=click.IntRange(min=0), default=0,
           help="Seed for assigning patients to train, val and test, if no splits are given."),
    option("-o", "--output", type=PATH, required=True, metavar="MANIFEST", callback=lambda *given: check_name(given[2]),
           help="Manifest to write (.csv, .csv.gz or .parquet); its sidecar .about.json says how it was made."),
    json_option,
)  # fmt: skip
reads_images = together(
    option("--missing", type=click.Choice(["error", "skip"]), default="error",
           help="If an image file is missing: stop with an error, or skip the row (the sidecar counts them)."),
    writes_manifest,
)  # fmt: skip


def _names(ctx: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """Split comma-separated names; a name that contains a comma is in double quotes."""
    return tuple(name for part in next(csv.reader([text]), []) if (name := part.strip()))


def _values(ctx: click.Context, option: click.Parameter, text: str) -> dict[str, int]:
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    wrong = next((pair for pair in pairs if not pair[0].strip() or pair[2].strip() not in ("1", "0", "-1")), None)
    if wrong:
        raise click.BadParameter(f"expected WORD=1, WORD=0 or WORD=-1 (uncertain), found {''.join(wrong)!r}")
    return {word.strip(): int(value) for word, _, value in pairs}


def _separator(ctx: click.Context, option: click.Parameter, text: str) -> str:
    if not text:
        raise click.BadParameter("expected a character, found nothing")
    return text.replace("\\n", "\n").replace("\\t", "\t")


@command(
    "cbmir data table ours.csv --image-column file --patient-column pid --labels Mass,Nodule -o manifest.csv",
    "cbmir data table ours.parquet --labels-column findings --separator ';' --images images/ -o manifest.csv",
    "cbmir data table ours.csv --labels-column findings --labels-format list --date-column day -o manifest.csv",
)
@click.argument("file", type=PATH)
@option("--image-column", "image", default="image", help="Path of the image.")
@option("--patient-column", "patient", default="patient_id", help="Patient of the image. A patient's images stay in "
        "one split, and are not returned for each other. Name the image column if each image is of a different "
        "patient.")  # fmt: skip
@option("--study-column", "study", help="Study of the image.")
@option("--view-column", "view", help="PA, AP, LATERAL or empty.")
@option("--split-column", "split", help="train, val, test or empty. Default: patients are split 70:10:20.")
@option("--report-column", "report", help="Text of the report, shown beside the image.")
@option("--source-column", "source", help="Hospital or data set: 'cbmir benchmark' reports figures for each, and "
        "'cbmir query --source' finds only images of one.")  # fmt: skip
@option("--date-column", "date", help="Date of the study: YYYY-MM-DD, YYYYMMDD or empty.")
@option("--date-format", metavar="FORMAT", help="Format of other dates: '%d.%m.%Y' for 31.5.2019.")
@option("--labels", callback=_names, metavar="A,B,C", default="", help="Findings that have their own column, with 1, "
        "0, -1 (uncertain), yes, no, true, false or nothing (unknown). With --labels-column: the findings to expect "
        "there, in this order.")  # fmt: skip
@option("--label-values", callback=_values, metavar="WORD=VALUE,…", default="", help="What other words mean in label "
        "columns: present=1,absent=0,equivocal=-1.")  # fmt: skip
@option("--labels-column", help='One column that joins the findings ("Mass|Nodule"). "No Finding" or "normal" means '
        "none; an empty cell means unknown.")  # fmt: skip
@option("--separator", default="|", callback=_separator, help=r"Separator of the findings in that column; \n and \t "
        "stand for a line break and a tab.")  # fmt: skip
@option("--labels-format", type=click.Choice(["text", "list"]), default="text", help="list: the cells are lists as "
        "Python or JSON print them, ['Mass', 'Nodule'].")  # fmt: skip
@option("--unlabelled", is_flag=True, help="The table has no labels: the images can only be searched. --labels then "
        "only names the findings.  [default: those of NIH]")  # fmt: skip
@option("--images", type=PATH, metavar="DIR", help="Where relative image paths start. Default: FILE's folder.")
@reads_images
def table(
    file: Path, labels: tuple[str, ...], label_values: dict[str, int], labels_column: str | None, separator: str,
    labels_format: Any, date_format: str | None, unlabelled: bool, images: Path | None, missing: Any, seed: int,
    output: Path, as_json: bool, **columns: Any,
) -> None:  # fmt: skip
    """Manifest of your own table.

    FILE is a CSV or Parquet table with one row per image. Options name its columns; nothing is guessed, and the log
    lists the columns that are not used. Semicolons or tabs between cells, Windows-1252 (Latin-1) and UTF-16 are
    recognised and reported in the log.
    """
    from cbmir.training.readers.table import ColumnMapping, LabelCells, read_own_table

    manifest = read_own_table(
        file, columns=ColumnMapping(**columns), labels=labels,
        cells=LabelCells(labels_column, separator, labels_format, label_values), date_format=date_format,
        images=images, missing=missing, seed=seed, unlabelled=unlabelled,
    )  # fmt: skip
    write(manifest, output, as_json)


@command(
    "cbmir data dicom archive/ -o manifest.csv",
    "cbmir data dicom /media/cdrom/DICOMDIR --labels Effusion,Mass -o manifest.csv",
    "cbmir index build model.onnx manifest.csv -o gallery --split all",
)
@click.argument("place", type=PATH, metavar="DIR")
@option("--labels", callback=_names, metavar="A,B,C", default="",
        help="Label columns of the manifest, all unknown.  [default: the 14 findings of NIH]")  # fmt: skip
@option("--allow-lateral", is_flag=True, help="Include lateral views, as view LATERAL.")
@option("--intensity", type=click.Choice(INTENSITIES), default="header", help="How stored values become grey (see "
        "'cbmir train --help'). A file that cannot be read that way is left out.")  # fmt: skip
@option("--workers", type=click.IntRange(0), help="Processes that decode images.  [default: one per processor]")
@writes_manifest
def dicom(place: Path, labels: tuple[str, ...], output: Path, as_json: bool, **reading: Any) -> None:
    """Manifest of the DICOM studies in a folder, or on a medium with a DICOMDIR.

    DIR is searched with its subfolders; for a DICOMDIR file, those that it lists are read. Patient, study, view and
    date come from the headers, and findings are unknown. Files that are not chest radiographs are left out and listed
    with the reason in .left-out.csv beside MANIFEST; if some of them are damaged, the exit code is 2. Images that were
    read with a warning are listed in .warnings.csv. The manifest names patients and paths: protect it like the images.
    """
    from cbmir.runtime.imaging.image_warning import write_warnings
    from cbmir.training.readers.dicom import read_dicom_studies, write_left_out

    manifest, left_out, warned = read_dicom_studies(place, labels=labels or NIH_14, **reading)
    write_manifest(manifest, output)
    listed, damaged = write_left_out(left_out, output), sum(entry.damaged for entry in left_out)
    warnings = output.with_suffix(".warnings.csv")
    kinds = write_warnings(warned, warnings)
    _tell(manifest, output, as_json, left_out={"files": len(left_out), "damaged": damaged}, warnings=kinds)
    tell_warnings(len(warned), kinds, warnings)
    if left_out:
        click.echo(f"{listed}: {len(left_out):,} files left out, {damaged:,} of them damaged", err=True)
    if damaged:
        sys.exit(2)


@command("cbmir data phantom -n 800 --seed 0 -o phantoms")
@option("-n", "--count", type=click.IntRange(min=1), default=800, help="Number of images.")
@option("--seed", type=click.IntRange(min=0), default=0, help="The same seed draws the same images.")
@option("--format", "image_format", type=click.Choice(["png", "dicom"]), default="png",
        help="File format of the images.")  # fmt: skip
@option("--size", type=click.IntRange(min=64), default=512, help="Side of an image, pixels.")
@option("-o", "--output", type=PATH, required=True, metavar="DIR", help="Folder for images and manifest.csv.")
@json_option
def phantom(count: int, seed: int, image_format: str, size: int, output: Path, as_json: bool) -> None:
    """Draw synthetic radiographs.

    Writes images with findings, reports and a manifest: a data set for learning and testing that shows no real patient.
    Results on it say nothing about patients.
    """
    from cbmir.training.phantom import generate

    path = generate(output, count=count, seed=seed, image_format=image_format, size=size)
    _tell(read_manifest(path), path, as_json)


@command("cbmir data check manifest.csv", "cbmir data check manifest.csv --json > check.json")
@click.argument("manifest", type=PATH)
@option("--quick", is_flag=True, help="Check the table and that the files exist, without opening the images.")
@option("--workers", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default="processors",
        help="Threads that read images.")  # fmt: skip
@json_option
def check(manifest: Path, quick: bool, workers: int, as_json: bool) -> None:
    """Check a manifest before training.

    Counts what MANIFEST holds and looks for problems: missing files, unreadable images, patients in two splits and the
    same image in two splits. The exit code is 2 if there are any. Images that were read with a warning (such as low
    contrast, or probably not frontal) are counted by kind, and listed in .warnings.csv beside MANIFEST.
    """
    from cbmir.runtime.imaging.image_warning import write_warnings
    from cbmir.training.manifest_check import check_manifest

    report = check_manifest(read_manifest(manifest), quick=quick, workers=workers)
    print_answer(as_json, report.to_json(), report.text())
    if not quick:
        listed = manifest.with_suffix(".warnings.csv")
        try:
            kinds = write_warnings(report.warnings, listed)
        except OSError as error:  # the data set's folder may be read-only
            log.warning("%s: not written (%s)", listed, error.strerror)
        else:
            tell_warnings(len(report.warnings), kinds, listed)
    if not report.ok:
        sys.exit(2)


def write(manifest: Manifest, path: Path, as_json: bool) -> None:
    """Write a reader's manifest and print a summary."""
    write_manifest(manifest, path)
    _tell(manifest, path, as_json)


def _tell(manifest: Manifest, path: Path, as_json: bool, **more: Any) -> None:
    """Print a summary of the manifest; `more` is added to the JSON."""
    from cbmir.training.manifest_check import summarise

    summary = manifest.about.get("counts") or summarise(manifest)
    splits = ", ".join(f"{name} {counts['images']:,}" for name, counts in summary["splits"].items())
    text = f"{path}: {summary['images']:,} images of {summary['patients']:,} patients ({splits})"
    print_answer(as_json, {"manifest": path, **summary, **more}, text)
