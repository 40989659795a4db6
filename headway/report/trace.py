"""`headway trace` exports a run's trace as Chrome trace events, for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.trace import (
    EngineSteps,
    GroupEnd,
    GroupTrace,
    Mark,
    QueueSnapshot,
    Span,
    StepTrace,
    TraceLine,
    TraceSession,
)
from headway.report.formats import duration
from headway.report.trace_events import TraceEvents
from headway.report.trace_groups import GroupLife, draw_groups
from headway.runtime.run_directory import write_atomically
from headway.telemetry.trace_file import read_trace

STEPS = 30  # newest steps that are exported by default
GROUPS = 20_000  # newest groups that are exported; browsers become slow with more

_DEVICES = "devices"
_TRAINER, _GENERATOR, _VERIFIERS, _OTHER, _QUEUE = "trainer", "generator", "verifiers", "weights, evaluation", "queue"
_ON_DEVICE = "device "  # prefix of the name of a device's track
IDLE_SPANS = ("idle", "yielded", "wait")  # names of spans in which a worker doesn't compute
PROCESS_BY_WORKER_KIND = {"trainer": _TRAINER, "generator": _GENERATOR, "verifier": _VERIFIERS}


@dataclass
class Timeline:
    """A trace's lines by kind. Times are seconds since 1970, so that the sessions of a resumed run are in order."""

    steps: list[StepTrace] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    snapshots: list[QueueSnapshot] = field(default_factory=list)
    engines: list[EngineSteps] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    groups: dict[int, GroupLife] = field(default_factory=dict)
    end_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TraceExport:
    """The result of `write_trace`: file, events, steps, and a description of the omitted parts."""

    path: Path
    events: int
    first_step: int  # -1: no step was completed yet
    last_step: int
    seconds: float
    left_out: str  # description of omitted steps and groups; "": none


def write_trace(
    run_dir: str | Path, out: str | Path | None = None, first_step: int | None = None, last_step: int | None = None
) -> TraceExport:
    """Write the steps from ``first_step`` to ``last_step`` (default: the newest STEPS of the trace) of the run at
    ``run_dir`` to ``out`` (default: RUN/trace.json).

    Raises ConfigurationError when there is no trace or none of these steps is in it, HeadwayError on a full disk.
    """
    timeline = timeline_of(read_trace(run_dir))
    path = Path(out) if out is not None else Path(run_dir) / "trace.json"
    steps, from_s, until_s = _window(timeline, first_step, last_step)
    events = TraceEvents((_DEVICES, _QUEUE, _TRAINER, _GENERATOR, _VERIFIERS, _OTHER))
    _draw_workers(events, timeline, from_s, until_s)
    group_lives = [life for life in timeline.groups.values() if life.start_s < until_s and life.end_s > from_s]
    group_lives.sort(key=lambda life: life.start_s)
    draw_groups(events, group_lives[-GROUPS:], timeline.steps)
    _draw_queue(events, timeline, from_s, until_s)
    _write(path, events.as_json({"run": str(run_dir)}))
    step_numbers = [step.step for step in steps]
    return TraceExport(
        path=path,
        events=len(events),
        first_step=min(step_numbers, default=-1),
        last_step=max(step_numbers, default=-1),
        seconds=events.duration_s,
        left_out=_left_out(timeline, steps, len(group_lives)),
    )


def describe(written: TraceExport) -> str:
    """Describe the written trace, and how to open it."""
    steps_text = f"steps {written.first_step} to {written.last_step}" if written.first_step >= 0 else "no training step"
    lines = [f"trace: {written.path} ({written.events:,} events, {steps_text}, {duration(written.seconds)})"]
    if written.left_out:
        lines.append(f"left out: {written.left_out}; --from-step and --to-step choose others")
    lines.append("open it at https://ui.perfetto.dev")
    return "\n".join(lines)


