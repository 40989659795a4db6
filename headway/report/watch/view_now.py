"""The view *Now* shows waits, queue, rates and problems of a run that is live or has ended."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headway.config.schema import Experiment
from headway.control.summaries import weighted_mean
from headway.control.tuning.balance import waits_of
from headway.records.generation import EngineLoad
from headway.records.ledger import StepRecord
from headway.records.stalls import WaitGraph
from headway.records.trace import GroupEnd, GroupTrace, QueueSnapshot, TraceLine, TraceSession
from headway.report.live_view import WINDOW
from headway.report.run_cost import cost_sentence
from headway.report.several.run_list import holder_of
from headway.report.verdict import judge_balance
from headway.report.watch.run_series import event_of
from headway.report.watch.watched_runs import RECENT, RunTail, WatchedRun, is_inside, stamp_of
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.trace_file import FILE_NAME

_TAIL_BYTES = 1 << 20  # of the trace; enough, since buffered groups have finished recently
_WAITS = "waits.json"
_SILENT_S = 8.0  # the orchestrator writes its waits every two seconds
_LATEST = 12
_decoder = msgspec.json.Decoder(TraceLine)


class TraceTail:
    """The end of a run's trace: its newest snapshot of the queue, and the groups that were buffered then."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, -1, 0
        self.snapshot: QueueSnapshot | None = None
        self.written_unix_s: float | None = None
        self._finished: dict[int, tuple[GroupTrace, float]] = {}  # group -> time of its end; inf: not yet
        self._session: TraceSession | None = None

    def refresh(self) -> None:
        """Read the lines appended since the last call."""
        path = self._path / FILE_NAME
        if not is_inside(path, self._path):
            return
        with path.open("rb") as file:
            file_stat = os.fstat(file.fileno())
            if file_stat.st_ino != self._inode or file_stat.st_size < self._offset:
                self._inode, self._offset = file_stat.st_ino, 0
            if torn_start := file_stat.st_size - self._offset > _TAIL_BYTES:
                self._offset = file_stat.st_size - _TAIL_BYTES
                self._finished.clear()  # some may have ended in the skipped lines
            file.seek(self._offset)
            line_texts = file.read().split(b"\n")
            self._offset, self.written_unix_s = file.tell() - len(line_texts[-1]), file_stat.st_mtime
        for line_text in line_texts[torn_start:-1]:
            try:
                self._take(_decoder.decode(line_text))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the view of devices counts damaged lines

    def _take(self, line: TraceLine) -> None:
        if isinstance(line, TraceSession):
            if self._session is not None and line != self._session:
                self._finished.clear()
            self._session = line
        elif isinstance(line, QueueSnapshot):
            self.snapshot = line
            for index in [index for index, (_, end_s) in self._finished.items() if end_s <= line.time_s]:
                del self._finished[index]
        elif isinstance(line, GroupTrace):
            self._finished[line.index] = (line, math.inf)
        elif isinstance(line, GroupEnd) and line.index in self._finished:
            self._finished[line.index] = (self._finished[line.index][0], line.time_s)

    def buffered(self) -> list[GroupTrace]:
        """Return the groups that were buffered at the newest snapshot."""
        at_s = -math.inf if self.snapshot is None else self.snapshot.time_s
        return [group for group, end_s in self._finished.values() if group.finished_s <= at_s < end_s]


def stamp(run: WatchedRun) -> tuple[Any, ...]:
    """Return a value that changes when the view `now` may have changed."""
    file_stamps = [stamp_of(run.path / name) for name in (FILE_NAME, _WAITS, "epoch")]
    is_silent = file_stamps[1] and time.time() - file_stamps[1][2] / 1e9 > _SILENT_S
    return run.stamp(), file_stamps, is_silent, holder_of(RunDirectory(run.path))


