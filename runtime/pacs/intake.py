"""The intake of DICOM files from any source into the queue, and the return of dead letters to it.

Files are checked for a chest radiograph later, because the sender waits for the answer.
"""

from __future__ import annotations

from enum import Enum

from cbmir.errors import DicomImageError, ImageError, ImageSizeError
from cbmir.runtime.dicom_output import answers_fingerprint, is_own_result
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging.dicom_header import IMAGE_CLASSES, UIDS, Tags, is_uid, pydicom_unlogged
from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_dicom
from cbmir.runtime.imaging.radiograph import ImageLimits, collected_warnings
from cbmir.runtime.logs import fields, pacs_log, what_failed
from cbmir.runtime.pacs.jobs import Arrival
from cbmir.runtime.pacs.queue import DurableQueue


class IntakeStatus(Enum):
    QUEUED = "queued"
    KNOWN = "known"  # already waiting, or done by this model
    OWN = "own result"  # never analysed, to avoid a loop
    NO_IMAGE = "no radiograph"  # by its SOP class


class Intake:
    """The entrance to one queue for files from any source. Many threads may use it."""

    def __init__(self, queue: DurableQueue, live: ReloadableFinder, limits: ImageLimits | None = None) -> None:
        self.queue, self.limits = queue, limits or ImageLimits()
        self._live = live

    def take(self, data: bytes, source: str, *, sop_class_uid: str = "", sop_instance_uid: str = "") -> IntakeStatus:
        """Queue a file from a source (an AE title or another short name). It is on disk when this returns. Raises
        ImageError for an unreadable file or other UIDs than the source announced, and QueueFullError. Refused files are
        counted (`DurableQueue.count_refusal`)."""
        try:
            status = self._take(data, source, sop_class_uid, sop_instance_uid)
        except ImageError as error:
            self.queue.count_refusal(error.reason)
            raise
        if status is IntakeStatus.NO_IMAGE:
            self.queue.count_refusal("SOPClassUID")
        return status

    def _take(self, data: bytes, source: str, sop_class_uid: str, sop_instance_uid: str) -> IntakeStatus:
        if len(data) > self.limits.max_bytes:
            raise ImageSizeError(f"expected at most {self.limits.max_bytes:,} bytes, found {len(data):,}")
        sop_class, arrival, is_own = _read_header(data, source, self.limits)
        announced = (("SOPClassUID", sop_class_uid), ("SOPInstanceUID", sop_instance_uid))
        for (keyword, expected), value in zip(announced, (sop_class, arrival.sop_instance_uid), strict=True):
            if expected and value != expected:
                raise DicomImageError(
                    f"expected the {keyword} that was announced, found another in the data set", keyword
                )
        if is_own:
            return IntakeStatus.OWN
        if sop_class not in IMAGE_CLASSES:
            return IntakeStatus.NO_IMAGE
        with self._live.use() as finder:
            fingerprint = answers_fingerprint(finder.card)
        return IntakeStatus.QUEUED if self.queue.put(data, arrival, fingerprint) else IntakeStatus.KNOWN


def retry(queue: DurableQueue, limits: ImageLimits | None = None) -> tuple[int, int]:
    """Put all dead letters back into the queue. Returns how many were put back, and how many stay because they cannot
    be read. Each is removed once its file is in the queue, so none is lost. Raises QueueFullError; the rest stay."""
    names, back = queue.spool.buried(), 0
    for name in names:
        try:
            data, about = queue.spool.dead_letter(name)
            _, arrival, _ = _read_header(data, str(about["source"]), limits or ImageLimits())
        except (OSError, LookupError, TypeError, ValueError, ImageError) as error:
            pacs_log.warning("stays a dead letter", extra=fields(job=name, reason=what_failed(error)))
            continue
        queue.put(data, arrival, "")
        queue.spool.remove_dead_letter(name)
        back += 1
    return back, len(names) - back


def _read_header(data: bytes, source: str, limits: ImageLimits) -> tuple[str, Arrival, bool]:
    """Return the SOP Class UID, the data for the queue, and whether it is cbmir's own result. Raises ImageError."""
    if not is_dicom(data):
        raise DicomImageError("expected a DICOM file, found another")
    with collected_warnings(), pydicom_unlogged():
        dataset, _ = parse_dicom(data, "object", limits)
        tags = Tags(dataset, "object")
        for keyword in UIDS:
            if not is_uid(tags.text(keyword)):
                raise tags.refusal(keyword, "expected a UID")
        sop_class, instance, study, _ = map(tags.text, UIDS)
        return sop_class, Arrival(instance, study, source), is_own_result(dataset)
