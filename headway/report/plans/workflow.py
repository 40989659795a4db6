"""Reports a workflow's steps, stage by stage: the expectations of its plans and the measured times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from headway.records.execution import WORKFLOW_FILE, FlowLine, FlowStep, StageStep
from headway.records.ledger import EventRecord
from headway.report.formats import duration, percent
from headway.report.tables import Rows, print_rows
from headway.telemetry.trace_file import decoded_lines


def is_workflow(folder: str | Path) -> bool:
    """Return whether the folder is a workflow's, not a run's: one of a policy in simulators has both files."""
    return (Path(folder) / WORKFLOW_FILE).is_file() and not (Path(folder) / "ledger.jsonl").is_file()


def read_workflow(folder: str | Path) -> list[FlowLine]:
    """Read the steps and events of a workflow, oldest first, without a torn last line. Raises ConfigurationError for a
    damaged line."""
    path, decoder = Path(folder) / WORKFLOW_FILE, msgspec.json.Decoder(FlowLine)
    return decoded_lines(path, path.read_bytes(), decoder.decode)


def workflow_rows(lines: Sequence[FlowLine]) -> Rows:
    """Describe the steps and stages of each plan, and the events, as rows."""
    rows: Rows = {}
    for plan_number, steps in enumerate(_by_plan([line for line in lines if isinstance(line, FlowStep)]), start=1):
        mean_step_s = sum(step.seconds for step in steps) / len(steps)
        expected_text = "" if steps[0].expected_s is None else f", expected {duration(steps[0].expected_s)}"
        moved_text = f"; the change of plan before took {duration(steps[0].moved_s)}" if steps[0].moved_s else ""
        row_label = f"plan {plan_number}: steps {steps[0].step} to {steps[-1].step}"
        rows[row_label] = f"{steps[0].mode}: {duration(mean_step_s)} a step{expected_text}{moved_text}"
        for stage in steps[0].stages:
            rows[f"plan {plan_number}: {stage}"] = _stage_text([step.stages[stage] for step in steps], mean_step_s)
    for event in (line for line in lines if isinstance(line, EventRecord)):
        row_label = f"step {event.step}: {event.event.replace('_', ' ')}"
        rows[row_label] = f"{rows[row_label]}; {event.detail}" if row_label in rows else event.detail
    return rows


def print_workflow(folder: str | Path, console: Console | None = None) -> None:
    """Print a workflow's report."""
    print_rows(workflow_rows(read_workflow(folder)), console=console or Console(highlight=False))


def _by_plan(steps: Sequence[FlowStep]) -> Iterator[list[FlowStep]]:
    """Split the steps into consecutive steps of one plan."""
    plan_steps: list[FlowStep] = []
    for step in steps:
        if plan_steps and (step.moved_s or _devices(step) != _devices(plan_steps[-1])):
            yield plan_steps
            plan_steps = []
        plan_steps.append(step)
    if plan_steps:
        yield plan_steps


def _devices(step: FlowStep) -> dict[str, tuple[str, ...]]:
    return {name: stage.devices for name, stage in step.stages.items()}


def _stage_text(steps: Sequence[StageStep], step_s: float) -> str:
    devices = steps[0].devices
    total_s = step_s * len(devices) * len(steps)

    def share(name: str) -> str:
        return percent(sum(getattr(step, name) for step in steps) / total_s) if total_s else percent(0.0)

    expected_s = steps[0].expected_s
    return (
        f"on {', '.join(devices)}: busy {share('busy_s')}"
        + ("" if expected_s is None or not step_s else f" (expected {percent(expected_s / step_s)})")
        + f", waits for data {share('data_wait_s')}, for its devices {share('device_wait_s')}, on- and offloading "
        f"{share('switch_s')}, transfers {share('transfer_s')}; {sum(step.items for step in steps):,} items"
    )
