"""`cbmir parity`: compare the answers of two models."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cbmir.cli.options import PATH, command, json_option, print_answer, tolerance_option
from cbmir.errors import require


@command(
    "cbmir parity run model.int8.onnx manifest.csv",
    "cbmir parity model.onnx model.openvino-bf16.xml manifest.csv --json",
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.argument("manifest", type=PATH)
@tolerance_option
@json_option
def parity(a: Path, b: Path, manifest: Path, tolerances: tuple[str, ...], as_json: bool) -> None:
    """Compare the answers of two models, each a RUN or an exported file, on the images of MANIFEST.

    Compares embeddings, scores, top 10 neighbours, nDCG and AUC of B with those of A, with 95% intervals over patients.
    For two files of one model the exit code is 1 if B misses the limits of its precision.
    """
    require("torch", "train")
    from cbmir.export.compare import compare_models

    found = compare_models(a, b, manifest, tolerances)
    print_answer(as_json, found.to_json() | {"failures": found.failures}, found.table())
    if found.failures:
        sys.exit(1)
