"""Alerts of real runs: raised once, delivered to a command and a webhook, and no failure of theirs harms the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import audited, events_of, output_of, refused, require_whole, steps_of, write_experiment, write_inputs
from webhook_server import webhook

from headway.records.ledger import EventRecord

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

ALERTING = tiny_run.HERE / "alerting_headway.py"
SAVE = [sys.executable, "-c", "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"]
FULL = str(1 << 60)  # bytes: no disk has so much room


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_run, "FAULTY", ALERTING)
    monkeypatch.setenv("STALL_FILE", str(tmp_path / "stall"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def alerts_of(run: Path) -> list[EventRecord]:
    return events_of(run, "alert")


def saved(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_stalled_verifier_and_full_disk_reach_command_and_slow_webhook_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.setenv("ALERT_DISK_BYTES", FULL)
    with webhook(delay_s=1.0) as server:
        monkeypatch.setenv("MY_HOOK", server.url)
        config = write_experiment(
            tmp_path,
            run={"directory": str(tmp_path / "run"), "steps": 10**6},
            verifier={"name": "stall_functions:holds_lock", "timeout_s": 120.0},
            alerts={"command": [*SAVE, str(tmp_path / "saved")], "webhook_env": "MY_HOOK"},
        )
        with tiny_run.headway("train", config, "--quiet", run=tmp_path / "run", fault="none") as command:
            command.until(lambda: len(steps_of(command.run)) >= 3, "steps")
            (tmp_path / "stall").touch()
            command.until(lambda: len(server.received) >= 2 and len(saved(tmp_path / "saved")) >= 2, "two alerts")
            command.until(lambda: events_of(command.run, "stalled"), "the stall")
    rules = [event.data["rule"] for event in alerts_of(tmp_path / "run")]
    assert sorted(map(str, rules)) == ["disk", "stall"]
    received = {alert["rule"]: alert for alert in server.received}
    assert received == {alert["rule"]: alert for alert in saved(tmp_path / "saved")}
    assert "verifier-0" in received["stall"]["detail"]
    assert str(tmp_path / "run") in received["disk"]["detail"]
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert [file for file in written if b"T0KEN" in file.read_bytes()] == []
    assert '"MY_HOOK"' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.slow
def test_dead_webhook_and_failing_command_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.setenv("ALERT_DISK_BYTES", FULL)
    monkeypatch.setenv("MY_HOOK", "http://127.0.0.1:9/T0KEN")  # nobody listens there
    alerts = {"command": [sys.executable, "-c", "import sys; sys.exit('no')"], "webhook_env": "MY_HOOK"}
    config = write_experiment(tmp_path, run={"directory": str(tmp_path / "run"), "steps": 60}, alerts=alerts)
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    require_whole(tmp_path / "run", 60)
    assert [event.data["rule"] for event in alerts_of(tmp_path / "run")] == ["disk"]
    lost = {event.detail.partition(": ")[0]: event.detail for event in events_of(tmp_path / "run", "exporter_lost")}
    assert "the webhook failed: ConnectionRefusedError" in lost["alerts.webhook_env"]
    assert "ended with exit code 1" in lost["alerts.command"]
    assert "T0KEN" not in command.output + (tmp_path / "run" / "ledger.jsonl").read_text()
    assert (tmp_path / "run" / "logs" / "alerts.log").read_text() == "no\n"
    report = output_of("doctor", tmp_path / "run")
    assert "alerts" in report
    assert "disk: the file system of" in report


def test_blocked_event_loop_is_alerted_to_by_the_other_process(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_experiment(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 10**6},
        hooks={"is_valid_group": "stall_functions:blocks_loop"},
        ledger={"trackers": [], "trace": False},  # fakes have no spans
        alerts={"rules": ["stall"], "command": [*SAVE, str(tmp_path / "saved")]},
    )
    with tiny_run.headway("train", config, "--quiet", run=tmp_path / "run", fault="fakes") as command:
        command.until(lambda: len(steps_of(command.run)) >= 3, "steps")
        (tmp_path / "stall").touch()
        command.until(lambda: saved(tmp_path / "saved"), "an alert")
    (alert,) = saved(tmp_path / "saved")
    assert "event loop is blocked in support/stall_functions.py" in alert["detail"]
    assert [event.data["rule"] for event in alerts_of(tmp_path / "run")] == ["stall"]


def test_healthy_run_raises_nothing_and_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the limits of every run
    write_inputs(tmp_path)
    config = write_experiment(tmp_path, run={"directory": str(tmp_path / "run"), "steps": 30})
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    assert alerts_of(tmp_path / "run") == []
    assert audited(tmp_path / "run").completed_steps == 30


def test_bad_keys_end_with_exit_code_2(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_experiment(tmp_path)
    assert "'reward_hacking'" in refused("train", config, "--alerts.rules=['hacking']")
    assert "there is no program 'nowhere'" in refused("check", config, "--alerts.command=['nowhere']")
    assert "there is no program 'nowhere'" in refused("train", config, "--alerts.command=['nowhere']")
    assert "the environment has no NOWHERE" in refused("train", config, "--alerts.webhook_env=NOWHERE")
    run = subprocess.run(["ls", tmp_path / "run"], capture_output=True, text=True, check=False)
    assert "config.json" not in run.stdout  # the same command, mended, starts anew
