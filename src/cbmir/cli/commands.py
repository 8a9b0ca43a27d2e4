"""The command tree: names, sections of the help, and the file that defines each command.

A command's file is imported when the command is used, and imports its dependencies inside the function, so
`cbmir query` starts without torch and `cbmir --help` without numpy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

import click

from cbmir import __version__
from cbmir.card import NOT_A_DEVICE
from cbmir.cli.options import Context, examples, log
from cbmir.errors import CbmirError

# Below warnings, these libraries log DICOM tags such as patient names and UIDs.
_QUOTE_PATIENTS = (
    "PIL", "pydicom", "highdicom", "pynetdicom", "requests", "urllib3",
)  # fmt: skip


class CommandGroup(click.Group):
    """A group that lists its commands in sections, and imports each from its file when it is used.

    Args:
        sections: Section of the help -> command -> the module of `cbmir.cli` that defines it. Commands of the section
            "" are hidden.
    """

    context_class = Context

    def __init__(self, sections: Mapping[str, Mapping[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self.modules = {name: module for commands in sections.values() for name, module in commands.items()}
        self.sections = {title: list(commands) for title, commands in sections.items() if title}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self.sections.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        found = vars(import_module(f"cbmir.cli.{self.modules[cmd_name]}")).values()
        return next(one for one in found if isinstance(one, click.Command) and one.name == cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            name, inner = error.command_name, (index, pacs)
            group = next((one.name for one in inner if ctx.command is cli and name in one.modules), None)
            message = group and f"No such command {name!r}. Did you mean '{group} {name}'?"
            near = None if group else self.list_commands(ctx)
            raise click.NoSuchCommand(name, message, possibilities=near, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for title, names in self.sections.items():
            commands = [(name.ljust(widest), self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(limit=sys.maxsize)) for name, one in commands if one])


index = CommandGroup(
    name="index",
    sections={
        "Change": {"build": "index.build"} | dict.fromkeys(("add", "update", "remove", "merge"), "index.contents"),
        "Look after": dict.fromkeys(("info", "verify", "rebuild", "compact", "export", "map"), "index.maintenance"),
    },
    help="Build and maintain a gallery: the labelled images in which neighbours are found.",
    epilog=examples(
        "cbmir index build model.onnx manifest.csv -o gallery",
        "cbmir index add gallery model.onnx new.csv",
        "cbmir index info gallery",
    ),
)
pacs = CommandGroup(
    name="pacs",
    sections={
        "Commands": {"analyze": "pacs.analyze", "node": "pacs.node", "follow": "pacs.follow", "retry": "pacs.follow"}
    },
    help=f"""Analyse the radiographs of a PACS, and return the results as DICOM objects or FHIR.

    {NOT_A_DEVICE}
    """,
    epilog=examples("cbmir pacs analyze chest.dcm -o results --model model.onnx --gallery gallery --sr --sc"),
)


@click.command(
    cls=CommandGroup,
    sections={
        "Data": {"data": "data"},
        "Train and evaluate": {"train": "train", "evaluate": "train"}
        | {"benchmark": "benchmark", "final": "benchmark"},
        "Export": {"export": "export", "parity": "export", "speed": "speed"},
        "Gallery": {"index": "commands", "embed": "embed"},
        "Answer": {"models": "models", "query": "query", "demo": "demo"},
        "Serve and PACS": {"serve": "serve", "pacs": "commands"},
        "Installation": {"doctor": "doctor"},
        "": {"benchmark-cell": "benchmark"},
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nSearch your own images with the model that comes with cbmir:\n  cbmir data dicom archive/ -o "
    "manifest.csv\n  cbmir index build starter manifest.csv -o gallery --split all\n  cbmir query starter gallery "
    "chest.dcm\n\n\b\nFive steps from an empty folder to the demo in the browser:\n  cbmir data phantom -n 800 -o "
    "phantoms\n  cbmir train phantoms/manifest.csv -o run --encoder resnet18 --image-size 64 --epochs 10\n  cbmir "
    "export run -o model.onnx --fp16\n  cbmir index build model.onnx phantoms/manifest.csv -o gallery\n  cbmir demo "
    "model.onnx gallery\n\nIf something does not work: 'cbmir doctor' shows what is installed, what works here, and "
    "how to install the rest.\n\nExit codes: 0 done; 1 failed, or a limit was missed; 2 an argument, an input file, "
    "an output folder or some of the images were not as expected (the other images are done); 130 stopped by Ctrl-C.",
)
@click.version_option(__version__, prog_name="cbmir")
@click.option("-v", "--verbose", count=True, help="Log more (-vv: everything).")
@click.option("-q", "--quiet", is_flag=True, help="Log only warnings and errors.")
def cli(verbose: int, quiet: bool) -> None:
    """Find similar chest X-rays, and the findings that they show.

    Research use only. Not a medical device, not for diagnosis.
    """
    level = logging.WARNING if quiet else logging.DEBUG if verbose > 1 else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    # Other libraries only log warnings, except with -vv.
    if verbose < 2:
        logging.getLogger().setLevel(logging.WARNING)
    log.setLevel(logging.DEBUG if verbose else level)
    for name in _QUOTE_PATIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line. Expected errors print no traceback. `cbmir --help` lists the exit codes."""
    try:
        result: Any = cli.main(args=args, prog_name="cbmir", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except (CbmirError, OSError) as error:  # OSError: a full disk, a folder without write permission
        if isinstance(error, OSError):
            log.debug("raised here:", exc_info=error)
        click.echo(f"Error: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        sys.exit(130)
