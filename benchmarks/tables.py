"""Measure time and memory of `cbmir data table` with 200,000 images, and of reading the manifests.

    python benchmarks/tables.py [--rows 200000]

The plain table has image, patient, view and 14 labels, like CheXpert's; the wide one has 40 columns, of which 26 are
used, including 20 labels and the report. Images are empty files. Prints wall time, CPU time, and the peak memory of a
process that does only this.
"""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

LABELS = [f"Finding {number}" for number in range(20)]
PLAIN = 14  # labels in the plain table
_STEPS = {
    "data table": "from cbmir.cli import cli; cli.main(sys.argv[1:], standalone_mode=False)",
    "read_manifest": "from cbmir.manifest import read_manifest; read_manifest(sys.argv[1])",
}
_COST = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime, u.ru_maxrss)"


@click.command(help=__doc__)
@click.option("--rows", default=200_000)
def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tables(folder, rows)
        wide = ["--report-column", "report", "--date-column", "date", "--study-column", "study"]
        for name, labels, more in (("plain", LABELS[:PLAIN], []), ("wide", LABELS, wide)):
            manifest = f"{folder}/{name}_manifest.csv"
            words = ["-q", "data", "table", f"{folder}/{name}.csv", "--labels", ",".join(labels), *more]
            measure(name, "data table", [*words, "--view-column", "view", "-o", manifest])
            measure(name, "read_manifest", [manifest])


def write_tables(folder: Path, rows: int) -> None:
    """Write both tables, and an empty file for each row."""
    chance = random.Random(0)
    more = [f"more {number}" for number in range(14)]
    places = [folder / f"{name}.csv" for name in ("plain", "wide")]
    with (
        places[0].open("w", newline="", encoding="utf-8") as plain_file,
        places[1].open("w", newline="", encoding="utf-8") as wide_file,
    ):
        plain, wide = csv.writer(plain_file), csv.writer(wide_file)
        plain.writerow(["image", "patient_id", "view", *LABELS[:PLAIN]])
        wide.writerow(["image", "patient_id", "study", "view", "report", "date", *LABELS, *more])
        for number in range(rows):
            labels = [chance.choice(["1.0", "0.0", "-1.0", ""]) for _ in LABELS]
            report = f"Report {number}. Heart and lungs are normal. No effusion, no pneumothorax. " * 3
            image, patient = f"{number:06}.png", f"p{number // 3}"
            plain.writerow([image, patient, "PA", *labels[:PLAIN]])
            fixed = [image, patient, f"s{number}", "PA", report, "2020-01-31"]
            wide.writerow([*fixed, *labels, *(f"value {chance.random()}" for _ in more)])
            (folder / image).touch()


def measure(table: str, step: str, words: list[str]) -> None:
    code = f"import sys\n{_STEPS[step]}\n{_COST}"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ,
    )  # fmt: skip
    seconds, most = done.stdout.splitlines()[-1].split()
    click.echo(f"{table}, {step}: {time.perf_counter() - start:.1f} s, {float(seconds):.1f} s of CPU time, "
               f"{int(most) / 1024:.0f} MiB at the peak")  # fmt: skip


if __name__ == "__main__":
    main()
