"""`headway trace`: what happened in a run, as slices that nest, in a file that a viewer takes."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import experiment_of, simulate

from headway.cli.main import main
from headway.generator.activity import Activity, StepLog
from headway.records.errors import ConfigurationError
from headway.records.generation import EngineStatistics, GenerationRequest
from headway.records.ledger import EventRecord
from headway.records.trace import (
    EngineStep,
    EngineSteps,
    GroupEnd,
    GroupTrace,
    QueueSnapshot,
    Span,
    StepTrace,
    TraceLine,
)
from headway.report.trace import STEPS, describe, timeline_of, write_trace
from headway.report.trace_events import TraceEvents
from headway.report.trace_groups import LaneAllocator
from headway.telemetry.trace_file import FILE_NAME, OLD_NAME, TraceFile, read_trace
from tests.unit.telemetry.test_ledger import ManualClock


def traced(
    tmp_path: Path,
    *,
    kills_s: tuple[float, ...] = (),
    steps: int = 12,
    generator: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A simulated run with its trace in ``tmp_path``."""
    files: list[TraceFile] = []
    experiment = experiment_of(tmp_path, run={"directory": str(tmp_path), "steps": steps}, **sections)

    def session(clock: Any) -> Any:
        files.append(TraceFile(tmp_path, clock, 1e9 + clock.now()))
        return files[-1].write

    simulate(experiment, observe=session, kills_s=kills_s, generator_options=generator)
    for file in files:
        file.close()
    return tmp_path


