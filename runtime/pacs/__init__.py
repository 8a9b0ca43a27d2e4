"""The runtime inside a PACS: radiographs come in from any number of sources, results go back, and none is lost.

::

    PacsNode (C-STORE) ──┐                                             ┌── StoreScu (C-STORE)
    OrthancChanges ──────┼─> Intake ─> DurableQueue ─> Workers ─> Outlet ── StowRs (STOW-RS)
    QidoPolling ─────────┘              (on disk)                      └── Folder

    intake      the header is looked at, own results are left alone, the rest is queued
    queue       what is acknowledged is on disk until it is answered, refused or given up (database, known, spool, jobs)
    worker      waits for a study to be quiet, analyses, keeps the results, hands them on; retries, dead letters
    running     all of it together, with its signals: stop, and a new model or gallery

For research, not for diagnosis. docs/pacs.md tells how it is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbmir.errors import require
from cbmir.runtime.pacs.dicomweb import DicomWeb, OrthancRest
from cbmir.runtime.pacs.following import Following, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.intake import Intake, Taken
from cbmir.runtime.pacs.jobs import Arrival, Job, Made
from cbmir.runtime.pacs.outlets import Address, Folder, Outlet, StoreScu, StowRs
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.running import run
from cbmir.runtime.pacs.tls import Tls
from cbmir.runtime.pacs.worker import Workers
from cbmir.signals import signals_held

if TYPE_CHECKING:
    from cbmir.runtime.pacs.node import PacsNode

__all__ = [
    "Address",
    "Arrival",
    "DicomWeb",
    "DurableQueue",
    "Folder",
    "Following",
    "Intake",
    "Job",
    "Made",
    "OrthancChanges",
    "OrthancRest",
    "Outlet",
    "PacsNode",
    "QidoPolling",
    "StoreScu",
    "StowRs",
    "Taken",
    "Tls",
    "Workers",
    "run",
    "signals_held",
]


def __getattr__(name: str) -> object:
    """`PacsNode` is imported when asked for: it needs pynetdicom."""
    if name != "PacsNode":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("pynetdicom", "dicom")
    from cbmir.runtime.pacs.node import PacsNode

    return PacsNode
