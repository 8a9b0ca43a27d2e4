"""`cbmir benchmark` compares the paper's methods; `cbmir final` trains the final model of a cross-validation."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from cbmir.cli.options import PATH, command, json_option, option, print_answer, training_options
from cbmir.errors import require
from cbmir.manifest import read_manifest
from cbmir.text_table import read_table


@command(
    "cbmir benchmark nih nih.csv -o report --recipe paper --weights imagenet  # the paper's Table 1: 12,000 images",
    "cbmir benchmark nih Data_Entry_2017_v2020.csv --dry-run                  # only show which images it would use",
    "cbmir benchmark chexpert cxp.csv -o report --sweep train-size            # 1,024 to 65,536 images",
    "cbmir benchmark table own.csv -o report --folds 5 --seeds 1              # each image is a query once",
    "cbmir benchmark table own.csv -o report --methods proxy,bce --resume",
)
@click.argument("protocol", type=click.Choice(["nih", "chexpert", "table"]))
@click.argument("manifest", type=PATH)
@option("-o", "--output", "report", type=PATH, help="REPORT folder to create.")
@option("--methods", default="all", metavar="A,B,…",
        help="all, or some of ssh, itq, sdh, dsh, osdh, texture, community, bce, ml-proxy-nca, proxy, proxy-negative, "
        "proxy-auto, proxy-anchor, soft-ndcg, proxy-fitted, fitted. With a sweep, all means bce, proxy and "
        "proxy-negative.")  # fmt: skip
@option("--seeds", default=3, help="Number of selections (nih, chexpert) and of training runs.")
@option("--folds", default=0, show_default=False,
        help="Number of folds, split by patient, for a table.  [default: the table's splits]")  # fmt: skip
@option("--sweep", "sweeps", multiple=True,
        type=click.Choice(["proxies-per-class", "train-size", "negative-proxies", "none"]), help="Compare numbers of "
        "proxies (1 to 32), sizes of the training set, negative proxies on and off. Repeat to cross them.")  # fmt: skip
@option("--tuned", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE.json",
        help='Options of single methods, as tuned on validation data: lr, epochs, head_rate and the number of '
        'seeds, such as {"bce": {"lr": 0.0003, "seeds": 1}}.')  # fmt: skip
@option("--code-bits", default=64, help="Code length of the hashing methods.")
@option("--pairs", multiple=True, metavar="A/B", help="Pair of labels to compare in a t-SNE map; may be repeated.")
@option("--jobs", type=click.IntRange(min=1), default=None, help="Cells to run at a time, spread over the GPUs.  "
        "[default: the number of GPUs, or 1]")  # fmt: skip
@option("--ray", default="", metavar="auto|ADDRESS",
        help="Run the cells as Ray tasks on this cluster; auto: the cluster of RAY_ADDRESS, or this "
        "machine.")  # fmt: skip
@option("--resume", is_flag=True, help="Continue the benchmark in -o; methods, seeds and sweeps may be added.")
@option("--report-only", is_flag=True, help="Only write the report of the finished cells in -o.")
@option("--dry-run", is_flag=True, help="Only print the selections and cells.")
@training_options
def benchmark(
    protocol: str, manifest: Path, report: Path | None, methods: str, seeds: int, folds: int, sweeps: tuple[str, ...],
    tuned: Path | None, code_bits: int, pairs: tuple[str, ...], jobs: int | None, ray: str, resume: bool,
    report_only: bool, dry_run: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Compare the paper's methods on MANIFEST, by the paper's protocol for NIH or CheXpert or on any table.

    Every method gets the same images, encoder, augmentation and metrics. Writes REPORT/index.html, report.md,
    results.json, figures/ and selections/. A finished cell (a method on one selection) is never trained again; a
    failed one is shown with its error, and the others still run. --resume also accepts REPORT/cells from another
    machine: answers.npz and cell.json of each cell are enough.
    """
    require("lightning", "train")
    from cbmir.training.comparison.plan import Plan, make_plan, prepare, preview, read_tuned, select_parts
    from cbmir.training.comparison.protocols import PROTOCOLS
    from cbmir.training.comparison.report.render import write_report
    from cbmir.training.readers.nih import read_entries

    if report is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--output'; or use --dry-run.")
    if report is not None and report_only:
        click.echo(write_report(report, Plan.read(report)))
        return
    if options["devices"] == "auto":
        options["devices"] = "1"  # so that batches, and the trained model, are the same on every machine
    if options["weights"] not in ("none", "imagenet"):
        options["weights"] = str(Path(options["weights"]).resolve())
    # A dry run opens no images, so it also accepts NIH's original table.
    own = dry_run and protocol == "nih" and manifest.is_file() and "Image Index" in read_table(manifest, ()).columns
    table = read_entries(manifest) if own else read_manifest(manifest)
    plan = make_plan(
        PROTOCOLS[protocol], table, manifest,
        methods=() if methods == "all" else tuple(name.strip() for name in methods.split(",")),
        sweeps=tuple(name for name in sweeps if name != "none"), seeds=seeds, folds=folds, pairs=pairs,
        training=options | {"code_bits": code_bits}, tuned=read_tuned(tuned) if tuned else {},
        command=shlex.join(["cbmir", *sys.argv[1:]]),
    )  # fmt: skip
    if dry_run:
        click.echo(preview(plan, select_parts(plan, table)))
        return
    assert report is not None
    import torch

    from cbmir.training.comparison.cells import check_finished
    from cbmir.training.comparison.runner import run_cells

    plan = prepare(report, plan, table, resume=resume)
    check_finished(report, plan)
    try:
        failed = run_cells(report, plan, jobs=jobs or max(1, torch.cuda.device_count()), ray=ray)
    except KeyboardInterrupt:
        click.echo("Continue with --resume; --report-only shows what is finished.", err=True)
        raise
    click.echo(write_report(report, plan))
    if failed:
        click.echo(f"{failed} cells failed; the report says why. --resume tries them again.", err=True)
        sys.exit(1)


