"""The parts of DICOMweb (PS3.18) and of Orthanc's REST API that are needed to follow a PACS and to send results.

Lists are limited: a page without new entries ends them, and they have a maximum length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from email.message import Message
from typing import Any, TypeVar
from uuid import uuid4

from cbmir.errors import AnswerSizeError, DeliveryAwayError, DeliveryError, ImageSizeError, PacsAwayError, PacsError
from cbmir.runtime.imaging.dicom_header import is_uid
from cbmir.runtime.logs import fields, pacs_log
from cbmir.runtime.pacs.http_server import HttpServer, PeerAnswer
from cbmir.runtime.pacs.jobs import ResultObject

_Found = TypeVar("_Found")
FILE_TIME = 300.0  # seconds for a whole file
_PAGE, _CHANGES = 200, 20  # entries per page of a search, and of Orthanc's change feed
MOST_STUDIES, MOST_INSTANCES = 200_000, 10_000  # in a search, and in a study
_HEADERS_SIZE = 2**20  # bytes that an answer may have besides the file
_JSON = {"Accept": "application/dicom+json"}
_SERIES, _CLASS, _INSTANCE = "0020000E", "00080016", "00080018"
_STUDY, _DAY, _COUNT = "0020000D", "00080020", "00201208"  # the last: NumberOfStudyRelatedInstances
_MODALITY = "00080060"
_FAILED, _REASON = "00081198", "00081197"  # FailedSOPSequence, and FailureReason in it
_STORED = "00081199"  # ReferencedSOPSequence
_ALREADY_THERE = (0x0111, 45070)  # reasons: PS3.7 C.5.7, and Azure's own
OUT_OF_RESOURCES = range(0xA700, 0xA800)  # statuses and reasons (PS3.4 table B.2-1)


@dataclass(frozen=True)
class StudyFound:
    """A study that QIDO-RS found: its date and the number of its instances, None if the server does not state them."""

    day: date | None
    count: int | None


@dataclass(frozen=True)
class InstanceFound:
    study_uid: str
    series_uid: str
    sop_class_uid: str
    sop_instance_uid: str


class DicomWeb(HttpServer):
    """A DICOMweb server, such as `http://localhost:8042/dicom-web`, as a source and as a destination."""

    def studies_since(self, first: date, modalities: Collection[str]) -> dict[str, StudyFound]:
        """Return studies from a day on with a series of one of these modalities, by their UIDs. Raises PacsError."""
        found: dict[str, StudyFound] = {}
        for modality in modalities:
            query = {"StudyDate": f"{first:%Y%m%d}-", "ModalitiesInStudy": modality, "includefield": _COUNT}
            found |= self._search("studies", "/studies", _STUDY, _study_found, MOST_STUDIES - len(found), **query)
        return found

    def instances(self, study_uid: str, modalities: Collection[str]) -> list[InstanceFound]:
        """Return the instances of a study in series of these modalities or without a modality. Raises PacsError."""
        found: list[InstanceFound] = []
        path = f"/studies/{study_uid}/series"
        every = self._search("series", path, _SERIES, lambda each: _value(each, _MODALITY)[:16], MOST_INSTANCES)
        for series in (uid for uid, modality in every.items() if modality in (*modalities, "")):
            path, most = f"/studies/{study_uid}/series/{series}/instances", MOST_INSTANCES - len(found)
            classes = self._search("instances", path, _INSTANCE, lambda each: _uid(each, _CLASS), most)
            found += [InstanceFound(study_uid, series, sop_class, uid) for uid, sop_class in classes.items()]
        return found

    def _search(
        self, what: str, path: str, tag: str, read: Callable[[dict[str, Any]], _Found], most: int, **query: str
    ) -> dict[str, _Found]:
        """Search by QIDO-RS (PS3.18 10.6), page by page up to an empty one. Returns `read` of each match by UID.

        Raises PacsError if more than `most` are found, or a full page has nothing new. A shorter page with nothing new
        ends the search: the server ignores the offset, and has returned everything.
        """
        found: dict[str, _Found] = {}
        offset = invalid = 0
        while True:
            with self._asking(f"search for {what}"):
                page = self._answer(
                    "GET", path, headers=_JSON, params=query | {"limit": str(_PAGE), "offset": str(offset)}
                ).json()
                page = [page] if isinstance(page, dict) else page or []  # some servers return one without a list
                read_page = {uid: read(each) for each in page if (uid := _uid(each, tag))}
            if not page:
                break
            offset += len(page)
            invalid += sum(not _uid(each, tag) for each in page)
            is_new = not read_page.keys() <= found.keys()
            found |= read_page
            if len(found) + invalid > most:
                raise PacsError(f"{self.url}: expected at most {most:,} {what}, found more; begin at a later date")
            if not is_new:
                why = f"the server returns the same {what} again for every offset"
                if len(page) == _PAGE:
                    raise PacsError(f"{self.url}: {why}: expected the next page, found no way to request it")
                pacs_log.error(f"a list was cut short: {why}", extra=fields(server=self.url, found=len(found)))
                break
        if invalid:
            pacs_log.warning("skipped: no valid UID", extra=fields(server=self.url, count=invalid))
        return found

    def retrieve(self, found: InstanceFound, max_bytes: int) -> bytes | None:
        """Fetch the file by WADO-RS, as it is stored; None if it is gone. Raises PacsError and ImageSizeError."""
        path = f"/studies/{found.study_uid}/series/{found.series_uid}/instances/{found.sop_instance_uid}"
        accepted = {"Accept": 'multipart/related; type="application/dicom"; transfer-syntax=*'}
        try:
            with self._asking("retrieve an instance", FILE_TIME):
                answer = self._answer("GET", path, headers=accepted, most=max_bytes + _HEADERS_SIZE, passed=(404, 410))
                return None if answer.status in (404, 410) else _only_part(answer.body, answer.content_type)
        except AnswerSizeError:
            raise ImageSizeError(f"expected at most {max_bytes:,} bytes, found more") from None

    def send(self, results: Sequence[ResultObject]) -> None:
        """Send results as `destinations.Destination.send`, by STOW-RS (PS3.18 section 10.5), byte for byte."""
        if not results:
            return
        edge = f"cbmir-{uuid4().hex}".encode()  # random: no file contains it
        part = b"--" + edge + b"\r\nContent-Type: application/dicom\r\n\r\n"
        body = b"".join([part + each.data + b"\r\n" for each in results] + [b"--", edge, b"--\r\n"])
        kind = f'multipart/related; type="application/dicom"; boundary={edge.decode()}'
        headers = {"Content-Type": kind, "Accept": "application/dicom+json"}
        try:
            with self._asking("store instances"):
                reasons = _failure_reasons(self._answer("POST", "/studies", data=body, headers=headers, passed=(409,)))
        except PacsAwayError as error:
            raise DeliveryAwayError(str(error)) from error
        except PacsError as error:
            raise DeliveryError(str(error)) from error
        refused = [reason for reason in reasons if reason not in _ALREADY_THERE]
        if refused:
            code = "" if refused[0] is None else f" (reason 0x{refused[0]:04X})"
            error_type = DeliveryAwayError if refused[0] in OUT_OF_RESOURCES else DeliveryError
            raise error_type(f"{self.url}: refused {len(refused)} of {len(results)} results{code}")


class OrthancRest(HttpServer):
    """Orthanc's own REST API, such as `http://localhost:8042`."""

    def changes(self, since: int) -> tuple[list[str], int, bool]:
        """Read a page of the change feed: ids of stable studies, the last change, and whether it is the newest.

        Raises PacsError, also if the feed does not advance.
        """
        with self._asking("read the change feed"):
            page = self._answer("GET", "/changes", params={"since": since, "limit": _CHANGES}).json()
            studies = dict.fromkeys(each["ID"] for each in page["Changes"] if each["ChangeType"] == "StableStudy")
            last, is_newest = int(page["Last"]), bool(page["Done"])
            if len(studies) > _CHANGES or not all(re.fullmatch(r"[0-9A-Za-z-]{1,64}", each) for each in studies):
                raise ValueError("changes that were not requested")
        if last == since and not is_newest:
            raise PacsError(f"{self.url}: expected the change feed to continue from {since}, found that it stays there")
        return list(studies), last, is_newest

    def last_change(self) -> int:
        with self._asking("read the change feed"):
            return int(self._answer("GET", "/changes?last").json()["Last"])

    def study_uid(self, orthanc_id: str) -> str | None:
        """Return the Study Instance UID of a study; None if it is gone."""
        with self._asking("look up a study"):
            answer = self._answer("GET", f"/studies/{orthanc_id}", passed=(404,))
            uid = None if answer.status == 404 else answer.json()["MainDicomTags"]["StudyInstanceUID"]
            if uid is not None and not is_uid(uid):
                raise ValueError("no UID")
            return uid


