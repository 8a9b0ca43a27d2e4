"""Options that several commands share."""

from __future__ import annotations

import click

#: The choices are `cbmir.runtime.engine.PROVIDERS`, which is not imported here: `--help` must be quick.
provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "tensorrt"]),
    default="cpu",
    show_default=True,
    help="What runs the model; an error if it is not there.",
)
