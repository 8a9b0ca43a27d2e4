"""`cbmir doctor`: what is installed, what works, and how to get the rest."""

from __future__ import annotations

import click

from cbmir.cli.options import json_option, print_json


@click.command(epilog="\b\nExample:\n  cbmir doctor\n  cbmir doctor --json > doctor.json")
@json_option
def doctor(as_json: bool) -> None:
    """Say what is installed here, which engines and devices really work, and how to get what is missing."""
    from cbmir.doctor import examine, text

    report = examine()
    if as_json:
        print_json(report)
    else:
        click.echo(text(report))