def events_in(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Events by phase; checks what every trace must obey."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        found[event["ph"]].append(event)
    assert set(found) <= {"X", "M", "C", "i"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in found["X"]:
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_until: list[int] = []
        for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    return found


def process_of(found: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    pid = {e["args"]["name"]: e["pid"] for e in found["M"] if e["name"] == "process_name"}[name]
    return [event for event in found["X"] if event["pid"] == pid]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("run"))


def test_a_run_in_full(whole_run: Path) -> None:
    folder = whole_run
    written = write_trace(folder)
    assert (written.first_step, written.last_step, written.left_out) == (0, 11, "")
    found = events_in(written.path)
    lines = read_trace(folder)
    groups = {line.index: line for line in lines if isinstance(line, GroupTrace)}
    ends = {line.index: line for line in lines if isinstance(line, GroupEnd)}
    trained = [line for line in ends.values() if line.ending == "trained"]
    assert len(trained) == 12 * 8
    computing = [e for e in process_of(found, "trainer") if e["name"].startswith("step ")]
    assert [e["name"] for e in computing] == [f"step {step}" for step in range(12)]
    assert all(e["args"]["samples"] > 0 for e in computing)
    assert {"wait", "publish"} <= {e["name"] for e in process_of(found, "trainer")}
    shown = {e["name"]: e for e in process_of(found, "groups") if e["name"].startswith("group ")}
    assert len(shown) == len(groups)
    end = trained[-1]
    slice_of_it = shown[f"group {end.index}"]
    assert slice_of_it["args"]["step"] == end.step
    assert slice_of_it["dur"] == pytest.approx((end.time_s - end.admitted_s) * 1e6, abs=5)
    rollouts = [e for e in process_of(found, "rollouts") if e["name"].startswith("rollout ")]
    assert len(rollouts) == sum(len(group.rollouts) for group in groups.values())
    rollout = next(e for e in rollouts if e["name"] == f"rollout {end.index}-3")
    member = groups[end.index].rollouts[3]
    assert rollout["args"]["staleness"] == end.step - member.first_version
    assert rollout["args"]["tokens"] == member.tokens
    inside = [e for e in process_of(found, "rollouts") if e["tid"] == rollout["tid"]
              and rollout["ts"] <= e["ts"] and e["ts"] + e["dur"] <= rollout["ts"] + rollout["dur"]]  # fmt: skip
    generating = next(e for e in inside if e["name"] == "generating")
    assert generating["dur"] == pytest.approx((member.generated_s - member.first_token_s) * 1e6, abs=5)


def test_the_newest_steps_are_shown_and_the_rest_is_said(tmp_path: Path) -> None:
    folder = traced(tmp_path, steps=STEPS + 5, queue={"groups_per_step": 2})
    written = write_trace(folder)
    assert (written.first_step, written.last_step) == (5, STEPS + 4)
    assert f"left out: 5 other steps (0 to {STEPS + 4} are in the trace)" in describe(written)
    names = {e["name"] for e in process_of(events_in(written.path), "trainer")}
    assert "step 5" in names
    assert "step 4" not in names
    some = write_trace(folder, tmp_path / "some.json", first_step=3, last_step=4)
    assert (some.first_step, some.last_step) == (3, 4)
    found = events_in(some.path)
    assert {e["name"] for e in process_of(found, "trainer")} >= {"step 3", "step 4"}
    assert len(found["X"]) < len(events_in(written.path)["X"]) / 4
    with pytest.raises(ConfigurationError, match=f"no step between .* the trace holds steps 0 to {STEPS + 4}"):
        write_trace(folder, first_step=900)


def test_a_killed_and_resumed_run(tmp_path: Path) -> None:
    folder = traced(tmp_path, kills_s=(0.9,))
    with (folder / FILE_NAME).open("ab") as file:
        file.write(b'{"kind":"span","track":"gen')  # torn by the kill
    found = events_in(write_trace(folder).path)
    assert {f"step {step}" for step in range(12)} <= {e["name"] for e in process_of(found, "trainer")}


def test_groups_that_end_otherwise_say_how(tmp_path: Path) -> None:
    folder = traced(
        tmp_path, queue={"overdue": "drop", "budget": 1, "groups_per_step": 2, "max_concurrent_rollouts": 64}
    )
    cut = {line.index for line in read_trace(folder) if isinstance(line, GroupEnd) and line.ending == "overdue"}
    assert cut
    names = {e["name"] for e in process_of(events_in(write_trace(folder).path), "groups")}
    assert {f"group {index} (overdue)" for index in cut} <= names


def test_a_member_that_failed_without_a_token_has_no_versions(tmp_path: Path) -> None:
    def cause(request: GenerationRequest) -> str:
        return "the engine is gone" if request.sampling.seed % 5 == 0 else ""

    folder = traced(tmp_path, generator={"error_of": cause}, rollout={"group_size": 6})
    arguments = [event["args"] for event in process_of(events_in(write_trace(folder).path), "rollouts")]
    without = [each for each in arguments if each.get("failed at") and not each["tokens"]]
    assert without
    assert {each["versions"] for each in without} == {each["staleness"] for each in without} == {None}
    assert {each["staleness"] >= 0 for each in arguments if each.get("staleness") is not None} == {True}


def test_replicas_queue_and_events(tmp_path: Path) -> None:
    clock = ManualClock()
    with TraceFile(tmp_path, clock, 5e8) as trace:
        for start_s, name in enumerate(("busy", "busy", "update", "busy")):
            trace.write(Span(track="generator-0", name=name, start_s=100.0 + start_s, end_s=101.0 + start_s))
        trace.write(QueueSnapshot(time_s=101.0, version=3, applied_version=2, open_groups=4, running_groups=3,
                          parked_groups=1, buffered_groups=1, oldest_age_s=0.5))  # fmt: skip
        clock.time_s = 102.0
        trace.on_line(EventRecord(event="generator_died", detail="signal 9"))
    found = events_in(write_trace(tmp_path).path)
    replica = [(e["name"], e["dur"]) for e in process_of(found, "generator")]
    assert replica == [("busy", 2_000_000), ("update", 1_000_000), ("busy", 1_000_000)]
    counters = {e["name"]: e["args"] for e in found["C"]}
    assert counters["groups"] == {"buffered": 1, "running": 2, "parked": 1}
    (mark,) = found["i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("generator_died", 2_000_000, {"detail": "signal 9"})


def test_every_rank_has_a_track(tmp_path: Path) -> None:
    with TraceFile(tmp_path, ManualClock(), 5e8) as trace:
        trace.write(Span(track="trainer-0", name="wait", start_s=100.0, end_s=100.5))
        trace.write(StepTrace(step=0, version=1, start_s=100.0, end_s=101.0, rank_compute_s=(0.4, 0.3)))
    found = process_of(events_in(write_trace(tmp_path).path), "trainer")
    assert sorted((e["tid"], e["name"], e["dur"]) for e in found) == [
        (1, "step 0", 400_000), (1, "wait", 500_000), (2, "step 0", 300_000), (2, "wait", 500_000)
    ]  # fmt: skip


# --- the file --------------------------------------------------------------------------------------------


def test_the_file_stays_small(tmp_path: Path) -> None:
    lines: list[TraceLine] = [Span(track="t", name=str(i), start_s=i, end_s=i + 1) for i in range(100)]
    with TraceFile(tmp_path, ManualClock(), 5e8, segment_bytes=2000) as trace:
        for line in lines:
            trace.write(line)
    assert (tmp_path / FILE_NAME).stat().st_size + (tmp_path / OLD_NAME).stat().st_size < 4400
    kept = [line for line in read_trace(tmp_path) if isinstance(line, Span)]
    assert kept == lines[-len(kept) :]
    assert len(kept) > 20
    assert timeline_of(read_trace(tmp_path)).spans[-1].start_s == 99 + 5e8 - 100


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    trace = TraceFile(tmp_path, ManualClock(), 5e8, on_failure=lambda *what: told.append(what))

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.runtime.line_file.os.write", full)
    for _ in range(3):
        trace.write(Span(track="t", name="n", start_s=0, end_s=1))
    assert [event for event, _ in told] == ["trace_failed"]
    assert "No space left" in told[0][1]


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
    assert "nowhere holds no run" in capsys.readouterr().err
    (tmp_path / "ledger.jsonl").write_text("")
    assert main(["trace", str(tmp_path)]) == 2
    assert "holds no trace" in capsys.readouterr().err
    (tmp_path / FILE_NAME).write_text('{"kind":"session","clock_s":1,"unix_s":2}\n{"kind":"what"}\n')
    assert main(["trace", str(tmp_path)]) == 2
    assert "trace.jsonl, line 2 is damaged" in capsys.readouterr().err
    (tmp_path / FILE_NAME).write_text('{"kind":"session","clock_s":1,"unix_s":2}\n')
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "no" / "folder.json")]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 0
    assert "no training step" in capsys.readouterr().out


# --- parts -----------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=15)


@settings(max_examples=60)
@given(SPANS)
def test_slices_of_a_track_nest_whatever_is_drawn(spans: list[tuple[int, int]]) -> None:
    events = TraceEvents()
    for start, length in sorted(spans, key=lambda span: (span[0], -span[1])):
        events.slice("p", "t", "n", float(start), float(start + length))
    drawn = [e for e in events.as_json({})["traceEvents"] if e["ph"] == "X"]
    for one in drawn:
        for other in drawn:
            first, second = sorted((one, other), key=lambda e: (e["ts"], -e["dur"]))
            end = first["ts"] + first["dur"]
            assert second["ts"] >= end or second["ts"] + second["dur"] <= end


@settings(max_examples=60)
@given(SPANS)
def test_lanes_never_overlap(spans: list[tuple[int, int]]) -> None:
    lanes, taken = LaneAllocator(), defaultdict(list)
    for start, length in sorted(spans):
        taken[lanes.take(start, start + length)].append((start, start + length))
    for intervals in taken.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))


