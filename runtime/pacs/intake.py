"""What every source does with a DICOM file: it looks at the header, leaves cbmir's own results alone, queues the rest.

Whether it is a chest radiograph is not asked here: a sender waits for the answer.

Dead letters back into the queue, once what they failed for is mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cbmir.errors import DicomImageError, ImageError, ImageSizeError
from cbmir.runtime.dicom_output import answers_fingerprint, is_own_result
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging.dicom_header import IMAGE_CLASSES, UIDS, Tags, pydicom_unlogged
from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_dicom
from cbmir.runtime.imaging.radiograph import ImageLimits, collected_warnings
from cbmir.runtime.pacs.jobs import Arrival
from cbmir.runtime.pacs.log import fields, log, what_failed
from cbmir.runtime.pacs.queue import DurableQueue


class IntakeStatus(Enum):
    """What became of a file."""

    QUEUED = "queued"
    KNOWN = "known"  # waiting already, or done by this model
    OWN = "own result"  # never analysed: no loop
    NO_IMAGE = "no radiograph"  # by its SOP class


@dataclass(frozen=True)
class Header:
    """What is read of a file before it is queued."""

    sop_class_uid: str
    sop_instance_uid: str
    study_instance_uid: str
    is_own: bool

    @classmethod
    def read(cls, data: bytes, limits: ImageLimits) -> Header:
        """Raises ImageError for what is no DICOM file, is damaged, or lacks one of its four UIDs."""
        if not is_dicom(data):
            raise DicomImageError("expected a DICOM file, found another")
        with collected_warnings(), pydicom_unlogged():
            dataset, _ = parse_dicom(data, "object", limits)
            tags = Tags(dataset, "object")
            for keyword in UIDS:
                if not tags.text(keyword):
                    raise tags.refusal(keyword, "expected a UID")
            sop_class, instance, study, _ = map(tags.text, UIDS)
            return cls(sop_class, instance, study, is_own_result(dataset))


class Intake:
    """Files of any source into one queue. Safe from many threads."""

    def __init__(self, queue: DurableQueue, live: ReloadableFinder, limits: ImageLimits | None = None) -> None:
        self.queue, self.limits = queue, limits or ImageLimits()
        self._live = live

    def take(self, data: bytes, source: str, *, sop_class_uid: str = "", sop_instance_uid: str = "") -> IntakeStatus:
        """Queue a file of a source (an AE title or another short name): on disk when this returns.

        The UIDs are those that the source announced; DicomImageError where the file has others. Raises ImageError for
        what is no readable DICOM file, QueueFullError.
        """
        if len(data) > self.limits.max_bytes:
            raise ImageSizeError(f"expected at most {self.limits.max_bytes:,} bytes, found {len(data):,}")
        header = Header.read(data, self.limits)
        announced = (("SOPClassUID", sop_class_uid), ("SOPInstanceUID", sop_instance_uid))
        found = (header.sop_class_uid, header.sop_instance_uid)
        for (keyword, expected), value in zip(announced, found, strict=True):
            if expected and value != expected:
                raise DicomImageError(f"expected the {keyword} that was announced, found another in the data set")
        if header.is_own:
            return IntakeStatus.OWN
        if header.sop_class_uid not in IMAGE_CLASSES:
            return IntakeStatus.NO_IMAGE
        with self._live.use() as finder:
            fingerprint = answers_fingerprint(finder.card)
        arrival = Arrival(header.sop_instance_uid, header.study_instance_uid, source)
        return IntakeStatus.QUEUED if self.queue.put(data, arrival, fingerprint) else IntakeStatus.KNOWN


def retry(queue: DurableQueue, limits: ImageLimits | None = None) -> tuple[int, int]:
    """Put every dead letter back into the queue, as if its sender had sent it again: how many were, and how many stay
    since one of their files is gone or not to be understood, which is logged.

    A dead letter goes once its file is in the queue, so a process that ends meanwhile loses none. Raises QueueFullError
    where the disk is full; the rest stays.
    """
    names, back = queue.spool.buried(), 0
    for name in names:
        try:
            data, about = queue.spool.dig_up(name)
            header, source = Header.read(data, limits or ImageLimits()), str(about["source"])
        except (OSError, LookupError, TypeError, ValueError, ImageError) as error:
            log.warning("stays a dead letter", extra=fields(job=name, reason=what_failed(error)))
            continue
        queue.put(data, Arrival(header.sop_instance_uid, header.study_instance_uid, source), "")
        queue.spool.forget(name)
        back += 1
    return back, len(names) - back
