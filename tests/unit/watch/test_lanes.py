"""A run's trace as lanes: what is drawn, growth, rotation, resumed sessions, damage, the cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import headway.report.watch.lanes
import headway.report.watch.spans
from headway.records.errors import ConfigurationError
from headway.records.trace import (
    EngineStep,
    EngineSteps,
    GroupEnd,
    GroupTrace,
    Mark,
    QueueSnapshot,
    RolloutTrace,
    Span,
    StepTrace,
    TraceLine,
    TraceSession,
    WorkerState,
)
from headway.report.trace_groups import LaneAllocator
from headway.report.watch.lanes import RunLanes
from headway.report.watch.spans import Row, SpanStore, StoredSpans
from headway.telemetry.trace_file import FILE_NAME, OLD_NAME

T0 = 1e9  # seconds since 1970 when the clocks of these traces are at 0
SESSION = TraceSession(clock_s=0.0, unix_s=T0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def append(run: Path, lines: Sequence[TraceLine], name: str = FILE_NAME) -> None:
    with (run / name).open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def span(track: str, name: str, start_s: float, end_s: float) -> Span:
    return Span(track=track, name=name, start_s=start_s, end_s=end_s)


def group(index: int, admitted_s: float, finished_s: float, members: int = 2) -> GroupTrace:
    generated_s = finished_s - 1
    rollouts = [RolloutTrace(member=m, first_token_s=admitted_s + 1, generated_s=generated_s, finished_s=finished_s,
                             verify_s=0.5, tokens=9, first_version=0, last_version=0, reward=1.0, resumes=0,
                             reprefills=0, failure="") for m in range(members)]  # fmt: skip
    return GroupTrace(index=index, task="t", admitted_s=admitted_s, admitted_version=0, finished_s=finished_s,
                      rollouts=tuple(rollouts))  # fmt: skip


def end(index: int, time_s: float, admitted_s: float, ending: str = "trained", finished: bool = True) -> GroupEnd:
    return GroupEnd(index=index, ending=ending, step=0, time_s=time_s, admitted_s=admitted_s, finished=finished)


def drawn(lanes: RunLanes, pixels: int = 10_000) -> dict[str, list[tuple[str, float, float]]]:
    """All spans by track, as (name, start, end) in seconds since T0, so finely that none are joined."""
    found = lanes.lanes()
    ids = {track["id"]: f"{track['group']}/{track['name']}" for track in found["tracks"]}
    spans = lanes.window(T0, T0 + 1000, pixels, ids)["tracks"] if ids else {}
    return {
        ids[int(track)]: [
            (found["names"][name], round(start, 3), round(until, 3))
            for name, start, until in zip(of["name"], of["start"], of["end"], strict=True)
        ]
        for track, of in spans.items()
    }


def test_workers_are_drawn_on_their_tracks_and_devices(run: Path):
    workers = (WorkerState(name="generator-0", up=True, device="cuda:0"), WorkerState(name="trainer-0", up=True))
    pulse = QueueSnapshot(time_s=0.5, version=0, applied_version=0, open_groups=0, running_groups=0, parked_groups=0,
                  buffered_groups=0, oldest_age_s=0.0, workers=workers)  # fmt: skip
    append(run, [
        SESSION, pulse, span("generator-0", "idle", 0, 10), span("generator-0", "busy", 10, 20),
        span("generator-0", "busy", 20, 30), span("verifier-1", "score 4", 3, 4), span("cpu:1", "trainer: step", 5, 6),
        span("trainer-0", "wait", 0, 40),
        StepTrace(step=7, version=8, start_s=0.0, end_s=60.0, rank_compute_s=(20.0, 15.0)),
        span("trainer-0", "publish", 60, 61), span("weights", "apply version 8", 61, 63),
        span("trainer-0", "wait", 63, 70),
        Mark(event="checkpoint", detail="version 8", time_s=64.0),
    ])  # fmt: skip
    lanes = RunLanes(run)
    assert drawn(lanes) == {
        "generator/generator-0": [("idle", 0, 10), ("busy", 10, 30)],  # the pulse had split it
        "devices/cuda:0": [("generator-0: busy", 10, 30)],
        "verifiers/verifier-1": [("score", 3, 4)],
        "devices/cpu:1 turns": [("trainer: step", 5, 6)],
        "trainer/trainer-0": [("wait", 0, 40), ("step", 40, 60), ("publish", 60, 61), ("wait", 63, 70)],
        "trainer/trainer-1": [("step", 45, 60), ("wait", 63, 70)],
        "other/weights": [("apply version", 61, 63)],
    }
    found = lanes.lanes()
    assert [found["names"][code] for code in found["waiting"]] == ["idle", "wait"]
    assert found["versions"] == [{"version": 8, "published_s": T0 + 61, "applied_s": T0 + 63}]
    assert found["steps"] == [{"step": 7, "start_s": T0, "end_s": T0 + 60, "skipped": False}]
    assert found["marks"] == [{"time_s": T0 + 64, "event": "checkpoint", "detail": "version 8"}]
    assert (found["from_s"], found["to_s"], found["events"], found["problems"]) == (T0, T0 + 70, 13, [])
    later = lanes.lanes(since_s=T0 + 60.5)
    assert (len(later["versions"]), later["steps"], len(later["marks"])) == (1, [], 1)
    step = lanes.window(T0 + 41, T0 + 50, 100, [next(t["id"] for t in found["tracks"] if t["name"] == "trainer-0")])
    (of_step,) = step["tracks"].values()
    assert (of_step["start"], of_step["end"], of_step["number"]) == ([-1], [19], [7])  # whole, beyond the window


def test_steps_of_an_engine_are_drawn_below_its_replica(run: Path):
    step = EngineStep(end_s=2.0, busy_s=0.5, steps=9, tokens=90, running=10, kv_used_tokens=1, version=0)
    append(run, [SESSION, EngineSteps(track="generator-0", rows=(step,))])
    assert drawn(RunLanes(run)) == {"generator/generator-0 engine": [("decoding requests", 1.5, 2)]}


def test_groups_and_rollouts_have_lanes_and_say_who_they_are(run: Path):
    append(run, [SESSION, group(3, 0, 10), group(4, 5, 20), end(3, 30, 0), end(5, 25, 21, "overdue", finished=False),
                 StepTrace(step=0, version=1, start_s=0, end_s=30.5, rank_compute_s=(4.5,))])  # fmt: skip
    lanes = RunLanes(run)
    found = drawn(lanes)
    assert found["groups/000"] == [("generating", 0, 9), ("verifying", 9, 10), ("buffered", 10, 26), ("step", 26, 30)]
    assert found["groups/001"] == [("generating", 5, 19), ("verifying", 19, 20)]  # buffered still
    assert found["groups/002"] == [("overdue", 21, 25)]
    rollout = [("queued", 0, 1), ("generating", 1, 9), ("verifying", 9, 10)]
    assert found["rollouts/000.00"] == found["rollouts/000.01"] == rollout
    assert {track for track in found if track.startswith("rollouts/001")} == {"rollouts/001.00", "rollouts/001.01"}
    track = next(t["id"] for t in lanes.lanes()["tracks"] if t["name"] == "001.01")
    (spans,) = lanes.window(T0, T0 + 30, 1000, [track])["tracks"].values()
    assert set(spans["number"]) == {4}
    assert set(spans["member"]) == {1}


def test_only_what_was_appended_is_read(run: Path, monkeypatch: pytest.MonkeyPatch):
    append(run, [SESSION, span("generator-0", "busy", 0, 1)])
    lanes, taken = RunLanes(run), list[bytes]()
    lanes.lanes()
    take = lanes._take
    monkeypatch.setattr(lanes, "_take", lambda data: (taken.append(data), take(data)))
    lanes.lanes()
    assert taken == []
    append(run, [span("generator-0", "busy", 2, 3)])
    with (run / FILE_NAME).open("ab") as file:
        file.write(b'{"kind":"span","track":"generator-0","name":"bu')
    assert drawn(lanes) == {"generator/generator-0": [("busy", 0, 1), ("busy", 2, 3)]}
    assert [data.count(b"\n") for data in taken] == [1]
    assert lanes.lanes()["problems"] == []
    with (run / FILE_NAME).open("ab") as file:
        file.write(b'sy","start_s":4,"end_s":5}\n')
    assert drawn(lanes)["generator/generator-0"][-1] == ("busy", 4, 5)


def test_a_trace_that_is_rotated_stays_whole(run: Path):
    append(run, [SESSION, span("a", "busy", 0, 1), group(0, 0, 9)])
    lanes = RunLanes(run)
    drawn(lanes)
    append(run, [span("a", "busy", 2, 3)])
    os.replace(run / FILE_NAME, run / OLD_NAME)
    append(run, [SESSION, span("a", "busy", 4, 5), end(0, 12, 0, "filtered")])
    expected = [("busy", 0, 1), ("busy", 2, 3), ("busy", 4, 5)]
    assert drawn(lanes)["other/a"] == drawn(RunLanes(run))["other/a"] == expected
    os.replace(run / FILE_NAME, run / OLD_NAME)
    append(run, [SESSION, span("a", "busy", 6, 7)])
    found = drawn(lanes)
    assert found["other/a"] == [*expected, ("busy", 6, 7)]  # what this process has read stays
    assert found["groups/000"][-1] == ("buffered", 9, 12)
    assert drawn(RunLanes(run))["other/a"] == [("busy", 4, 5), ("busy", 6, 7)]  # what is left of the trace


def test_another_trace_in_its_place_is_read_anew(run: Path):
    append(run, [SESSION, span("a", "busy", 0, 1)])
    lanes = RunLanes(run)
    drawn(lanes)
    (run / FILE_NAME).unlink()
    append(run, [SESSION, span("b", "busy", 2, 3), span("b", "busy", 4, 5)])
    assert drawn(lanes) == {"other/b": [("busy", 2, 3), ("busy", 4, 5)]}


def test_sessions_of_a_resumed_run_follow_each_other(run: Path):
    append(run, [SESSION, span("a", "busy", 0, 1), group(0, 0, 9), group(1, 0, 9), end(1, 10, 0, "filtered")])
    append(run, [TraceSession(clock_s=5000.0, unix_s=T0 + 100), span("a", "busy", 5001, 5002), group(0, 4000, 5009),
                 end(0, 5010, 4000, "filtered")])  # fmt: skip
    found = drawn(RunLanes(run))
    assert found["other/a"] == [("busy", 0, 1), ("busy", 101, 102)]
    of_groups = sorted(itertools.chain.from_iterable(of for track, of in found.items() if track.startswith("groups/")))
    assert ("generating", 100, 108) in of_groups  # admitted anew: not before its session
    assert max(until for _, _, until in of_groups) == 110


def test_lines_that_cannot_be_read_are_left_out_and_counted(run: Path):
    append(run, [span("a", "busy", 0, 1), SESSION])  # the first one before anybody has said the time of day
    (run / FILE_NAME).open("ab").write(b'\x00\xff\x80 garbage\n{"kind":"unknown"}\n\n[1, 2\n')
    append(run, [span("a", "busy", 2, 3)])
    lanes = RunLanes(run)
    assert drawn(lanes) == {"other/a": [("busy", 2, 3)]}
    (problem,) = lanes.lanes()["problems"]
    assert problem.startswith("3 lines of the trace can't be read")


@pytest.mark.parametrize("content", [None, b"", b"\x00" * 5_000_000, b"no trace\n"])
def test_a_run_without_a_trace_says_so(run: Path, content: bytes | None):
    if content is not None:
        (run / FILE_NAME).write_bytes(content)
    lanes = RunLanes(run)
    found = lanes.lanes()
    assert (found["tracks"], found["from_s"], found["to_s"], found["steps"]) == ([], None, None, [])
    assert len(found["problems"]) == 1
    assert lanes.window(0, 1, 100, [0, 1]) == {"tracks": {}}


def test_a_trace_outside_the_run_is_not_read(run: Path, tmp_path: Path):
    append(tmp_path, [SESSION, span("secret", "busy", 0, 1)])
    (run / FILE_NAME).symlink_to(tmp_path / FILE_NAME)
    assert RunLanes(run).lanes()["tracks"] == []


@pytest.mark.parametrize("bad", [(1, 1, 100), (2, 1, 100), (0, float("nan"), 100), (0, float("inf"), 100), (0, 1, 1)])
def test_a_window_that_is_none_is_refused(run: Path, bad: tuple[float, float, int]):
    with pytest.raises(ConfigurationError, match="valid: "):
        RunLanes(run).window(*bad, [0])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sealed by 64, so that a test's trace has many blocks in files."""
    for module in (headway.report.watch.lanes, headway.report.watch.spans):
        monkeypatch.setattr(module, "SEAL_ROWS", 64)
    monkeypatch.setattr(headway.report.watch.lanes, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(headway.report.watch.lanes, "_REFRESH_BYTES", 8192)


def all_of(lanes: RunLanes) -> dict[str, Any]:
    while (found := lanes.lanes())["indexed_share"] < 1:
        pass
    return found


@pytest.mark.usefixtures("small")
def test_what_was_read_is_in_the_cache_and_the_run_is_not_written(run: Path, cache: Path):
    append(run, [SESSION, *(span(f"verifier-{i % 3}", f"score {i}", i / 4, i / 4 + 0.2) for i in range(2000))])
    files = sorted(run.iterdir())
    first = RunLanes(run)
    expected = all_of(first) and drawn(first)
    assert sum(map(len, expected.values())) == 2000
    second = RunLanes(run)  # beside the first, which has the cache: reads for itself
    assert not second._store.kept
    assert all_of(second)
    assert drawn(second) == expected
    del first
    append(run, [span("verifier-0", "score 3", 600, 601)])
    third = RunLanes(run)
    assert third._store.kept
    assert third._state.events > 1800  # without a look at the trace
    all_of(third)
    assert drawn(third) == expected | {"verifiers/verifier-0": [*expected["verifiers/verifier-0"], ("score", 600, 601)]}
    assert sorted(run.iterdir()) == files
    del third
    (state,) = cache.rglob("*.state")
    for damage in (b"garbage", b""):
        state.write_bytes(damage)
        (run / FILE_NAME).unlink()
        append(run, [SESSION, *(span("verifier-1", "score 1", i / 4 + 0.1, i / 4 + 0.2) for i in range(500))])
        found = RunLanes(run)
        all_of(found)
        assert [start for _, start, _ in drawn(found)["verifiers/verifier-1"]] == [0.1 + i / 4 for i in range(500)]
        del found


@pytest.mark.parametrize("sealed", [1, 100])
def test_where_two_overlap_the_later_one_is_cut(monkeypatch: pytest.MonkeyPatch, sealed: int):
    monkeypatch.setattr(headway.report.watch.spans, "SEAL_ROWS", sealed)
    store, works = SpanStore(Path("/nowhere/rows"), Path("/nowhere/blocks")), np.array([True, True])
    store.restore(StoredSpans())
    assert store.add([(0.0, 10.0, 0, 0, 1, -1)], works, 100.0) == (sealed == 1)
    store.add([(5.0, 12.0, 0, 1, 2, -1), (2.0, 3.0, 0, 1, 3, -1), (5.0, 6.0, 1, 0, 4, -1)], works, 100.0)
    found = store.window(0, -1.0, 20.0, 1000, works)
    assert (found["start"], found["end"], found["number"]) == ([1, 11], [11, 13], [1, 2])
    found = store.window(0, 5.0, 11.0, 1000, works)  # whole, beyond the window
    assert (found["start"], found["end"]) == ([-5, 5], [5, 7])
    assert not store.add([(97.0, 98.0, 0, 0, 5, -1)], works, 100.0)  # an earlier one may still arrive


def test_lanes_are_as_few_as_run_at_once_by_start_or_by_end():
    random = np.random.default_rng(0)
    spans = [(start, start + random.uniform(0, 9)) for start in random.uniform(0, 100, 500)]
    most = max(sum(start <= moment < until for start, until in spans) for moment, _ in spans)
    for order in (0, 1):
        lanes, taken = LaneAllocator(), dict[int, float]()
        for start, until in sorted(spans, key=lambda one: one[order]):
            lane = lanes.take(start, until)
            assert taken.get(lane, 0) <= start
            taken[lane] = until
        assert lanes.count == most


def store_of(rows: list[Row], works: NDArray[np.bool_], pieces: int) -> SpanStore:
    """A store with rows of a track, added in so many pieces, most of them sealed, in blocks of three."""
    with pytest.MonkeyPatch.context() as patch:
        for name, few in {"SEAL_ROWS": 8, "_BLOCK_ROWS": 3}.items():
            patch.setattr(headway.report.watch.spans, name, few)
        store = SpanStore(Path("/nowhere/rows"), Path("/nowhere/blocks"))
        store.restore(StoredSpans())
        for part in np.array_split(np.arange(len(rows)), pieces):
            store.add([rows[place] for place in part], works, rows[part[-1]][1] if len(part) else 0)
    return store


def assert_whole(store: SpanStore, rows: list[Row], works: NDArray[np.bool_], from_s: float, to_s: float, pixels: int):
    """A window is sorted, not longer than it may be, and has all the work and each wide span of ``rows``."""
    found = store.window(0, from_s, to_s, pixels, works)
    shown = list(zip(found["start"], found["end"], strict=True))
    assert len(shown) <= pixels
    assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(shown))
    inside = [min(until, to_s - from_s) - max(start, 0) for start, until in shown]
    cut = [(min(until, to_s) - max(start, from_s), start, until, name) for start, until, _, name, *_ in rows]
    expected = sum(took for took, *_, name in cut if took > 0 and works[name])
    assert np.dot(inside, found["share"]) == pytest.approx(expected, abs=1e-4 * (to_s - from_s) + 1e-5)
    for took, start, until, _ in cut:
        if took > 2.001 * (to_s - from_s) / pixels:  # wide: it is there as it is
            assert any(abs(a + from_s - start) + abs(b + from_s - until) < 1e-5 for a, b in shown)


