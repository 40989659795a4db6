"""The view Now: the queue of a live run, its waits, stalls, alerts, and what is said of one that has ended."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_run import evaluation, step_record

from headway.records.generation import EngineLoad
from headway.records.ledger import EventRecord
from headway.records.stalls import Wait, WaitGraph
from headway.records.trace import GroupEnd, GroupTrace, QueueSnapshot, RolloutTrace, Span, WorkerState
from headway.report.run_view import view_run
from headway.report.watch import view_now as view
from headway.report.watch.watched_runs import WatchedRun
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger
from headway.telemetry.trace_file import TraceFile

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"
WORKERS = (
    WorkerState(name="generator-0", up=True, device="cpu:0"),
    WorkerState(name="trainer-0", up=False, restarts=2, device="cpu:1"),
)


class LiveRun:
    """A run that this process holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, RealClock()
        folder.mkdir()
        shutil.copy(RECORDED / "ended" / "config.json", folder)
        self.ledger = Ledger(folder, self.clock)
        self.trace = TraceFile(folder, self.clock, time.time())
        self.watched = WatchedRun("run", folder)
        self.ledger.record(EventRecord(event="start"))

    def steps(self, count: int, **changes: Any) -> None:
        for step in range(count):
            self.ledger.record(step_record(step, **changes))

    def group(self, index: int, version: int, age_s: float = 0.0) -> None:
        now_s = self.clock.now() - age_s
        times = {"first_token_s": now_s, "generated_s": now_s, "finished_s": now_s, "verify_s": 0.0}
        rollouts = tuple(
            RolloutTrace(member=member, tokens=9, first_version=version + member, last_version=9, reward=1.0, resumes=0,
                         reprefills=0, failure="", **times)
            for member in range(2)
        )  # fmt: skip
        self.trace.write(GroupTrace(index=index, task="t", admitted_s=0.0, admitted_version=0, finished_s=now_s,
                                    rollouts=rollouts))  # fmt: skip

    def pulse(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"version": 7, "applied_version": 6, "open_groups": 20, "running_groups": 12,
                                  "parked_groups": 1, "buffered_groups": 3, "oldest_age_s": 4.5, "workers": WORKERS,
                                  "engines": EngineLoad(slots=32, running_rollouts=30, waiting_rollouts=9)}  # fmt: skip
        self.trace.write(QueueSnapshot(time_s=self.clock.now(), **fields | changes))

    def waits(self, *kinds: tuple[str, str], age_s: float = 0.0) -> None:
        waits = tuple(Wait(kind=kind, owner=owner, waiter="w", since_s=0.0) for kind, owner in kinds)
        graph = WaitGraph(written_s=time.time() - age_s, pid=os.getpid(), now_s=self.clock.now(), waits=waits)
        (self.folder / "waits.json").write_bytes(msgspec.json.encode(graph))

    def now(self, price: float | None = None) -> dict[str, Any]:
        self.trace._write_pending()
        found = view.now(self.watched, price)
        msgspec.json.encode(found)
        return found


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    with RunDirectory(tmp_path / "run") as held:
        run = LiveRun(tmp_path / "run")
        held.acquire()
        yield run
        run.trace.close()
        run.ledger.close()


def stages(found: dict[str, Any]) -> dict[str, tuple[int, int | None]]:
    return {stage["name"]: (stage["groups"], stage["rollouts"]) for stage in found["queue"]["stages"]}


