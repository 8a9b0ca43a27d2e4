"""Shared by `cbmir pacs node` and `follow`: options, and the service that both run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.cli.options import (
    Command,
    announce,
    finder_options,
    gallery_option,
    model_option,
    option,
    threads_option,
    together,
)
from cbmir.process import signals_held, threads_each

if TYPE_CHECKING:
    from cbmir.runtime.pacs.destinations import Destination
    from cbmir.runtime.pacs.intake import Intake
    from cbmir.runtime.pacs.service import ImageSource

state_option = option("--state", type=click.Path(path_type=Path, resolve_path=True), default=Path("cbmir-pacs"),
                      envvar="STATE_DIRECTORY", show_envvar=True, metavar="DIR",
                      help="Folder of the queue: waiting images and dead letters. It is patient data.")  # fmt: skip
#: Options that `node` and `follow` share: the arguments of `pacs_service`.
service_options = together(
    model_option,
    gallery_option("findings only"),
    state_option,
    option("--sr", is_flag=True, help="Answer with a structured report (TID 1500). The default."),
    option("--sc", is_flag=True, help="Answer with a picture of the results (Secondary Capture)."),
    option("--kos", is_flag=True, help="Answer with a selection of the patient's own similar priors."),
    option("--settle", type=click.FloatRange(0), default=5.0, metavar="SECONDS",
           help="Start on a study when no image of it has arrived for this long."),
    option("--workers", type=click.IntRange(1), default=2, help="Images analysed at once."),
    option("--capacity", type=click.IntRange(1), default=10_000, help="Limit of waiting images (docs/pacs.md)."),
    option("--attempts", type=click.IntRange(1), default=12,
           help="Attempts before a failing image becomes a dead letter: the default takes 3.5 hours. While the "
           "archive, the gallery or the engine is unavailable, it is retried for seven days."),
    threads_option,
    finder_options,
)  # fmt: skip


class SignalsHeldCommand(Command):
    """A command that holds signals before it parses options, since loading the pseudonyms' key imports numpy."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with ExitStack() as held:
            if "--help" not in args:
                held.enter_context(signals_held())
            rest = super().parse_args(ctx, args)
            ctx.call_on_close(held.pop_all().close)
        return rest


@contextmanager
def pacs_service(
    open_destination: Callable[[], Destination], *, model: Path, gallery: str | None, state: Path, sr: bool, sc: bool,
    kos: bool, settle: float, workers: int, capacity: int, attempts: int, threads: int | None, **opening: Any,
) -> Iterator[tuple[Intake, Callable[[ImageSource, Callable[[], str]], None]]]:  # fmt: skip
    """Yield the intake, and a function that runs a source until a signal ends it, and announces its address."""
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.hot_reload import ReloadableFinder
    from cbmir.runtime.imaging.decoder_process import DecoderPool
    from cbmir.runtime.pacs.intake import Intake
    from cbmir.runtime.pacs.queue import DurableQueue
    from cbmir.runtime.pacs.service import run
    from cbmir.runtime.pacs.worker import Workers

    kinds = [kind for kind, wanted in (("sr", sr), ("sc", sc), ("kos", kos)) if wanted] or ["sr"]
    log_safely()
    with ExitStack() as stack:
        queue = stack.enter_context(DurableQueue(state, capacity, quiet=settle, attempts=attempts))
        destination = open_destination()  # after the queue, which locks the folder
        decoders = stack.enter_context(DecoderPool(workers))
        open_finder = partial(
            Finder.open, model, gallery, threads=threads_each(threads, workers), read=decoders.read, **opening
        )
        finder = stack.enter_context(ReloadableFinder(open_finder))

        def start(source: ImageSource, where: Callable[[], str]) -> None:
            crew = Workers(queue, finder, destination, kinds=kinds, count=workers)
            with finder.use() as opened:
                notes = opened.card.notes
            run(queue, crew, [source], finder, lambda: announce(where(), notes))

        yield Intake(queue, finder), start


def log_safely() -> None:
    """Log as JSON lines, without the messages of other libraries, which quote tags and UIDs of images."""
    from cbmir.runtime.logs import log_as_json

    log_as_json()
    logging.getLogger("pynetdicom").setLevel(logging.CRITICAL + 1)
