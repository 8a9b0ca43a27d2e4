"""How long a table of 200,000 images takes, and how much memory: `cbmir data table`, and reading its manifest.

    python benchmarks/tables.py [--rows 200000]

The table has 40 columns, of which 26 are used; images are empty files. Prints seconds of wall and processor, and the
most memory of a process that does only this.
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
        write_table(folder, rows)
        words = ["-q", "data", "table", f"{folder}/table.csv", "--labels", ",".join(LABELS), "--view-column", "view"]
        words += ["--report-column", "report", "--date-column", "date", "--study-column", "study"]
        measure("data table", [*words, "-o", f"{folder}/manifest.csv"])
        measure("read_manifest", [f"{folder}/manifest.csv"])


def write_table(folder: Path, rows: int) -> None:
    """The table, and an empty file for each row."""
    chance = random.Random(0)
    more = [f"more {number}" for number in range(14)]
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "patient_id", "study", "view", "report", "date", *LABELS, *more])
        for number in range(rows):
            labels = [chance.choice(["1.0", "0.0", "-1.0", ""]) for _ in LABELS]
            report = f"Report {number}. Heart and lungs are normal. No effusion, no pneumothorax. " * 3
            fixed = [f"{number:06}.png", f"p{number // 3}", f"s{number}", "PA", report, "2020-01-31"]
            writer.writerow([*fixed, *labels, *(f"value {chance.random()}" for _ in more)])
            (folder / f"{number:06}.png").touch()


def measure(step: str, words: list[str]) -> None:
    code = f"import sys\n{_STEPS[step]}\n{_COST}"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ,
    )  # fmt: skip
    seconds, most = done.stdout.splitlines()[-1].split()
    click.echo(f"{step}: {time.perf_counter() - start:.1f} s, {float(seconds):.1f} s of processor, "
               f"{int(most) / 1024:.0f} MiB at most")  # fmt: skip


if __name__ == "__main__":
    main()