def test_the_queue_of_a_live_run(live: LiveRun) -> None:
    live.steps(30)
    for index, version in enumerate((5, 5, 6, 4, 5)):
        live.group(index, version, age_s=10.0 + index)
    live.trace.write(GroupEnd(index=3, ending="trained", step=6, time_s=0.0, admitted_s=0.0))
    live.pulse(version=31)
    live.trace.write(GroupEnd(index=0, ending="trained", step=31, time_s=live.clock.now() + 1, admitted_s=0.0))
    live.group(9, 31, age_s=-1.0)  # neither was so yet when the queue was looked at
    live.waits(("verdicts", "loops"), ("verdicts", "loops"), ("trainer.train_step", "trainer-0"))
    found = live.now()
    assert (found["state"], found["holder"], found["problems"]) == ("running", f"process {os.getpid()}", [])
    assert (found["version"], found["applied_version"], found["step"], found["steps"]) == (31, 6, 30, 4)
    assert stages(found) == {  # 9 rollouts wait for a slot: two groups of four
        **{"admitted": (2, 9), "generating": (8, 30), "verifying": (2, None)},
        **{"parked": (1, None), "buffered": (3, None), "batch": (4, None)},
    }
    queue = found["queue"]
    live.waits(("verdicts", "loops"), ("a teacher", "loops"), ("a teacher", "loops"))
    taught = stages(live.now())
    assert [taught[name][0] for name in ("admitted", "generating", "verifying", "teaching")] == [2, 7, 1, 2]
    assert [(of["version"], of["groups"]) for of in queue["buffered_by_version"]] == [(5, 3), (6, 1)]
    assert queue["version"] == 31
    assert queue["buffered_by_version"][0]["age_s"] == pytest.approx(14.0, abs=1.0)
    assert (queue["capacity"], queue["budget"], queue["oldest_age_s"]) == (40, 2, 4.5)
    assert [(one["name"], one["up"], one["restarts"], one["doing"]) for one in found["workers"]] == [
        ("generator-0", True, 0, ""),
        ("trainer-0", False, 2, "train step"),
    ]
    assert time.time() - found["updated_unix_s"] < 10
    assert len(found["rates"]["recent"]) == 30
    assert found["rates"]["recent"][-1][1:] == [step_record(29).production_per_s, step_record(29).consumption_per_s]


def test_a_batch_is_empty_while_the_trainer_waits_for_one(live: LiveRun) -> None:
    live.steps(1)
    live.pulse()
    live.waits(("a batch", "loops"))
    assert stages(live.now())["batch"] == (0, None)


def test_what_the_newest_steps_say_otherwise_is_said_beside_the_judgement_of_the_run(live: LiveRun) -> None:
    live.steps(100, trainer_wait_ratio=0.6, generator_wait_ratio=0.02)
    for step in range(100, 120):
        live.ledger.record(step_record(step, trainer_wait_ratio=0.02, generator_wait_ratio=0.6))
    found = live.now()
    assert found["balance"] == view_run(live.folder).verdict.balance == "generation-bound"
    assert "In the newest 20 steps: Training-bound: the trainer waits 2% of the time" in found["sentence"]
    assert (found["waits"]["generator"], found["waits_of"]) == (pytest.approx(0.6), 20)


def test_the_sentence_says_who_waits_how_stale_whether_it_learns_and_the_cost(live: LiveRun) -> None:
    live.ledger.record(evaluation("during", 0, 0.3, split="validation"))
    live.steps(30, trainer_wait_ratio=0.6, generator_wait_ratio=0.02)
    assert ". On the training tasks the solve rate went" in live.now()["sentence"]
    live.ledger.record(evaluation("during", 30, 0.9, split="validation"))
    found = live.now(price=3600.0)
    waits = "Generation-bound: the trainer waits 60% of the time"
    stale = "trajectories were at most 3 versions old, 1.3 on average when trained, against a budget of 2"
    for words in (waits, stale, ". Solve rate on 500"):
        assert words in found["sentence"]
    assert found["sentence"].endswith("so far.")
    assert found["cost"]["usd"] == pytest.approx(2 * 31.5)  # two devices, a dollar a second
    assert (found["balance"], found["learning"]) == ("generation-bound", "improved")
    verdict = view_run(live.folder).verdict
    assert (verdict.balance, verdict.learning) == ("generation-bound", "improved")
    assert verdict.staleness_text == f"BUDGET BROKEN: {stale}."
    unmeasured = {"yielded": 0.0, "environment": 0.0, "teaching": 0.0}
    assert found["waits"] == pytest.approx({"trainer": 0.6, "generator": 0.02} | unmeasured)


