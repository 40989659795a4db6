"""Exports `/metrics` of the kernel service for Prometheus: responses, evaluations, faults, queue and devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.kernels.devices import DeviceTable
from headway.services.kernel_dispatch import KernelDispatch
from headway.services.serve_metrics import ServiceMetrics, labelled, response_family

_COUNTED = {
    "evaluations": "evaluations with a result",
    "correct": "of these, correct ones",
    "cheats": "of these, attempts at cheating",
    "repeated": "of these, answered from the result of an equal submission",
    "retries": "repetitions after a failure of the infrastructure",
    "failures": "evaluations that failed for good, without a result",
    "waited_s": "seconds for which evaluations have waited for slots and devices, in total",
    "evaluated_s": "seconds for which evaluations have run, in total",
}


@dataclass(frozen=True, eq=False)
class KernelMetrics(ServiceMetrics):
    """Collects the service's metrics from its state."""

    responses: Mapping[tuple[str, int], int]  # by route and status; 0: the client disconnected before
    dispatch: KernelDispatch
    devices: DeviceTable

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield response_family("headway_kernels_responses", self.responses)
        counts = self.dispatch.counts
        for name, meaning in _COUNTED.items():
            yield CounterMetricFamily(f"headway_kernels_{name}", meaning, getattr(counts, name))
        fault_family = CounterMetricFamily("headway_kernels_faults", "faulty candidates by class", labels=["fault"])
        yield labelled(fault_family, (([fault], count) for fault, count in sorted(counts.faults.items())))
        yield GaugeMetricFamily("headway_kernels_running", "running evaluations", self.dispatch.running)
        waiting_family = GaugeMetricFamily("headway_kernels_waiting", "waiting submissions", labels=["place"])
        yield labelled(waiting_family, (([queue], count) for queue, count in self.dispatch.waiting.items()))
        meaning = "1: the device is in this state"
        state_family = GaugeMetricFamily("headway_kernels_device", meaning, labels=["device", "state"])
        yield labelled(state_family, (([device["device"], device["state"]], 1.0) for device in self.devices.describe()))