@command(
    "cbmir final report -o run --method fitted",
    "cbmir final report -o run --method fitted --resume      # continue after an interruption",
)
@click.argument("report", type=PATH)
@option("-o", "--output", "run", required=True, type=PATH, help="RUN folder to create.")
@option("--method", required=True, help="A method of REPORT whose folds are finished.")
@option("--seed", default=0, help="Seed of the folds' runs, and of this one.")
@option("--resume", is_flag=True, help="Continue the run in -o from its last complete epoch.")
@json_option
def final(report: Path, run: Path, method: str, seed: int, resume: bool, as_json: bool) -> None:
    """Train a method of a cross-validation in REPORT on every image of its table.

    Uses the options and the number of epochs of the folds. Thresholds and calibration come from the scores that each
    image got as a test image, and the card has the figures of all folds together.

    REPORT is the folder of 'cbmir benchmark table … --folds 5'. Writes a RUN folder, as 'cbmir train' does.
    """
    require("lightning", "train")
    from cbmir.training.comparison.final import train_final
    from cbmir.training.harness import first_process

    finished = train_final(report, run, method, seed=seed, resume=resume)
    if first_process():
        card = finished.read_card()
        value = {"run": finished.path, "fingerprint": card.fingerprint, "metrics": card.metrics}
        print_answer(as_json, value, str(finished.path))


@click.command(hidden=True)
@click.argument("report", type=PATH)
@click.argument("name")
def benchmark_cell(report: Path, name: str) -> None:
    """Run one cell of a benchmark: 'cbmir benchmark' starts one such process per cell."""
    from cbmir.training.comparison.cells import run_cell
    from cbmir.training.comparison.plan import Plan

    plan = Plan.read(report)
    run_cell(report, plan, plan.cell(name))
