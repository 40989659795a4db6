"""Draws the live view of a run, a screen with waits, queue, staleness, learning and rates."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway.config.simulation import AnyExperiment
from headway.control.summaries import pooled, weighted_mean
from headway.control.tuning.balance import waits_of
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, PassAt, SourceScore, StepRecord
from headway.records.rollout import ENDINGS
from headway.report.doctor import costs_of
from headway.report.episodes import evaluation_text, score_text, throughput_text
from headway.report.formats import duration, format_kernel_shares, percent, quantity, score
from headway.report.incidents import event_detail
from headway.report.run_cost import LiveCost, cost_sentence, live_cost
from headway.report.streams import streams_text, teaching_text
from headway.report.verdict import judge_balance
from headway.telemetry.ledger import EVENT_ALERT, EVENT_END, EVENT_PLAN_CHANGED, EVENT_STALL_ENDED, EVENT_STALLED

WINDOW = 20  # steps over which current values are averaged
REDRAW_EVERY_S = 0.5  # drawing takes the orchestrator's core a few milliseconds
LINE_EVERY_S = 5.0  # without a terminal
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "matched": "green",
    "generation-bound": "yellow",
    "training-bound": "yellow",
    "synchronous": "cyan",
    "time-shared": "green",
    "teacher-bound": "yellow",
    "environment-bound": "yellow",
    "other-bound": "red",
    "unknown": "dim",
}


class LiveState:
    """The state of a run after its ledger lines so far. It has no clock and no terminal; those belong to the views."""

    def __init__(self, experiment: AnyExperiment, usd_per_device_hour: float | None = None) -> None:
        self.experiment = experiment
        self.usd_per_device_hour = usd_per_device_hour
        self.lost_h = Counter[str]()  # cause -> device-hours, as in DeviceCosts
        self.sums = Counter[str]()  # steps and trained tokens of this session
        self.last: StepRecord | None = None
        self.recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self.solve_rates: deque[float] = deque(maxlen=4000)
        self.evaluations: deque[EvaluationRecord] = deque(maxlen=4)
        self.evaluation_before: EvaluationRecord | None = None
        self.events: deque[EventRecord] = deque(maxlen=5)
        self.endings = Counter[str]()
        self.worst_staleness = 0
        self.ended = False
        self.placement: EventRecord | None = None  # the last change of plan
        self.stalls: dict[str, str] = {}  # worker -> description of its stall, while the stall lasts
        self.alerts: dict[object, str] = {}  # rule -> the alert's detail, while the alert holds

    def take(self, line: LedgerLine) -> None:
        if isinstance(line, StepRecord):
            self.last = line
            self.recent.append(line)
            if line.rewards:
                self.solve_rates.append(line.rewards.solve_rate)
            if line.episodes:
                self.solve_rates.append(line.episodes.success_rate)
            self.worst_staleness = max(self.worst_staleness, int(line.trajectory_staleness.max))
            self.endings.update(line.endings)
            self.lost_h.update(costs_of([line], self.experiment, None).lost_h)
            self.sums.update(steps=1, tokens=line.flow.trained_tokens)
        elif isinstance(line, EvaluationRecord):
            self.evaluations.append(line)
            if line.phase == "before" and line.samples:
                self.evaluation_before = line
        else:
            self.events.append(line)
            if line.event == EVENT_PLAN_CHANGED:
                self.placement = line
            if line.event == EVENT_STALLED:
                self.stalls[line.worker] = event_detail(line)
            elif line.event == EVENT_STALL_ENDED or line.event.endswith(("_restarted", "_restored")):
                self.stalls.pop(line.worker, None)
            self.alerts.pop(rule := line.data.get("rule"), None)  # only alerts and their ends have one
            if line.event == EVENT_ALERT:
                self.alerts[rule] = event_detail(line)
            self.ended = line.event == EVENT_END

    def recent_mean(self, column: Callable[[StepRecord], float]) -> float:
        """Return the time-weighted mean of a column over the last WINDOW steps."""
        return weighted_mean(self.recent, column, lambda step: step.step_s)

    def cost(self) -> LiveCost | None:
        """Return the cost of this session so far; None without a price."""
        if self.last is None or self.usd_per_device_hour is None:
            return None
        costs = msgspec.structs.replace(costs_of([], self.experiment, None), lost_h=dict(self.lost_h))
        totals = {"steps": self.sums["steps"], "trained_tokens": self.sums["tokens"]}
        return live_cost(costs, self.usd_per_device_hour, duration_s=self.last.time_s, **totals)

    def remaining_s(self) -> float | None:
        """Return the seconds to the end by steps or the time limit, whichever is first; None outside the run."""
        if self.last is None or self.ended:
            return None
        run = self.experiment.run
        step_s = sum(step.step_s for step in self.recent) / len(self.recent)
        eta_s = max(0, run.steps - self.last.version) * step_s
        return eta_s if run.time_limit_s is None else min(eta_s, max(0.0, run.time_limit_s - self.last.time_s))


# --- one line, for logs ----------------------------------------------------------------------------------


def step_line(state: LiveState) -> str:
    """Describe the state after a step in one line."""
    step = state.last
    if step is None:
        return "no step yet"
    eta_s = state.remaining_s()
    parts = [
        f"step {step.version}/{state.experiment.run.steps}",
        duration(step.time_s) + (f" ({duration(eta_s)} left)" if eta_s is not None else ""),
        score_text(step, "solve") + _failed_text(step),
        f"waits: trainer {state.recent_mean(lambda s: s.trainer_wait_ratio):.0%}, "
        f"{'simulators' if step.episodes else 'generator'} {state.recent_mean(lambda s: s.generator_wait_ratio):.0%}",
        f"stale {step.trajectory_staleness.mean:.1f}, worst {state.worst_staleness} of {state.experiment.queue.budget}",
        *([] if step.episodes else [f"buffered {step.buffered_groups}/{step.buffer_capacity_groups}"]),
        throughput_text(step, state.recent_mean),
    ]
    parts += filter(None, (streams_text([step]), teaching_text([step])))
    if (cost := state.cost()) is not None:
        parts.append(f"${cost.usd:,.2f}, waits ${cost.trainer_waits_usd + cost.generator_waits_usd:,.2f}")
    if step.skipped:
        parts.append("SKIPPED (not finite)")
    return " · ".join(parts)


def _failed_text(step: StepRecord) -> str:
    failed_count = sum(step.failures.values())
    return f" ({failed_count:,} failed)" if failed_count else ""


def evaluation_line(record: EvaluationRecord) -> str:
    if record.return_interval:
        return evaluation_text(record)
    versions_text = (
        f"version {record.first_version}" if record.held else f"versions {record.first_version}–{record.last_version}"
    )
    if record.phase == "after":  # it evaluates the best weights, which need not be the last
        is_last = record.last_version == record.step
        versions_text += ", the last" if is_last else f", the best by validation of {record.step}"
    failed_text = f"; {record.failures_text}" if record.failed else ""
    rate_text = score(record.solve_rate if record.samples else None, record.standard_error)
    sources_text = "".join(f"; {label} {format_score(source)}" for label, source in record.by_source.items())
    rate_text += "".join(f", {text}" for text in format_pass_at(record.pass_at))
    kernels_text = "".join(f"; {name} {text}" for name, text in format_kernel_shares(record.kernels).items())
    judged_text = f" of {record.samples:,}" if record.failed and record.samples else ""
    return (
        f"{record.split} {record.phase}: solve rate {rate_text}{judged_text} ({record.tasks} tasks, {versions_text})"
        f"{failed_text}{sources_text}{kernels_text}"
    )


def format_pass_at(rate_by_k: Mapping[str, PassAt]) -> list[str]:
    """Format pass@k for each k above 1; pass@1 is the solve rate."""
    return [f"pass@{k} {score(rate.value, rate.standard_error)}" for k, rate in rate_by_k.items() if k != "1"]


def format_score(source: SourceScore) -> str:
    return score(source.solve_rate if source.samples else None, source.standard_error)


def event_line(event: EventRecord) -> str:
    return f"{event.event} at version {event.step}" + (f": {event_detail(event)}" if event.detail else "")


# --- the screen ------------------------------------------------------------------------------------------


def screen(state: LiveState) -> RenderableType:
    """Render the whole view; needs 80 columns."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)
    if state.last is None:
        rows.add_row("Starting", "workers start; the first step comes when its batch is full")
    else:
        step = state.last
        rows.add_row("Who waits?", _waits(state))
        if step.episodes is None:
            rows.add_row("Queue", _queue(step))
        rows.add_row("How stale?", _staleness(state, step))
        rows.add_row("Learning?", _learning(state, step))
        for label, text in (("Streams", streams_text(state.recent)), ("Teachers", teaching_text(state.recent))):
            if text:
                rows.add_row(label, text)
        rows.add_row("Rates", _rates(state, step))
        rows.add_row("Endings", _endings(state))
        if (plan_event := state.placement) is not None:
            expected_text = quantity(float(plan_event.data["gain"]) * float(plan_event.data["rate"]))
            plan = f"{plan_event.data['after']}, since version {plan_event.step}; {expected_text} samples/s expected"
            rows.add_row("Plan", plan)
        if (cost := state.cost()) is not None:
            rows.add_row("Cost", cost_sentence(cost))
    for stall_text in state.stalls.values():
        rows.add_row(Text("Stalled", style="bold red"), Text(stall_text, style="red"))
    for rule, alert_text in state.alerts.items():
        if rule != "stall":  # it has a row already
            rows.add_row(Text("Alert", style="bold red"), Text(alert_text, style="red"))
    for record in state.evaluations:
        rows.add_row("Evaluation", evaluation_line(record))
    for event in state.events:
        rows.add_row("Event", Text(event_line(event).splitlines()[0], style="dim", overflow="ellipsis", no_wrap=True))
    return Panel(rows, title=Text(_title(state)), title_align="left", border_style="blue")


