"""`cbmir index export`: a copy of a gallery, whole or de-identified."""

from __future__ import annotations

from pathlib import Path

import click

from cbmir.cli.options import PATH, PATIENT_DATA, command, json_option, log, option, print_answer


@command("cbmir index export gallery -o backup", "cbmir index export gallery -o shared --deidentified")
@click.argument("gallery", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="A new or empty folder.")
@option("--deidentified", is_flag=True,
        help="Only embeddings, labels, views and splits, under new ids and in another order.")  # fmt: skip
@json_option
def export(gallery: Path, output: Path, deidentified: bool, as_json: bool) -> None:
    """Copy GALLERY as it is at this moment, while others use it.

    De-identified is not anonymous: an embedding is still close to other images of the same patient, so anyone with such
    an image can find the patient. Do not publish such a copy.
    """
    from cbmir.runtime.gallery import Gallery, maintenance

    with Gallery.open(gallery) as opened:
        (maintenance.export_deidentified if deidentified else maintenance.export)(opened, output)
    with Gallery.open(output) as made:
        images = len(made)
    print_answer(as_json, {"gallery": output, "images": images}, f"{output}: {images} images")
    log.warning(PATIENT_DATA if not deidentified else "De-identified is not anonymous: do not make it public.")
