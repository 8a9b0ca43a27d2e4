"""The command line, run in this process."""

from __future__ import annotations

import pytest

from cbmir.cli import main


def run(*args: object) -> int:
    """Run `cbmir ARGS`. Returns the exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    assert isinstance(stop.value.code, int)
    return stop.value.code
