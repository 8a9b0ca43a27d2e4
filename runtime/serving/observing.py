"""What is kept of a request: a line of log, a line of audit, metrics. The outermost middleware, so that nothing raises
past it, and every answer has an id and the headers that make browsers careful.

Nothing that a client sent stands in any of these but an image's digest: no path, query, header or message.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir.runtime.logs import log, told
from cbmir.runtime.serving.audit import Audit
from cbmir.runtime.serving.metrics import Metrics
from cbmir.runtime.serving.problems import Problem, problem_of, response_of

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_AUDITED = "/v1/"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_NO_AUDIT = Problem(503, "audit", "The audit trail cannot be written, so nothing is answered.", retry_after=60)


@dataclass
class Trace:
    """Of one request, as `scope["cbmir"]`. `admitted`: let in by `Guard`, or else no matter of the audit, whose disk
    anyone could fill. `facts` are what the audit has of it beside: set by who answers."""

    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    start: float = field(default_factory=time.perf_counter)
    admitted: bool = False
    status: int = 0
    problem: str = ""  # the kind of the problem that was answered
    error: Exception | None = None
    uploaded: int = 0  # bytes
    facts: dict[str, Any] = field(default_factory=dict)


class Observer:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: Audit | None) -> None:
        self._app, self._metrics, self._audit = app, metrics, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = scope["cbmir"] = Trace()
        answer = _Answer(send, trace.id)

        async def send_audited(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                if not self._is_audited(scope, trace):
                    trace.problem, trace.status = "audit", 503
                    await answer.replace(_NO_AUDIT, scope, receive)
            await answer.send(message)

        try:
            await self._app(scope, receive, send_audited)
        except Exception as error:  # whatever it is, it is told, and answered where it still can be
            trace.error = error
            if answer.is_started:
                log.error("failed while answering", extra={"fields": {"request": trace.id, **told(error)}})
                raise
            problem = problem_of(error)
            trace.problem = problem.kind
            await response_of(problem, trace.id)(scope, receive, send_audited)
        finally:
            self._tell(scope, trace)

    def _is_audited(self, scope: Scope, trace: Trace) -> bool:
        """Whether the trail has it, or need not."""
        if self._audit is None or not trace.admitted or not scope["path"].startswith(_AUDITED):
            return True
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request": trace.id,
            "client": (scope.get("client") or ("",))[0],
            "route": _route(scope),
            "status": trace.status,
            "problem": trace.problem,
            **trace.facts,
        }
        try:
            self._audit.write(line)
        except OSError as error:
            log.error("the audit trail cannot be written (%s)", error.strerror or "the disk is full")
            return False
        return True

    def _tell(self, scope: Scope, trace: Trace) -> None:
        seconds = time.perf_counter() - trace.start
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.count(
            route=_route(scope), method=method, status=trace.status, seconds=seconds, problem=trace.problem,
            uploaded=trace.uploaded,
        )  # fmt: skip
        fields: dict[str, Any] = {
            "request": trace.id, "route": _route(scope), "method": method, "status": trace.status,
            "ms": round(1000 * seconds, 1),
        }  # fmt: skip
        if trace.problem:
            fields["problem"] = trace.problem
        failed = trace.status >= 500 and trace.error is not None
        if failed and trace.error is not None:
            fields |= told(trace.error)
        log.log(logging.ERROR if failed else logging.INFO, "answered", extra={"fields": fields})


class _Answer:
    """Passes an answer on with headers, or another one in its place."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._id = send, request_id
        self.is_started = self._is_replaced = False

    async def send(self, message: Message) -> None:
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update({**_HEADERS, "X-Request-ID": self._id})
        self.is_started = True
        await self._send(message)

    async def replace(self, problem: Problem, scope: Scope, receive: Receive) -> None:
        await response_of(problem, self._id)(scope, receive, self.send)
        self._is_replaced = True


def _route(scope: Scope) -> str:
    """The route's template, which has nothing of what a client sent."""
    return getattr(scope.get("route"), "path", None) or "none"
