"""The command line.

A command stands in the file of its name: `cbmir train` in `train.py`, `cbmir index build` in `index/build.py`. Small
commands of one group share a file. `commands.py` lists them all and has the file of each; `options.py` has what
several commands share.
"""

from __future__ import annotations

from cbmir.cli.commands import cli, main

__all__ = ["cli", "main"]
