"""`/metrics`: real requests, read by Prometheus' own parser."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from simulated_run import experiment_of
from synthetic_run import evaluation, step_record
from test_ledger import ManualClock

from headway.orchestrator.preflight.check import check
from headway.records.errors import ConfigurationError
from headway.records.generation import EngineLoad
from headway.records.ledger import EventRecord, PassAt
from headway.records.node import GpuConditions, NodeConditions
from headway.records.trace import QueueSnapshot, WorkerState
from headway.runtime.addresses import is_loopback
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.exporters import Exports, start_exports
from headway.telemetry.exporters.prometheus import Prometheus
from headway.telemetry.ledger import Ledger, read_ledger

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(url: str) -> Samples:
    """(name, labels) -> value."""
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def url_of(folder: Path) -> str:
    """Where the ledger says the metrics are."""
    (told,) = (line for line in read_ledger(folder) if isinstance(line, EventRecord) and line.event == "exporting")
    assert told.time_s == 0.0  # before the run's own clock starts
    return told.detail.split("prometheus: ")[1].split(" ")[0].rstrip(";")


def serving(tmp_path: Path, ledger: Ledger, directory: RunDirectory, address: str = "127.0.0.1:0") -> Exports:
    experiment = experiment_of(directory.path, ledger={"trackers": [], "prometheus": address})
    exports = start_exports(experiment, directory, ledger, resume=False)
    exports.announce()
    return exports


def told(monkeypatch: pytest.MonkeyPatch, method: str) -> SimpleQueue[Any]:
    """What the exporter's thread has been told by ``method``, once it has taken it in."""
    queue, original = SimpleQueue[Any](), getattr(Prometheus, method)

    def watched(exporter: Prometheus, line: Any) -> None:
        original(exporter, line)
        queue.put(line)

    monkeypatch.setattr(Prometheus, method, watched)
    return queue


def test_the_newest_numbers_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, pulses = told(monkeypatch, "event"), told(monkeypatch, "snapshot")
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    with Ledger(directory.path, ManualClock()) as ledger, serving(tmp_path, ledger, directory) as exports:
        url = url_of(directory.path)
        assert scrape(url)["headway_steps_total", ()] == 0
        for step in range(3):
            lengths = {"8": 30, "20": 4}
            ledger.record(
                step_record(
                    step,
                    buffered_groups=step,
                    lengths__mean=9.0,
                    lengths__histogram=lengths,
                    rewards__pass_at={k: PassAt(groups=8, value=0.25 * step, standard_error=0.1) for k in ("4", "8")},
                )
            )
        ledger.record(evaluation("during", 3, 0.75, split="validation"))
        ledger.record(EventRecord(event="generator_died"))
        while events.get(timeout=5.0).event != "generator_died":
            pass
        seen = scrape(url)
        assert seen["headway_events_total", (("event", "generator_died"),)] == 1
        told_of_stalls(ledger, events, url)
        assert seen["headway_steps_total", ()] == 3
        assert seen["headway_queue_buffered_groups", ()] == 2
        assert seen["headway_evaluation_validation_solve_rate", ()] == 0.75
        assert seen["headway_reward_pass_at_8", ()] == 0.5
        assert seen["headway_endings_rollouts_total", (("ending", "trained"),)] == 3 * 64
        assert seen["headway_last_step_age_s", ()] < 60
        staleness = "headway_staleness_trajectory_steps_distribution"
        assert seen[f"{staleness}_bucket", (("le", "1.0"),)] == 3 * (10 + 30)
        assert seen[f"{staleness}_count", ()] == 3 * 64
        assert seen[f"{staleness}_sum", ()] == pytest.approx(3 * 64 * 1.3)
        assert seen["headway_length_tokens_distribution_bucket", (("le", "16.0"),)] == 3 * 30
        assert seen["headway_length_tokens_distribution_sum", ()] == pytest.approx(3 * 34 * 9.0)
        assert ("headway_worker_up", (("worker", "trainer-0"),)) not in seen
        exports.snapshot(
            QueueSnapshot(
                time_s=1, version=3, applied_version=2, open_groups=9, running_groups=5, parked_groups=0,
                buffered_groups=4, oldest_age_s=1.5, engines=EngineLoad(kv_used_tokens=100),
                workers=(WorkerState(name="generator-0", up=False, restarts=2),),
                nodes=(
                    NodeConditions(
                        name="node1", cpu_ratio=0.5, memory_free_bytes=1, shared_memory_free_bytes=2, disk_free_bytes=3,
                        gpus=(GpuConditions(index=4, busy_ratio=1, memory_used_bytes=5, memory_bytes=6, ecc_errors=7),)
                    ),
                ),
            )
        )  # fmt: skip
        pulses.get(timeout=5.0)
        seen = scrape(url)
        assert seen["headway_version", ()] == 3
        assert seen["headway_queue_buffered_groups", ()] == 4
        assert seen["headway_queue_kv_used_tokens", ()] == 100
        assert seen["headway_worker_up", (("worker", "generator-0"),)] == 0
        assert seen["headway_worker_restarts_total", (("worker", "generator-0"),)] == 2
        assert seen["headway_node_shared_memory_free_bytes", (("node", "node1"),)] == 2
        assert seen["headway_node_disk_free_bytes", (("node", "node1"),)] == 3
        assert seen["headway_gpu_ecc_errors", (("gpu", "4"), ("node", "node1"))] == 7
        shown = set(re.findall(r"headway_\w+", DASHBOARD.read_text()))
        assert shown - {name for name, _ in seen} == {"headway_evaluation_test_solve_rate"}
    with pytest.raises(urllib.error.URLError):
        scrape(url)


