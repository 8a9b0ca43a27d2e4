"""`cbmir data`: from a dataset to a manifest, and what is wrong with one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from cbmir.cli.commands import CommandGroup
from cbmir.cli.options import PATH, command, examples, json_option, option, print_answer, together
from cbmir.labels import NIH_14
from cbmir.manifest import Manifest, read_manifest, write_manifest
from cbmir.preprocessing import INTENSITIES

data = CommandGroup(
    name="data",
    sections={
        "Readers of data sets": dict.fromkeys(("nih", "chexpert", "table", "dicom"), "data"),
        "More": dict.fromkeys(("phantom", "check"), "data"),
    },
    help="""Make a manifest of a dataset, or check one.

    A manifest is one table with one row per image: image, patient_id, study_id, view, split, report, and a column for
    each finding that holds 1, 0, -1 (uncertain) or nothing (unknown). Every other command reads nothing else.
    """,
    epilog=examples(
        "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv -o manifest.csv",
        "cbmir data check manifest.csv",
    ),
)

# The options that every reader shares.
_writes_manifest = together(
    option("--seed", type=click.IntRange(min=0), default=0,
           help="Draws the patients of train, val and test where no splits are given."),
    option("-o", "--output", type=PATH, required=True, metavar="MANIFEST",
           help="Manifest to write (.csv, .csv.gz or .parquet); its sidecar .about.json says how it was made."),
    json_option,
)  # fmt: skip
_missing_option = option("--missing", type=click.Choice(["error", "skip"]), default="error",
                         help="A row whose image file is absent: stop, or leave the row out (counted in the "
                         "sidecar).")  # fmt: skip


@command(
    "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv -o manifest.csv",
    "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv --findings 13 --splits splits.csv -o m.csv",
)
@option("--images", type=PATH, required=True, metavar="DIR", help="Folder of the X-rays, subfolders such as "
        "images_001/images included; .png, or .jpg of the same name.")  # fmt: skip
@option("--entries", type=PATH, required=True, metavar="CSV",
        help="NIH's Data_Entry_2017*.csv as it comes, or .csv.gz.")  # fmt: skip
@option("--splits", type=PATH, metavar="CSV",
        help="Columns image,split (train, val, test). Default: patients are split 70:10:20.")  # fmt: skip
@option("--findings", type=click.Choice([13, 14]), default=14, help="13 leaves Hernia out, as the paper does; an image "
        "that shows only a hernia then has no finding.")  # fmt: skip
@_missing_option
@_writes_manifest
def nih(output: Path, as_json: bool, **options: Any) -> None:
    """Manifest of NIH ChestX-ray14.

    That is 112,120 frontal X-rays of 30,805 patients, or any part of them. Labels were mined from the reports.
    """
    from cbmir.training.readers.nih import read_nih

    _write(read_nih(**options), output, as_json)


@command("cbmir data chexpert --root . --csv CheXpert-v1.0-small/train.csv -o manifest.csv")
@option("--root", type=PATH, required=True, metavar="DIR",
        help="Folder that holds CheXpert-v1.0-small, or that folder.")  # fmt: skip
@option("--csv", "table", type=PATH, required=True, metavar="CSV", help="CheXpert's train.csv or valid.csv.")
@option("--frontal-only/--all-views", default=True, help="Leave lateral images out, or not.")
@option("--findings", type=click.Choice([9, 13]), default=9,
        help='The paper\'s nine, or all columns but "No Finding" (Support Devices included).')  # fmt: skip
@option("--blank", type=click.Choice(["zero", "unknown"]), default="zero", help="What an empty cell means, a finding "
        "that the report does not mention: absent, or unknown. -1 is uncertain.")  # fmt: skip
@_missing_option
@_writes_manifest
def chexpert(output: Path, as_json: bool, **options: Any) -> None:
    """Manifest of CheXpert.

    Its train.csv or valid.csv, of the small or the full-size edition. Uncertain labels (-1) stay uncertain.
    """
    from cbmir.training.readers.chexpert import read_chexpert

    _write(read_chexpert(**options), output, as_json)


@command(
    "cbmir data table ours.csv --image-column file --patient-column pid --labels Mass,Nodule -o manifest.csv",
    "cbmir data table ours.parquet --labels-column findings --separator ';' --images images/ -o manifest.csv",
)
@click.argument("file", type=PATH)
@option("--image-column", "image", default="image", help="Path of the image.")
@option("--patient-column", "patient", default="patient_id", help="The image's patient: never in two splits, and left "
        "out of their own look-alikes. Name the image column to state that each image is another patient.")  # fmt: skip
@option("--study-column", "study", help="Study of the image.")
@option("--view-column", "view", help="PA, AP, LATERAL or empty.")
@option("--split-column", "split", help="train, val, test or empty. Default: patients are split 70:10:20.")
@option("--report-column", "report", help="Text of the report, shown beside the image.")
@option("--source-column", "source", help="Hospital or data set, by which 'cbmir benchmark' breaks its figures down.")
@option("--date-column", "date", help="Date of the study, YYYY-MM-DD or empty.")
@option("--labels", metavar="A,B,C", default="", help="Findings with a column each, holding 1, 0, -1 (uncertain) or "
        "nothing (unknown). With --labels-column: the findings to expect there, in this order.")  # fmt: skip
@option("--labels-column", help='One column that joins the findings ("Mass|Nodule"). "No Finding" means none; an empty '
        "cell means unknown.")  # fmt: skip
@option("--separator", default="|", help="What joins them.")
@option("--images", type=PATH, metavar="DIR", help="Where relative image paths start. Default: FILE's folder.")
@_missing_option
@_writes_manifest
def table(
    file: Path, labels: str, labels_column: str | None, separator: str, images: Path | None, missing: Any, seed: int,
    output: Path, as_json: bool, **columns: Any,
) -> None:  # fmt: skip
    """Manifest of your own table.

    FILE is a CSV or Parquet table with a row for each image. Columns are named by options, never guessed; those not
    named are not used, and the log lists them.
    """
    from cbmir.training.readers.table import ColumnMapping, read_own_table

    manifest = read_own_table(
        file, columns=ColumnMapping(**columns), labels=[name.strip() for name in labels.split(",") if name.strip()],
        labels_column=labels_column, separator=separator, images=images, missing=missing, seed=seed,
    )  # fmt: skip
    _write(manifest, output, as_json)


@command(
    "cbmir data dicom archive/ -o manifest.csv",
    "cbmir data dicom /media/cdrom/DICOMDIR --labels Effusion,Mass -o manifest.csv",
    "cbmir index build model.onnx manifest.csv -o gallery --split all",
)
@click.argument("place", type=PATH, metavar="DIR")
@option("--labels", metavar="A,B,C", default="",
        help="Label columns of the manifest, all unknown.  [default: the 14 findings of NIH]")  # fmt: skip
@option("--allow-lateral", is_flag=True, help="Take lateral views too, as view LATERAL.")
@option("--intensity", type=click.Choice(INTENSITIES), default="header", help="How stored values become grey, as "
        "'cbmir train' has it: a file that cannot be read so is left out.")  # fmt: skip
@option("--workers", type=click.IntRange(0), help="Processes that decode images.  [default: one a processor]")
@_writes_manifest
def dicom(place: Path, labels: str, output: Path, as_json: bool, **reading: Any) -> None:
    """Manifest of the DICOM studies in a folder, or on a medium with a DICOMDIR.

    DIR is searched with its subfolders; of a DICOMDIR file, what it lists. Patient, study, view and date are those of
    the headers, findings are unknown. What is no chest radiograph is left out, and listed with the reason in
    .left-out.csv beside MANIFEST; where damaged files are among it, the exit code is 2. The manifest names patients and
    paths: keep it as safe as the images.
    """
    from cbmir.training.readers.dicom import read_dicom_studies, write_left_out

    names = [name.strip() for name in labels.split(",") if name.strip()] or NIH_14
    manifest, left_out = read_dicom_studies(place, labels=names, **reading)
    write_manifest(manifest, output)
    listed, damaged = write_left_out(left_out, output), sum(entry.damaged for entry in left_out)
    _tell(manifest, output, as_json, left_out={"files": len(left_out), "damaged": damaged})
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

    With findings, reports and their manifest: a data set to learn and test with that is nobody's. What is measured on
    it says nothing about patients.
    """
    from cbmir.training.phantom import generate

    path = generate(output, count=count, seed=seed, image_format=image_format, size=size)
    _tell(read_manifest(path), path, as_json)


