"""`/metrics` of `headway serve`: its responses, sessions, router and workers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway.records.generation import RouterStatistics
from headway.records.trace import WorkerState
from headway.telemetry.exporters.prometheus import router_families, worker_families

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


class ServiceMetrics(Collector):
    """Base of the metrics of an HTTP service: one text for each request of them."""

    def text(self) -> bytes:
        """The metrics in Prometheus' text format: the body of the response."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[GaugeMetricFamily]:
        return []


@dataclass(frozen=True, eq=False)
class ServeMetrics(ServiceMetrics):
    """Collects the server's metrics from one snapshot of its state."""

    responses: Mapping[tuple[str, int], int]  # by route and status, 0 where the client left before
    router: RouterStatistics
    workers: Iterable[WorkerState]
    sessions: int  # open named ones
    kept_tokens: int  # tokens that these keep
    compiling: int  # requests that wait for their grammars, and aren't the router's yet

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield response_family("headway_serve_responses", self.responses)
        for name, value in (("sessions", self.sessions), ("kept_tokens", self.kept_tokens)):
            yield GaugeMetricFamily(f"headway_serve_{name}", f"{name.replace('_', ' ')} of named sessions", value)
        yield GaugeMetricFamily("headway_serve_compiling", "requests that wait for their grammars", self.compiling)
        yield from router_families(self.router)
        yield from worker_families(self.workers)


def response_family(name: str, responses: Mapping[tuple[str, int], int]) -> CounterMetricFamily:
    """A service's responses as a metric. ``responses``: counts by route and status."""
    family = CounterMetricFamily(name, "status 0: the client left before", labels=["route", "status"])
    return labelled(family, (((route, str(status)), count) for (route, status), count in sorted(responses.items())))


def labelled(family: Family, samples: Iterable[tuple[Sequence[str], float]]) -> Family:
    """A metric with samples: the values of its labels, its own."""
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
