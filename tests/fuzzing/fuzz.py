"""Coverage-guided fuzzing (atheris) of the image and table readers and the HTTP upload: `make fuzz`, by hand.

    python tests/fuzzing/fuzz.py [--seconds 600] [--timeout 10] [--target reader|upload|table] [--keep DIR]

It ends after a crash, an unexpected exception (for images any except ImageError, for tables any except ManifestError
and SplitError), a status of 500 or more, ten seconds for one file, or more than a gigabyte of memory; the file is then
in DIR. Minimise it, add it to finds/ (a table as table-…) with a line in README.md there, and fix the bug.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "helpers"))

TARGETS = ("reader", "upload", "table")
LIMITS = ["-rss_limit_mb=1024", "-max_len=65536", "-print_final_stats=1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--timeout", type=int, default=10, help="for one file; more where others use the machine")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--keep", type=Path, default=Path("fuzzing"), help="corpus and finds")
    given = parser.parse_args()
    codes = []
    for target in given.target or TARGETS:
        corpus = given.keep / target
        corpus.mkdir(parents=True, exist_ok=True)
        for name, data in seeds(target).items():
            (corpus / name).write_bytes(data)
        command = [sys.executable, __file__, "--run", target, *LIMITS]
        command += [f"-max_total_time={given.seconds}", f"-timeout={given.timeout}"]
        command += [f"-artifact_prefix={given.keep}/{target}-", str(corpus)]
        codes.append(subprocess.run(command, check=False).returncode)
    return int(any(codes))  # negative after a signal


def seeds(target: str) -> dict[str, bytes]:
    """Valid files for a target, to start with."""
    if target == "table":
        from broken_tables import whole_tables

        return whole_tables()
    from broken_files import whole_files

    return whole_files()


def run(target: str, arguments: list[str]) -> None:
    import atheris

    warnings.simplefilter("error")  # a warning that escapes from a library is a find
    with atheris.instrument_imports(include=["cbmir", "pydicom"]):
        whole = seeds(target)  # imports pydicom
        one_input = {"reader": reader, "upload": upload, "table": table}[target]()
        for data in whole.values():  # triggers all lazy imports
            one_input(data)
    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


def reader() -> Any:
    from cbmir.errors import ImageError
    from cbmir.runtime.imaging.reader import read_image

    def read(data: bytes) -> None:
        try:
            read_image(data, intensity="percentile", allow_lateral=True)
        except ImageError as error:
            if "SECRET" in str(error):
                raise RuntimeError("the message names the patient") from error

    return read


def table() -> Any:
    import logging
    import tempfile

    from broken_tables import read_as_table

    logging.disable()
    folder = Path(tempfile.mkdtemp())
    return lambda data: read_as_table(data, folder)


def upload() -> Any:
    """The HTTP service in this process, with a tiny model and without a gallery."""
    import tempfile

    from fastapi.testclient import TestClient

    from cbmir.runtime import Finder
    from cbmir.runtime.hot_reload import ReloadableFinder
    from cbmir.runtime.serving.app import create_app
    from cbmir.runtime.serving.settings import Settings

    sys.path.insert(0, str(HERE.parent))
    from conftest import write_tiny_model

    model = write_tiny_model(Path(tempfile.mkdtemp()) / "tiny.onnx")
    live = ReloadableFinder(lambda: Finder.open(model, threads=1))
    client = TestClient(create_app(live, Settings()), base_url="http://localhost", raise_server_exceptions=False)
    client.__enter__()

    def send(data: bytes) -> None:
        answer = client.post("/v1/analyze", content=data)
        if answer.status_code >= 500 or "SECRET" in answer.text:
            raise RuntimeError(f"answered {answer.status_code}: {answer.text}")

    return send


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
