"""What the queue remembers of objects that it has ended with: those that were answered on disk, the others for now."""

from __future__ import annotations

import hashlib
import sqlite3

from cbmir.runtime.pacs.database import is_there
from cbmir.runtime.pacs.jobs import Job

#: So many objects that were answered are remembered, the oldest are forgotten; and so many that were passed over.
REMEMBERED, PASSED_OVER = 1_000_000, 100_000


class Known:
    """Objects by their SOP Instance UID, content and the model that was asked; of UIDs only the SHA-256 is kept.

    Whoever calls holds the queue's lock.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        # By UID, content and model. Not on disk: the next process may take what this one refuses.
        self._passed_over = dict[bytes, tuple[bytes, str | None]]()

    def answered(self, job: Job, fingerprint: str, report: str) -> None:
        """An object was answered by the model of this fingerprint, with the SR of this UID."""
        row = (_hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), job.digest, fingerprint, report)
        number = self._database.execute(
            "INSERT OR REPLACE INTO done (instance, study, digest, fingerprint, report) VALUES (?, ?, ?, ?, ?)", row
        ).lastrowid
        self._database.execute("DELETE FROM done WHERE number <= ?", ((number or 0) - REMEMBERED,))

    def passed_over(self, job: Job, fingerprint: str | None = None) -> None:
        """An object was refused, or (None) given up: of these `has` knows none, so who sends one again has it tried."""
        self._passed_over[_hashed(job.sop_instance_uid)] = (job.digest, fingerprint)
        if len(self._passed_over) > PASSED_OVER:
            del self._passed_over[next(iter(self._passed_over))]

    def has(self, sop_instance_uid: str, digest: bytes, fingerprint: str) -> bool:
        """Whether this content was answered, or refused, by the model of this fingerprint."""
        uid = _hashed(sop_instance_uid)
        return self._passed_over.get(uid) == (digest, fingerprint) or is_there(
            self._database, "SELECT 1 FROM done WHERE instance = ? AND digest = ? AND fingerprint = ?",
            (uid, digest, fingerprint),
        )  # fmt: skip

    def has_any(self, sop_instance_uid: str) -> bool:
        """Whether an object of this UID was, by whatever model and whatever its content."""
        uid = _hashed(sop_instance_uid)
        return uid in self._passed_over or is_there(self._database, "SELECT 1 FROM done WHERE instance = ?", (uid,))

    def predecessor(self, job: Job, fingerprint: str) -> str:
        """The UID of the SR that the last other model made of an object in this study; empty where there is none."""
        row = self._database.execute(
            "SELECT report FROM done WHERE instance = ? AND study = ? AND fingerprint <> ? AND report <> '' "
            "ORDER BY number DESC LIMIT 1",
            (_hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), fingerprint),
        ).fetchone()
        return "" if row is None else str(row[0])


def _hashed(uid: str) -> bytes:
    return hashlib.sha256(uid.encode()).digest()
