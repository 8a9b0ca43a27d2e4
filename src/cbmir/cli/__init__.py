"""The command line.

Each command is in a file of the same name: `cbmir train` in `train.py`, `cbmir index build` in `index/build.py`. Three
files hold several: `data.py` and `data_sets.py` the group `cbmir data`, and `index/maintenance.py` the small `info`,
`verify`, `rebuild` and `compact`. `commands.py` says in which file each command is; `options.py` has what several
commands share.
"""

from __future__ import annotations

from cbmir.cli.commands import cli, main

__all__ = ["cli", "main"]
