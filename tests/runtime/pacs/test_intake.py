"""Objects on arrival: those that are queued, passed over, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydicom.uid import Comprehensive3DSRStorage

from cbmir.errors import DicomImageError, NotAnImageError
from cbmir.runtime.pacs.intake import Intake, IntakeStatus
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import without


def test_reports_of_others_are_not_images(
    intake: Intake, queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    assert intake.take(radiograph(SOPClassUID=Comprehensive3DSRStorage), "SENDER") is IntakeStatus.NO_IMAGE
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", DicomImageError), (b"\x89PNG\r\n\x1a\n" + bytes(200), DicomImageError), (None, NotAnImageError)],
)
def test_unreadable_files_are_refused(
    intake: Intake, radiograph: Callable[..., bytes], data: bytes | None, expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        intake.take(radiograph()[:200] if data is None else data, "SENDER")


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
def test_invalid_uids_are_refused_on_arrival(intake: Intake, radiograph: Callable[..., bytes]) -> None:
    """Once an image is acknowledged, its sender is not told any more."""
    with pytest.raises(DicomImageError, match=r"SeriesInstanceUID .*expected a UID"):
        intake.take(radiograph(SeriesInstanceUID="series 1"), "SENDER")


def test_announced_uids_must_match(intake: Intake, radiograph: Callable[..., bytes]) -> None:
    with pytest.raises(DicomImageError, match="SOPInstanceUID that was announced"):
        intake.take(radiograph(), "SENDER", sop_instance_uid="1.2.3")
    with pytest.raises(DicomImageError, match=r"SOPInstanceUID \(0008,0018\)"):
        intake.take(without(radiograph(), "SOPInstanceUID"), "SENDER")