def _title(state: LiveState) -> str:
    run = state.experiment.run
    if state.last is None:
        return f"headway · {run.directory}"
    eta_s = state.remaining_s()
    eta = f", {duration(eta_s)} left" if eta_s is not None else ""
    return f"headway · {run.directory} · step {state.last.version}/{run.steps} · {duration(state.last.time_s)}{eta}"


def bar(share: float, width: int, colour: str) -> Text:
    """Draw a horizontal bar of ``width`` cells; ``share`` is clamped to 0..1."""
    full_cells = round(min(1.0, max(0.0, share)) * width) if math.isfinite(share) else 0
    return Text.assemble(("█" * full_cells, colour), ("░" * (width - full_cells), "dim"))


def sparkline(values: list[float], width: int, top: float = 1.0) -> str:
    """Draw the means of ``width`` equal parts of ``values`` as block characters, on a scale from 0 to ``top``."""
    if not values:
        return ""
    cell_count = min(width, len(values))
    edges = [round(i * len(values) / cell_count) for i in range(cell_count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_block_character(mean / top) for mean in means)


def _block_character(height: float) -> str:
    """Return the block character for a height from 0 to 1; a blank for NaN and infinities."""
    if not math.isfinite(height):
        return " "
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(height * len(_BLOCKS))))]


