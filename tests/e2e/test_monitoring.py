"""A real run, watched: `/metrics` while it goes on, its trace while it goes on and afterwards."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_run import events_of, headway, output_of, refused, steps_of, train, write_experiment, write_inputs

pytestmark = pytest.mark.real


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def test_metrics_and_trace_of_a_run(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    run, gate = tmp_path / "run", tmp_path / "gate"
    gate.touch()  # no group is verified while it stands
    config = write_experiment(
        tmp_path,
        verifier={"name": "tiny_verifiers:gated", "timeout_s": 100},
        **{"verifier.parameters": {"gate": str(gate)}},
        ledger={"trackers": ["tensorboard"], "prometheus": "127.0.0.1:0"},
    )
    with headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: events_of(run, "exporting"), "address of /metrics")
        (told,) = events_of(run, "exporting")
        url = told.detail.split("prometheus: ")[1].split(";")[0]
        command.until(lambda: scrape(url).get("headway_queue_running_groups", 0) > 0, "running groups in /metrics")
        seen = scrape(url)
        assert {f"headway_worker_up/{name}-0" for name in ("generator", "trainer", "verifier")} <= seen.keys()
        assert seen["headway_worker_up/generator-0"] == 1
        assert seen["headway_steps_total"] == 0
        assert "no training step" in output_of("trace", run)
        gate.unlink()
        assert command.wait() == 0, command.output
    assert len(steps_of(run)) == 6
    assert any((run / "tensorboard").iterdir())
    assert "steps 0 to 5" in output_of("trace", run, "--out", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = {(processes[e["pid"]], e["name"].split(" ")[0]) for e in events if e["ph"] == "X"}
    assert {("trainer", name) for name in ("wait", "step", "publish", "checkpoint")} <= shown
    assert {("generator", name) for name in ("busy", "idle", "update")} <= shown
    assert {("verifiers", "score"), ("groups", "buffered"), ("rollouts", "generating")} <= shown
    rollouts = [e for e in events if e["ph"] == "X" and e["name"].startswith("rollout ")]
    assert len(rollouts) == 6 * 4 * 4


@pytest.mark.slow
def test_a_tracker_that_cannot_start_leaves_no_run(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_experiment(tmp_path, ledger={"prometheus": "192.0.2.1:9464"})  # an address of nobody's
    message = refused("train", config)
    assert "ledger.prometheus" in message
    assert "192.0.2.1:9464" in message
    config = write_experiment(tmp_path)
    assert train(config, "--run.steps=1").process.returncode == 0
