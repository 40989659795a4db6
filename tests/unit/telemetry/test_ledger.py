"""The ledger: whole lines only, replays resolved, a run summed up from its lines."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import step_of
from synthetic_run import evaluation, resolved, step_record, synthetic_lines, write_run

from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.report.incidents import incident_text
from headway.report.run_view import view_run
from headway.report.tables import summary_rows
from headway.report.watch.watched_runs import RunTail
from headway.runtime import line_file
from headway.runtime.line_file import LineFile
from headway.telemetry.ledger import Ledger, LedgerTail, read_ledger, read_ledger_tail
from headway.telemetry.summary import summarise, undisturbed


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def open_ledger(folder: Path, clock: ManualClock | None = None) -> Ledger:
    return Ledger(folder, clock or ManualClock())


def steps_of(lines: list[LedgerLine]) -> list[int]:
    return [line.step for line in lines if isinstance(line, StepRecord)]


def test_lines_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    lines = synthetic_lines(steps=25)
    with open_ledger(tmp_path) as ledger:
        for line in lines:
            ledger.record(line)
    assert read_ledger(tmp_path) == lines


def test_event_is_stamped_with_the_time_since_opening(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_ledger(tmp_path, clock=clock) as ledger:
        clock.time_s += 2.5
        ledger.event("checkpoint", "version 4", step=4, seconds=0.25)
    assert read_ledger(tmp_path) == [
        EventRecord(event="checkpoint", detail="version 4", step=4, time_s=2.5, data={"seconds": 0.25})
    ]


def test_each_line_is_written_before_record_returns(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    for step in range(3):
        ledger.record(step_record(step))
        assert steps_of(read_ledger(tmp_path)) == list(range(step + 1))
    ledger.close()
    ledger.close()
    with pytest.raises(ValueError, match="closed"):
        ledger.record(step_record(3))


def test_non_finite_numbers_survive_as_nan(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.record(step_of(0, version=0, skipped=True, rewards__mean=math.nan, metrics={"loss": math.inf}))
    (line,) = read_ledger(tmp_path)
    assert isinstance(line, StepRecord)
    assert math.isnan(line.rewards.mean)
    assert math.isnan(line.metrics["loss"])


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(min_value=1, max_value=400))
def test_a_torn_end_is_ignored_by_readers_and_cut_off_on_resume(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with open_ledger(folder) as ledger:
        for step in range(3):
            ledger.record(step_record(step))
    path = folder / "ledger.jsonl"
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    path.write_bytes(data[: min(last + cut, len(data) - 1)])
    assert steps_of(read_ledger(folder)) == [0, 1]
    with open_ledger(folder) as ledger:
        ledger.record(step_record(2))
        ledger.record(step_record(3))
    assert steps_of(read_ledger(folder)) == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [0, 3, line_file._BLOCK_BYTES - 1, line_file._BLOCK_BYTES, 3 * line_file._BLOCK_BYTES])
def test_a_torn_end_of_any_length_is_found_from_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: int
) -> None:
    path = tmp_path / "lines"
    whole = b"x" * (1 << 20) + b"\nlast\n"
    path.write_bytes(whole + b"y" * torn)
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: read.append(size) or real(fd, size, offset))
    with LineFile(path):
        assert path.read_bytes() == whole
    assert 0 < sum(read) <= torn + line_file._BLOCK_BYTES
    path.write_bytes(b"y" * torn)
    with LineFile(path):
        assert path.read_bytes() == b""


def test_an_end_of_zero_bytes_is_cut_off(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.record(step_record(0))
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b"\0" * 50 + b"\n")
    assert steps_of(read_ledger(tmp_path)) == [0]
    with open_ledger(tmp_path) as ledger:
        ledger.record(step_record(1))
    assert steps_of(read_ledger(tmp_path)) == [0, 1]


def test_damage_inside_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    good = msgspec.json.encode(step_record(0))
    (tmp_path / "ledger.jsonl").write_bytes(good + b"\n{broken\n" + good + b"\n")
    with pytest.raises(ConfigurationError, match=r"ledger\.jsonl, line 2 is damaged.*remove it \(sed -i 2d "):
        read_ledger(tmp_path)
    with pytest.raises(ConfigurationError, match="line 2"):
        open_ledger(tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes().startswith(good)


def test_no_ledger_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        read_ledger(tmp_path / "nothing")


@pytest.mark.parametrize("partly", [0, 10])
def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partly: int) -> None:
    ledger = open_ledger(tmp_path)
    ledger.record(step_record(0))
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if partly:
            return real(fd, data[:partly])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(HeadwayError, match=r"(?i)no space left"):
            ledger.record(step_record(1))
    ledger.record(step_record(1))
    ledger.close()
    assert (tmp_path / "ledger.jsonl").read_bytes().count(b"\n") == 2
    assert steps_of(read_ledger(tmp_path)) == [0, 1]


def test_subscribers_get_every_line_and_a_failing_one_is_dropped_with_an_event(tmp_path: Path) -> None:
    seen: list[LedgerLine] = []

    def broken(line: LedgerLine) -> None:
        raise RuntimeError("no screen")

    with open_ledger(tmp_path) as ledger:
        ledger.subscribe(broken)
        ledger.subscribe(seen.append)
        ledger.record(step_record(0))
        ledger.record(step_record(1))
    recorded = read_ledger(tmp_path)
    events = [line for line in recorded if isinstance(line, EventRecord)]
    assert [(event.event, event.detail) for event in events] == [("view_failed", "RuntimeError: no screen")]
    assert sorted(map(str, seen)) == sorted(map(str, recorded))


# --- replays ---------------------------------------------------------------------------------------------


def test_a_replayed_step_keeps_its_last_record_and_later_ones_stay() -> None:
    first = [step_record(step, samples=1) for step in range(5)]
    again = [step_record(step, samples=2) for step in (2, 3)]
    kept = resolved([*first, EventRecord(event="resume"), *again])
    found = {line.step: line.samples for line in kept if isinstance(line, StepRecord)}
    assert found == {0: 1, 1: 1, 4: 1, 2: 2, 3: 2}


def test_time_of_a_session_counts_whole_though_its_steps_were_trained_again(tmp_path: Path) -> None:
    """Report and page say the same of a resumed run."""
    lines: list[LedgerLine] = [EventRecord(event="start", time_s=0.5)]
    lines += [step_record(step, time_s=10.0 * (step + 1)) for step in range(3)]
    lines += [EventRecord(event="resume", time_s=1.0), step_record(2, time_s=5.0), EventRecord(event="end", time_s=7.0)]
    run = write_run(tmp_path / "run", lines)
    assert len(read_ledger(run)) == len(lines) - 1
    assert read_ledger_tail(run).duration_s == 37.0
    assert view_run(run).summary.duration_s == 37.0
    tail = RunTail(run)
    tail.refresh()
    assert (tail.duration_s, tail.view().summary.duration_s) == (37.0, 37.0)


def test_a_reader_that_broke_off_goes_on_with_the_next_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", synthetic_lines(steps=6))
    whole, tail = read_ledger(run), LedgerTail(run / "ledger.jsonl")
    seen = []
    for _, line, _ in tail.refresh():
        seen.append(line)
        if len(seen) == 3:
            break
    seen += [line for _, line, _ in tail.refresh()]
    assert seen == whole == list(tail.lines.values())


def test_a_ledger_that_was_cut_and_has_grown_since_is_read_anew(tmp_path: Path) -> None:
    """As after a power failure: a resume cuts off the damaged end between two looks of a page."""
    lines = synthetic_lines(steps=6)
    run = write_run(tmp_path / "run", lines)
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    tail = RunTail(run)
    tail.refresh()
    assert "1 damaged lines" in tail.problems[0]
    with open_ledger(run) as ledger:
        ledger.event("resume", "after a power failure, from the last checkpoint")
        ledger.event("something")
    tail.refresh()
    assert list(tail.lines.values()) == read_ledger(run)
    assert not any("damaged" in problem for problem in tail.problems)


def test_a_replay_shows_without_a_resume_event_too() -> None:
    lines = [step_record(step, samples=1) for step in range(4)] + [step_record(2, samples=2), step_record(3, samples=2)]
    kept = [line for line in resolved(lines) if isinstance(line, StepRecord)]
    assert [(line.step, line.samples) for line in kept] == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_skipped_tries_of_a_step_are_one_history_and_are_replaced_together() -> None:
    tried = [
        step_record(0),
        step_record(1, version=1, skipped=True),
        step_record(1, version=1, skipped=True),
        step_record(1),
    ]
    assert resolved(tried) == tried
    replay = [step_record(1, version=1, skipped=True, samples=7), step_record(1, samples=7)]
    kept = resolved([*tried, EventRecord(event="resume"), *replay])
    assert [line for line in kept if isinstance(line, StepRecord)] == [tried[0], *replay]


def test_an_evaluation_recorded_again_counts_once() -> None:
    lines = [evaluation("during", 20, 0.5, "validation"), evaluation("during", 20, 0.6, "validation")]
    assert resolved(lines) == lines[1:]
    both = [evaluation("before", 0, 0.5, "validation"), evaluation("before", 0, 0.5, "test")]
    assert resolved(both) == both


@settings(deadline=None, max_examples=60)
@given(kills=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5), steps=st.integers(1, 15))
def test_after_any_kills_every_step_stands_once_and_comes_from_the_last_session(
    kills: list[tuple[int, int]], steps: int
) -> None:
    lines: list[LedgerLine] = [EventRecord(event="start")]
    newest: dict[int, int] = {}
    reached = 0
    for session, (more, back) in enumerate([*kills, (steps, 0)]):
        if session:
            lines.append(EventRecord(event="resume"))
        for step in range(reached, reached + more):
            lines.append(StepRecord(step=step, version=step + 1, samples=session))
            newest[step] = session
        reached = max(0, reached + more - back)
    kept = [line for line in resolved(lines) if isinstance(line, StepRecord)]
    assert {line.step: line.samples for line in kept} == newest
    assert len(kept) == len(newest)


# --- summary ---------------------------------------------------------------------------------------------


def test_summary_weights_waits_by_time_and_rates_by_the_whole_run() -> None:
    lines: list[LedgerLine] = [
        EventRecord(event="start"),
        step_of(
            0, time_s=2.0, step_s=1.0, samples=10, trainer_wait_s=0.9, generator_wait_ratio=0.0,
            production_per_s=4.0, effective_production_per_s=2.0, endings={"trained": 10}, length_bias__ks=0.5,
        ),
        step_of(
            1, time_s=5.0, step_s=3.0, samples=30, trainer_wait_s=0.1, generator_wait_ratio=0.4,
            production_per_s=8.0, effective_production_per_s=6.0, endings={"trained": 30, "failed": 1},
            length_bias__ks=0.1,
        ),
    ]  # fmt: skip
    summary = summarise(lines)
    assert summary.trainer_wait_ratio == pytest.approx(1.0 / 4.0)
    assert summary.generator_wait_ratio == pytest.approx(0.4 * 3 / 4)
    assert summary.consumption_per_s == pytest.approx(40 / 3)
    assert summary.production_per_s == pytest.approx((4 + 24) / 4)
    assert summary.effective_production_per_s == pytest.approx((2 + 18) / 4)
    assert summary.trained_per_s == pytest.approx(10.0)
    assert summary.samples_trained == 40
    assert summary.steps == 2
    assert summary.duration_s == 5.0
    assert summary.length_bias_ks == 0.1
    assert summary.endings == {"trained": 40, "failed": 1}
    assert not summary.finished
    assert not summary.accounting_balanced


def test_summary_of_a_finished_run() -> None:
    summary = summarise(synthetic_lines(steps=40))
    assert summary.finished
    assert summary.accounting_balanced
    assert summary.best_version == 40
    assert (summary.solve_rate_before, summary.solve_rate_after) == (0.452, 0.93)
    assert summary.max_trajectory_staleness == 3
    assert summary.endings == {"trained": 64 * 40, "filtered": 16 * 40}


def test_summary_of_nothing() -> None:
    summary = summarise([])
    assert summary.steps == 0
    assert summary.trainer_wait_ratio == 0.0
    assert summary.solve_rate_before is None


def test_a_resumed_run_is_neither_finished_nor_balanced_until_it_says_so_again() -> None:
    ended = synthetic_lines(steps=5)
    resumed = [*ended, EventRecord(event="resume"), step_record(5, time_s=1.0)]
    summary = summarise(resumed)
    assert not summary.finished
    assert not summary.accounting_balanced
    assert summary.duration_s == pytest.approx(5 * 1.05 + 3 + 1.0)


def test_skipped_steps_train_nothing_but_take_time() -> None:
    lines = [
        StepRecord(step=0, version=0, skipped=True, samples=8, step_s=1.0),
        StepRecord(step=0, version=1, samples=8, step_s=1.0),
    ]
    summary = summarise(lines)
    assert summary.samples_trained == 8
    assert summary.trained_per_s == pytest.approx(4.0)


def test_steps_whose_own_lines_are_lost_have_no_rate() -> None:
    """The ledger was removed after 20 steps: two were rebuilt from the buffer, three went as they should."""
    lines: list[LedgerLine] = [EventRecord(event="resume")]
    lines += [StepRecord(step=step, version=step + 1, samples=16) for step in (20, 21)]
    lines += [
        StepRecord(step=step, version=step + 1, samples=16, step_s=0.8, time_s=step - 21.2) for step in (22, 23, 24)
    ]
    lines.append(EventRecord(event="accounting", data={"balanced": 1, "trained": 25 * 16}))
    summary = summarise([*lines, EventRecord(event="end", time_s=2.8)])
    assert (summary.steps, summary.untimed_steps) == (25, 22)
    assert summary.samples_trained == 25 * 16
    assert summary.trained_per_s == pytest.approx(20.0)
    assert summary_rows(summary)["steps"] == "25 in 2.8 s and the time of 22 that the ledger has lost"


def test_a_node_that_joins_or_gets_files_is_no_incident() -> None:
    orderly = [EventRecord(event=name, worker="b") for name in ("node_joined", "files_sent")]
    lines: list[LedgerLine] = [step_record(0), *orderly, step_record(1), step_record(2)]
    assert undisturbed(lines) == [step_record(step) for step in range(3)]
    assert incident_text(lines) == ""
    lost = EventRecord(event="node_lost", worker="b", cause="silent")
    assert undisturbed([step_record(0), lost, step_record(1), step_record(2), step_record(3)]) == [
        step_record(0), step_record(3)]  # fmt: skip
