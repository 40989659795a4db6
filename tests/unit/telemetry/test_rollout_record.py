"""The record of rollouts: exact, in order of arrival, whatever is killed, full or damaged."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.buffer.store import GroupBuffer
from headway.config.schema import LedgerConfig
from headway.orchestrator.train_loop import TrainLoop
from headway.records.rollout import Batch, FinishedGroup
from headway.records.tokens import TokenMask
from headway.runtime.clock import VirtualClock
from headway.telemetry.rollouts import segments
from headway.telemetry.rollouts.columns import ENDED, FINISHED, ended_batch, finished_batch
from headway.telemetry.rollouts.joined import JoinedRollouts
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.telemetry.rollouts.recorder import EVENT_ROLLOUTS_ENDED, EVENT_ROLLOUTS_LOST, RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentFile, SegmentWriter, list_segments
from tests.support.recorded import random_group, rollouts_in, rows_in
from tests.support.simulated_run import experiment_of, simulate
from tests.unit.telemetry.test_ledger import ManualClock

Told = list[tuple[str, str]]


def recorder_of(run: Path, told: Told | None = None, limits: dict[str, int] | None = None, **keys: Any):
    def on_event(name: str, detail: str, **data: Any) -> None:
        assert told is not None, f"{name}: {detail}"
        told.append((name, detail))

    return RolloutRecorder(run, LedgerConfig(**keys), VirtualClock(), on_event, **(limits or {}))


def fill(recorder: RolloutRecorder, groups: list[FinishedGroup]) -> None:
    recorder.begin(lambda share: 0)
    for group in groups:
        recorder.finished(group)


# --- exactness -------------------------------------------------------------------------------------------


def test_record_is_exact_and_in_order_of_arrival(tmp_path: Path) -> None:
    groups = [random_group(index, 1 + index % 5) for index in random.Random(0).sample(range(150), 150)]
    recorder = recorder_of(tmp_path)
    fill(recorder, groups[:70])
    recorder.flush()
    for group in groups[70:]:
        recorder.finished(group)
    recorder.close()
    assert rollouts_in(tmp_path) == [rollout for group in groups for rollout in group.rollouts]
    tasks = [group.group.task.task_id for group in groups for _ in group.rollouts]
    assert [row["task_id"] for row in rows_in(tmp_path)] == tasks
    tokens = [rollout.response_tokens for group in groups for rollout in group.rollouts]
    assert [row["tokens"] for row in rows_in(tmp_path)] == tokens


@pytest.mark.parametrize("steps", [25, pytest.param(650, marks=pytest.mark.long)])
def test_record_equals_what_was_trained_on(tmp_path: Path, steps: int) -> None:
    """A run in virtual time, which filters groups and whose rollouts cross updates."""
    experiment = experiment_of(
        tmp_path,
        run={"steps": steps},
        rollout={"group_size": 4, "max_response_tokens": 60},
        queue={
            "groups_per_step": 4,
            "budget": 3,
            "filter_zero_variance": True,
            "surplus": "discard",
            "oversampling": 1.5,
        },
    )
    outcome = simulate(experiment, record_to=tmp_path)
    recorded = {(rollout.group, rollout.member): rollout for rollout in rollouts_in(tmp_path)}
    trained = [sample.rollout for batch in outcome.trainer.batches for sample in batch.samples]
    assert len(trained) >= 16 * steps
    assert [recorded[rollout.group, rollout.member] for rollout in trained] == trained
    assert any(len(rollout.versions) > 1 for rollout in trained)
    # Every rollout is there once, with the ending that the books have; open ones aren't.
    joined, counts = JoinedRollouts(tmp_path), dict[str, int]()
    for row in rows_in(tmp_path):
        ending, _, _ = joined.end_of(row)
        counts[ending] = counts.get(ending, 0) + 1
    assert {name: count for name, count in counts.items() if name != "open"} == outcome.endings
    assert {"trained", "filtered", "discarded"} <= counts.keys()
    steps_of = {group: end.step for group, end in joined.endings.items() if end.ending == "trained"}
    for batch in outcome.trainer.batches:
        assert {steps_of[sample.rollout.group] for sample in batch.samples} == {batch.step}


def test_rollouts_and_endings_are_written_every_two_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    recorder = RolloutRecorder(tmp_path, LedgerConfig(), clock, lambda *_, **__: None)
    fill(recorder, [random_group(0, 2)])
    recorder.ended([0], "trained", "", 0)
    record = RolloutRecord(tmp_path)
    assert (record.count(), list(record.endings())) == (0, [])
    clock.time_s += 2.5
    recorder.finished(random_group(1, 2))
    assert (record.count(), list(record.endings())) == (4, [0])
    recorder.finished(random_group(2, 2))
    clock.time_s += 2.5
    assert record.count() == 4
    recorder.ended([1], "trained", "", 1)  # a step ends, and no group finishes
    assert (record.count(), list(record.endings())) == (6, [0, 1])


def test_all_endings_are_written_before_a_run_evaluates_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    checkpoint = TrainLoop.checkpoint

    async def looked_at(loop: TrainLoop) -> None:
        seen.append(len(RolloutRecord(tmp_path).endings()))
        await checkpoint(loop)

    monkeypatch.setattr(TrainLoop, "checkpoint", looked_at)
    queue = {"groups_per_step": 2, "filter_zero_variance": False}
    outcome = simulate(experiment_of(tmp_path, run={"steps": 3}, queue=queue), record_to=tmp_path)
    assert seen[-1] == len(RolloutRecord(tmp_path).endings()) == len(outcome.trained_groups) == 6


def test_sequences_whose_columns_differ_in_length_are_never_written(tmp_path: Path) -> None:
    told: Told = []
    recorder = recorder_of(tmp_path, told)
    whole = random_group(0, 1)
    broken = msgspec.structs.replace(whole.rollouts[0], response_mask=TokenMask([True] * 7777))
    fill(recorder, [FinishedGroup(group=whole.group, rollouts=(broken,))])
    recorder.flush()
    assert "7777 mask values" in told[0][1]
    assert RolloutRecord(tmp_path).count() == 0


def test_a_segment_with_other_columns_is_said_and_not_read(tmp_path: Path) -> None:
    group = random_group(0, 3)
    batch = finished_batch(group.rollouts, ["t"] * 3)
    kept = [name for name in FINISHED.names if not name.startswith(("call_", "tool_"))]
    assert len(kept) == len(FINISHED) - 8
    old = batch.select(kept)
    writer = SegmentWriter(tmp_path / "rollouts" / "finished", old.schema)
    writer.append(old, 0)
    writer.close()
    record = RolloutRecord(tmp_path)
    assert list(record.batches()) == []
    assert [problem.endswith("its columns aren't those that this Headway writes") for problem in
            record.problems.values()] == [True]  # fmt: skip


def test_share_takes_whole_groups_evenly(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, rollouts=0.25)
    fill(recorder, [random_group(index, 3) for index in range(40)])
    recorder.ended(range(40), "trained", "", 0)
    recorder.close()
    assert sorted(row["group"] for row in rows_in(tmp_path)) == sorted([*range(0, 40, 4)] * 3)
    assert list(RolloutRecord(tmp_path).endings()) == [*range(0, 40, 4)]
    fill(recorder_of(tmp_path / "none", rollouts="none"), [random_group(0, 2)])
    assert not (tmp_path / "none").exists()


# --- reading ---------------------------------------------------------------------------------------------


def test_ranges_are_read_lazily_over_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(tmp_path, limits={"segment_bytes": 20_000})
    recorder.begin(lambda share: 0)
    for index in range(60):
        recorder.finished(random_group(index, 3))
        recorder.flush()
    record = RolloutRecord(tmp_path)
    assert record.count() == 180, "also before it is closed"
    assert len(list_segments(tmp_path / "rollouts" / "finished")) > 4
    assert not record.problems
    groups = [index for index in range(60) for _ in range(3)]
    for start, stop in ((0, None), (0, 1), (17, 31), (100, 180), (179, 400), (50, 50)):
        found = list(record.batches(["group"], start, stop))
        assert [group for _, batch in found for group in batch["group"].to_pylist()] == groups[start:stop]
        assert all(batch.schema.names == ["group"] for _, batch in found)
        assert [row for row, _ in found][:1] == ([start] if groups[start:stop] else [])
    opened: list[Path] = []
    batches = SegmentFile.batches
    monkeypatch.setattr(
        SegmentFile, "batches", lambda self, *a, **k: (opened.append(self.path), batches(self, *a, **k))[1]
    )
    list(record.batches(["reward"], 90, 93))
    assert len(opened) <= 2, "of other segments nothing is read"
    recorder.finished(random_group(60, 3))
    recorder.close()
    assert record.count() == 183


def test_torn_batch_is_left_out_and_said(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    recorder.begin(lambda share: 0)
    for index in range(3):
        recorder.finished(random_group(index, 2))
        recorder.flush()
    (segment,) = list_segments(tmp_path / "rollouts" / "finished")
    data = segment.path.read_bytes()
    offsets = [offset for offset, _ in SegmentFile(segment.path, FINISHED).batches()]
    for cut in range(0, len(data), 97):
        segment.path.write_bytes(data[:cut])
        record = RolloutRecord(tmp_path)
        whole = sum(2 for end in [*offsets[1:], len(data)] if cut >= end)
        assert record.count() == whole
        assert bool(record.problems) == (cut not in (*offsets, len(data)))


def test_garbage_is_said_and_crashes_nobody(tmp_path: Path) -> None:
    fill(recorder := recorder_of(tmp_path), [random_group(index, 3) for index in range(10)])
    recorder.close()
    (segment,) = list_segments(tmp_path / "rollouts" / "finished")
    data, chance = segment.path.read_bytes(), random.Random(1)
    said = 0
    for _ in range(300):
        damaged = bytearray(data)
        start = chance.randrange(len(data))
        for position in range(start, min(len(data), start + chance.choice([1, 8, 4000]))):
            damaged[position] = chance.choice([0, 255, chance.randrange(256)])
        segment.path.write_bytes(damaged)
        record = RolloutRecord(tmp_path)
        for _, batch in record.batches():
            batch.to_pylist()
        said += bool(record.problems)
    assert said > 30


# --- ends ------------------------------------------------------------------------------------------------


def full(written: int) -> Callable[[int, Any], int]:
    """``os.write`` on a disk that takes so many bytes."""
    left, write = [written], os.write

    def limited(fd: int, data: Any) -> int:
        taken = min(left[0], len(memoryview(data)))
        left[0] -= taken
        if not taken:
            raise OSError(28, "No space left on device")
        return write(fd, bytes(data)[:taken])

    return limited


@pytest.mark.parametrize("room", [10_000, 20_000, 25_001])
def test_full_disk_ends_the_recording_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    told: Told = []
    recorder = recorder_of(tmp_path, told)
    monkeypatch.setattr(segments.os, "write", full(room))
    recorder.begin(lambda share: 0)
    for index in range(20):
        recorder.finished(random_group(index, 2))
        recorder.flush()
    recorder.close()
    assert [name for name, _ in told] == [EVENT_ROLLOUTS_ENDED]
    assert "No space left" in told[0][1] or "no space left" in told[0][1]
    monkeypatch.undo()
    whole = rollouts_in(tmp_path)
    expected = [rollout for index in range(20) for rollout in random_group(index, 2).rollouts]
    assert len(whole) < 40
    assert whole == expected[: len(whole)]


def test_record_leaves_room_and_keeps_its_limit(tmp_path: Path) -> None:
    for keys, limits, why in (
        ({}, {"reserve_bytes": 1 << 60}, "are left to checkpoints"),
        ({"rollouts_max_bytes": 30_000}, {"segment_bytes": 10_000}, "ledger.rollouts_max_bytes = 30000"),
    ):
        told: Told = []
        run = tmp_path / why[:3]
        recorder = recorder_of(run, told, limits, **keys)
        recorder.begin(lambda share: 0)
        for index in range(60):
            recorder.finished(random_group(index, 3))
            recorder.flush()
        assert [name for name, _ in told] == [EVENT_ROLLOUTS_ENDED]
        assert why in told[0][1]
        assert segments.stored_bytes(run / "rollouts") < 60_000


def test_error_in_the_record_does_not_reach_the_run(tmp_path: Path) -> None:
    told: Told = []
    recorder = recorder_of(tmp_path, told)
    recorder.begin(lambda share: 0)
    whole = random_group(0, 1)
    broken = msgspec.structs.replace(whole.rollouts[0], copies="many")
    recorder.finished(FinishedGroup(group=whole.group, rollouts=(broken,)))
    recorder.flush()
    recorder.finished(random_group(1, 1))
    recorder.close()
    assert len(told) == 1
    assert "copies" in told[0][1] or "many" in told[0][1]


# --- resume ----------------------------------------------------------------------------------------------


def test_resume_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    """Without a kill, what isn't flushed is lost; the next process counts it in the books."""
    told: Told = []
    unwritten = recorder_of(tmp_path)
    buffer = GroupBuffer(tmp_path / "buffer.db", 100, VirtualClock(), recorder=unwritten)
    for index in range(10):
        finished = random_group(index, 4)
        buffer.admit(finished.group)
        if index == 8:
            buffer.end_group(8, "overdue", "late", {0: (17, False)})
        elif index < 9:
            buffer.finish_group(finished)
        if index == 3:
            buffer.commit_batch(Batch(step=0, groups=(0, 1)))
            buffer.complete_step(0, "trained")
            unwritten.flush()
    buffer.close()
    again = recorder_of(tmp_path, told)
    buffer = GroupBuffer(tmp_path / "buffer.db", 100, VirtualClock(), recorder=again)
    assert told == [(EVENT_ROLLOUTS_LOST, told[0][1])]
    assert told[0][1].startswith("20 rollouts")
    buffer.end_group(9, "overdue", "late", {1: (5, False)})
    buffer.end_group(4, "discarded", "surplus")
    buffer.close()
    again.close()
    rows = list(rows_in(tmp_path))
    assert [row["group"] for row in rows] == [g for g in (0, 1, 2, 3, 9) for _ in range(4)]
    assert [(row["verified"], row["tokens"], row["task_id"]) for row in rows[16:]] == [
        (False, tokens, "task-2") for tokens in (0, 5, 0, 0)
    ]
    endings = RolloutRecord(tmp_path).endings()  # of 8 out of the books
    assert {group: (end.ending, end.reason, end.step) for group, end in endings.items()} == {
        0: ("trained", "step 0", 0), 1: ("trained", "step 0", 0), 8: ("overdue", "late", None),
        9: ("overdue", "late", None), 4: ("discarded", "surplus", None)
    }  # fmt: skip
    assert [segment.first for segment in list_segments(tmp_path / "rollouts" / "finished")] == [0, 16]
    third = recorder_of(tmp_path, told)  # nothing was lost since
    GroupBuffer(tmp_path / "buffer.db", 100, VirtualClock(), recorder=third).close()
    assert len(told) == 1


