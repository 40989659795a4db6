"""The summary of a run, computed from its ledger alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, RunSummary, StepRecord
from headway.records.rollout import BOUNDARIES, ENDINGS
from headway.telemetry.ledger import (
    EVENT_ACCOUNTING,
    EVENT_BEST,
    EVENT_COUNTED,
    EVENT_END,
    EVENT_LAST_KEPT,
    EVENT_NO_PROGRESS,
    EVENT_RESUME,
    EVENT_SIMULATED,
    EVENT_START,
    duration_of,
)

_COUNTING = (EVENT_ACCOUNTING, EVENT_COUNTED, EVENT_NO_PROGRESS)  # events that may have the accounting's counts


def summarise(lines: Sequence[LedgerLine], duration_s: float | None = None) -> RunSummary:
    """Summarise the lines of a run (as `read_ledger` returns them: replays resolved). ``duration_s``: time of all
    sessions, replaced lines included; None: of these lines.

    Wait ratios are weighted by the time of each step. Rates are over the time of all steps including waits, except the
    consumption rate, which excludes the trainer's wait. The accounting counts as balanced only if the run recorded so:
    a killed run has ``accounting_balanced = False`` and ``finished = False``.
    """
    steps = [line for line in lines if isinstance(line, StepRecord)]
    timed_steps = [step for step in steps if step.step_s > 0 and not step.skipped]
    total_s = sum(step.step_s for step in steps)
    trained_samples = sum(step.samples for step in timed_steps)
    wait_s = sum(step.trainer_wait_s for step in steps)
    accounting = accounting_event(lines)
    ending_counts = endings(lines)
    session_event = last_event(lines, EVENT_START, EVENT_RESUME, EVENT_END)
    return RunSummary(
        finished=is_finished(lines),
        ended=session_event.detail if session_event is not None and session_event.event == EVENT_END else "",
        steps=recorded_steps(steps),
        untimed_steps=recorded_steps(steps) - len({step.version for step in timed_steps}),
        samples_trained=max(sum(step.samples for step in steps if not step.skipped), ending_counts.get("trained", 0)),
        duration_s=duration_of(lines) if duration_s is None else duration_s,
        solve_rate_before=_solve_rate(lines, "before"),
        solve_rate_after=_solve_rate(lines, "after"),
        version_after=None if (evaluation := measured_evaluation(lines, "after")) is None else evaluation.last_version,
        failed_before=_failed(lines, "before"),
        failed_after=_failed(lines, "after"),
        best_version=best_version(lines),
        trainer_wait_ratio=_share(wait_s, total_s),
        generator_wait_ratio=_share(sum(step.generator_wait_ratio * step.step_s for step in steps), total_s),
        generator_yielded_ratio=_share(sum(step.generator_yielded_ratio * step.step_s for step in steps), total_s),
        max_trajectory_staleness=int(max((step.trajectory_staleness.max for step in steps), default=0)),
        accounting_balanced=accounting is not None and bool(accounting.data.get("balanced", 0)),
        length_bias_ks=steps[-1].length_bias.ks if steps and steps[-1].length_bias else 0.0,
        consumption_per_s=_share(trained_samples, total_s - wait_s),
        production_per_s=_share(sum(step.production_per_s * step.step_s for step in steps), total_s),
        effective_production_per_s=_share(
            sum(step.effective_production_per_s * step.step_s for step in steps), total_s
        ),
        trained_per_s=_share(trained_samples, total_s),
        endings=ending_counts,
        simulated=last_event(lines, EVENT_SIMULATED) is not None,
        episodes=steps[-1].episodes if steps else None,
        environment_steps=sum(step.episodes.transitions for step in steps if step.episodes),
    )


def recorded_steps(lines: Sequence[LedgerLine]) -> int:
    """The number of recorded steps, which is the version after the last one."""
    return max((line.version for line in lines if isinstance(line, StepRecord)), default=0)


_ORDERLY = ("node_joined", "files_sent")  # events that name a node which does what it should


def is_incident(event: EventRecord) -> bool:
    """Whether ``event`` is a death, a stall, a restart or a replay of a worker or a node."""
    return bool(event.worker) and event.event not in _ORDERLY


def undisturbed(lines: Sequence[LedgerLine]) -> list[StepRecord]:
    """The steps without those that have an incident or a resume and the step after each, which don't measure the run's
    rate."""
    kept_steps: list[StepRecord] = []
    steps_to_skip = 0
    for line in lines:
        if isinstance(line, EventRecord) and (is_incident(line) or line.event == EVENT_RESUME):
            steps_to_skip = 2
        elif isinstance(line, StepRecord):
            kept_steps += [] if steps_to_skip else [line]
            steps_to_skip = max(0, steps_to_skip - 1)
    return kept_steps


def last_live_step(lines: Sequence[LedgerLine]) -> StepRecord | None:
    """The last step that was recorded when it happened; a record rebuilt after a kill lacks the knobs."""
    newest_first = (line for line in reversed(lines) if isinstance(line, StepRecord))
    return next((step for step in newest_first if step.flow.concurrent_rollouts), None)


def last_event(lines: Sequence[LedgerLine], *names: str) -> EventRecord | None:
    """The last event that has one of these names."""
    events = (line for line in reversed(lines) if isinstance(line, EventRecord))
    return next((event for event in events if event.event in names), None)


def is_finished(lines: Sequence[LedgerLine]) -> bool:
    """Whether the run ended in order and was not resumed since."""
    newest = last_event(lines, EVENT_START, EVENT_RESUME, EVENT_END)
    return newest is not None and newest.event == EVENT_END


def accounting_event(lines: Sequence[LedgerLine]) -> EventRecord | None:
    """The event that closed the accounting; None: the run didn't close it, or was resumed since."""
    newest = last_event(lines, EVENT_ACCOUNTING, EVENT_START, EVENT_RESUME)
    return newest if newest is not None and newest.event == EVENT_ACCOUNTING else None


