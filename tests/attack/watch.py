"""Run processes with limits on time, and on memory including their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from process_memory import resident_tree

_LOOK = 0.05  # seconds between two checks


def cbmir(*words: object, seconds: float = 60, mebibytes: float = 2048) -> str:
    """Run `cbmir WORDS`. Returns "" after success or an expected error, else what went wrong."""
    return limited([sys.executable, "-m", "cbmir", *map(str, words)], seconds, mebibytes)


def limited(command: Sequence[str], seconds: float, mebibytes: float) -> str:
    """Run a command within limits. Returns like `cbmir`."""
    with tempfile.TemporaryFile("w+") as said:
        start = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() - start > seconds:
                    return f"had not ended after {seconds:g} s"
                if (used := resident_tree(process.pid)) > mebibytes:
                    return f"took {used:.0f} MiB"
                time.sleep(_LOOK)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        text = said.read().strip()
    last = text.splitlines()[-1][:200] if text else "nothing said"
    if "Traceback" in text:
        return f"a traceback: {last}"
    return "" if process.returncode in (0, 1, 2) else f"ended with {process.returncode}: {last}"