def test_stalls_alerts_and_a_silent_orchestrator_are_told(live: LiveRun) -> None:
    live.steps(2)
    stall = EventRecord(event="stalled", worker="trainer-0", detail="stalled 9 s: why", time_s=20.0, lost_s=9.0)
    live.ledger.record(stall)
    live.ledger.record(EventRecord(event="alert", detail="entropy fell", step=2, time_s=20.0,
                                   data={"rule": "entropy", "at": 1.7e9}))  # fmt: skip
    live.waits(age_s=60.0)
    found = live.now()
    (one,) = found["stalls"]
    assert (one["worker"], one["detail"]) == ("trainer-0", "stalled 9 s: why")
    assert found["alerts"] == [{"rule": "entropy", "detail": "entropy fell", "step": 2, "unix_s": 1.7e9}]
    assert [event["event"] for event in found["latest"]] == ["alert", "stalled", "start"]
    assert [event["kind"] for event in found["latest"]] == ["alert", "stall", "restart"]
    assert "silent for 60 s" in found["problems"][0]


def test_what_is_left_ends_with_the_steps_or_the_time(live: LiveRun) -> None:
    raw = json.loads((live.folder / "config.json").read_text())
    (live.folder / "config.json").write_text(json.dumps(raw | {"run": raw["run"] | {"steps": 100}}))
    live.steps(10, step_s=2.0, time_s=50.0)
    assert live.now()["left_s"] == pytest.approx(180.0)


def test_a_run_without_a_line_is_no_blank(live: LiveRun) -> None:
    os.truncate(live.folder / "ledger.jsonl", 0)
    found = live.now(price=1.0)
    assert found["problems"] == ["nothing is recorded yet"]
    assert (found["step"], found["left_s"], found["state"]) == (0, None, "running")
    assert stages(found)["generating"] == (0, 0)


def test_a_run_that_is_being_resumed_is_said_to_be(live: LiveRun) -> None:
    live.steps(2)
    live.ledger.record(EventRecord(event="end"))
    assert live.now()["problems"] == []  # the process that ends holds its lock a little longer
    os.utime(live.folder / "lock", (time.time() + 9, time.time() + 9))  # it is taken again
    found = live.now()
    assert (found["state"], len(found["problems"])) == ("running", 1)
    assert "started or resumed" in found["problems"][0]
    live.ledger.record(EventRecord(event="resume"))
    assert live.now()["problems"] == []


def test_a_dead_run_shows_what_it_was_last(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as held:
        run = LiveRun(tmp_path / "run")
        held.acquire()
        run.steps(3)
        run.pulse()
        run.waits(("verdicts", "loops"))
    found = run.now()
    assert (found["state"], found["left_s"], found["applied_version"]) == ("died", None, None)
    assert found["sentence"].startswith("It died. ")
    assert stages(found)["buffered"] == (step_record(2).buffered_groups, None)
    assert found["workers"] == []


@pytest.mark.parametrize("name", ["ended", "interrupted", "killed", "other"])
def test_recorded_runs_of_an_older_format_are_shown(name: str) -> None:
    found = view.now(WatchedRun(name, RECORDED / name), 1.0)
    states = {"ended": "ended", "other": "ended", "killed": "died", "interrupted": "interrupted"}
    assert found["state"] == states[name]
    assert found["problems"] == []
    assert found["sentence"]


def test_the_trace_is_read_from_its_end(live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    live.steps(1)
    live.trace._write_pending()
    with (live.folder / "trace.jsonl").open("ab") as file:
        file.write(b"garbage\n" * 1000)
    monkeypatch.setattr(view, "_TAIL_BYTES", 4000)
    live.group(1, 7)
    live.pulse()
    assert live.now()["version"] == 7
    assert len(live.now()["queue"]["buffered_by_version"]) == 1
    for number in range(200):  # more than the tail since the last look: the pulse is found again
        live.trace.write(Span(track="generator-0", name="busy", start_s=number, end_s=number + 1.0))
    live.pulse(version=8)
    assert live.now()["version"] == 8
    assert live.now()["queue"]["buffered_by_version"] == []


def test_the_stamp_changes_with_what_the_run_writes(live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    live.waits()
    stamps = [view.stamp(live.watched)]
    assert view.stamp(live.watched) == stamps[0]
    live.steps(1)
    stamps.append(view.stamp(live.watched))
    live.pulse()
    live.trace._write_pending()
    stamps.append(view.stamp(live.watched))
    live.waits(("a", "b"))
    stamps.append(view.stamp(live.watched))
    monkeypatch.setattr(view, "_SILENT_S", -math.inf)
    stamps.append(view.stamp(live.watched))
    assert len(set(map(str, stamps))) == len(stamps)