def told_of_stalls(ledger: Ledger, events: Any, url: str) -> None:
    """A stall counts once and shows for how long it lasts; of a blocked event loop only the end is recorded here."""
    verifier: dict[str, Any] = {"wait": "verifier.score"}
    loop: dict[str, Any] = {"wait": "event loop"}
    stalled = EventRecord(event="stalled", worker="verifier-0", lost_s=40.0, data=verifier)
    ended = EventRecord(event="stall_ended", worker="verifier-0", lost_s=60.0, data=verifier)
    loop_ended = EventRecord(event="stall_ended", worker="orchestrator", lost_s=15.0, data=loop)
    labels = (("wait", "verifier.score"), ("worker", "verifier-0"))
    for event, lasting in ((stalled, True), (ended, False), (loop_ended, False)):
        ledger.record(event)
        events.get(timeout=5.0)
        seen = scrape(url)
        assert seen["headway_stalls_total", labels] == 1
        assert (("headway_stalled_s", labels) in seen) is lasting
        if lasting:
            assert 40.0 <= seen["headway_stalled_s", labels] < 60.0
    assert seen["headway_stalls_total", (("wait", "event loop"), ("worker", "orchestrator"))] == 1


def test_what_a_step_did_not_measure_is_not_repeated_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = told(monkeypatch, "event")
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    with Ledger(directory.path, ManualClock()) as ledger, serving(tmp_path, ledger, directory):
        ledger.record(step_record(0, agents__calls=7, lengths__mean=30.0))
        ledger.record(EventRecord(event="one"))
        while events.get(timeout=5.0).event != "one":
            pass
        names = {name for name, _ in scrape(url_of(directory.path))}
        assert "headway_agents_calls" in names
        ledger.record(step_record(1, lengths__mean=31.0))
        ledger.record(EventRecord(event="two"))
        while events.get(timeout=5.0).event != "two":
            pass
        seen = scrape(url_of(directory.path))
        assert ("headway_agents_calls", ()) not in seen
        assert seen["headway_length_mean_tokens", ()] == 31.0


def test_a_taken_port_is_said_before_the_run_starts(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    with socket.socket() as taken, Ledger(directory.path, ManualClock()) as ledger:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"ledger.prometheus: {address}: Address already in use"):
            serving(tmp_path, ledger, directory, address)
        found = check(experiment_of(tmp_path / "new", ledger={"prometheus": address}), smoke_test=False)
        assert [f.level for f in found if f.key == "ledger.prometheus"] == ["error"]


def test_an_address_for_everyone_is_allowed_and_said(tmp_path: Path) -> None:
    found = check(experiment_of(tmp_path / "new", ledger={"prometheus": "0.0.0.0:0"}), smoke_test=False)
    (warning,) = (f for f in found if f.key == "ledger.prometheus")
    assert warning.level == "warning"
    assert "any host that reaches it" in warning.message


@pytest.mark.parametrize("address", ["9464", "localhost", ":9464", "127.0.0.1:99999", "127.0.0.1:x", 9464])
def test_what_is_no_address_is_refused(tmp_path: Path, address: object) -> None:
    with pytest.raises(ConfigurationError, match=r"ledger\.prometheus = .* valid: HOST:PORT"):
        experiment_of(tmp_path, ledger={"prometheus": address})


def test_loopback_is_known() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1:1", "localhost:1", "[::1]:1", "0.0.0.0:1", "10.0.0.2:1")] == [
        True, True, True, False, False
    ]  # fmt: skip