def test_killed_runs_record_every_rollout_once(tmp_path: Path) -> None:
    experiment = experiment_of(
        tmp_path, run={"steps": 20}, rollout={"group_size": 4, "max_response_tokens": 60}, queue={"groups_per_step": 4}
    )
    outcome = simulate(experiment, record_to=tmp_path, kills_s=(3.0, 2.5, 4.0))
    keys = [(row["group"], row["member"]) for row in rows_in(tmp_path)]
    assert len(keys) == len(set(keys))
    lost = [line for line in outcome.lines if getattr(line, "event", "") == EVENT_ROLLOUTS_LOST]
    missing = sum(outcome.endings.values()) - len([key for key in keys if key[0] in RolloutRecord(tmp_path).endings()])
    assert 0 <= missing <= sum(line.data["rollouts"] for line in lost)


@pytest.mark.slow
def test_read_batches_leave_memory_and_arrays_of_them_stay_whole(tmp_path: Path) -> None:
    def resident_kb(path: Path) -> int:
        """Of the mapped file."""
        entries = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        own = [entry for entry in entries if str(path) in entry.split("\n", 1)[0]]
        assert own, "it is mapped"
        return sum(int(entry.split("\nRss:", 1)[1].split()[0]) for entry in own)

    rows = [(index, "trained", "", 1, 0.0) for index in range(50_000)]
    writer = SegmentWriter(tmp_path, ENDED)
    for at in range(8):
        writer.append(ended_batch([(at, *row[1:]) for row in rows]), 0)
    writer.close()
    (segment,) = list_segments(tmp_path)
    kept, most_kb = [], 0
    for _, batch in SegmentFile(segment.path, ENDED).batches():
        kept.append(batch["group"])
        most_kb = max(most_kb, resident_kb(segment.path))
    assert most_kb < segment.path.stat().st_size / 1024 / 4
    assert [column.unique().to_pylist() for column in kept] == [[at] for at in range(8)]


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    fill(recorder := recorder_of(tmp_path), [random_group(index, 3) for index in range(10)])
    recorder.close()
    ((_, batch),) = RolloutRecord(tmp_path).batches(["response_logprobs"])
    values = batch["response_logprobs"].flatten().to_numpy()
    assert values.dtype == np.float32
    assert not values.flags.owndata
