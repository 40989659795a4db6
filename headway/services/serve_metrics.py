"""`/metrics` of `headway serve`: its responses, sessions, router and workers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway.records.generation import RouterStatistics
from headway.records.trace import WorkerState
from headway.telemetry.exporters.prometheus import router_families, worker_families


class ServeMetrics(Collector):
    """Collects the server's metrics from one snapshot of its state."""

    def __init__(
        self,
        responses: Mapping[tuple[str, int], int],
        router: RouterStatistics,
        workers: Iterable[WorkerState],
        sessions: int,
        kept_tokens: int,
    ) -> None:
        """``responses``: by route and status, 0 where the client left before; ``sessions``: open named ones;
        ``kept_tokens``: tokens that these keep."""
        self._responses = responses
        self._router = router
        self._workers = workers
        self._gauges = {"sessions": float(sessions), "kept_tokens": float(kept_tokens)}

    def text(self) -> bytes:
        """The metrics in Prometheus' text format: the body of the response."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["route", "status"]
        responses = CounterMetricFamily("headway_serve_responses", "status 0: the client left before", labels=labels)
        for (route, status), count in sorted(self._responses.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"headway_serve_{name}", f"{name.replace('_', ' ')} of named sessions", value)
        yield from router_families(self._router)
        yield from worker_families(self._workers)
