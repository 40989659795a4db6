"""Exports `/metrics` of `headway serve` for Prometheus: responses, sessions, router and workers."""

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
    """Base class of the metrics of an HTTP service, which are collected at each request."""

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format, the body of the response."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[GaugeMetricFamily]:
        return []


@dataclass(frozen=True, eq=False)
class ServeMetrics(ServiceMetrics):
    """Collects the server's metrics from a snapshot of its state."""

    responses: Mapping[tuple[str, int], int]  # by route and status; 0: the client disconnected before
    router: RouterStatistics
    workers: Iterable[WorkerState]
    sessions: int  # open named sessions
    kept_tokens: int  # tokens that these sessions keep
    compiling: int  # requests that wait for their grammars, before they reach the router

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield response_family("headway_serve_responses", self.responses)
        for name, value in (("sessions", self.sessions), ("kept_tokens", self.kept_tokens)):
            yield GaugeMetricFamily(f"headway_serve_{name}", f"{name.replace('_', ' ')} of named sessions", value)
        yield GaugeMetricFamily("headway_serve_compiling", "requests that wait for their grammars", self.compiling)
        yield from router_families(self.router)
        yield from worker_families(self.workers)


def response_family(name: str, responses: Mapping[tuple[str, int], int]) -> CounterMetricFamily:
    """Make a metric of a service's responses. ``responses``: counts by route and status."""
    family = CounterMetricFamily(name, "status 0: the client left before", labels=["route", "status"])
    return labelled(family, (((route, str(status)), count) for (route, status), count in sorted(responses.items())))


def labelled(family: Family, samples: Iterable[tuple[Sequence[str], float]]) -> Family:
    """Add samples (label values, value) to a metric, and return it."""
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
