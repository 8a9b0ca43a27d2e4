"""`cbmir index build`, `add`, `update` and `remove`: what changes the images of a gallery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.cli.options import (
    INDEXES,
    STAYS_CLEAR,
    engine_option,
    json_option,
    print_json,
    pseudonyms_option,
    reading_options,
    resumable,
)  # fmt: skip
from cbmir.errors import GalleryError

if TYPE_CHECKING:
    from cbmir.runtime.gallery.build import IndexReport
    from cbmir.runtime.gallery.protocol import SearchableGallery
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms

log = logging.getLogger("cbmir")


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which images go in, and how they are read."""
    for option in reversed(
        (
            click.option(
                "--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True,
                default=["train"], show_default=True, help="Which of the manifest's images go in; may be repeated.",
            ),
            click.option(
                "--embeddings", type=click.Path(path_type=Path), metavar="DIR",
                help="Take what 'cbmir embed' made of this manifest with this model, and read no image.",
            ),
            reading_options,
            pseudonyms_option,
            engine_option,
        )
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(
    epilog="\b\nExample:\n"
    "  cbmir index build model.onnx manifest.csv -o gallery\n"
    "  cbmir index build model.onnx manifest.csv -o gallery --split train --split val\n"
    "  cbmir index build model.onnx manifest.csv -o milvus://localhost:19530/chest"
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="GALLERY", required=True,
    help="The gallery's folder; or milvus://HOST:PORT/NAME, or milvus:./FILE.db for one embedded here.",
)  # fmt: skip
@click.option(
    "--index", "setting", type=click.Choice(INDEXES), default="auto", show_default=True,
    help="How it is searched: auto compares all images of a small gallery, and has an index for a large one.",
)  # fmt: skip
@click.option(
    "--replace", "replace_others", is_flag=True,
    help="Replace a gallery also where that loses images that are not among those of MANIFEST, or its pseudonyms.",
)  # fmt: skip
@_source_options
@json_option
@click.pass_context
def build(
    ctx: click.Context, model: Path, manifest: Path, output: str, setting: str, replace_others: bool,
    splits: tuple[str, ...], embeddings: Path | None, workers: int | None, reduced_jpeg2000: bool,
    pseudonyms: Pseudonyms | None, engine: str, as_json: bool,
) -> None:  # fmt: skip
    """Embed the images of MANIFEST with MODEL into a gallery; one of the same images is replaced at the end.

    A build that was stopped goes on when the same command is given again. Images that cannot be read are left out and
    listed in the gallery's unreadable.csv; the exit code is then 2. Of several with the same content one goes in; the
    others are listed in duplicates.csv. A gallery is patient data: keep it as safe as the images.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import build_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = build_gallery(
            opened, table, output, splits=splits, workers=workers, reduced_jpeg2000=reduced_jpeg2000,
            embeddings=embeddings, pseudonyms=pseudonyms, index=setting, replace_others=replace_others,
        )  # fmt: skip
    if as_json:
        _print_report(output, report)
    else:
        click.echo(f"{output}: {report.images} images")
    if pseudonyms is not None:
        log.warning(STAYS_CLEAR)
    _tell_left_out(ctx, output, report)


@click.command(
    epilog="\b\nExample:\n"
    "  cbmir index add gallery model.onnx new.csv\n"
    "  cbmir index add gallery model.onnx manifest.csv --split all"
)  # fmt: skip
@click.argument("gallery", type=click.Path())
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("manifest", type=click.Path(path_type=Path))
@_source_options
@json_option
@click.pass_context
def add(
    ctx: click.Context, gallery: str, model: Path, manifest: Path, splits: tuple[str, ...], embeddings: Path | None,
    workers: int | None, reduced_jpeg2000: bool, pseudonyms: Pseudonyms | None, engine: str, as_json: bool,
) -> None:  # fmt: skip
    """Embed those images of MANIFEST that GALLERY does not have, and add them all at once.

    What is there already stays as it is ('cbmir index update' brings labels and reports up to date). The gallery serves
    others meanwhile. An addition that was stopped leaves the gallery as it was, and goes on when the same command is
    given again. Images that could not be read, or have changed since they went in (changed.csv), give exit code 2; the
    lists of earlier runs keep what they say of other images.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.gallery.build import add_to_gallery

    table = read_manifest(manifest)
    with resumable(), open_engine(model, engine=engine) as opened:
        report = add_to_gallery(
            opened, table, gallery, splits=splits, workers=workers, reduced_jpeg2000=reduced_jpeg2000,
            embeddings=embeddings, pseudonyms=pseudonyms,
        )  # fmt: skip
    if as_json:
        _print_report(gallery, report)
    else:
        click.echo(f"{gallery}: {report.images} images added, {report.there} were there")
    _tell_left_out(ctx, gallery, report)


@click.command(epilog="\b\nExample:\n  cbmir index update gallery corrected.csv")
@click.argument("gallery", type=click.Path())
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--split", "splits", type=click.Choice(["train", "val", "test", "all"]), multiple=True, default=["all"],
    show_default=True, help="Which of the manifest's rows to take; may be repeated.",
)  # fmt: skip
@pseudonyms_option
@json_option
@click.pass_context
def update(
    ctx: click.Context, gallery: str, manifest: Path, splits: tuple[str, ...], pseudonyms: Pseudonyms | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Take over labels, reports, patients, studies, views, dates and splits of MANIFEST for the images of GALLERY.

    All at once, and nothing is embedded again. A row is for the image of the same path, or else of the same content, as
    after a move. What MANIFEST has no column for stays, and so does what a row leaves empty of study, view and date; a
    report or split that a row leaves empty is emptied. Rows whose image GALLERY does not have are listed; the exit code
    is then 2.
    """
    from cbmir.manifest import read_manifest
    from cbmir.runtime.gallery.maintenance import update_gallery
    from cbmir.runtime.gallery.protocol import open_gallery

    table = read_manifest(manifest)
    with open_gallery(gallery, pseudonyms=pseudonyms) as opened:
        report = update_gallery(opened, table, splits=splits)
    if as_json:
        print_json({"gallery": gallery, "found": report.found, "changed": report.changed, "absent": report.absent})
    else:
        click.echo(f"{gallery}: {report.changed} of {report.found} images changed")
        for path in report.absent:
            click.echo(f"not in the gallery: {path}")
    if report.absent:
        log.error("%d rows are of images that the gallery does not have", len(report.absent))
        ctx.exit(2)


@click.command(
    epilog="\b\nExample:\n"
    "  cbmir index remove gallery --patient-id 0001234\n"
    "  cbmir index remove gallery --id image_07 --id image_08"
)  # fmt: skip
@click.argument("gallery", type=click.Path())
@click.option("--id", "ids", multiple=True, help="An image's id in the gallery; may be repeated.")
@click.option("--patient-id", "patients", multiple=True, help="All images of a patient; may be repeated.")
@click.option("--study-id", "studies", multiple=True, help="Images of a study; with --patient-id, of that patient.")
@pseudonyms_option
@json_option
@click.pass_context
def remove(
    ctx: click.Context, gallery: str, ids: tuple[str, ...], patients: tuple[str, ...], studies: tuple[str, ...],
    pseudonyms: Pseudonyms | None, as_json: bool,
) -> None:  # fmt: skip
    """Remove images from GALLERY, with report, thumbnail and embedding; there is no way back.

    Their bytes are overwritten in the gallery's files, those of unfinished builds and additions beside it too; 'cbmir
    index compact' then gives the room back. Copies and exports made before are yours to delete. A row of a manifest
    brings its image back with the next 'add' or 'build', also one that goes on: take it out of there as well. Exit code
    2 where something given is not in the gallery, or that cannot be told.
    """
    from cbmir.runtime.gallery.parts import remove_from_unfinished
    from cbmir.runtime.gallery.protocol import is_milvus, open_gallery

    if not (ids or patients or studies):
        raise click.UsageError("expected what to remove: --id, --patient-id or --study-id")
    with open_gallery(gallery, pseudonyms=pseudonyms) as opened:
        unknown = _unknown(opened, patients, studies, pseudonyms)
        removed = opened.remove(ids=ids, patient_ids=patients, study_ids=studies)
    if as_json:
        print_json({"gallery": gallery, "removed": removed})
    else:
        click.echo(f"{gallery}: {len(removed)} images removed")
    if missing := [name for name in ids if name not in removed]:
        unknown.append(f"not in the gallery: {', '.join(missing)}")
    if not is_milvus(gallery):
        unknown += remove_from_unfinished(
            Path(gallery).resolve(), pseudonyms, ids=ids, patient_ids=patients, study_ids=studies
        )
    for line in unknown:
        log.error("%s", line)
    if unknown or not removed:
        ctx.exit(2)


def _unknown(
    opened: SearchableGallery, patients: Sequence[str], studies: Sequence[str], pseudonyms: Pseudonyms | None
) -> list[str]:
    """Lines that say how many of these the gallery does not have. Damage must not stand in the way of a removal."""
    if not (patients or studies):
        return []
    patients_there, studies_there = set[str](), set[str]()
    try:
        for entry in opened.every_entry():
            patients_there.add(entry.patient_id)
            studies_there.add(entry.study_id)
    except GalleryError as error:
        return [f"cannot tell whether all that was given was in the gallery ({error})"]
    if pseudonyms is not None:
        patients, studies = list(map(pseudonyms.patient, patients)), list(map(pseudonyms.study, studies))
    return [
        f"{count} of {len(given)} {kind} ids are not in the gallery"
        for kind, given, there in (("patient", patients, patients_there), ("study", studies, studies_there))
        if (count := sum(key not in there for key in given))
    ]


def _print_report(gallery: str, report: IndexReport) -> None:
    print_json(
        {"gallery": gallery, "images": report.images, "resumed": report.resumed, "there": report.there}
        | {"unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable]}
        | {"duplicates": [{"path": path, "id": entry} for path, entry in report.duplicates]}
        | {"changed": [{"path": path, "id": entry} for path, entry in report.changed]}
    )


def _tell_left_out(ctx: click.Context, gallery: str, report: IndexReport) -> None:
    from cbmir.runtime.gallery.protocol import is_milvus

    folder = "" if is_milvus(gallery) else f"{gallery}/"
    if report.duplicates:
        log.warning(
            "%d images have the content of others and were left out: see %sduplicates.csv",
            len(report.duplicates), folder,
        )  # fmt: skip
    if report.changed:
        log.error(
            "%d images have changed since they went in, and stay as they were: see %schanged.csv; "
            "'cbmir index remove' takes them out, then they can be added anew", len(report.changed), folder,
        )  # fmt: skip
    if report.unreadable:
        log.error("%d images could not be read: see %sunreadable.csv", len(report.unreadable), folder)
    if report.changed or report.unreadable:
        ctx.exit(2)
