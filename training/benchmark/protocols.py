"""The paper's selections from whole datasets."""

from __future__ import annotations

from dataclasses import replace

from cbmir.errors import SplitError
from cbmir.labels import NIH_13
from cbmir.manifest import Manifest
from cbmir.training.readers.common import keep_labels
from cbmir.training.splits import shuffle_patients


def nih_protocol(
    manifest: Manifest, *, seed: int = 0, training: int = 12_000, queries: int = 1_000, validation: int = 1_000
) -> Manifest:
    """The paper's NIH experiment: 12,000 training images, each with at least one of the 13 most common findings.

    The 1,000 queries (split `test`), and 1,000 images for what is chosen on validation (`val`; the paper names none),
    hold at least one of the 13 too: a query without a positive label has no ideal DCG. Patients are drawn by `seed`
    and never shared between splits; what a patient has beyond the last image needed is left out.

    `manifest` holds the whole dataset, from `read_nih` or, without any image file, from `read_entries`; its own splits
    are ignored. Returns the selected rows, in the manifest's order, with the 13 labels.
    Raises SplitError if there are too few images, ManifestError if a label is missing.
    """
    chosen = keep_labels(manifest, NIH_13)
    images_of: dict[str, list[int]] = {}
    for position, row in enumerate(chosen):
        if 1 in row.labels:
            images_of.setdefault(row.patient_id, []).append(position)
    split_of: dict[int, str] = {}
    patients = iter(shuffle_patients(images_of, seed=seed))
    for split, wanted in (("test", queries), ("val", validation), ("train", training)):
        left = wanted
        while left > 0:
            patient = next(patients, None)
            if patient is None:
                raise SplitError(
                    f"expected {queries} query, {validation} validation and {training} training images of different "
                    f"patients with one of the 13 findings, ran out {left} short of the {wanted} for {split}; "
                    f"the protocol needs the whole ChestX-ray14 table (112,120 images)"
                )
            taken = images_of[patient][:left]
            split_of.update(dict.fromkeys(taken, split))
            left -= len(taken)
    rows = tuple(replace(row, split=split_of[i]) for i, row in enumerate(chosen) if i in split_of)
    protocol = {"name": "nih-13", "seed": seed, "training": training, "validation": validation, "queries": queries}
    return replace(chosen, rows=rows, about=chosen.about | {"protocol": protocol})
