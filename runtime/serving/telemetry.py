"""What is kept of a request: a line of log, a line of audit, metrics. The outermost middleware, so that nothing raises
past it, and every answer has an id and the headers that make browsers careful.

Nothing that a client sent stands in any of these but an image's digest: no path, query, header or message.

The audit trail: who asked for what, when, and what became of it; a line of JSON each, without patient data.

An image is named by the SHA-256 of its file: who holds the file can tell that it was analysed, nobody else. Cases that
were shown are named as they were shown.

What Prometheus is told. Labels are of small, fixed sets: never what a client sent.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir import __version__
from cbmir.errors import CbmirError, UserError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.logs import log, told
from cbmir.runtime.serving.limits import RequestLimiter
from cbmir.runtime.serving.problems import Problem, problem_of, response_of
from cbmir.runtime.serving.service import GalleryState


class Audit:
    """Adds to a file that is opened for each line: it may be moved away (rotated) at any time."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where the file cannot be written."""
        self._path = path
        try:
            os.close(self._open())
        except OSError as error:
            raise UserError(f"{path}: cannot write the audit trail ({error.strerror})") from error

    def write(self, line: dict[str, Any]) -> None:
        """Raises OSError where that is not possible; nothing is half there then."""
        data = json.dumps(line).encode() + b"\n"
        descriptor = self._open()
        try:
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, data) < len(data):  # the disk is full
                os.ftruncate(descriptor, before)
                raise OSError("the audit trail's disk is full")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Of one application, in a registry of its own."""

    def __init__(self, live: ReloadableFinder, gate: RequestLimiter) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Now(live, gate))
        self._requests = Counter(
            "cbmir_http_requests_total", "Requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "cbmir_http_request_duration_seconds", "From a request's header to the end of its answer.", ["route"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._problems = Counter(
            "cbmir_http_problems_total", "Errors answered, by the end of their type.", ["kind"], registry=self.registry
        )
        self._bytes = Counter("cbmir_uploaded_bytes_total", "Bytes of bodies taken.", registry=self.registry)

    def count(self, *, route: str, method: str, status: int, seconds: float, problem: str, uploaded: int) -> None:
        """One request is answered."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        self._bytes.inc(uploaded)
        if problem:
            self._problems.labels(problem).inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _Now(Collector):
    """What is read at the moment of asking."""

    def __init__(self, live: ReloadableFinder, gate: RequestLimiter) -> None:
        self._live, self._gate = live, gate

    def describe(self) -> list[Metric]:
        return []  # else `collect` would be called to register it

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("cbmir_requests_working", "Requests that a thread works on.", self._gate.working)
        yield GaugeMetricFamily("cbmir_requests_waiting", "Requests that are uploaded or wait.", self._gate.waiting)
        yield GaugeMetricFamily("cbmir_requests_capacity", "Places for requests in all.", self._gate.capacity)
        yield CounterMetricFamily("cbmir_models_opened", "Since the start.", self._live.generation)
        yield InfoMetricFamily("cbmir_build", "The software.", {"version": __version__})
        try:
            with self._live.use() as finder:
                card, health = finder.card, finder.health()
                yield InfoMetricFamily("cbmir_model", "What runs.", {
                    "fingerprint": card.fingerprint, "weights": card.weights, "encoder": card.encoder,
                    "engine": health.engine, "device": health.device, "precision": health.precision,
                    "engine_version": health.version, "threads": str(health.threads),
                })  # fmt: skip
                if finder.gallery is not None:
                    state = GalleryState.of(finder.gallery)
                    yield GaugeMetricFamily("cbmir_gallery_images", "Images in the gallery.", state.images)
                    if state.generation is not None:
                        yield GaugeMetricFamily(
                            "cbmir_gallery_generation", "Writes to the gallery so far.", state.generation
                        )
            ready = 1
        except CbmirError:  # which is what the gauge says
            ready = 0
        yield GaugeMetricFamily("cbmir_ready", "1 where requests can be answered.", ready)


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
