"""The command line.

Each command is in a file of the same name: `cbmir train` in `train.py`, `cbmir index build` in `index/build.py`. Some
files hold several: `data.py` and `data_sets.py` the group `cbmir data`, `index/contents.py` and `index/maintenance.py`
small ones of `cbmir index`, and a few a small one beside a large one. `commands.py` says in which file each command is;
`options.py` has what several commands share.
"""

from __future__ import annotations

from cbmir.cli.commands import cli, main

__all__ = ["cli", "main"]
