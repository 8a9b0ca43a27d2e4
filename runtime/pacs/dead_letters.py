"""Dead letters back into the queue, once what they failed for is mended."""

from __future__ import annotations

from cbmir.errors import ImageError
from cbmir.runtime.pacs.events import fields, log, what_failed
from cbmir.runtime.pacs.intake import Header
from cbmir.runtime.pacs.jobs import Arrival
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.radiograph import Limits


def retry(queue: DurableQueue, limits: Limits | None = None) -> tuple[int, int]:
    """Put every dead letter back into the queue, as if its sender had sent it again: how many were, and how many stay
    since one of their files is gone or not to be understood, which is logged.

    A dead letter goes once its file is in the queue, so a process that ends meanwhile loses none. Raises QueueFullError
    where the disk is full; the rest stays.
    """
    names, back = queue.spool.buried(), 0
    for name in names:
        try:
            data, about = queue.spool.dig_up(name)
            header, source = Header.read(data, limits or Limits()), str(about["source"])
        except (OSError, LookupError, TypeError, ValueError, ImageError) as error:
            log.warning("stays a dead letter", extra=fields(job=name, reason=what_failed(error)))
            continue
        queue.put(data, Arrival(header.sop_instance_uid, header.study_instance_uid, source), "")
        queue.spool.forget(name)
        back += 1
    return back, len(names) - back
