"""Read files in a separate process, which they may crash, stall or fill with data. The tests run it.

    python tests/fuzzing/read_files.py DIR

Prints one line of JSON per file: its name, the outcome, and the peak memory so far (MiB). Exits with a traceback if a
file takes more than ten seconds.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

from cbmir.errors import ImageError
from cbmir.runtime.imaging.reader import read_image

SECONDS = 10


def main(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome = f"{read_image(path.read_bytes(), intensity='percentile', allow_lateral=True).pixels.dtype}"
        except ImageError as error:
            outcome = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"file": path.name, "outcome": outcome, "most": most_memory()}), flush=True)  # noqa: T201


def most_memory() -> int:
    """Peak memory of this process in MiB. `resource` does not work here: its value starts at that of the parent, and a
    test run has more than a gigabyte."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
