"""The commands of `cbmir data` that read public data sets, each from what its publisher ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cbmir.cli.data import missing_option, write, writes_manifest
from cbmir.cli.options import PATH, command, option, together

_frontal_option = option("--frontal-only/--all-views", default=True, help="Leave lateral images out, or not.")
#: How the 14 columns of CheXpert's labeller are read.
_chexpert_labels = together(
    option("--findings", type=click.Choice([9, 13]), default=9,
           help='The paper\'s nine, or all columns but "No Finding" (Support Devices included).'),
    option("--blank", type=click.Choice(["zero", "unknown"]), default="zero", help="What an empty cell means, a "
           "finding that the report does not mention: absent, or unknown. -1 is uncertain."),
)  # fmt: skip


@command(
    "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv -o manifest.csv",
    "cbmir data nih --images images/ --entries entries.csv --official-splits . --boxes BBox_List_2017.csv -o nih.csv",
    "cbmir data nih --images images/ --relabelled test_labels.csv --relabelled validation_labels.csv -o google.csv",
)
@option("--images", type=PATH, required=True, metavar="DIR", help="Folder of the X-rays, subfolders such as "
        "images_001/images included; .png, or .jpg of the same name.")  # fmt: skip
@option("--entries", type=PATH, metavar="CSV", help="NIH's Data_Entry_2017*.csv as it comes, or .csv.gz.")
@option("--relabelled", type=PATH, multiple=True, metavar="CSV", help="In place of --entries: Google's test_labels.csv "
        "or validation_labels.csv of four findings, which radiologists agreed on. May be repeated.")  # fmt: skip
@option("--splits", type=PATH, metavar="CSV",
        help="Columns image,split (train, val, test). Default: patients are split 70:10:20.")  # fmt: skip
@option("--official-splits", "official", type=PATH, metavar="DIR", help="Folder with NIH's train_val_list.txt and "
        "test_list.txt: its test split; one in eight of the other patients is in val.")  # fmt: skip
@option("--boxes", type=PATH, metavar="CSV", help="NIH's BBox_List_2017.csv: where findings are.")
@option("--findings", type=click.Choice([13, 14]), default=14, help="13 leaves Hernia out, as the paper does; an image "
        "that shows only a hernia then has no finding.")  # fmt: skip
@missing_option
@writes_manifest
def nih(output: Path, as_json: bool, **options: Any) -> None:
    """Manifest of NIH ChestX-ray14.

    That is 112,120 frontal X-rays of 30,805 patients, or any part of them. Labels were mined from the reports.
    """
    from cbmir.training.readers.nih import read_nih

    write(read_nih(**options), output, as_json)


@command(
    "cbmir data chexpert --root . --csv CheXpert-v1.0-small/train.csv -o manifest.csv",
    "cbmir data chexpert --root . --csv train.csv --csv valid.csv -o manifest.csv",
)
@option("--root", type=PATH, required=True, metavar="DIR",
        help="Folder that holds CheXpert-v1.0-small or the batches of CheXpert-v1.0, or the small folder.")  # fmt: skip
@option("--csv", "tables", type=PATH, required=True, multiple=True, metavar="CSV", help="train.csv, valid.csv or "
        "test_labels.csv. Several keep the publisher's splits; one is split 70:10:20 by patient.")  # fmt: skip
@_frontal_option
@_chexpert_labels
@missing_option
@writes_manifest
def chexpert(output: Path, as_json: bool, **options: Any) -> None:
    """Manifest of CheXpert.

    Its tables, of the small or the full-size edition. Uncertain labels (-1) stay uncertain.
    """
    from cbmir.training.readers.chexpert import read_chexpert

    write(read_chexpert(**options), output, as_json)
