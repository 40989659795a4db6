"""The views Run and Compare: series in bins, evaluations and events at their places, logs, configurations."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import evaluation, step_record, synthetic_lines, write_run

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.report.run_view import view_run
from headway.report.several.axes import axis_positions
from headway.report.watch import run_series as view
from headway.report.watch.view_compare import compare
from headway.report.watch.watched_runs import WatchedRun

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    write_run(tmp_path / "run", synthetic_lines(120))
    shutil.copy(RECORDED / "ended" / "config.json", tmp_path / "run")
    return WatchedRun("run", tmp_path / "run")


def test_bins_are_of_equally_many_steps(run: WatchedRun) -> None:
    found = view.series(run, "reward/mean,length/p99_tokens", points=50)
    steps = [step for step in view_run(run.path).steps if not step.skipped]
    versions, rewards = (
        np.array(column).reshape(40, 3) for column in zip(*((s.version, s.rewards.mean) for s in steps), strict=True)
    )
    rows = found["series"]["reward/mean"]
    assert (found["per_point"], found["steps"], found["x"]) == (3, 120, versions.mean(axis=1).tolist())
    assert rows["mean"] == pytest.approx(rewards.mean(axis=1).tolist())
    assert rows["high"] == rewards.max(axis=1).tolist()
    assert rows["low"] == rewards.min(axis=1).tolist()
    assert list(found["series"]) == ["reward/mean", "length/p99_tokens"]
    single = view.series(run, "reward/mean", points=120)
    assert (single["per_point"], len(single["x"]), single["series"]["reward/mean"]["low"]) == (1, 120, None)


def test_series_begin_with_a_version(run: WatchedRun) -> None:
    found = view.series(run, "reward/mean", points=1000, since=101)
    assert found["x"] == [float(version) for version in range(101, 121)]
    assert view.series(run, "reward/mean", since=10**12)["x"] == []


def test_values_that_are_missing_leave_holes(tmp_path: Path) -> None:
    lines = [step_record(step, metrics={} if step < 3 else {"loss": 1.0}) for step in range(4)]
    write_run(tmp_path / "run", lines)
    found = view.series(WatchedRun("run", tmp_path / "run"), "loss/loss", points=2)["series"]["loss/loss"]
    assert [math.isnan(found["mean"][0]), *found["mean"][1:]] == [True, 1.0]
    assert [math.isnan(found["low"][0]), *found["high"][1:]] == [True, 1.0]


@pytest.mark.parametrize("axis", ["steps", "samples", "hours", "dollars"])
def test_evaluations_and_steps_have_places_on_each_axis(run: WatchedRun, axis: str) -> None:
    if axis == "dollars":
        with pytest.raises(ConfigurationError, match="--usd-per-device-hour"):
            view.series(run, "reward/mean", axis)
    found = view.series(run, "reward/mean", axis, points=1000, price=2.0)
    places = axis_positions(view_run(run.path), 2.0)[axis]
    assert found["x"] == pytest.approx(list(places.values())[1:])
    records = found["evaluations"]
    assert [record["phase"] for record in records] == ["before", *["during"] * 6, "after"]
    assert records[0]["x"] == 0.0
    assert records[-1]["x"] == pytest.approx(places[120])
    assert records[1]["x"] == pytest.approx((places[20] + places[21]) / 2)  # of versions 20 and 21


def test_unknown_names_axes_and_numbers_are_refused_with_what_is_valid(run: WatchedRun) -> None:
    for wrong, words in (
        ({"names": "reward/mean,nonsense"}, "names = 'nonsense': valid: .*reward/mean"),
        ({"names": "", "axis": "furlongs"}, "axis = 'furlongs': valid: steps, samples"),
        ({"names": "", "points": 1}, "points = 1: valid: 2 to"),
        ({"names": "", "axis": "tokens"}, "doesn't say"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            view.series(run, **wrong)


def test_names_stand_in_the_reports_plots_in_reading_order(run: WatchedRun) -> None:
    rows = view.names(run)["series"]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows) == len(set(by_name))
    assert sorted(by_name) == sorted(_all_names(run))
    assert [row["section"] for row in rows[:3]] == ["Learning"] * 3
    assert by_name["wait/trainer_ratio"] == {
        **{"name": "wait/trainer_ratio", "section": "Balance", "title": "Who waits", "unit": "share"},
        "caption": "share of the step the trainer waited for a batch",
    }
    assert by_name["wait/generator_ratio"]["title"] == "Who waits"
    assert by_name["rates/production_samples_per_s"]["unit"] == "samples/s"
    assert by_name["loss/entropy"]["section"] == "Optimiser"
    assert all(row["title"] and row["section"] for row in rows)


def _all_names(run: WatchedRun) -> list[str]:
    with run.tail(wide=True) as tail:
        return tail.names()


# --- events ----------------------------------------------------------------------------------------------


def test_events_come_after_a_line_with_kinds_and_places(run: WatchedRun) -> None:
    found = view.events(run, -1)["events"]
    assert [event["event"] for event in found] == [
        "start",
        *["evaluation"] * 7,
        "best",
        "evaluation",
        "accounting",
        "end",
    ]
    assert [event["kind"] for event in found[:2]] == ["restart", "evaluation"]
    assert "solve rate 0.452" in found[1]["detail"]
    last = found[-1]
    assert (last["x"]["steps"], last["x"]["hours"] * 3600) == (120, pytest.approx(129.0))
    assert view.events(run, found[-2]["n"])["events"] == [last]
    assert view.events(run, last["n"]) == {"events": [], "problems": []}


def test_kinds_of_events(tmp_path: Path) -> None:
    kinds = {"trainer_died": "restart", "stalled": "stall", "alert": "alert", "plan_changed": "plan", "best": "update",
             "resume": "restart", "<script>": "other", "step_skipped": "alert"}  # fmt: skip
    write_run(tmp_path / "run", [EventRecord(event=event) for event in kinds])
    found = view.events(WatchedRun("run", tmp_path / "run"))["events"]
    assert {event["event"]: event["kind"] for event in found} == kinds


def test_of_many_events_the_newest_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", [EventRecord(event=f"event {number}") for number in range(10)])
    monkeypatch.setattr(view, "_MAX_EVENTS", 3)
    found = view.events(WatchedRun("run", tmp_path / "run"))
    assert [event["event"] for event in found["events"]] == ["event 7", "event 8", "event 9"]
    assert found["problems"][-1] == "7 older events are left out"


# --- logs and configuration ------------------------------------------------------------------------------


@pytest.fixture
def logs(run: WatchedRun, tmp_path: Path) -> Path:
    folder = run.path / "logs"
    (folder / "agents").mkdir(parents=True)
    (folder / "trainer-0.log").write_bytes(b"0123456789" * 10)
    (folder / "agents" / "0.log").write_text("an agent\n")
    os.utime(folder / "agents" / "0.log", (1e9, 1e9))
    (tmp_path / "secret").write_text("secret")
    (folder / "elsewhere.log").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    return folder


@pytest.mark.usefixtures("logs")
def test_logs_are_listed_and_nothing_else_is_read(run: WatchedRun) -> None:
    rows = view.logs(run)["logs"]
    assert [(row["name"], row["size_bytes"]) for row in rows] == [("trainer-0.log", 100), ("agents/0.log", 9)]
    for name in ("elsewhere.log", "../config.json", "/etc/passwd", "folder/secret", "agents", "", "\0"):
        with pytest.raises(ConfigurationError, match=r"valid: agents/0.log, trainer-0.log"):
            view.log(run, name)


@pytest.mark.usefixtures("logs")
def test_parts_of_a_log(run: WatchedRun) -> None:
    def part(**where: int) -> tuple[str, int, int]:
        found = view.log(run, "trainer-0.log", **where)
        assert found["size_bytes"] == 100
        return found["text"], found["start"], found["end"]

    assert part(bytes=5) == ("56789", 95, 100)
    assert part(end=12, bytes=4) == ("8901", 8, 12)
    assert part(end=3, bytes=10) == ("012", 0, 3)
    assert part(end=10**30, bytes=1) == ("9", 99, 100)
    assert part(end=-5, bytes=1) == ("", 0, 0)
    with pytest.raises(ConfigurationError, match="bytes = 0"):
        part(bytes=0)
    assert view.log(run, "trainer-0.log", unix_s=1.0)["problems"] == ["its lines have no times: this is its end"]


def test_a_log_with_times_is_shown_around_a_moment(run: WatchedRun, logs: Path) -> None:
    began_s = datetime(2026, 1, 2, 3, tzinfo=UTC).timestamp()
    lines = []
    for second in range(20_000):
        at = datetime.fromtimestamp(began_s + second, UTC).isoformat(timespec="seconds")
        lines.append(f"{at} line {second}\n  more of it\n")
    (logs / "timed.log").write_text("".join(lines))
    for second in (0, 7_000, 19_999):
        found = view.log(run, "timed.log", unix_s=began_s + second, bytes=1 << 18)
        assert f" line {second}\n" in found["text"], second
    for unix_s in (0.0, 1e12, math.nan):
        assert view.log(run, "timed.log", unix_s=unix_s)["problems"] == []


def test_the_configuration_is_as_it_is_stored(run: WatchedRun, tmp_path: Path) -> None:
    stored = json.loads((run.path / "config.json").read_text())
    assert view.configuration(run) == {"configuration": stored, "problems": []}
    (run.path / "config.json").write_bytes(b"\xff{")
    assert "config.json can't be read" in view.configuration(run)["problems"][0]
    (run.path / "config.json").unlink()
    (tmp_path / "secret").write_text('{"secret": 1}')
    (run.path / "config.json").symlink_to(tmp_path / "secret")
    assert view.configuration(run)["configuration"] == {}


# --- several runs ----------------------------------------------------------------------------------------


def test_runs_are_compared_and_what_one_lacks_is_left_out(tmp_path: Path, run: WatchedRun) -> None:
    other = write_run(tmp_path / "other", [evaluation("before", 0, 0.2), step_record(0, metrics={"new": 1.0})])
    config = json.loads((run.path / "config.json").read_text()) | {"only_here": True}
    (other / "config.json").write_text(json.dumps(config))
    runs = [run, WatchedRun("x/other", other)]
    found = compare(runs, "reward/mean,loss/new,nonsense", "hours", 400, 2.0)
    assert [(one["id"], one["name"], sorted(one["series"])) for one in found["runs"]] == [
        ("run", "run", ["reward/mean"]),
        ("x/other", "other", ["loss/new", "reward/mean"]),
    ]
    assert found["differences"] == {"only_here": ["–", "true"]}
    numbers = found["runs"][0]["numbers"]
    assert numbers["state"] == "ended"
    assert numbers["steps"].startswith("120 in ")
    assert re.match(r"0\.930 ± .* \(500 tasks, version 120\)", numbers["solve rate, test after"])
    assert numbers["learning"].startswith("Yes: ")
    assert numbers["cost"] == "$0.14"
    assert any(problem.startswith("x/other: cost and time left aren't known") for problem in found["problems"])
    assert len(found["runs"][0]["x"]) == 120
    np.testing.assert_allclose(found["runs"][0]["evaluations"][-1]["x"], 126 / 3600)


def test_a_run_without_an_axis_is_left_out_there(tmp_path: Path, run: WatchedRun) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ledger.jsonl").write_bytes(b"")
    runs = [WatchedRun("ended", RECORDED / "ended"), run, WatchedRun("empty", tmp_path / "empty")]
    found = compare(runs, "reward/mean", "tokens")
    assert [len(one["x"]) for one in found["runs"]] == [4, 0, 0]
    assert any("run: axis = 'tokens'" in problem for problem in found["problems"])
    assert found["axes"] == ["steps", "samples", "tokens", "hours"]
    with pytest.raises(ConfigurationError, match="axis = 'x'"):
        compare(runs, "", "x")
    with pytest.raises(ConfigurationError, match="runs = 40: valid: 1 to"):
        compare(runs[:1] * 40)
