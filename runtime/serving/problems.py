"""The service's errors as `application/problem+json` (RFC 9457).

`type` is a stable URN for programs; `title` and `detail` are for people. `detail` may quote what the client itself
sent, and is never logged. `instance` is the request's id, which is also in the log.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from cbmir import errors

MOST_ERRORS = 20  # listed for one request
#: Texts that replace an error's own message, which names paths and images of the gallery.
_DETAILS = {
    "gallery-replaced": "The gallery was replaced on the disk while it was open. POST /v1/reload, or SIGHUP to the "
    "service, opens the new one.",
    "gallery-unavailable": "The gallery cannot be read at the moment; the service's log says where it failed.",
}

#: Status and kind of cbmir's errors. The first match counts.
_OF_ERROR: tuple[tuple[type[errors.CbmirError], int, str], ...] = (
    (errors.NotAnImageError, 415, "not-an-image"),
    (errors.DamagedImageError, 422, "damaged-image"),
    (errors.ImageSizeError, 422, "image-size"),
    (errors.BlankImageError, 422, "blank-image"),
    (errors.DecodingError, 422, "decoding"),
    (errors.DicomImageError, 422, "no-chest-radiograph"),
    (errors.ImageError, 422, "image"),
    (errors.MissingDependencyError, 415, "no-codec"),
    (errors.GalleryReplacedError, 503, "gallery-replaced"),
    (errors.RankError, 422, "rank"),
    (errors.GalleryError, 503, "gallery-unavailable"),
    (errors.NotReadyError, 503, "not-ready"),
    (errors.EngineError, 500, "engine"),
    (errors.UserError, 422, "input"),
)


@dataclass
class Trace:
    """The record of one request, for log, metrics and audit trail. The trail only contains requests that the guard
    `admitted`, or anyone could fill the disk; `facts` are additional members of its entry."""

    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    start: float = field(default_factory=time.perf_counter)
    admitted: bool = False
    status: int = 0
    problem: str = ""  # the kind of the problem that was answered
    error: Exception | None = None
    uploaded: int = 0  # bytes
    facts: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(scope: Scope) -> Trace:
        """Return the trace of a request; the first call makes it."""
        trace: Trace = scope.setdefault("cbmir", Trace())
        return trace


class Problem(HTTPException):
    """An error as an answer. `kind` is the end of the `type`, and appears in log, audit trail and metrics."""

    def __init__(
        self, status: int, kind: str, detail: str, *, retry_after: int | None = None,
        headers: Mapping[str, str] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """`retry_after` is in seconds. `more` are additional members of the answer."""
        waiting = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, detail, {**(headers or {}), **waiting})
        self.kind, self.more = kind, more


def problem_of(error: Exception) -> Problem:
    """Return the answer to an error. Only cbmir's own errors are quoted in it."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, MemoryError):
        return Problem(503, "no-memory", "The machine has no memory left for this request.", retry_after=10)
    for kind_of_error, status, kind in _OF_ERROR:
        if isinstance(error, kind_of_error):
            return Problem(status, kind, _DETAILS.get(kind, str(error)), retry_after=5 if status == 503 else None)
    return Problem(500, "unexpected", "Something went wrong in the service; its log says where.")


def response_of(problem: Problem, request_id: str) -> Response:
    """Make the response. Non-ASCII is escaped, so that it can hold any text."""
    body = {
        "type": f"urn:cbmir:problem:{problem.kind}",
        "title": HTTPStatus(problem.status_code).phrase,
        "status": problem.status_code,
        "detail": problem.detail,
        "instance": f"urn:uuid:{request_id}",
        **problem.more,
    }
    return Response(json.dumps(body), problem.status_code, problem.headers, "application/problem+json")


async def refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    trace = Trace.of(scope)
    trace.problem = problem.kind
    await response_of(problem, trace.id)(scope, receive, send)


async def answer_problem(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        wrong = [  # where and what, without the value that was found
            {"where": ".".join(str(part) for part in one["loc"]), "expected": str(one["msg"])}
            for one in error.errors()[:MOST_ERRORS]
        ]
        problem = Problem(422, "parameters", "Some parameters are not as expected.", errors=wrong)
    elif isinstance(error, StarletteHTTPException) and not isinstance(error, Problem):
        kind = {404: "no-such-route", 405: "no-such-method"}.get(error.status_code, "http")
        problem = Problem(error.status_code, kind, str(error.detail), headers=error.headers)
    else:
        problem = problem_of(error)
    trace = Trace.of(request.scope)
    trace.problem, trace.error = problem.kind, error
    return response_of(problem, trace.id)
