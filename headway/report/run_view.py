"""Reads a run's ledger, summary and verdict, also during the run and after it was killed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.control.summaries import weighted_mean
from headway.records.ledger import (
    EvaluationRecord,
    EventRecord,
    LedgerLine,
    LengthBiasStatistics,
    RunSummary,
    StepRecord,
)
from headway.report.incidents import incidents
from headway.report.verdict import Judgement, judge
from headway.runtime.run_directory import RunDirectory, without_schema
from headway.telemetry.ledger import EVENT_RESUME, LedgerTail, read_ledger_tail
from headway.telemetry.summary import evaluations, measured_evaluation, summarise


@dataclass(frozen=True)
class RunView:
    """A run's ledger lines, summary, verdict and configuration, as `headway report` needs them."""

    path: Path
    lines: list[LedgerLine]
    summary: RunSummary
    verdict: Judgement
    budget: int | None  # η; None when the run's configuration can't be read
    configuration: dict[str, Any]  # as stored; {} when it can't be read
    holder: int | None  # id of the process that runs it now; None: no process

    @property
    def steps(self) -> list[StepRecord]:
        return [line for line in self.lines if isinstance(line, StepRecord)]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        return evaluations(self.lines)

    @property
    def events(self) -> list[EventRecord]:
        return [line for line in self.lines if isinstance(line, EventRecord)]

    @property
    def state(self) -> str:
        """Return the state of the run: finished | running | stopped (killed or interrupted, and resumable)."""
        if self.holder is not None:
            return "running"
        return "finished" if self.summary.finished else "stopped"


def view_run(run_dir: str | Path) -> RunView:
    """Read the run at ``run_dir``. Raises ConfigurationError when there is no ledger or it is damaged."""
    return view_from(run_dir, read_ledger_tail(run_dir))


def view_from(run_dir: str | Path, ledger: LedgerTail) -> RunView:
    """Summarise and judge the ledger of a run. Report, page and doctor share this function."""
    lines = list(ledger.lines.values())
    directory = RunDirectory(run_dir)
    configuration = _configuration(directory)
    queue = configuration.get("queue")
    budget = queue.get("budget") if isinstance(queue, dict) else None
    summary = summarise(lines, ledger.duration_s)
    return RunView(
        path=directory.path,
        lines=lines,
        summary=summary,
        verdict=judge(lines, summary, budget),
        budget=budget,
        configuration=configuration,
        holder=directory.holder(),
    )


def _configuration(directory: RunDirectory) -> dict[str, Any]:
    # Not validated, since a report must also work where a user's function can't be imported any more.
    try:
        raw = json.loads(directory.config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return without_schema(cast("dict[str, Any]", raw), directory.path) if isinstance(raw, dict) else {}


def as_json(view: RunView) -> dict[str, Any]:
    """Convert a run to one JSON object: RunSummary's fields, the verdict, means over the run. NaN becomes null."""
    steps = view.steps
    trained = [step for step in steps if step.samples and not step.skipped]
    token_staleness = [step.tokens.staleness for step in trained if step.tokens]
    length_bias = (steps[-1].length_bias if steps else None) or LengthBiasStatistics()
    tokens = [(step.tokens, step.step_s) for step in steps if step.tokens]
    document = {
        **msgspec.to_builtins(view.summary),
        "run": str(view.path),
        "state": view.state,
        "verdict": msgspec.to_builtins(view.verdict),
        "staleness_budget": view.budget,
        "solve_rate_before_error": _error(view, "before"),
        "solve_rate_after_error": _error(view, "after"),
        "mean_trajectory_staleness": weighted_mean(trained, lambda s: s.trajectory_staleness.mean, lambda s: s.samples),
        "mean_token_staleness": weighted_mean(token_staleness, lambda s: s.mean, lambda s: sum(s.histogram.values())),
        "max_optimizer_step_staleness": int(max((step.optimizer_step_staleness.max for step in steps), default=0)),
        "length_bias_scheduling_ks": length_bias.scheduling_ks,
        "length_bias_filter_ks": length_bias.filter_ks,
        "length_bias_pruning_ks": length_bias.pruning_ks,
        "censored_share": length_bias.censored_share,
        "generated_tokens_per_s": weighted_mean(tokens, lambda pair: pair[0].generated_per_s, lambda pair: pair[1]),
        "trained_tokens_per_s": weighted_mean(tokens, lambda pair: pair[0].trained_per_s, lambda pair: pair[1]),
        "mfu_step": weighted_mean(steps, lambda s: s.mfu_step, lambda s: s.step_s),
        "mfu_compute": weighted_mean(steps, lambda s: s.mfu_compute, lambda s: s.trainer_compute_s),
        "skipped_steps": sum(step.skipped for step in steps),
        "resumes": sum(event.event == EVENT_RESUME for event in view.events),
        "failures": view.verdict.failures,
        "incidents": [msgspec.to_builtins(event) for event in incidents(view.lines)],
        "evaluations": [msgspec.to_builtins(record) for record in view.evaluations],
    }
    return _without_nan(document)


def _error(view: RunView, phase: str) -> float | None:
    record = measured_evaluation(view.lines, phase)
    return record.standard_error if record else None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