def _waits(state: LiveState) -> Text:
    waits = waits_of(state.recent)
    balance, _ = judge_balance(waits, state.experiment.queue.budget)
    return Text.assemble(
        "trainer ",
        bar(waits.trainer, 12, "blue"),
        f" {waits.trainer:>4.0%}   {'simulators' if state.last and state.last.episodes else 'generator'} ",
        bar(waits.generator, 12, "yellow"),
        f" {waits.generator:>4.0%}   ",
        (balance, f"bold {_COLOURS[balance]}"),
    )


def _queue(step: StepRecord) -> Text:
    capacity = step.buffer_capacity_groups
    share = step.buffered_groups / capacity if capacity else 0.0
    text = Text.assemble(
        "buffered ",
        bar(share, 12, "blue"),
        f" {step.buffered_groups}/{capacity} groups, oldest {duration(step.oldest_age_s)}",
        f" · running {step.running_groups}",
    )
    if step.parked_groups:
        text.append(f" · parked {step.parked_groups}")
    if (engines := step.engines) and engines.slots:
        text.append(f" · slots {engines.running_rollouts}/{engines.slots}")
    if engines and engines.kv_capacity_tokens:
        text.append(f" · KV {engines.kv_used_tokens / engines.kv_capacity_tokens:.0%}")
    return text


