"""Alerts on their way to a command and a webhook: what they get, what a failure costs, that no secret is written."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_run import experiment_of
from synthetic_run import step_record
from test_ledger import ManualClock
from webhook_server import webhook

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.orchestrator.preflight.check import check
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.ledger import EventRecord
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters import alerts, exporters
from headway.telemetry.exporters.alerts import alert_fields, post, run_command, webhook_url
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.ledger import Ledger, read_ledger

SAVE = [sys.executable, "-c", "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "RETRY_S", 0.01)
    monkeypatch.setattr(alerts, "REQUEST_S", 0.3)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def asking(folder: Path, **keys: Any) -> Experiment:
    return experiment_of(folder, ledger={"trackers": []}, alerts=keys)


def alert(rule: str = "kl") -> EventRecord:
    return EventRecord(event="alert", detail=f"{rule}: KL is 0.2", step=7, time_s=70.0, data=alert_fields(rule))


def events_after(folder: Path, experiment: Experiment, *lines: EventRecord) -> list[EventRecord]:
    """Record ``lines`` in a run that exports; its events about exporters."""
    directory = RunDirectory(folder)
    directory.logs.mkdir()
    with Ledger(folder, ManualClock()) as ledger, start_exports(experiment, directory, ledger, resume=False) as exports:
        exports.announce()
        for line in lines:
            ledger.record(line)
    found = [line for line in read_ledger(folder) if isinstance(line, EventRecord)]
    return [event for event in found if event.event.startswith("export")]


def test_command_and_webhook_get_the_alert_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = tmp_path / "saved"
    with webhook() as server:
        monkeypatch.setenv("MY_HOOK", server.url)
        experiment = asking(tmp_path, command=[*SAVE, str(saved)], webhook_env="MY_HOOK")
        started, cleared = EventRecord(event="start"), EventRecord(event="alert_cleared", data={"rule": "kl"})
        (told,) = events_after(tmp_path, experiment, started, alert(), cleared)
    assert told.event == "exporting"
    assert told.detail.endswith("alerts.webhook_env: $MY_HOOK")
    (received,) = server.received
    assert json.loads(saved.read_text()) == received
    assert received == {
        "text": f"headway {tmp_path.name} on {received['host']}, step 7: kl: KL is 0.2",
        "rule": "kl",
        "detail": "kl: KL is 0.2",
        "run": str(tmp_path),
        "host": os.uname().nodename,
        "step": 7,
        "page": "docs/troubleshooting.md#alert-kl",
        "at": pytest.approx(time.time(), abs=60),
    }


def test_alerts_are_not_lost_behind_a_crowd_of_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporters, "CAPACITY", 1)
    saved = tmp_path / "saved"
    directory, experiment = RunDirectory(tmp_path), asking(tmp_path, command=[*SAVE, str(saved)])
    directory.logs.mkdir()
    with Ledger(tmp_path, ManualClock()) as ledger, start_exports(experiment, directory, ledger, resume=False):
        for step in range(2000):
            ledger.record(step_record(step))
        ledger.record(alert())
    assert len(saved.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import sys; print('TOKEN'); sys.exit(3)", "exit code 3; its output is in logs/alerts.log"),
        ("import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)", "was killed after 0.5 s"),
        ("import os; os.close(0); os._exit(4)", "exit code 4"),  # reads nothing
    ],
)
def test_failing_command_is_told_once_without_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, cause: str
):
    monkeypatch.setattr(alerts, "COMMAND_S", 0.5)
    begun_s = time.monotonic()
    told = events_after(tmp_path, asking(tmp_path, command=[sys.executable, "-c", program]), alert())
    assert time.monotonic() - begun_s < 20.0
    (lost,) = [event for event in told if event.event == "exporter_lost"]
    assert cause in lost.detail
    assert "TOKEN" not in (tmp_path / "ledger.jsonl").read_text()


def test_command_that_is_too_slow_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alerts, "COMMAND_S", 1.0)
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; sleep 60"
    with pytest.raises(HeadwayError, match="killed after 1 s"):
        run_command(("sh", "-c", script), b"{}", tmp_path / "log")
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    deadline = time.monotonic() + 5.0
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline


def test_webhook_is_asked_again_where_that_may_help():
    with webhook(500, 429, 200) as server:
        post(server.url, b'{"a": 1}')
    assert server.received == [{"a": 1}] * 3
    with webhook(503) as server, pytest.raises(HeadwayError, match=r"^the webhook failed: HTTP 503$"):
        post(server.url, b"{}")
    assert len(server.received) == alerts.ATTEMPTS
    with webhook(403) as server, pytest.raises(HeadwayError, match=r"^the webhook failed: HTTP 403$"):
        post(server.url, b"{}")
    assert len(server.received) == 1


def test_redirect_is_not_followed():
    with (
        webhook() as elsewhere,
        webhook(302, location=elsewhere.url) as server,
        pytest.raises(HeadwayError, match="HTTP 302"),
    ):
        post(server.url, b"{}")
    assert elsewhere.received == []


def test_slow_dead_and_nonsensical_webhooks_fail_in_bounded_time_without_their_url():
    begun_s = time.monotonic()
    with webhook(delay_s=30.0) as server, pytest.raises(HeadwayError, match="Timeout") as slow:
        post(server.url, b"{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{free.getsockname()[1]}/T0KEN"
    with pytest.raises(HeadwayError, match="ConnectionRefusedError") as dead:
        post(dead_url, b"{}")
    for url in ("http://:T0KEN/", "http://a b/T0KEN", "http://127.0.0.1:T0KEN/", "https:///T0KEN"):
        with pytest.raises(HeadwayError, match="the webhook failed") as nonsense:
            post(url, b"{}")
        assert "T0KEN" not in str(nonsense.value)
    assert time.monotonic() - begun_s < 10.0
    assert "T0KEN" not in f"{slow.value} {dead.value}"


def test_failing_webhook_is_told_without_its_url_and_the_run_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with webhook(delay_s=30.0) as server:
        monkeypatch.setenv("MY_HOOK", server.url)
        directory, experiment = RunDirectory(tmp_path), asking(tmp_path, webhook_env="MY_HOOK")
        directory.begin(experiment, resume=False)
        with Ledger(tmp_path, ManualClock()) as ledger, start_exports(experiment, directory, ledger, resume=False):
            begun_s = time.monotonic()
            ledger.record(alert())
            assert time.monotonic() - begun_s < 0.2
        directory.release()
    assert any("the webhook failed: " in line.detail for line in read_ledger(tmp_path) if isinstance(line, EventRecord))
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.json", "ledger.jsonl"} <= {file.name for file in written}
    assert [file for file in written if b"T0KEN" in file.read_bytes()] == []


# --- bad input -------------------------------------------------------------------------------------------


def test_unknown_rule_is_refused_with_the_valid_ones(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"alerts\.rules\.0 = 'kll': .*'stall', 'no_step'.*'all'"):
        asking(tmp_path, rules=["kll"])
    with pytest.raises(ConfigurationError, match="a rule is named twice"):
        asking(tmp_path, rules=["kl", "kl"])


def test_command_and_variable_that_are_missing_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    monkeypatch.setenv("ODD_HOOK", "ftp://T0KEN")
    for keys, message in (
        ({"command": ["no-such-program-anywhere"]}, "there is no program 'no-such-program-anywhere'"),
        ({"webhook_env": "NO_SUCH_HOOK"}, "the environment has no NO_SUCH_HOOK"),
        ({"webhook_env": "ODD_HOOK"}, "ODD_HOOK isn't a URL; valid: http://... or https://..."),
    ):
        experiment = asking(tmp_path, **keys)
        with Ledger(tmp_path, ManualClock()) as ledger, pytest.raises(ConfigurationError) as refused:
            start_exports(experiment, RunDirectory(tmp_path), ledger, resume=False)
        assert message in str(refused.value)
        assert "T0KEN" not in str(refused.value)
        (found,) = [one for one in check(experiment, smoke_test=False) if one.key == f"alerts.{next(iter(keys))}"]
        assert found.level == "error"
        assert message in found.message


def test_url_in_place_of_a_variable_is_refused_and_not_shown(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="valid: the name of an environment variable") as refused:
        asking(tmp_path, webhook_env="https://hooks.example.com/T0KEN")
    assert "T0KEN" not in str(refused.value)
    assert webhook_url("") == ""


def test_keys_may_change_when_a_run_is_resumed(tmp_path: Path):
    from headway.config.load import require_resumable

    require_resumable(asking(tmp_path), asking(tmp_path, rules=["kl"], command=["true"]))
    raw = json.loads(asking(tmp_path).model_dump_json())
    del raw["alerts"]  # of a run before there were alerts
    require_resumable(validate_experiment(raw, "old"), asking(tmp_path))
