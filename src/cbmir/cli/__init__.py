"""The command line.

Most commands are in a file of the same name: `cbmir train` in `train.py`, `cbmir index build` in `index/build.py`. Some
files define several: `data.py` and `data_sets.py` the group `cbmir data`, `index/contents.py` and
`index/maintenance.py` the smaller commands of `cbmir index`. `commands.py` maps each command to its file, and
`options.py` has shared options and helpers.
"""

from __future__ import annotations

from cbmir.cli.commands import cli, main

__all__ = ["cli", "main"]