def now(run: WatchedRun, price: float | None = None) -> dict[str, Any]:
    """Return the current state of the run. ``price``: dollars of a device-hour."""
    holder = holder_of(RunDirectory(run.path))
    with run.reader(TraceTail) as trace, run.tail() as tail:
        trace.refresh()
        alive = bool(holder)
        waits = _waits(run.path) if alive else None
        problems = list(tail.problems)
        if alive and waits is not None and (waits_age_s := time.time() - waits.written_s) > _SILENT_S:
            problems.append(f"the orchestrator (process {waits.pid}) has been silent for {waits_age_s:.0f} s")
        state = tail.state(holder)
        if tail.last is None:
            problems.append("nothing is recorded yet")
        elif alive and state != "running" and _locked_s(run.path) > (tail.written_unix_s or 0.0) + 1e-3:  # else it ends
            problems.append("it is being started or resumed: this session has recorded nothing yet")
        state = "running" if alive else state
        last_step, snapshot = tail.recent[-1] if tail.recent else None, trace.snapshot if alive else None
        return {
            **{"run": run.id, "name": run.path.name, "state": state, "holder": holder, **_verdict(tail, state, price)},
            "step": last_step.version if last_step else 0,
            "steps": tail.experiment and tail.experiment.run.steps,
            "version": max(snapshot.version if snapshot else 0, last_step.version if last_step else 0),
            "applied_version": snapshot.applied_version if snapshot else None,
            "left_s": _remaining_s(tail) if alive else None,
            "updated_unix_s": max(filter(None, (tail.written_unix_s, trace.written_unix_s)), default=None),
            "queue": _queue(tail, trace, waits, snapshot, last_step),
            "rates": _rates(tail, state),
            "workers": _workers(snapshot, waits),
            "stalls": [
                {"worker": event.worker, "detail": event.detail, "since_unix_s": _since(tail, number, event)}
                for number, event in tail.stalls.values()
            ],
            "alerts": [
                {"rule": rule, "detail": event.detail, "step": event.step, "unix_s": event.data.get("at")}
                for rule, (_, event) in tail.alerts.items()
            ],
            "latest": [event_of(tail, number) for number in sorted(tail.events)[-_LATEST:][::-1]],
            "problems": problems,
        }


def _locked_s(path: Path) -> float:
    """Return when a process last took the run's lock, seconds since 1970; 0: never."""
    lock_stamp = stamp_of(RunDirectory(path).lock)
    return lock_stamp[2] / 1e9 if lock_stamp else 0.0


def _waits(path: Path) -> WaitGraph | None:
    file = path / _WAITS
    try:
        return msgspec.json.decode(file.read_bytes(), type=WaitGraph) if is_inside(file, path) else None
    except (OSError, msgspec.DecodeError):
        return None


def _mean(tail: RunTail, column: Callable[[StepRecord], float]) -> float:
    return weighted_mean(list(tail.recent)[-WINDOW:], column, lambda step: step.step_s)


def _verdict(tail: RunTail, state: str, price: float | None) -> dict[str, Any]:
    """Summarise the verdict of `headway report` in a sentence, with its parts. In a live run ``waits`` are those of
    its newest steps, whose number is ``waits_of``."""
    verdict, cost = tail.view().verdict, tail.cost(price)
    newest_steps = list(tail.recent)[-WINDOW:] if state == "running" else tail.view().steps
    waits = waits_of(newest_steps)
    state_texts = {"unknown": "Its end isn't recorded", "died": "It died"}
    part_texts = [] if state == "running" else [state_texts.get(state, state.capitalize())]
    if tail.recent:
        part_texts.append(verdict.balance_text.partition(". ")[0])
        recent_balance, balance_text = judge_balance(waits, verdict.staleness_budget)
        if recent_balance != verdict.balance:
            part_texts.append(f"In the newest {len(newest_steps)} steps: {balance_text.partition('. ')[0]}")
        learning_text = verdict.learning_text.removeprefix("No two evaluations to compare. ").removeprefix("Yes: ")
        part_texts += [verdict.staleness_text, learning_text]
    if cost is not None:
        part_texts.append(f"${cost.usd:,.2f} so far")
    sentence = ". ".join(part[:1].upper() + part[1:].rstrip(".") for part in part_texts)
    return {
        "sentence": f"{sentence}." if sentence else "",
        **{"learning": verdict.learning, "balance": verdict.balance},
        **{"waits": msgspec.to_builtins(waits), "waits_of": len(newest_steps)},
        "cost": None if cost is None else {**msgspec.to_builtins(cost), "text": cost_sentence(cost)},
    }


def _remaining_s(tail: RunTail) -> float | None:
    if tail.experiment is None or not tail.recent:
        return None
    run, last, step_s = tail.experiment.run, tail.recent[-1], _mean(tail, lambda step: step.step_s)
    remaining_s = max(0, run.steps - last.version) * step_s
    return remaining_s if run.time_limit_s is None else min(remaining_s, max(0.0, run.time_limit_s - last.time_s))


