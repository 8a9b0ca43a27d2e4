"""`cbmir pacs node`, `follow` and `retry`: radiographs from a PACS into a queue, results back, dead letters anew."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.card import NOT_A_DEVICE
from cbmir.cli.options import (
    allow_lateral_option,
    engine_option,
    json_option,
    print_json,
    pseudonyms_option,
    threads_each,
    threads_option,
)
from cbmir.errors import UserError, require
from cbmir.process import signals_held

if TYPE_CHECKING:
    from cbmir.runtime.gallery.pseudonyms import Pseudonyms
    from cbmir.runtime.pacs.destinations import Destination
    from cbmir.runtime.pacs.intake import Intake
    from cbmir.runtime.pacs.service import Source

_state_option = click.option(
    "--state", type=click.Path(path_type=Path, resolve_path=True), default=Path("cbmir-pacs"), show_default=True,
    envvar="STATE_DIRECTORY", show_envvar=True, metavar="DIR",
    help="The queue's folder: what waits, and dead letters. It is patient data.",
)  # fmt: skip
_SHARED = (
    click.option("--model", required=True, type=click.Path(path_type=Path), help="A model file, or a folder of them."),
    click.option("--gallery", help="A gallery's folder or milvus: place.  [default: findings only]"),
    _state_option,
    click.option("--sr", is_flag=True, help="Answer with a structured report (TID 1500). The default."),
    click.option("--sc", is_flag=True, help="Answer with a page to look at (Secondary Capture)."),
    click.option("--kos", is_flag=True, help="Answer with a selection of the patient's own similar priors."),
    click.option(
        "--settle", type=click.FloatRange(0), default=5.0, show_default=True, metavar="SECONDS",
        help="Begin with a study when nothing of it has come for so long.",
    ),
    click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Images analysed at once."),
    click.option(
        "--capacity", type=click.IntRange(1), default=10_000, show_default=True, help="Images that may wait; see docs."
    ),
    click.option(
        "--attempts", type=click.IntRange(1), default=12, show_default=True,
        help="Give an image that fails up, as a dead letter, after so many: by default in some three hours. While the "
        "archive, the gallery or the engine is away, it is tried again for seven days.",
    ),
    threads_option,
    allow_lateral_option,
    pseudonyms_option,
    engine_option,
)  # fmt: skip


@dataclass(frozen=True)
class _Common:
    """What both commands are given."""

    model: Path
    gallery: str | None
    state: Path
    sr: bool
    sc: bool
    kos: bool
    settle: float
    workers: int
    capacity: int
    attempts: int
    threads: int | None
    allow_lateral: bool
    pseudonyms: Pseudonyms | None
    engine: str


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SHARED):
        command = option(command)
    return command


class _Held(click.Command):
    """A command that holds signals before an option is read: reading the key of pseudonyms imports numpy."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with ExitStack() as held:
            held.enter_context(signals_held())
            rest = super().parse_args(ctx, args)
            ctx.call_on_close(held.pop_all().close)
        return rest