def _staleness(state: LiveState, step: StepRecord) -> Text:
    budget = state.experiment.queue.budget
    staleness_counts = pooled(record.trajectory_staleness.histogram for record in state.recent)
    columns = range(min(24, max([budget, *staleness_counts]) + 1))
    peak_count = max(staleness_counts.values(), default=1)
    histogram_text = " ".join(f"{value}{_BLOCKS[round(staleness_counts[value] / peak_count * 7)]}" for value in columns)
    style = "bold red" if state.worst_staleness > budget else ""
    return Text.assemble(
        f"mean {step.trajectory_staleness.mean:.1f} · ",
        (f"worst {state.worst_staleness} of {budget}", style),
        f" · {histogram_text if staleness_counts else ''}",
    )


def _learning(state: LiveState, step: StepRecord) -> Text:
    loss = step.metrics.get("loss")
    entropy = step.metrics.get("entropy")
    rewards, lengths = step.rewards, step.lengths
    detail_texts = [f"reward {rewards.mean:.3f}", f"no variance {rewards.zero_variance_share:.0%}"] if rewards else []
    detail_texts += [f"loss {loss:+.4f}"] if loss is not None else []
    detail_texts += [f"entropy {entropy:.3f}"] if entropy is not None else []
    if (explained := step.metrics.get("explained_variance")) is not None:
        detail_texts.append(f"values explain {explained:.0%} of the returns' variance")
    detail_texts += [f"length {lengths.mean:.0f}, p99 {lengths.p99:.0f}"] if lengths else []
    if state.evaluation_before is not None:
        detail_texts.append(f"before {state.evaluation_before.solve_rate:.3f}")
    return Text.assemble(
        f"{score_text(step, 'solve rate')}{_failed_text(step)} ",
        (sparkline(list(state.solve_rates), 30), "green"),
        "\n" + " · ".join(detail_texts),
    )


def _rates(state: LiveState, step: StepRecord) -> Text:
    consumption = state.recent_mean(lambda s: s.consumption_per_s)
    production = state.recent_mean(lambda s: s.production_per_s)
    effective = state.recent_mean(lambda s: s.effective_production_per_s)
    text = Text(
        f"consumption {quantity(consumption)} · production {quantity(production)} · effective {quantity(effective)} "
        "samples/s"
    )
    if step.episodes:
        text = Text(throughput_text(step, state.recent_mean))
    if rates := step.tokens:
        text.append(f"\ngenerated {quantity(rates.generated_per_s)} · trained {quantity(rates.trained_per_s)} tokens/s")
    if step.mfu_step:
        text.append(f" · MFU {percent(step.mfu_step)} of the step, {percent(step.mfu_compute)} of compute")
    return text


def _endings(state: LiveState) -> Text:
    ordered_endings = [ending for ending in ENDINGS if ending in state.endings]
    ordered_endings += sorted(set(state.endings) - set(ENDINGS))
    return Text(" · ".join(f"{ending} {state.endings[ending]:,}" for ending in ordered_endings) or "none yet")


# --- the two views ---------------------------------------------------------------------------------------


class LiveView:
    """A subscriber of the ledger that redraws one screen on a terminal, and prints a line every few seconds elsewhere.

    Lifecycle: *entered* (draws) -> *exited* (the last state stays on the screen).
    """

    def __init__(
        self,
        experiment: AnyExperiment,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        usd_per_device_hour: float | None = None,
    ) -> None:
        self.state = LiveState(experiment, usd_per_device_hour)
        self._console = console or Console(highlight=False)
        self._now = now
        self._drawn_s = -float("inf")
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(screen(self.state), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __call__(self, line: LedgerLine) -> None:
        self.state.take(line)
        if self._live is not None:
            if isinstance(line, EvaluationRecord) or self._due(REDRAW_EVERY_S):
                self._live.update(screen(self.state), refresh=True)
        elif isinstance(line, StepRecord):
            if self._due(LINE_EVERY_S) or line.skipped:
                self._print(step_line(self.state))
        else:
            self._print(evaluation_line(line) if isinstance(line, EvaluationRecord) else event_line(line))

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(screen(self.state), refresh=True)
            self._live.stop()
            self._live = None
        elif self.state.last is not None:
            self._print(step_line(self.state))

    def _due(self, every_s: float) -> bool:
        if self._now() - self._drawn_s < every_s:
            return False
        self._drawn_s = self._now()
        return True

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