def timeline_of(lines: Sequence[TraceLine]) -> Timeline:
    """Sort ``lines`` by kind, and convert their times to seconds since 1970."""
    timeline = Timeline()
    offset, session_s = 0.0, -float("inf")
    for line in lines:
        if isinstance(line, TraceSession):
            offset, session_s = line.unix_s - line.clock_s, line.unix_s
            timeline.end_s = max(timeline.end_s, session_s)
        elif isinstance(line, GroupTrace):
            life = timeline.groups[line.index] = GroupLife.of(line, offset, session_s)
            timeline.end_s = max(timeline.end_s, life.end_s)
        elif isinstance(line, GroupEnd):
            _end_group(timeline, line, offset, session_s)
            timeline.end_s = max(timeline.end_s, line.time_s + offset)
        elif isinstance(line, EngineSteps):
            timeline.engines.append(line.shifted(offset))
        else:
            _add_line(timeline, line, offset)
    for life in timeline.groups.values():
        if not life.ending:
            life.end_s = timeline.end_s  # buffered still
    return timeline


def _end_group(timeline: Timeline, line: GroupEnd, offset: float, session_s: float) -> None:
    life = timeline.groups.get(line.index)
    if life is None:
        if line.finished:
            return  # its GroupTrace was in a deleted part of the trace
        life = timeline.groups[line.index] = GroupLife.of(line, offset, session_s)
    life.ending, life.step, life.end_s = line.ending, line.step, max(life.start_s, line.time_s + offset)


def _add_line(timeline: Timeline, line: Span | StepTrace | QueueSnapshot | Mark, offset: float) -> None:
    times = {name: getattr(line, name) + offset for name in ("start_s", "end_s", "time_s") if hasattr(line, name)}
    shifted_line = msgspec.structs.replace(line, **times)
    timeline.end_s = max([timeline.end_s, *times.values()])
    lists: dict[type, list[Any]] = {StepTrace: timeline.steps, Span: timeline.spans, QueueSnapshot: timeline.snapshots}
    lists.get(type(shifted_line), timeline.marks).append(shifted_line)


def _window(timeline: Timeline, first: int | None, last: int | None) -> tuple[list[StepTrace], float, float]:
    """Return the steps to export, and the start and end of their window. The window of the trace's first step includes
    all events before it, that of the last step all events after it."""
    steps = timeline.steps
    if not steps:
        if first is not None or last is not None:
            raise ConfigurationError("no step is completed yet: leave --from-step and --to-step out")
        return [], -float("inf"), float("inf")
    if first is None and last is None:
        chosen_steps = steps[-STEPS:]
    else:
        low_step = 0 if first is None else first
        chosen_steps = [step for step in steps if low_step <= step.step and (last is None or step.step <= last)]
    if not chosen_steps:
        held = sorted({step.step for step in steps})
        raise ConfigurationError(
            f"no step between --from-step {first} and --to-step {last}: the trace holds steps {held[0]} to {held[-1]}"
        )
    from_s = -float("inf") if chosen_steps[0] is steps[0] else chosen_steps[0].start_s
    until_s = float("inf") if chosen_steps[-1] is steps[-1] else chosen_steps[-1].end_s
    return chosen_steps, from_s, until_s


def _draw_workers(events: TraceEvents, timeline: Timeline, from_s: float, until_s: float) -> None:
    spans = _merge_spans(timeline.spans)
    rank_count = max((len(step.rank_compute_s) for step in timeline.steps), default=1)
    for step in timeline.steps:
        for rank, compute_s in enumerate(step.rank_compute_s):
            name = f"step {step.step}" + (" (skipped)" if step.skipped else "")
            start_s = max(step.start_s, step.end_s - compute_s)
            spans.append(Span(track=f"trainer-{rank}", name=name, start_s=start_s, end_s=step.end_s, step=step.step))
    for span in [span for span in spans if span.track == "trainer-0" and span.name == "wait"]:
        spans += [msgspec.structs.replace(span, track=f"trainer-{rank}") for rank in range(1, rank_count)]
    spans += _device_spans(spans, timeline.snapshots)
    samples_by_name = {f"step {step.step}": step.samples for step in timeline.steps}
    for span in sorted(spans, key=lambda span: (span.track, span.start_s)):
        if span.start_s < until_s and span.end_s > from_s:
            process = PROCESS_BY_WORKER_KIND.get(span.track.rpartition("-")[0], _OTHER)
            process = _DEVICES if span.track.startswith(_ON_DEVICE) else process
            arguments = {"samples": samples_by_name[span.name]} if span.name in samples_by_name else {}
            events.slice(process, span.track, span.name, span.start_s, span.end_s, arguments)
    for mark in timeline.marks:
        if from_s <= mark.time_s <= until_s:
            events.instant(_OTHER, "events", mark.event, mark.time_s, {"detail": mark.detail})


