"""`cbmir doctor`: what is installed, what works, and how to get the rest."""

from __future__ import annotations

import json

import click


@click.command(epilog="\b\nExample:\n  cbmir doctor\n  cbmir doctor --json > doctor.json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what is installed here, which engines and devices really work, and how to get what is missing."""
    from cbmir.doctor import examine, text

    report = examine()
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else text(report))