@click.command(
    cls=_Held,
    epilog="\b\nExample:\n"
    "  cbmir pacs node --model model.onnx --gallery gallery --store-to ORTHANC@127.0.0.1:4242\n"
    "  cbmir pacs node --model model.onnx --host 0.0.0.0 --allow-calling ORTHANC --tls node.pem node.key ca.pem"
)  # fmt: skip
@click.option("--aet", default="CBMIR", show_default=True, help="The node's AE title: senders must call it so.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=11112, show_default=True, help="0: any free one.")
@click.option("--allow-calling", multiple=True, metavar="AET", help="An AE title that may send; give each one.")
@click.option("--allow-any-calling", is_flag=True, help="Let everyone send who reaches --host.")
@click.option(
    "--tls", nargs=3, type=click.Path(path_type=Path), metavar="CERT KEY CA",
    help="TLS both ways, with these PEM files: the node's certificate, its key, and the authorities that are trusted; "
    "who has no certificate of theirs is turned away.",
)  # fmt: skip
@click.option("--store-to", metavar="AET@HOST:PORT", help="Send results there.  [default: files in DIR/results]")
@click.option("--max-associations", type=click.IntRange(1), default=16, show_default=True, help="Senders at once.")
@_shared
def node(
    aet: str, host: str, port: int, allow_calling: tuple[str, ...], allow_any_calling: bool,
    tls: tuple[Path, Path, Path] | None, store_to: str | None, max_associations: int, **common: Any,
) -> None:  # fmt: skip
    """Be a DICOM node: C-ECHO, C-STORE of radiographs, and results back by C-STORE (docs/pacs.md).

    A sender gets its answer when the image is on disk; from then on none is lost, whatever happens to this process. A
    report is sent at least once and always under the same UID. SIGTERM lets what is begun end, a second one does not;
    SIGHUP opens model and gallery anew.

    Research use only. Not a medical device, not for diagnosis.
    """
    require("pynetdicom", "dicom")
    from cbmir.runtime.pacs.destinations import Address, Folder, StoreScu
    from cbmir.runtime.pacs.storage_scp import StorageScp
    from cbmir.runtime.pacs.tls import Tls
    from cbmir.runtime.sockets import is_loopback

    if not (allow_calling or allow_any_calling or tls or is_loopback(host)):
        raise UserError(f"expected --allow-calling or --tls, since other machines can reach {host}, found neither; "
                        f"--allow-any-calling lets everyone in")  # fmt: skip
    given = _Common(**common)
    files = Tls(*tls) if tls else None
    to = None if store_to is None else Address.parse(store_to)

    def outlet() -> Destination:
        if to is None:
            return Folder(given.state / "results")
        return StoreScu(to, calling=aet, tls=files.client() if files else None)

    with _service(given, outlet) as (intake, start):
        pacs_node = StorageScp(
            intake, ae_title=aet, host=host, port=port, allow_calling=allow_calling,
            tls=files.server() if files else None, max_associations=max_associations,
        )  # fmt: skip
        start(pacs_node, lambda: f"{aet}@{host}:{pacs_node.port}")


@click.command(
    cls=_Held,
    epilog="\b\nExample:\n"
    "  cbmir pacs follow --orthanc http://127.0.0.1:8042 --model model.onnx --gallery gallery\n"
    "  cbmir pacs follow --dicomweb https://pacs.example/dicom-web --since 2026-01-01 --model model.onnx"
)  # fmt: skip
@click.option("--orthanc", metavar="URL", help="Follow the change feed of Orthanc, which has its DICOMweb plugin.")
@click.option("--dicomweb", metavar="URL", help="Ask a DICOMweb server for new studies by QIDO-RS.")
@click.option(
    "--since", metavar="DAY|NUMBER",
    help="With --dicomweb the day of the oldest studies, YYYY-MM-DD; with --orthanc the number of the change to begin "
    "after, 0 for all. At every start: it is for the first one.  [default: where it was left, at first from now on]",
)  # fmt: skip
@click.option(
    "--interval", type=click.FloatRange(0.1), default=10.0, show_default=True, metavar="SECONDS",
    help="Ask again after so long.",
)  # fmt: skip
@_shared
def follow(orthanc: str | None, dicomweb: str | None, since: str | None, interval: float, **common: Any) -> None:
    """Follow a PACS: read its new radiographs by WADO-RS, and store results by STOW-RS (docs/pacs.md).

    Credentials are read from ~/.netrc. SIGTERM lets what is begun end, a second one does not; SIGHUP opens model and
    gallery anew.

    Research use only. Not a medical device, not for diagnosis.
    """
    require("dicomweb_client", "dicom")
    from cbmir.runtime.pacs.destinations import StowRs
    from cbmir.runtime.pacs.dicomweb import DicomWeb, OrthancRest
    from cbmir.runtime.pacs.polling import Following, OrthancChanges, QidoPolling

    if (orthanc is None) == (dicomweb is None):
        raise click.UsageError("expected one of --orthanc and --dicomweb")
    number, day = (_number(since), None) if orthanc else (None, _day(since))
    web = DicomWeb(f"{orthanc.rstrip('/')}/dicom-web" if orthanc else str(dicomweb))
    with _service(_Common(**common), lambda: StowRs(web)) as (intake, start):
        feed: OrthancChanges | QidoPolling
        if orthanc:
            feed = OrthancChanges(OrthancRest(orthanc), web, intake, since=number)
        else:
            feed = QidoPolling(web, intake, since=day)
        start(Following(feed, interval=interval), lambda: f"following {orthanc or dicomweb}")


@click.command(epilog="\b\nExample:\n  cbmir pacs retry --state cbmir-pacs")
@_state_option
@json_option
def retry(state: Path, as_json: bool) -> None:
    """Put dead letters back into the queue, once what they failed for is mended (docs/pacs.md).

    The node or follower must be stopped meanwhile: one process has the queue at a time. Its next start works them off.
    """
    require("pydicom", "dicom")
    from cbmir.runtime.pacs.intake import retry as put_back
    from cbmir.runtime.pacs.queue import DATABASE, DurableQueue

    if not (state / DATABASE).exists():
        raise UserError(f"expected the folder of a queue, found none at {state}; name it with --state")
    _log_safely()
    with DurableQueue(state, sys.maxsize) as queue:
        back, left = put_back(queue)
    if as_json:
        print_json({"back": back, "left": left})
    else:
        click.echo(f"{back} dead letters are back in the queue, {left} stay")


@contextmanager
def _service(
    given: _Common, open_outlet: Callable[[], Destination]
) -> Iterator[tuple[Intake, Callable[[Source, Callable[[], str]], None]]]:
    """What takes files in, and a function that runs a source until a signal ends it, and says when it is ready."""
    from cbmir.runtime.finder import Finder
    from cbmir.runtime.hot_reload import ReloadableFinder
    from cbmir.runtime.pacs.intake import Intake
    from cbmir.runtime.pacs.queue import DurableQueue
    from cbmir.runtime.pacs.service import run
    from cbmir.runtime.pacs.worker import Workers

    kinds = [kind for kind in ("sr", "sc", "kos") if getattr(given, kind)] or ["sr"]
    _log_safely()
    with ExitStack() as stack:
        queue = stack.enter_context(
            DurableQueue(given.state, given.capacity, quiet=given.settle, attempts=given.attempts)
        )
        outlet = open_outlet()  # now that the folder is this process's own
        open_finder = partial(
            Finder.open, given.model, given.gallery, engine=given.engine, pseudonyms=given.pseudonyms,
            threads=threads_each(given.threads, given.workers), allow_lateral=given.allow_lateral,
        )  # fmt: skip
        live = stack.enter_context(ReloadableFinder(open_finder))

        def start(source: Source, where: Callable[[], str]) -> None:
            def ready() -> None:
                click.echo(f"{where()}  (Ctrl-C ends it)\n{NOT_A_DEVICE}")

            run(queue, Workers(queue, live, outlet, kinds=kinds, count=given.workers), [source], live, ready)

        yield Intake(queue, live), start


def _log_safely() -> None:
    """Lines of JSON, of cbmir's own messages alone: other libraries quote the tags of images and UIDs."""
    from cbmir.runtime.logs import log_as_json

    log_as_json()
    logging.getLogger("pynetdicom").setLevel(logging.CRITICAL + 1)


def _number(since: str | None) -> int | None:
    if since is None or since.isdecimal():
        return None if since is None else int(since)
    raise click.BadParameter(f"expected the number of a change with --orthanc, found {since!r}", param_hint="--since")


def _day(since: str | None) -> date | None:
    try:
        return None if since is None else datetime.strptime(since, "%Y-%m-%d").date()
    except ValueError:
        raise click.BadParameter(
            f"expected a day YYYY-MM-DD with --dicomweb, found {since!r}", param_hint="--since"
        ) from None
