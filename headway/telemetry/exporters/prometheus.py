"""Exporter to Prometheus: `/metrics` with the ledger's newest numbers and the state of queue and workers."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headway.records.errors import ConfigurationError
from headway.records.generation import ROUTER_COUNTERS, RouterStatistics
from headway.records.ledger import EventRecord
from headway.records.node import NodeConditions
from headway.records.trace import QueueSnapshot, WorkerState
from headway.runtime.addresses import is_loopback, listening_socket, split_address
from headway.telemetry.exporters.exporters import Exporter, ExporterContext, Status
from headway.telemetry.ledger import EVENT_STALL_ENDED, EVENT_STALLED
from headway.telemetry.metrics import LENGTHS, STEP_METRICS, Histogram, router_metrics

_UNUSUAL = re.compile(r"[^a-zA-Z0-9_]")
_STALENESS_LIMITS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32]  # steps
_LENGTH_LIMITS = [2**power for power in range(21)]  # tokens
_COUNTED = re.compile(r"^(endings|failures)/(\w+)_rollouts$")
_LABELS = {"endings": "ending", "failures": "boundary"}
# Fields of a snapshot that refresh the gauges of the same names, which the ledger's step records set
_SNAPSHOT_GAUGES = ("open_groups", "running_groups", "parked_groups", "buffered_groups", "oldest_age_s")


def metric_name(name: str) -> str:
    """The Prometheus name of a metric: ``headway_group_quantity_unit`` for ``group/quantity_unit``."""
    return "headway_" + _UNUSUAL.sub("_", name)


_CONDITIONS = {
    "cpu_ratio": "share of its cores' time in use",
    "memory_free_bytes": "free memory",
    "shared_memory_free_bytes": "free in /dev/shm, where weights are published",
    "disk_free_bytes": "free on the disk with its temporary files",
    "processes": "worker processes that run there",
}
_GPU_CONDITIONS = {
    "busy_ratio": "share of the last second in which it computed",
    "memory_used_bytes": "memory in use on the GPU",
    "memory_bytes": "memory of the GPU in total",
    "ecc_errors": "memory errors that could not be corrected",
}


class Prometheus(Exporter, Collector):
    """Serves `/metrics` over HTTP, in its own threads. Counters and histograms start at 0 with this process."""

    wants_snapshots = True

    def __init__(self, context: ExporterContext) -> None:
        address = context.experiment.ledger.prometheus
        try:
            listening_socket(address).close()
        except ConfigurationError as error:
            raise ConfigurationError(f"ledger.prometheus: {error}") from None
        host, port = split_address(address)
        self._gauges: dict[str, float] = {}
        self._of_step: Collection[str] = ()  # names of the last step's values
        self._counts: dict[str, Counter[str]] = {"endings": Counter(), "failures": Counter(), "events": Counter()}
        self._shapes: dict[str, Counter[int]] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._step_at_s: float | None = None
        self._snapshot: QueueSnapshot | None = None
        self._stalls: Counter[tuple[str, str]] = Counter()  # (worker, wait)
        self._stalled_at_s: dict[tuple[str, str], float] = {}  # of those that last: when the wait began
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        bound_port = self._server.server_port
        printed_host = f"[{host}]" if ":" in host else host
        self.destination = f"http://{printed_host}:{bound_port}/metrics"
        if not is_loopback(address):
            self.destination += " (any host that reaches it can read it)"

    # --- from the exporter's thread ---------------------------------------------------------------------------

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        gauges = dict(self._gauges)
        if "time/step_s" in values:  # metrics of the previous step that this step lacks are no longer measured
            gauges = {name: value for name, value in gauges.items() if name not in self._of_step}
            self._of_step = values.keys()
        for name, value in values.items():
            count_match = _COUNTED.match(name)
            if count_match:
                self._counts[count_match[1]][count_match[2]] += int(value)
            else:
                gauges[name] = value
        for name, histogram in shapes.items():
            bucket_counts = Counter(self._shapes.get(name, {}))
            for edge, count in zip(histogram.edges[1:], histogram.counts, strict=True):
                bucket_counts[int(edge)] += count
            self._shapes[name] = bucket_counts
            mean = values.get("length/mean_tokens" if name == LENGTHS else name.replace("_steps", "_mean_steps"), 0.0)
            self._sums[name] += mean * sum(histogram.counts)
        if "time/step_s" in values:
            self._steps += 1
            self._step_at_s = time.monotonic()
        self._gauges = gauges  # replaced at once: a scrape sees either the old numbers or the new

    def event(self, event: EventRecord) -> None:
        self._counts["events"][event.event] += 1
        stall_key = (event.worker, str(event.data.get("wait", "")))
        has_begun = event.event == EVENT_STALLED
        # A block of the event loop is reported by another process; this one sees only its end.
        if has_begun or (event.event == EVENT_STALL_ENDED and stall_key not in self._stalled_at_s):
            self._stalls[stall_key] += 1
        if has_begun:
            self._stalled_at_s[stall_key] = time.monotonic() - event.lost_s
        elif event.event == EVENT_STALL_ENDED:
            self._stalled_at_s.pop(stall_key, None)

    def snapshot(self, snapshot: QueueSnapshot) -> None:
        self._snapshot = snapshot
        value_by_field = {f: getattr(snapshot, f) for f in _SNAPSHOT_GAUGES} | msgspec.structs.asdict(snapshot.engines)
        self._gauges = self._gauges | {f"queue/{field}": float(value) for field, value in value_by_field.items()}

    def finish(self, status: Status) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- from a scrape's thread -------------------------------------------------------------------------------

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # the metrics are only known once the run has recorded them

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        for name, value in sorted(self._gauges.items()):
            meaning = STEP_METRICS[name][1] if name in STEP_METRICS else name
            yield GaugeMetricFamily(metric_name(name), meaning, value)
        yield CounterMetricFamily("headway_steps", "training steps, skipped ones too", self._steps)
        if self._step_at_s is not None:
            age_s = time.monotonic() - self._step_at_s
            yield GaugeMetricFamily("headway_last_step_age_s", "since the newest step's record", age_s)
        for count_kind, label in _LABELS.items():
            family = CounterMetricFamily(f"headway_{count_kind}_rollouts", f"{count_kind} of rollouts", labels=[label])
            for label_value, count in list(self._counts[count_kind].items()):
                family.add_metric([label_value], count)
            yield family
        event_family = CounterMetricFamily("headway_events", "events of the ledger", labels=["event"])
        for event_name, count in list(self._counts["events"].items()):
            event_family.add_metric([event_name], count)
        yield event_family
        yield from self._stall_families()
        for name, bucket_counts in list(self._shapes.items()):
            yield _histogram(name, bucket_counts, self._sums[name])
        if (snapshot := self._snapshot) is not None:
            help_text = "lowest that a replica samples with"
            yield GaugeMetricFamily("headway_version", "completed training steps", snapshot.version)
            yield GaugeMetricFamily("headway_applied_version", help_text, snapshot.applied_version)
            yield from worker_families(snapshot.workers)
            yield from node_families(snapshot.nodes)

    def _stall_families(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["worker", "wait"]
        counter = CounterMetricFamily("headway_stalls", "stalls, by worker waited for and kind of wait", labels=labels)
        gauge = GaugeMetricFamily("headway_stalled_s", "seconds that a present stall has lasted", labels=labels)
        for stall_key, count in list(self._stalls.items()):
            counter.add_metric(stall_key, count)
        for stall_key, since_s in list(self._stalled_at_s.items()):
            gauge.add_metric(stall_key, time.monotonic() - since_s)
        yield counter
        yield gauge


def worker_families(workers: Iterable[WorkerState]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Metrics of the workers: whether each is alive, and its number of restarts."""
    up_family = GaugeMetricFamily("headway_worker_up", "1: its process lives", labels=["worker"])
    restarts_family = CounterMetricFamily("headway_worker_restarts", "of its process", labels=["worker"])
    for worker in workers:
        up_family.add_metric([worker.name], float(worker.up))
        restarts_family.add_metric([worker.name], worker.restarts)
    yield up_family
    yield restarts_family


