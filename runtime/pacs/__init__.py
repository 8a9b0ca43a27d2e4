"""The runtime inside a PACS: radiographs come in from any number of sources, results go back, and none is lost.

::

    StorageScp (C-STORE) ──┐                                             ┌── StoreScu (C-STORE)
    OrthancChanges ──────┼─> Intake ─> DurableQueue ─> Workers ─> Destination ── StowRs (STOW-RS)
    QidoPolling ─────────┘              (on disk)                      └── Folder

    intake      the header is looked at, own results are left alone, the rest is queued
    queue       what is acknowledged is on disk until it is answered, refused or given up (database, known, spool, jobs)
    worker      waits for a study to be quiet, analyses, keeps the results, hands them on; retries, dead letters
    running     all of it together, with its signals: stop, and a new model or gallery

For research, not for diagnosis. docs/pacs.md tells how it is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports
from cbmir.process import signals_held
from cbmir.runtime.pacs.destinations import Address, Destination, Folder, StoreScu, StowRs
from cbmir.runtime.pacs.dicomweb import DicomWeb, OrthancRest
from cbmir.runtime.pacs.intake import Intake, IntakeStatus
from cbmir.runtime.pacs.jobs import Arrival, Job, ResultObject
from cbmir.runtime.pacs.polling import Following, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.service import run
from cbmir.runtime.pacs.tls import Tls
from cbmir.runtime.pacs.worker import Workers

if TYPE_CHECKING:
    from cbmir.runtime.pacs.storage_scp import StorageScp

__getattr__ = lazy_imports(__name__, {"StorageScp": "cbmir.runtime.pacs.storage_scp"}, needs=("pynetdicom", "dicom"))

__all__ = [
    "Address",
    "Arrival",
    "Destination",
    "DicomWeb",
    "DurableQueue",
    "Folder",
    "Following",
    "Intake",
    "IntakeStatus",
    "Job",
    "OrthancChanges",
    "OrthancRest",
    "QidoPolling",
    "ResultObject",
    "StorageScp",
    "StoreScu",
    "StowRs",
    "Tls",
    "Workers",
    "run",
    "signals_held",
]
