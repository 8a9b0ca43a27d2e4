"""A DICOMweb server (PS3.18), as much of it as following and answering needs, and Orthanc's REST API.

`requests` reads credentials from `.netrc` (or the file that `NETRC` names) and authorities from `REQUESTS_CA_BUNDLE`.
Errors name the server and the HTTP status, never the address asked for, which holds UIDs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from email.message import Message
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from cbmir.errors import DeliveryAwayError, DeliveryError, ImageSizeError, PacsAwayError, PacsError, require
from cbmir.process import Closing
from cbmir.runtime.logs import what_failed
from cbmir.runtime.pacs.jobs import ResultObject

TIMEOUT = (10.0, 60.0)  # seconds: to connect, and between two bytes of an answer
_CHUNK = 2**20
_SERIES, _CLASS, _INSTANCE = "0020000E", "00080016", "00080018"
_STUDY, _DAY, _COUNT = "0020000D", "00080020", "00201208"  # the last: NumberOfStudyRelatedInstances
_FAILED, _REASON = "00081198", "00081197"  # FailedSOPSequence, and FailureReason in it
_ALREADY_THERE = (0x0111, 45070)  # reasons: PS3.7 C.5.7, and what Azure answers
OUT_OF_RESOURCES = range(0xA700, 0xA800)  # statuses and reasons (PS3.4 table B.2-1)
_NO_URL = "expected the URL of a server, http://HOST/… or https://HOST/…; found something else"
_AWAY = (401, 403, 407, 429, 502, 503, 504)  # statuses that say nothing about what was asked for


@dataclass(frozen=True)
class StudyFound:
    """A study that QIDO-RS found: its day and the number of its instances, None where the server does not say."""

    day: date | None
    count: int | None


@dataclass(frozen=True)
class InstanceFound:
    study_uid: str
    series_uid: str
    sop_class_uid: str
    sop_instance_uid: str


class HttpServer(Closing):
    """A server and the connections to it. Safe from many threads, but for the session's cookies."""

    def __init__(self, url: str) -> None:
        """`url` is the services' root. Raises MissingDependencyError, and PacsError, which does not quote it."""
        if "@" in url:
            raise PacsError(
                "expected a URL without credentials, which logs would show; found some: put them into ~/.netrc"
            )
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one:
            raise PacsError(_NO_URL)
        self.url = url.rstrip("/")
        self._session = require("requests", "dicom").Session()
        self._session.headers["User-Agent"] = "cbmir"

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Errors of the libraries become PacsError, or PacsAwayError: their texts hold UIDs."""
        requests = require("requests", "dicom")
        try:
            yield
        except requests.RequestException as error:
            status = getattr(error.response, "status_code", None)
            is_away = status in _AWAY or isinstance(error, requests.ConnectionError | requests.Timeout)
            found = type(error).__name__ if status is None else f"the server answered with status {status}"
            raise (PacsAwayError if is_away else PacsError)(f"{self.url}: cannot {what}: {found}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found = f"the answer is not as the standard has it ({what_failed(error)})"
            raise PacsError(f"{self.url}: cannot {what}: {found}") from None


class DicomWeb(HttpServer):
    """A DICOMweb server, such as `http://localhost:8042/dicom-web`: read from, and a destination of results."""

    def __init__(self, url: str) -> None:
        api = require("dicomweb_client.api", "dicom")
        super().__init__(url)
        try:
            self._client = api.DICOMwebClient(self.url, session=self._session, timeout=TIMEOUT)
        except ValueError as error:
            raise PacsError(_NO_URL) from error
        self._client.set_http_retry_params(retry=False)  # the queue and the feeds try again by themselves

    def studies_since(self, first: date, modalities: Collection[str]) -> dict[str, StudyFound]:
        """Studies of a day or later with a series of these modalities, by their UIDs. Raises PacsError."""
        found: dict[str, StudyFound] = {}
        for modality in modalities:
            with self._asking("search for studies"):
                answers = self._client.search_for_studies(
                    search_filters={"StudyDate": f"{first:%Y%m%d}-", "ModalitiesInStudy": modality},
                    fields=["NumberOfStudyRelatedInstances"], limit=200, get_remaining=True,
                )  # fmt: skip
                for answer in answers:
                    count = _value(answer, _COUNT)
                    found[_value(answer, _STUDY)] = StudyFound(_day(answer), int(count) if count else None)
        return found

    def instances(self, study_uid: str, modalities: Collection[str]) -> list[InstanceFound]:
        """The instances of a study in series of these modalities, or of none. Raises PacsError."""
        found = []
        with self._asking("search for instances"):
            for series in self._client.search_for_series(study_uid, get_remaining=True):
                if _value(series, "00080060") not in (*modalities, ""):
                    continue
                uid = _value(series, _SERIES)
                for instance in self._client.search_for_instances(study_uid, uid, get_remaining=True):
                    found.append(InstanceFound(study_uid, uid, _value(instance, _CLASS), _value(instance, _INSTANCE)))
        return found

    def retrieve(self, found: InstanceFound, max_bytes: int) -> bytes | None:
        """The file by WADO-RS, as it is stored; None where it is gone. Raises PacsError and ImageSizeError."""
        url = f"{self.url}/studies/{found.study_uid}/series/{found.series_uid}/instances/{found.sop_instance_uid}"
        accepted = {"Accept": 'multipart/related; type="application/dicom"; transfer-syntax=*'}
        with (
            self._asking("retrieve an instance"),
            self._session.get(url, headers=accepted, stream=True, timeout=TIMEOUT) as answer,
        ):
            if answer.status_code in (404, 410):
                return None
            answer.raise_for_status()
            body = bytearray()
            for chunk in answer.iter_content(_CHUNK):
                body += chunk
                if len(body) > max_bytes + _CHUNK:  # its headers are few
                    raise ImageSizeError(f"expected at most {max_bytes:,} bytes, found more")
            return _only_part(bytes(body), answer.headers.get("Content-Type", ""))

    def send(self, results: Sequence[ResultObject]) -> None:
        """As `destinations.Destination.send`, by STOW-RS (PS3.18 section 10.5), byte by byte."""
        if not results:
            return
        edge = f"cbmir-{uuid4().hex}".encode()  # in no file
        part = b"--" + edge + b"\r\nContent-Type: application/dicom\r\n\r\n"
        body = b"".join([part + each.data + b"\r\n" for each in results] + [b"--", edge, b"--\r\n"])
        kind = f'multipart/related; type="application/dicom"; boundary={edge.decode()}'
        headers = {"Content-Type": kind, "Accept": "application/dicom+json"}
        try:
            with self._asking("store instances"):
                answer = self._session.post(f"{self.url}/studies", data=body, headers=headers, timeout=TIMEOUT)
                reasons = _failure_reasons(answer)
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
        """A page of the change feed: ids of studies that became stable, its last change, and whether no newer is."""
        page = self._get("/changes", since=since, limit=20)
        studies = (c["ID"] for c in page["Changes"] if c["ChangeType"] == "StableStudy")
        return list(dict.fromkeys(studies)), int(page["Last"]), bool(page["Done"])

    def last_change(self) -> int:
        return int(self._get("/changes?last")["Last"])

    def study_uid(self, orthanc_id: str) -> str | None:
        """The Study Instance UID of a study; None where it is gone."""
        study = self._get(f"/studies/{orthanc_id}")
        return None if study is None else str(study["MainDicomTags"]["StudyInstanceUID"])

    def _get(self, path: str, **query: int) -> Any:
        with self._asking("ask Orthanc"):
            answer = self._session.get(self.url + path, params=query, timeout=TIMEOUT)
            if answer.status_code == 404:
                return None
            answer.raise_for_status()
            return answer.json()


def _failure_reasons(answer: Any) -> list[int | None]:
    """Why objects were not stored, one by one (PS3.18 10.5.3); None where the server does not say."""
    failed: list[dict[str, Any]] = []
    if "json" in answer.headers.get("Content-Type", "") and answer.status_code in (200, 202, 409):
        failed = answer.json().get(_FAILED, {}).get("Value", [])
    if not failed and answer.status_code != 200:
        answer.raise_for_status()
    return [next(iter(item.get(_REASON, {}).get("Value", [])), None) for item in failed]


def _value(answer: dict[str, Any], tag: str) -> str:
    """The first value of a tag in DICOM JSON (PS3.18 annex F), empty where there is none."""
    values = answer.get(tag, {}).get("Value") or [""]
    return str(values[0])


def _day(answer: dict[str, Any]) -> date | None:
    """The Study Date; None for an odd one, which is no reason to stop."""
    try:
        return datetime.strptime(_value(answer, _DAY), "%Y%m%d").date()
    except ValueError:
        return None


def _only_part(body: bytes, content_type: str) -> bytes:
    """The one part of a multipart/related body (RFC 2387); another body is taken for the part itself."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if boundary is None:
        return body
    delimiter = b"--" + boundary.encode()
    _, _, part = body.partition(delimiter)
    _, _, content = part.partition(b"\r\n\r\n")
    return content[: content.rindex(b"\r\n" + delimiter)]