def node_families(nodes: Iterable[NodeConditions]) -> Iterator[GaugeMetricFamily]:
    """Metrics of the machines of a run: used and free resources."""
    for field, meaning in _CONDITIONS.items():
        family = GaugeMetricFamily(f"headway_node_{field}", meaning, labels=["node"])
        for node in nodes:
            family.add_metric([node.name], float(getattr(node, field)))
        yield family
    for field, meaning in _GPU_CONDITIONS.items():
        family = GaugeMetricFamily(f"headway_gpu_{field}", meaning, labels=["node", "gpu"])
        for node in nodes:
            for gpu in node.gpus:
                family.add_metric([node.name, str(gpu.index)], float(getattr(gpu, field)))
        yield family


def router_families(router: RouterStatistics) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Metrics of a router: its present load, and its counters since it started."""
    for name, value in router_metrics(router):
        is_counter = name.removeprefix("router/") in ROUTER_COUNTERS
        yield (CounterMetricFamily if is_counter else GaugeMetricFamily)(metric_name(name), name, value)


def _histogram(name: str, counts: Counter[int], total: float) -> HistogramMetricFamily:
    limits = _LENGTH_LIMITS if name == LENGTHS else _STALENESS_LIMITS
    buckets = [(str(float(limit)), float(sum(n for edge, n in counts.items() if edge <= limit))) for limit in limits]
    buckets.append(("+Inf", float(counts.total())))
    return HistogramMetricFamily(metric_name(f"{name}_distribution"), f"{name}, of every step", buckets, total)
