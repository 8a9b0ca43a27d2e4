"""`cbmir pacs follow` analyses new radiographs of a PACS; `cbmir pacs retry` requeues those that failed."""

from __future__ import annotations

import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import click

from cbmir.cli.options import command, json_option, option, print_answer
from cbmir.cli.pacs.service import SignalsHeldCommand, log_safely, pacs_service, service_options, state_option
from cbmir.errors import UserError, require


@command(
    "cbmir pacs follow --orthanc http://127.0.0.1:8042 --model model.onnx --gallery gallery",
    "cbmir pacs follow --dicomweb https://pacs.example/dicom-web --since 2026-01-01 --model model.onnx",
    cls=SignalsHeldCommand,
)
@option("--orthanc", metavar="URL", help="Follow the change feed of an Orthanc that has the DICOMweb plugin.")
@option("--dicomweb", metavar="URL", help="Ask a DICOMweb server for new studies by QIDO-RS.")
@option("--since", metavar="DAY|NUMBER", help="With --dicomweb the day of the oldest studies, YYYY-MM-DD; with "
        "--orthanc the number of the change to begin after, 0 for all. Meant for the first start: it overrides the "
        "saved position.  [default: where it stopped; at first, from now on]")  # fmt: skip
@option("--interval", type=click.FloatRange(0.1), default=10.0, metavar="SECONDS", help="Time between requests.")
@service_options
def follow(orthanc: str | None, dicomweb: str | None, since: str | None, interval: float, **common: Any) -> None:
    """Follow a PACS: read its new radiographs by WADO-RS, and store results by STOW-RS (docs/pacs.md).

    Credentials are read from ~/.netrc. SIGTERM finishes the work in progress, a second one stops at once; SIGHUP
    reloads model and gallery.

    Research use only. Not a medical device, not for diagnosis.
    """
    require("requests", "dicom")
    from cbmir.runtime.pacs.dicomweb import DicomWeb, OrthancRest
    from cbmir.runtime.pacs.polling import Follower, OrthancChanges, QidoPolling

    if (orthanc is None) == (dicomweb is None):
        raise click.UsageError("expected one of --orthanc and --dicomweb")
    number, day = (_number(since), None) if orthanc else (None, _day(since))
    url = f"{orthanc.rstrip('/')}/dicom-web" if orthanc else str(dicomweb)
    web = DicomWeb(url)
    # A second client sends the results: a shutdown interrupts following, but not sending.
    with pacs_service(lambda: DicomWeb(url), **common) as (intake, start):
        feed: OrthancChanges | QidoPolling
        if orthanc:
            feed = OrthancChanges(OrthancRest(orthanc), web, intake, since=number)
        else:
            feed = QidoPolling(web, intake, since=day)
        start(Follower(feed, interval=interval), lambda: f"following {orthanc or dicomweb}")


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


@command("cbmir pacs retry --state cbmir-pacs")
@state_option
@json_option
def retry(state: Path, as_json: bool) -> None:
    """Put dead letters back into the queue, once the cause of their failure is fixed (docs/pacs.md).

    Stop the node or follower first: only one process can open the queue. Its next start processes them.
    """
    require("pydicom", "dicom")
    from cbmir.runtime.pacs.intake import retry as put_back
    from cbmir.runtime.pacs.jobs import DATABASE
    from cbmir.runtime.pacs.queue import DurableQueue

    if not (state / DATABASE).exists():
        raise UserError(f"expected the folder of a queue, found none at {state}; name it with --state")
    log_safely()
    with DurableQueue(state, sys.maxsize) as queue:
        back, left = put_back(queue)
    text = f"{back} dead letters are back in the queue, {left} stay"
    print_answer(as_json, {"back": back, "left": left}, text)