WORKS = np.array([True, False, True, True])


@given(
    st.lists(st.tuples(st.floats(0.001, 5), st.floats(0.001, 5), st.integers(0, 3)), min_size=1, max_size=300),
    st.floats(0, 1),
    st.floats(0.001, 1),
    st.integers(2, 400),
    st.integers(1, 7),
)
def test_a_window_has_all_the_work_there_is(
    steps: list[tuple[float, float, int]], left: float, width: float, pixels: int, pieces: int
):
    rows, at = list[Row](), 0.0
    for gap, took, name in steps:
        rows.append((at + gap, at + gap + took, 0, name, len(rows), -1))
        at += gap + took
    from_s = left * at
    assert_whole(store_of(rows, WORKS, pieces), rows, WORKS, from_s, from_s + max(1e-3, width * at), pixels)


def test_windows_of_many_spans_have_all_their_work():
    random = np.random.default_rng(0)
    bounds = np.cumsum(random.exponential(1, 2 * 3000))
    rows = [(float(a), float(b), 0, int(random.integers(4)), i, -1) for i, (a, b) in enumerate(bounds.reshape(-1, 2))]
    store = store_of(rows, WORKS, 7)
    for _ in range(60):
        from_s = random.uniform(0, 6000)
        assert_whole(store, rows, WORKS, from_s, from_s + random.uniform(1, 6000), int(random.integers(2, 200)))