@command("cbmir data check manifest.csv", "cbmir data check manifest.csv --json > check.json")
@click.argument("manifest", type=PATH)
@option("--quick", is_flag=True, help="Look at the table and for the files, but open no image.")
@option("--workers", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default="processors",
        help="Threads that read images.")  # fmt: skip
@json_option
def check(manifest: Path, quick: bool, workers: int, as_json: bool) -> None:
    """Look for what would spoil a training.

    Counts what MANIFEST holds, then checks it. Problems are missing files, unreadable images, patients in two splits
    and the same image in two splits. Any of them makes the exit code 2; a clean manifest gives 0.
    """
    from cbmir.training.manifest_check import check_manifest

    report = check_manifest(read_manifest(manifest), quick=quick, workers=workers)
    print_answer(as_json, report.to_json(), report.text())
    if not report.ok:
        sys.exit(2)


def _write(manifest: Manifest, path: Path, as_json: bool) -> None:
    write_manifest(manifest, path)
    _tell(manifest, path, as_json)


def _tell(manifest: Manifest, path: Path, as_json: bool, **more: Any) -> None:
    """What the manifest holds; `more` goes into the JSON."""
    from cbmir.training.manifest_check import summarise

    summary = summarise(manifest)
    splits = ", ".join(f"{name} {counts['images']:,}" for name, counts in summary["splits"].items())
    text = f"{path}: {summary['images']:,} images of {summary['patients']:,} patients ({splits})"
    print_answer(as_json, {"manifest": path, **summary, **more}, text)
