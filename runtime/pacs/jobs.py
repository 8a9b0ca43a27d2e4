"""What the queue takes, gives out and keeps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_GROUP_LENGTH = b"\x02\x00\x00\x00UL\x04\x00"  # (0002,0000), of 4 bytes


@dataclass(frozen=True)
class Arrival:
    """What the queue must know of a file: its UIDs, and who sent it (an AE title, or the name of a source)."""

    sop_instance_uid: str
    study_instance_uid: str
    source: str


@dataclass(frozen=True)
class Job:
    """A file being worked on. `name` says nothing of the patient; `received` is a time as `time.time` gives it;
    `attempts` counts this one; `fingerprint` is that of the model whose results are kept, else empty."""

    number: int
    name: str
    sop_instance_uid: str
    study_instance_uid: str
    digest: bytes
    source: str
    received: float
    attempts: int
    fingerprint: str


@dataclass(frozen=True)
class ResultObject:
    """A DICOM object ready to be sent: its kind (`sr`, `sc`, `kos`), SOP Instance UID and file."""

    kind: str
    uid: str
    data: bytes


@dataclass(frozen=True)
class State:
    """How a queue does: how many files wait or are worked on, of these those whose results are made and not sent, how
    many seconds the oldest has been there (0 where none is), and how many dead letters there are."""

    waiting: int
    unsent: int
    oldest_s: float
    dead_letters: int


def content_digest(data: bytes) -> bytes:
    """SHA-256 of a DICOM file without its preamble and File Meta Information (PS3.10 7.1), which is the last sender's:
    an object is the same whichever way it came."""
    start = 0
    if data[128:132] == b"DICM":
        start = 132
        if data[132:140] == _GROUP_LENGTH:
            start = 144 + int.from_bytes(data[140:144], "little")
    return hashlib.sha256(memoryview(data)[start:]).digest()
