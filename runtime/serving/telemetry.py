"""The records of a request: metrics for Prometheus, a log line, and a line in the audit trail.

They contain nothing that a client sent except an image's digest: no path, query, header or message. The audit trail
identifies an image by the SHA-256 of its file, so only a reader who has the file can find out that it was analysed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
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
from cbmir.runtime.logs import error_fields, fields, log
from cbmir.runtime.serving.limits import RequestLimiter
from cbmir.runtime.serving.problems import Problem, Trace, problem_of, refuse
from cbmir.runtime.serving.service import gallery_state, model_of


class Audit:
    """The audit trail: a file that is opened for each line, so that it can be moved away (rotated) at any time."""

    def __init__(self, path: Path) -> None:
        """Check that the file can be written. Raises UserError."""
        self._path = path
        try:
            os.close(self._open())
        except OSError as error:
            raise UserError(f"{path}: cannot write the audit trail ({error.strerror})") from error

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. Raises OSError if that fails, and then leaves no part of the line."""
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


class Metrics(Collector):
    """The metrics of one application, in their own registry: counters, and values that are collected on request."""

    def __init__(self, live: ReloadableFinder, limiter: RequestLimiter) -> None:
        self._live, self._limiter = live, limiter
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)
        self._requests = Counter(
            "cbmir_http_requests_total", "Requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "cbmir_http_request_duration_seconds", "From a request's header to the end of its answer.", ["route"],
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60), registry=self.registry,
        )  # fmt: skip
        self._problems = Counter(
            "cbmir_http_problems_total", "Error responses, by the end of their type.", ["kind"], registry=self.registry
        )
        self._bytes = Counter("cbmir_uploaded_bytes_total", "Bytes of bodies received.", registry=self.registry)

    def count(self, trace: Trace, route: str, method: str, seconds: float) -> None:
        self._requests.labels(route, method, str(trace.status)).inc()
        self._seconds.labels(route).observe(seconds)
        self._bytes.inc(trace.uploaded)
        if trace.problem:
            self._problems.labels(trace.problem).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []  # else `collect` would be called to register it

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("cbmir_requests_working", "Requests in a thread.", self._limiter.working)
        yield GaugeMetricFamily("cbmir_requests_waiting", "Requests in upload or waiting.", self._limiter.waiting)
        yield GaugeMetricFamily("cbmir_requests_capacity", "Slots for requests in total.", self._limiter.capacity)
        yield CounterMetricFamily("cbmir_models_opened", "Models opened since the start.", self._live.generation)
        yield InfoMetricFamily("cbmir_build", "The software.", {"version": __version__})
        try:
            with self._live.use() as finder:
                health, model = finder.health(), model_of(finder).model_dump(exclude={"version"})
                more = {"engine_version": health.version, "threads": str(health.threads)}
                yield InfoMetricFamily("cbmir_model", "The running model.", model | more)
                if finder.gallery is not None:
                    state = gallery_state(finder.gallery)
                    yield GaugeMetricFamily("cbmir_gallery_images", "Images in the gallery.", state["images"])
                    if (count := state["generation"]) is not None:
                        yield GaugeMetricFamily("cbmir_gallery_generation", "Writes to the gallery so far.", count)
            ready = 1
        except CbmirError:  # the gauge reports it
            ready = 0
        yield GaugeMetricFamily("cbmir_ready", "1 if requests can be answered.", ready)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NO_AUDIT = Problem(503, "audit", "The audit trail cannot be written, so no request is answered.", retry_after=60)


class Observer:
    """ASGI middleware that counts, logs and audits requests, gives every answer an id, and answers every error."""

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: Audit | None) -> None:
        self._app, self._metrics, self._audit = app, metrics, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace.of(scope)
        is_replaced = False

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-ID"] = trace.id
                trace.status = message["status"]
            await send(message)

        async def send_audited(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start" and not self._is_audited(scope, trace, message["status"]):
                is_replaced = True
                await refuse(_NO_AUDIT, scope, receive, send_with_id)
            if not is_replaced:
                await send_with_id(message)

        try:
            await self._app(scope, receive, send_audited)
        except Exception as error:  # logged, and answered if that is still possible
            trace.error = error
            if trace.status:  # the answer has begun
                log.error("failed while answering", extra=fields(request=trace.id, **error_fields(error)))
                raise
            await refuse(problem_of(error), scope, receive, send_audited)
        finally:
            self._report(scope, trace)

    def _is_audited(self, scope: Scope, trace: Trace, status: int) -> bool:
        if self._audit is None or not trace.admitted or not scope["path"].startswith("/v1/"):
            return True
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request": trace.id,
            "client": (scope.get("client") or ("",))[0],
            "route": _route(scope),
            "status": status,
            "problem": trace.problem,
            **trace.facts,
        }
        try:
            self._audit.write(line)
        except OSError as error:
            log.error("the audit trail cannot be written (%s)", error.strerror or "the disk is full")
            return False
        return True

    def _report(self, scope: Scope, trace: Trace) -> None:
        seconds = time.perf_counter() - trace.start
        route, method = _route(scope), scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.count(trace, route, method, seconds)
        more: dict[str, Any] = {"problem": trace.problem} if trace.problem else {}
        error, trace.error = trace.error, None  # its frames hold the request, which holds the trace
        if has_failed := trace.status >= 500 and error is not None:
            more |= error_fields(error)
        about = fields(
            request=trace.id, route=route, method=method, status=trace.status, ms=round(1000 * seconds, 1), **more
        )
        log.log(logging.ERROR if has_failed else logging.INFO, "answered", extra=about)


def _route(scope: Scope) -> str:
    """Return the route's template, which contains nothing that a client sent."""
    return getattr(scope.get("route"), "path", None) or "none"