def test_activity_is_cut_and_goes_on() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    activity = Activity(now=lambda: next(times))
    activity.enter("busy")  # at 1
    activity.enter("busy")
    with activity.during("update"):  # 2 to 3
        pass
    assert activity.take() == [("idle", 0.0, 1.0), ("busy", 1.0, 2.0), ("update", 2.0, 3.0), ("busy", 3.0, 4.0)]
    assert activity.take() == [("busy", 4.0, 5.0)]


def test_a_rollout_is_a_short_line(whole_run: Path) -> None:
    lines = [line for line in read_trace(whole_run) if isinstance(line, GroupTrace)]
    rollouts = sum(len(line.rollouts) for line in lines)
    assert sum(len(msgspec.json.encode(line)) for line in lines) / rollouts < 120  # bytes


def test_steps_are_added_up_to_ten_rows_a_second() -> None:
    seen, now = EngineStatistics(), 100.0
    reads: list[float] = []

    def statistics() -> EngineStatistics:
        nonlocal now
        now += cost_s
        reads.append(now)
        return seen

    def work(steps: int, step_s: float) -> None:
        nonlocal seen, now
        for _ in range(steps):
            now += step_s
            seen = EngineStatistics(
                version=4, running=3, kv_used_tokens=50, busy_s=seen.busy_s + step_s,
                decode_steps=seen.decode_steps + 1, generated_tokens=seen.generated_tokens + 3,
            )  # fmt: skip
            log.note(True, now)

    cost_s = 0.0
    log = StepLog(statistics, lambda: now)
    work(1000, 0.001)  # one of a step, and ten of a tenth of a second, the last of them so far
    rows = log.take()
    assert [row.steps for row in rows] == [1, *[100] * 9, 99]
    assert sum(row.tokens for row in rows) == 3000
    assert {(row.running, row.kv_used_tokens, row.version) for row in rows} == {(3, 50, 4)}
    assert [row.busy_s for row in rows] == [0.001, *[0.1] * 9, 0.099]
    assert rows[-1].end_s == 101.0
    now += 60
    log.note(False, now)
    assert log.take() == [], "nothing was done"
    work(5, 0.4)
    assert [row.steps for row in log.take()] == [1] * 5, "each step by itself"
    reads.clear()
    cost_s = 0.02  # counters that have to be fetched
    work(10_000, 0.001)
    assert 3 <= len(reads) <= 7, "a hundredth of the time"


def test_engine_steps_are_counters_of_their_replica(tmp_path: Path) -> None:
    more: dict[str, int] = {"running": 3, "kv_used_tokens": 50, "version": 7}
    rows = (
        EngineStep(end_s=101.5, busy_s=0.08, steps=4, tokens=12, **more),
        EngineStep(end_s=102.5, busy_s=0.05, steps=1, tokens=3, **more),
    )
    line = EngineSteps(track="generator-0", rows=rows)
    with TraceFile(tmp_path, ManualClock(), 1000.0) as file:
        file.write(StepTrace(step=0, version=1, start_s=100.0, end_s=104.0))
        file.write(line)
    assert read_trace(tmp_path)[-1] == line
    assert [row.end_s for row in timeline_of(read_trace(tmp_path)).engines[0].rows] == [1001.5, 1002.5]
    found = events_in(write_trace(tmp_path).path)
    counters = [(event["name"], event["args"]) for event in found["C"]]
    assert counters == [
        ("generator-0, ms a step", {"ms": 20.0}), ("generator-0, requests", {"running": 3}),
        ("generator-0, ms a step", {"ms": 50.0}), ("generator-0, requests", {"running": 3}),
    ]  # fmt: skip