def evaluations(lines: Sequence[LedgerLine]) -> list[EvaluationRecord]:
    return [line for line in lines if isinstance(line, EvaluationRecord)]


def measured_evaluation(lines: Sequence[LedgerLine], phase: str) -> EvaluationRecord | None:
    """The evaluation ``before`` (the first) or ``after`` (the last) training, on the test split if there is one. None:
    there is none, or all its attempts failed."""
    phase_records = [record for record in evaluations(lines) if record.phase == phase]
    split_records = [record for record in phase_records if record.split == "test"] or phase_records
    measured_records = [record for record in split_records if record.samples]
    if not measured_records:
        return None
    return measured_records[0] if phase == "before" else measured_records[-1]


def _solve_rate(lines: Sequence[LedgerLine], phase: str) -> float | None:
    record = measured_evaluation(lines, phase)
    return None if record is None else record.solve_rate


def _failed(lines: Sequence[LedgerLine], phase: str) -> str:
    """A text on failed attempts of the evaluation whose solve rate is reported, or of those that measured nothing."""
    evaluation = measured_evaluation(lines, phase)
    records = [evaluation] if evaluation is not None else [e for e in evaluations(lines) if e.phase == phase]
    return next(filter(None, (record.failures_text for record in records)), "")


def best_version(lines: Sequence[LedgerLine]) -> int | None:
    """The version with the best validation result; None: no version was validated."""
    newest = last_event(lines, EVENT_LAST_KEPT, EVENT_BEST)
    if newest is None or newest.event != EVENT_BEST or "version" not in newest.data:
        return None
    return int(newest.data["version"])


def endings(lines: Sequence[LedgerLine]) -> dict[str, int]:
    """The number of rollouts by ending, over all processes of the run."""
    return _counted(lines, {ending: ending for ending in ENDINGS}, lambda step: step.endings)


def failures(lines: Sequence[LedgerLine]) -> dict[str, int]:
    """The number of rollouts that failed themselves, by boundary, over all processes of the run."""
    return _counted(lines, {f"failed_at_{boundary}": boundary for boundary in BOUNDARIES}, lambda step: step.failures)


def _counted(
    lines: Sequence[LedgerLine], names: Mapping[str, str], of_step: Callable[[StepRecord], Mapping[str, int]]
) -> dict[str, int]:
    """Counts by name: those of the last event with the accounting's counts (``names``: its data key -> name), plus
    those of later steps. Only the event counts a process that made no step."""
    count_by_name = Counter[str]()
    for line in lines:
        if isinstance(line, StepRecord):
            count_by_name.update(of_step(line))
        elif isinstance(line, EventRecord) and line.event in _COUNTING and not names.keys().isdisjoint(line.data):
            count_by_name = Counter({name: int(line.data.get(key, 0)) for key, name in names.items()})
    return {name: count for name, count in count_by_name.items() if count}


def _share(part: float, total: float) -> float:
    return part / total if total > 0 else 0.0