def _failure_reasons(answer: PeerAnswer) -> list[int | None]:
    """Return the reason why each refused object was not stored (PS3.18 10.5.3); None if the server states none."""
    readable = "json" in answer.content_type and answer.status in (200, 202, 409)
    about: dict[str, Any] = (answer.json() or {}) if readable else {}
    failed = about.get(_FAILED, {}).get("Value", [])
    if not failed and (answer.status == 409 or (answer.status == 202 and _STORED not in about)):
        raise PacsError(f"did not say which results it refused, and why (status {answer.status})")
    reasons = [next(iter(item.get(_REASON, {}).get("Value", [])), None) for item in failed]
    return [None if reason is None else int(reason) for reason in reasons]


def _study_found(answer: dict[str, Any]) -> StudyFound:
    count = _value(answer, _COUNT)
    return StudyFound(_day(answer), int(count) if count else None)


def _uid(answer: dict[str, Any], tag: str) -> str:
    """Return a UID by `_value`; empty if it is invalid, because it could change the URL."""
    value = _value(answer, tag)
    return value if is_uid(value) else ""


def _value(answer: dict[str, Any], tag: str) -> str:
    """Return the first value of a tag in DICOM JSON (PS3.18 annex F), or an empty text."""
    values = answer.get(tag, {}).get("Value") or [""]
    return str(values[0])


def _day(answer: dict[str, Any]) -> date | None:
    """Return the Study Date; None if it is invalid."""
    try:
        return datetime.strptime(_value(answer, _DAY), "%Y%m%d").date()
    except ValueError:
        return None


def _only_part(body: bytes, content_type: str) -> bytes:
    """Return the only part of a multipart/related body (RFC 2387). Any other body counts as the part itself."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if boundary is None:
        return body
    delimiter = b"--" + boundary.encode()
    _, _, part = body.partition(delimiter)
    _, _, content = part.partition(b"\r\n\r\n")
    return content[: content.rindex(b"\r\n" + delimiter)]