def _device_spans(spans: Sequence[Span], snapshots: Sequence[QueueSnapshot]) -> list[Span]:
    """Make a track for each device with the spans of its workers. A span is on the device that its worker had at the
    first snapshot after its start; `IDLE_SPANS` are left out."""
    placements_by_worker: dict[str, list[tuple[float, str]]] = {}  # worker -> (since, device)
    for snapshot in snapshots:
        for worker in snapshot.workers:
            devices = placements_by_worker.setdefault(worker.name, [])
            if worker.device and (not devices or devices[-1][1] != worker.device):
                devices.append((snapshot.time_s, worker.device))
    device_spans: list[Span] = []
    for span in spans:
        devices = placements_by_worker.get(span.track, [])
        if devices and span.name not in IDLE_SPANS:
            device_name = next((name for since_s, name in reversed(devices) if since_s <= span.end_s), devices[0][1])
            name = f"{span.track}: {span.name}"
            device_spans.append(msgspec.structs.replace(span, track=_ON_DEVICE + device_name, name=name))
    return device_spans


def _merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Merge the spans that were split only by a snapshot: those of one track and name without a gap."""
    merged_spans: list[Span] = []
    newest_by_track: dict[str, int] = {}  # track -> index of its newest span
    for span in spans:
        index = newest_by_track.get(span.track)
        if index is not None:
            previous_span = merged_spans[index]
            if previous_span.name == span.name and abs(span.start_s - previous_span.end_s) < 1e-6:
                merged_spans[index] = msgspec.structs.replace(previous_span, end_s=span.end_s)
                continue
        newest_by_track[span.track] = len(merged_spans)
        merged_spans.append(span)
    return merged_spans


def _draw_queue(events: TraceEvents, timeline: Timeline, from_s: float, until_s: float) -> None:
    for snapshot in timeline.snapshots:
        if from_s <= snapshot.time_s <= until_s:
            for name, values in _counters(snapshot):
                events.counter(_QUEUE, name, snapshot.time_s, values)
    for line in timeline.engines:
        for row in line.rows:
            if from_s <= row.end_s <= until_s:
                step_ms = 1000 * row.busy_s / max(1, row.steps)
                events.counter(_GENERATOR, f"{line.track}, ms a step", row.end_s, {"ms": step_ms})
                events.counter(_GENERATOR, f"{line.track}, requests", row.end_s, {"running": row.running})


def _counters(snapshot: QueueSnapshot) -> Iterator[tuple[str, dict[str, float]]]:
    running = snapshot.running_groups - snapshot.parked_groups
    yield "groups", {"buffered": snapshot.buffered_groups, "running": running, "parked": snapshot.parked_groups}
    yield "rollouts", {"running": snapshot.engines.running_rollouts, "waiting": snapshot.engines.waiting_rollouts}
    yield "version", {"trained": snapshot.version}
    yield "version applied", {"applied": snapshot.applied_version}
    yield "KV tokens", {"used": snapshot.engines.kv_used_tokens}
    yield "oldest buffered group, s", {"age": snapshot.oldest_age_s}


def _left_out(timeline: Timeline, steps: Sequence[StepTrace], groups: int) -> str:
    parts: list[str] = []
    if len(steps) < len(timeline.steps):
        held = [step.step for step in timeline.steps]
        parts.append(f"{len(timeline.steps) - len(steps)} other steps ({min(held)} to {max(held)} are in the trace)")
    if groups > GROUPS:
        parts.append(f"the oldest {groups - GROUPS} of {groups} groups")
    return ", ".join(parts)


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        write_atomically(path, msgspec.json.encode(document))
    except HeadwayError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError):
            raise ConfigurationError(f"--out {error}") from None
        raise