def _queue(
    tail: RunTail, trace: TraceTail, waits: WaitGraph | None, snapshot: QueueSnapshot | None, last: StepRecord | None
) -> dict[str, Any]:
    queue_state = snapshot or last or StepRecord(step=0, version=0)
    engines = queue_state.engines or EngineLoad()
    waits_by_kind = Counter(wait.kind for wait in waits.waits) if waits is not None else Counter[str]()
    experiment, is_training = tail.experiment, any(kind.startswith("trainer.") for kind in waits_by_kind)
    is_language = isinstance(experiment, Experiment)  # a fragment of simulators is a group of one
    group_size = experiment.rollout.group_size if is_language else 1
    teaching_groups = min(queue_state.running_groups, waits_by_kind["a teacher"])
    verifying_groups = min(queue_state.running_groups - teaching_groups, waits_by_kind["verdicts"])
    generating_groups = queue_state.running_groups - teaching_groups - verifying_groups
    queued_groups = min(generating_groups, engines.waiting_rollouts // group_size)
    stage_rows = (
        ("admitted", queued_groups, engines.waiting_rollouts),
        ("generating", generating_groups - queued_groups, engines.running_rollouts),
        ("parked", queue_state.parked_groups, None),
        ("verifying", verifying_groups, None),
        *([("teaching", teaching_groups, None)] if teaching_groups else ()),
        ("buffered", queue_state.buffered_groups, None),
        ("batch", experiment.queue.groups_per_step if is_training and is_language else 0, None),
    )
    finished_by_version, now_s = dict[int, list[float]](), snapshot.time_s if snapshot else 0.0
    for group in trace.buffered() if snapshot is not None else ():
        versions = [rollout.first_version for rollout in group.rollouts if rollout.first_version >= 0]
        finished_by_version.setdefault(min(versions, default=group.admitted_version), []).append(group.finished_s)
    return {
        "capacity": last.buffer_capacity_groups if last else None,
        "stages": [{"name": name, "groups": groups, "rollouts": rollouts} for name, groups, rollouts in stage_rows],
        "version": snapshot.version if snapshot else None,  # trained when the groups were buffered
        "buffered_by_version": [
            {"version": version, "groups": len(finish_times), "age_s": max(0.0, now_s - min(finish_times))}
            for version, finish_times in sorted(finished_by_version.items())
        ],
        "budget": experiment and experiment.queue.budget,
        "oldest_age_s": queue_state.oldest_age_s,
    }


def _rates(tail: RunTail, state: str) -> dict[str, Any]:
    """Return the rates over the newest steps of a live run, else over the whole run."""
    names = ("production", "effective_production", "consumption", "trained")
    mean_by_name: dict[str, float | None] = dict.fromkeys(names)
    if tail.recent and state == "running":
        mean_by_name = {name: _mean(tail, lambda s, field=f"{name}_per_s": getattr(s, field)) for name in names[:3]}
        mean_by_name["trained"] = _mean(tail, lambda step: step.samples / step.step_s if step.step_s else 0.0)
    elif tail.recent:
        mean_by_name = {name: getattr(tail.view().summary, f"{name}_per_s") for name in names}
    columns = [tail.unix_column(), *(tail.column(f"rates/{name}_samples_per_s") for name in (names[0], names[2]))]
    recent = [list(row) for row in zip(*(column[-RECENT:].tolist() for column in columns), strict=True)]
    return {**mean_by_name, "unit": "samples/s", "recent": recent}


def _workers(snapshot: QueueSnapshot | None, waits: WaitGraph | None) -> list[dict[str, Any]]:
    calls_by_owner: dict[str, Counter[str]] = {}
    for wait in waits.waits if waits is not None else ():
        calls_by_owner.setdefault(wait.owner, Counter())[wait.kind.rpartition(".")[2].replace("_", " ")] += 1
    doing_by_worker = {
        owner: ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in counts.most_common(2))
        for owner, counts in calls_by_owner.items()
    }
    workers = snapshot.workers if snapshot is not None else ()
    return [{**msgspec.to_builtins(worker), "doing": doing_by_worker.get(worker.name, "")} for worker in workers]


def _since(tail: RunTail, number: int, event: Any) -> float | None:
    at_s = tail.unix_s(number, event.time_s)
    return None if at_s is None else at_s - event.lost_s
