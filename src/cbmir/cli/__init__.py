"""The command line. One file a group of commands; each imports what it needs inside its command, so that
`cbmir query` starts without torch and `cbmir --help` without numpy.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, NoReturn

import click

from cbmir import __version__
from cbmir.errors import CbmirError

# command -> module of cbmir.cli that defines it, in the order of the work
_COMMANDS = {
    "data": "data",
    "train": "train",
    "evaluate": "train",
    "benchmark": "benchmark",
    "benchmark-cell": "benchmark",
    "export": "export",
    "parity": "export",
    "bench": "bench",
    "embed": "embed",
    "index": "index",
    "query": "query",
    "pacs": "pacs",
    "demo": "demo",
    "serve": "serve",
    "doctor": "doctor",
}
# What these say below a warning quotes an image's tags, a patient's name or a UID among them.
_QUOTE_PATIENTS = (
    "PIL", "pydicom", "highdicom", "pynetdicom", "dicomweb_client", "urllib3", "pylibjpeg", "libjpeg", "openjpeg",
    "rle",
)  # fmt: skip


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"cbmir.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nThe five steps from nothing to a browser:\n"
    "  cbmir data phantom -n 800 -o phantoms\n"
    "  cbmir train phantoms/manifest.csv -o run --encoder resnet18 --image-size 64 --epochs 10\n"
    "  cbmir export run -o model.onnx --fp16\n"
    "  cbmir index build model.onnx phantoms/manifest.csv -o gallery\n"
    "  cbmir demo model.onnx gallery\n"
    "\n\b\nFirst aid: 'cbmir doctor' says what is installed, what works here, and how to get the rest.\n"
    "\n\b\nExit codes: 0 done; 1 it failed, or a limit was missed; 2 something given was not as expected: an\n"
    "argument, a file, a folder to write to, or some of the images (the others are done); 130 stopped by Ctrl-C.",
)
@click.version_option(__version__, prog_name="cbmir")
@click.option("-v", "--verbose", count=True, help="Say more (-vv: everything).")
@click.option("-q", "--quiet", is_flag=True, help="Say only warnings and errors.")
def cli(verbose: int, quiet: bool) -> None:
    """Find chest X-rays that are alike, and say which findings they show.

    Research use only. Not a medical device, not for diagnosis.
    """
    level = logging.WARNING if quiet else logging.DEBUG if verbose > 1 else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    # Other libraries speak up only when everything is asked for.
    if verbose < 2:
        logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("cbmir").setLevel(logging.DEBUG if verbose else level)
    for name in _QUOTE_PATIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line. Expected errors print no traceback. Exit codes as `cbmir --help` says."""
    try:
        result: Any = cli.main(args=args, prog_name="cbmir", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except CbmirError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that may not be written
        logging.getLogger("cbmir").debug("raised here:", exc_info=error)
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        sys.exit(130)
