"""Run the steps of benchmarks/gpu.sh, each in its own process, so that a crash or hang affects no other step.

    python benchmarks/gpu.py [--wheels DIR] [--out DIR] [--model FILE.onnx] [--minutes 7] [--dry-run]

A step (in gpu_steps.py, or gpu_torch.py for PyTorch) writes each row to OUT/STEP.jsonl at once, so that a step that
runs out of time keeps its measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BATCHES = (1, 8, 32, 128)
#: Modules that the steps need, and the packages that provide them.
NEEDED = {
    "torch": "torch", "torchvision": "torchvision", "onnx": "onnx", "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime-gpu", "cuda.bindings": "cuda-python", "click": "click", "numpy": "numpy",
    "PIL": "pillow", "tqdm": "tqdm", "usearch": "usearch",
}  # fmt: skip
#: Step -> its time limit in seconds, what it does, and whether it needs a GPU.
STEPS = {
    "machine": (60, "the card, its driver and versions, and the bf16 peak that a large matrix product attains", True),
    "export": (120, "a model as float32 and float16 files, and as TensorRT plans if TensorRT is installed", False),
    "parity": (90, "every engine that works here against ONNX Runtime on the CPU", False),
    "engines": (75, "milliseconds of each engine, host to host", True),
    "torch": (90, "milliseconds of PyTorch eager and channels_last, by CUDA events", True),
    "training": (45, "images per second of training, and its share of the peak", True),
    "compile": (90, "milliseconds of torch.compile, by CUDA events", True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder of wheels of missing packages")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), metavar="DIR", help="folder for the figures")
    parser.add_argument("--model", type=Path, metavar="FILE.onnx", help="a file of 'cbmir export', not random weights")
    parser.add_argument("--minutes", type=float, default=7, help="time limit of all steps together")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and exit")
    chosen = parser.parse_args()
    if chosen.wheels and not chosen.wheels.is_dir():
        parser.error(f"--wheels {chosen.wheels}: expected a folder of wheels, found none")
    if chosen.model and not chosen.model.is_file():
        parser.error(f"--model {chosen.model}: expected a model file, found none")
    if not 0 < chosen.minutes <= 8:
        parser.error(f"--minutes {chosen.minutes:g}: expected more than 0 and at most 8")
    return chosen


def main() -> int:
    chosen = arguments()
    deadline = time.monotonic() + 60 * chosen.minutes
    has_card, card = find_card()
    steps = [name for name, (_, _, needs_card) in STEPS.items() if has_card or not needs_card]
    if chosen.model:
        chosen.model = chosen.model.resolve()
    say(card)
    missing = [package for module, package in NEEDED.items() if not is_installed(module)]
    if chosen.dry_run:
        say(f"Would install: {' '.join(missing) or 'nothing'}{f' from {chosen.wheels}' if chosen.wheels else ''}")
        for name in steps:
            seconds, what, _ = STEPS[name]
            say(f"Would run {name}: {what} (at most {seconds} s)")
        say(f"Would write {chosen.out}/gpu.md and gpu.json within {chosen.minutes:g} minutes")
        return 0
    if missing and not install(missing, chosen.wheels, deadline):
        return 2
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in steps if not run(name, chosen, deadline)]
    rows = [row for name in steps for row in read(chosen.out / f"{name}.jsonl")]
    report = table(card, rows, failed)
    (chosen.out / "gpu.json").write_text(json.dumps({"card": card, "failed": failed, "rows": rows}, indent=2) + "\n")
    (chosen.out / "gpu.md").write_text(report)
    say("\n" + report)
    return int(bool(failed) or any(row.get("within") is False for row in rows))


def find_card() -> tuple[bool, str]:
    """Return whether there is an NVIDIA GPU, and a description of it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return False, "No NVIDIA GPU found: running only the checks that a CPU can do, without timing."
    return True, answer.stdout.splitlines()[0].strip()


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def install(missing: list[str], wheels: Path | None, deadline: float) -> bool:
    if wheels is None:
        say(f"Missing: {' '.join(missing)}. Install them, or give a folder of wheels with --wheels DIR.")
        return False
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(wheels), *missing]
    say(shlex.join(command))
    try:
        return subprocess.run(command, timeout=deadline - time.monotonic(), check=False).returncode == 0
    except subprocess.TimeoutExpired:
        say("out of time while installing")
        return False


def run(name: str, chosen: argparse.Namespace, deadline: float) -> bool:
    """Run a step within its time limit and the time left. Returns whether it succeeded."""
    rows = chosen.out / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    seconds = min(STEPS[name][0], deadline - time.monotonic())
    if seconds <= 0:
        say(f"{name}: no time left")
        return False
    command = [sys.executable, str(Path(__file__).with_name("gpu_steps.py")), name, str(chosen.out)]
    start = time.monotonic()
    try:
        done = subprocess.run([*command, *([str(chosen.model)] if chosen.model else [])], timeout=seconds, check=False)
        ended = "done" if done.returncode == 0 else f"failed with exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = "out of time; its measurements are kept"
    say(f"{name}: {ended}, {time.monotonic() - start:.0f} s")
    return ended == "done"


def read(path: Path) -> Iterator[Row]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def table(card: str, rows: list[Row], failed: list[str]) -> str:
    """Format all results as Markdown."""
    lines = [f"# {card}", ""]
    lines += [f"{row['name']}: {row['value']}" for row in rows if row["step"] == "machine"]
    checks = [row for row in rows if "engine" in row]
    lines += ["", "| engine | file | error / distance of images | score difference | top-10 overlap | within |",
              "|---|---|---|---|---|---|"] if checks else []  # fmt: skip
    for row in checks:
        found = f"{row['error']:.1e} | {row['score_difference']:.1e} | {row['overlap']:.0%}" if "error" in row else (
            f"{row['problem']} | | ")  # fmt: skip
        lines.append(f"| {row['engine']} | {row['file']} | {found} | {'yes' if row['within'] else 'NO'} |")
    timed = [row for row in rows if "ms" in row or ("batch" in row and "problem" in row)]
    if timed:
        lines += ["", f"| ms per batch of | {' | '.join(map(str, BATCHES))} |", "|---|" + "---|" * len(BATCHES)]
    for name in dict.fromkeys(row["name"] for row in timed):
        cells = {row["batch"]: f"{row['ms']:.2f}" if "ms" in row else "failed" for row in timed if row["name"] == name}
        lines.append(f"| {name} | {' | '.join(cells.get(batch, '') for batch in BATCHES)} |")
    lines += ["", *(f"{row['name']}: {row['value']}" for row in rows if row["step"] == "training")]
    problems = [f"{row.get('name', row['step'])}: {row['problem']}" for row in rows if "problem" in row]
    lines += ["", *problems, *(f"{name}: failed or out of time" for name in failed)]
    return "\n".join(lines).rstrip() + "\n"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
