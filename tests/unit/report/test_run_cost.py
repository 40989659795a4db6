"""`headway cost live`: what a run has cost, and its waits, by hand; in the report and on the live screen."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from page_answers import words
from rich.console import Console

from headway.cli.main import main as headway
from headway.records.ledger import EventRecord, LedgerLine, QueueFlow, StepRecord
from headway.report.live_view import LiveView, screen, step_line
from headway.report.run_cost import cost_of_run, cost_sentence, with_cost
from headway.report.run_view import view_run
from headway.runtime.run_directory import RunDirectory
from tests.support.simulated_run import experiment_of

PRICE = 3.0


def lines() -> list[LedgerLine]:
    """Ten steps of 30 s after a start of 60 s, on two replicas and two ranks: 360 s of four devices."""
    busy = {"generator_s": 60.0, "generator_busy_s": 54.0}
    flow = QueueFlow(trained_tokens=50_000, straggler_wait_s=1.0, update_wait_s=2.0, **busy)
    first = StepRecord(
        step=0, version=1, step_s=30.0, samples=8, trainer_wait_s=6.0, generator_wait_ratio=0.1, flow=flow
    )
    steps = (
        msgspec.structs.replace(first, step=index, version=index + 1, time_s=60.0 + 30.0 * (index + 1))
        for index in range(10)
    )
    return [EventRecord(event="start"), *steps]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    devices = {"generator": {"devices": ["cuda:0", "cuda:1"]}, "trainer": {"devices": ["cuda:2", "cuda:3"]}}
    RunDirectory(tmp_path).store(experiment_of(tmp_path, **devices))
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines()))
    return tmp_path


def test_all_devices_are_paid_for_all_of_the_time_and_waits_for_theirs(run: Path) -> None:
    found = cost_of_run(view_run(run), PRICE)
    hour = PRICE / 3600
    assert (found.devices, found.duration_s, found.steps, found.trained_tokens) == (4, 360.0, 10, 500_000)
    assert found.usd == pytest.approx(4 * 360 * hour)
    assert found.trainer_waits_usd == pytest.approx(2 * 10 * (6.0 + 2.0) * hour)  # stragglers are among the 6 s
    assert found.generator_waits_usd == pytest.approx(10 * 0.1 * 60.0 * hour)
    assert found.usd_per_step == pytest.approx(found.usd / 10)
    assert found.usd_per_mtok == pytest.approx(2 * found.usd)


def test_a_run_without_a_step_has_no_price_a_step(run: Path) -> None:
    (run / "ledger.jsonl").write_bytes(msgspec.json.encode(EventRecord(event="start", time_s=9.0)) + b"\n")
    found = cost_of_run(view_run(run), PRICE)
    assert (found.usd_per_step, found.usd_per_mtok, found.trainer_waits_usd) == (None, None, 0.0)
    assert "a step" not in cost_sentence(found)


def test_the_commands_say_it_where_a_price_is_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["cost", "live", str(run), "--price", "3"]) == 0
    assert "4 devices for 6 min 00 s at $3 an hour each" in capsys.readouterr().out
    assert headway(["cost", "live", str(run), "--price", "rented.H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usd"] > 0
    assert headway(["report", str(run)]) == 0
    assert "What did it cost?" not in capsys.readouterr().out
    page = run / "page.html"
    assert headway(["report", str(run), "--usd-per-device-hour", "3", "--html", str(page)]) == 0
    assert "What did it cost?" in capsys.readouterr().out
    assert "4 devices for 6 min" in words(page)
    assert headway(["report", str(run), "--json", "--usd-per-device-hour", "3"]) == 0
    assert "4 devices" in json.loads(capsys.readouterr().out)["verdict"]["cost_text"]
    for wrong in (["--price", "-1"], ["--price", "owned.none"], []):
        assert headway(["cost", "live", str(run), *wrong]) == 2


def test_the_live_screen_has_the_sums_of_the_ledger(run: Path) -> None:
    view = view_run(run)
    devices = {"generator": {"devices": ["cuda:0", "cuda:1"]}, "trainer": {"devices": ["cuda:2", "cuda:3"]}}
    dear = LiveView(experiment_of(run, **devices), Console(width=200), usd_per_device_hour=PRICE).state
    free = LiveView(experiment_of(run, **devices), Console(width=200)).state
    for line in lines():
        dear.take(line)
        free.take(line)
    found, whole = dear.cost(), cost_of_run(view, PRICE)
    assert found is not None
    assert found.usd == pytest.approx(whole.usd)
    assert found.trainer_waits_usd == pytest.approx(whole.trainer_waits_usd)
    assert found.usd_per_mtok == pytest.approx(whole.usd_per_mtok)
    assert "$1.20, waits $0.18" in step_line(dear)
    console = Console(width=120, record=True)
    console.print(screen(dear))
    assert "$1.20: 4 devices" in console.export_text()
    assert free.cost() is None
    assert "$" not in step_line(free)


def test_the_report_says_what_the_controller_recommended(run: Path) -> None:
    said = EventRecord(event="control", detail="recommended: 3 replicas", step=7, data={"kind": "recommended"})
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(said) + b"\n")
    answers = with_cost(view_run(run), None).verdict.sentences
    assert answers["Would another plan pay?"] == "At version 7 the controller recommended: 3 replicas"
