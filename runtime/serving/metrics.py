"""What Prometheus is told. Labels are of small, fixed sets: never what a client sent."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from cbmir import __version__
from cbmir.errors import CbmirError
from cbmir.runtime.live import LiveFinder
from cbmir.runtime.serving.gate import Gate
from cbmir.runtime.serving.state import GalleryState

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Of one application, in a registry of its own."""

    def __init__(self, live: LiveFinder, gate: Gate) -> None:
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

    def __init__(self, live: LiveFinder, gate: Gate) -> None:
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
