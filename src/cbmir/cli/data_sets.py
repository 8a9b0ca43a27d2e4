"""The commands of `cbmir data` for public data sets, which read the files as published."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from cbmir.cli.data import reads_images, write, writes_manifest
from cbmir.cli.options import PATH, command, option, together

_frontal_option = option("--frontal-only/--all-views", default=True, help="Whether to leave out lateral images.")
#: How to read the 14 columns of CheXpert's labeller.
_chexpert_labels = together(
    option("--findings", type=click.Choice([9, 13]), default=9,
           help='The paper\'s nine, or all columns but "No Finding" (Support Devices included).'),
    option("--blank", type=click.Choice(["zero", "unknown"]), default="zero", help="How to read an empty cell, for a "
           "finding that the report does not mention: absent, or unknown. -1 is uncertain."),
)  # fmt: skip

_mapped_labels = option("--labels", type=click.Choice(["mapped", "own"]), default="mapped", help="mapped: the 14 "
                        "findings of NIH (listed in the sidecar). own: the data set's names.")  # fmt: skip
_folder = click.argument("folder", type=PATH)


def _data_set(*examples: str, **attributes: Any) -> Callable[[Callable[[], None]], click.Command]:
    """Make a command that calls the reader with the function's name, with its options as arguments. The docstring is
    the help."""

    def decorate(function: Callable[[], None]) -> click.Command:
        @wraps(function)
        def read(output: Path, as_json: bool, **options: Any) -> None:
            from cbmir.training import readers

            write(getattr(readers, f"read_{function.__name__}")(**options), output, as_json)

        return command(*examples, **attributes)(read)

    return decorate


@_data_set(
    "cbmir data nih --images images/ --entries Data_Entry_2017_v2020.csv -o manifest.csv",
    "cbmir data nih --images images/ --entries entries.csv --official-splits . --boxes BBox_List_2017.csv -o nih.csv",
    "cbmir data nih --images images/ --relabelled test_labels.csv --relabelled validation_labels.csv -o google.csv",
)
@option("--images", type=PATH, required=True, metavar="DIR", help="Folder of the X-rays, searched with "
        "subfolders such as images_001/images; .png, or .jpg of the same name.")  # fmt: skip
@option("--entries", type=PATH, metavar="CSV", help="NIH's Data_Entry_2017*.csv as it comes, or .csv.gz.")
@option("--relabelled", type=PATH, multiple=True, metavar="CSV", help="Instead of --entries: Google's test_labels.csv "
        "or validation_labels.csv, four findings adjudicated by radiologists. May be repeated.")  # fmt: skip
@option("--splits", type=PATH, metavar="CSV",
        help="Columns image,split (train, val, test). Default: patients are split 70:10:20.")  # fmt: skip
@option("--official-splits", "official", type=PATH, metavar="DIR", help="Folder with NIH's train_val_list.txt and "
        "test_list.txt: NIH's test split; one in eight of the other patients goes into val.")  # fmt: skip
@option("--boxes", type=PATH, metavar="CSV", help="NIH's BBox_List_2017.csv: where findings are.")
@option("--findings", type=click.Choice([13, 14]), help="With --entries: 13 leaves Hernia out, as the paper does; an "
        "image that shows only a hernia then has no finding.  [default: 14]")  # fmt: skip
@reads_images
def nih() -> None:
    """Manifest of NIH ChestX-ray14.

    112,120 frontal X-rays of 30,805 patients, or any part of them. Labels were mined from the reports.
    """


@_data_set(
    "cbmir data chexpert --root . --csv CheXpert-v1.0-small/train.csv -o manifest.csv",
    "cbmir data chexpert --root . --csv train.csv --csv valid.csv -o manifest.csv",
)
@option("--root", type=PATH, required=True, metavar="DIR",
        help="Folder that holds CheXpert-v1.0-small or the batches of CheXpert-v1.0, or CheXpert-v1.0-small "
        "itself.")  # fmt: skip
@option("--csv", "tables", type=PATH, required=True, multiple=True, metavar="CSV", help="train.csv, valid.csv or "
        "test_labels.csv. Several keep the publisher's splits; one is split 70:10:20 by patient.")  # fmt: skip
@_frontal_option
@_chexpert_labels
@reads_images
def chexpert() -> None:
    """Manifest of CheXpert.

    Reads the tables of the small or the full-size edition. Uncertain labels (-1) stay uncertain.
    """


@_data_set("cbmir data mimic mimic-cxr-jpg/2.1.0 -o manifest.csv",
         "cbmir data mimic mimic-cxr-jpg/2.1.0 --reports mimic-cxr-reports --blank unknown -o m.csv")  # fmt: skip
@_folder
@option("--labeller", type=click.Choice(["chexpert", "negbio"]), default="chexpert", help="Whose labels.")
@option("--reports", type=PATH, metavar="DIR", help="Folder with the files of mimic-cxr-reports.zip. Default: FOLDER, "
        "or mimic-cxr-reports in it.")  # fmt: skip
@_frontal_option
@_chexpert_labels
@reads_images
def mimic() -> None:
    """Manifest of MIMIC-CXR-JPG.

    377,110 images of 65,379 patients, with labels, metadata and splits as PhysioNet ships them, and reports if present.

    FOLDER holds files and the tables mimic-cxr-2.*.csv.
    """


@_data_set("cbmir data brax brax/1.1.0 -o manifest.csv")
@_folder
@_frontal_option
@_chexpert_labels
@reads_images
def brax() -> None:
    """Manifest of BRAX.

    40,967 images of a hospital in São Paulo, PNG or DICOM, with CheXpert's labels from Portuguese reports.

    FOLDER holds master_spreadsheet_update.csv and the images.
    """


@_data_set("cbmir data padchest padchest/ -o manifest.csv", "cbmir data padchest padchest/ --labels own -o own.csv")
@_folder
@_mapped_labels
@option("--damaged", type=PATH, metavar="TXT", help="Names of images to leave out, one per line, besides those known "
        "to be damaged.")  # fmt: skip
@_frontal_option
@reads_images
def padchest() -> None:
    """Manifest of PadChest.

    160,868 images of 67,625 patients of a hospital near Alicante, 16-bit PNG, with reports in Spanish.

    FOLDER holds PadChest's table and its images, at any depth.
    """


@_data_set("cbmir data vindr vindr-cxr/1.0.0 -o manifest.csv",
         "cbmir data vindr resized/ --sizes train_meta.csv -o manifest.csv")  # fmt: skip
@_folder
@option("--agree", type=click.IntRange(1), default=2, help="Number of radiologists who must agree on a finding for "
        "label 1 and its boxes; with fewer, it is uncertain.")  # fmt: skip
@option("--sizes", type=PATH, metavar="CSV", help="For converted images: columns image_id,dim0,dim1, the height and "
        "width of the originals, since boxes are in their pixels.")  # fmt: skip
@reads_images
def vindr() -> None:
    """Manifest of VinDr-CXR, with boxes.

    18,000 images of two hospitals in Hanoi, each read by three radiologists.

    FOLDER holds train.csv, or annotations_train.csv and annotations_test.csv (image_labels_train.csv and
    image_labels_test.csv are also read if present), and the images.
    """


@_data_set("cbmir data rsna rsna-pneumonia/ -o manifest.csv")
@_folder
@reads_images
def rsna() -> None:
    """Manifest of the RSNA Pneumonia Detection Challenge, with boxes.

    26,684 of NIH's images, on which radiologists drew opacities that may be pneumonia.

    FOLDER holds stage_2_train_labels.csv and the images.
    """


@_data_set("cbmir data siim siim/ -o manifest.csv")
@_folder
@reads_images
def siim() -> None:
    """Manifest of SIIM-ACR Pneumothorax Segmentation, with a box around each mask.

    12,047 images, of which 2,669 show a pneumothorax.

    FOLDER holds train-rle.csv and the images, at any depth.
    """


@_data_set("cbmir data openi openi/ --download -o manifest.csv")
@_folder
@option("--download", "fetch", is_flag=True, help="Fetch the publisher's archives into FOLDER first, about 1.3 GB, and "
        "unpack them. After an interruption the same command continues.")  # fmt: skip
@_mapped_labels
@option("--projections", type=PATH, metavar="CSV", help="Columns filename,projection (Frontal, Lateral). Default: the "
        "projection that the caption states.")  # fmt: skip
@option("--guess-frontal", is_flag=True, help="If no caption of a report states a frontal view, take the first image "
        "whose caption states none.")  # fmt: skip
@_frontal_option
@reads_images
def openi() -> None:
    """Manifest of Open-i's chest X-rays.

    7,470 images of Indiana University with 3,955 reports, whose findings were indexed by MeSH terms.

    FOLDER holds reports (ecgen-radiology) and the images, at any depth; made by --download.
    """


@_data_set("cbmir data covid covid-chestxray-dataset/ -o manifest.csv")
@_folder
@_frontal_option
@reads_images
def covid() -> None:
    """Manifest of ieee8023's COVID-19 image data collection.

    X-rays of publications; each part of a finding such as Pneumonia/Viral/COVID-19 is a label.

    FOLDER holds metadata.csv and images.
    """


@_data_set("cbmir data ralo ralo/ -o manifest.csv")
@_folder
@reads_images
def ralo() -> None:
    """Manifest of Stony Brook's X-rays of COVID-19, scored for lung opacity (RALO).

    FOLDER holds ralo-dataset-metadata.csv and CXR_images_scored.
    """


@_data_set("cbmir data tuberculosis nlm/ -o manifest.csv", name="tuberculosis")
@_folder
@writes_manifest
def nlm_tuberculosis() -> None:
    """Manifest of the tuberculosis sets of Montgomery County and Shenzhen (NLM).

    FOLDER holds MontgomerySet, ChinaSet_AllFiles, or both.
    """


@_data_set("cbmir data tbx11k TBX11K/ -o manifest.csv")
@_folder
@reads_images
def tbx11k() -> None:
    """Manifest of TBX11K, tuberculosis with boxes: its training and validation images.

    FOLDER holds imgs, lists and annotations.
    """


@_data_set("cbmir data object-cxr object-cxr/ -o manifest.csv", name="object-cxr")
@_folder
@reads_images
def object_cxr() -> None:
    """Manifest of Object-CXR, foreign objects on chest X-rays.

    FOLDER holds train.csv, dev.csv or both, and the images in train and dev.
    """
