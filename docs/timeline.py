"""Draws the timelines of docs/async.md: the real loops and rules in virtual time, with a fake generator and trainer.

    python -m docs.timeline            # print them
    python -m docs.timeline --write    # put them into docs/async.md

The wiring is that of tests/support/simulated_run.py. Nothing is drawn by hand and nothing is random from run to run:
the clock jumps from event to event, and a response's length depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from headway.records.rollout import Rollout
from headway.records.training import TrainBatch
from tests.support.simulated_run import Outcome, experiment_of, simulate

PAGE = Path(__file__).parent / "async.md"
COLUMN_S = 0.5  # seconds one character stands for
TOKEN_S = 0.1  # per decode step, all slots together
STEP_S = 1.5  # one training step
GROUPS, MEMBERS, SLOTS, STEPS = 2, 2, 6, 7
LONG = 60  # steps of the runs behind the tables
SEED = 11


def run(budget: int, **sections: Any) -> tuple[Outcome, dict[int, float]]:
    """A small run, and when each of its steps began (seconds)."""
    experiment = experiment_of(
        Path("unused"),
        run={"steps": sections.pop("steps", STEPS)},
        rollout={"group_size": MEMBERS, "max_response_tokens": sections.pop("longest", 90)},
        queue={"groups_per_step": GROUPS, "budget": budget, "filter_zero_variance": False, **sections.pop("queue", {})},
        weights={"steps_per_publish": sections.pop("steps_per_publish", 1)},
        generator={"slots": SLOTS, "prefetch_groups": 0, **sections.pop("generator", {})},
    )
    began: dict[int, float] = {}

    def seconds(batch: TrainBatch) -> float:
        began[batch.step] = asyncio.get_running_loop().time()
        return STEP_S

    options = {"prefill_s": lambda request: 0.002 * (len(request.prompt_ids) + len(request.partial.ids))}
    outcome = simulate(
        experiment,
        seed=SEED,
        token_s=TOKEN_S,
        sample_s=seconds,
        publish_s=0.0,
        verify_s=0.0,
        generator_options=options,
    )
    return outcome, began


def timeline(budget: int) -> str:
    """One row a group: the member that ends last."""
    outcome, began = run(budget)
    batches = {batch.step: batch for batch in outcome.trainer.batches}
    width = round((max(began.values()) + STEP_S) / COLUMN_S)
    rows = {group: _row(rollouts, began[step], step, width) for step, group, rollouts in _groups(batches)}
    trainer = [" "] * width
    for step, start in began.items():
        _fill(trainer, start, start + STEP_S, "#")
        trainer[_column(start)] = str(step)
    ruler = "".join(f"{second:<{round(2 / COLUMN_S)}}" for second in range(0, round(width * COLUMN_S) + 1, 2))
    lines = [f"           {ruler.rstrip()} s"]
    lines += [f"group {group:>2}   {text}" for group, text in sorted(rows.items())]
    lines += [f"trainer    {''.join(trainer)}", "", *_facts(outcome)]
    return "\n".join(line.rstrip() for line in lines)


def _groups(batches: dict[int, TrainBatch]) -> list[tuple[int, int, list[Rollout]]]:
    found: dict[tuple[int, int], list[Rollout]] = {}
    for step, batch in batches.items():
        for sample in batch.samples:
            found.setdefault((step, sample.rollout.group), []).append(sample.rollout)
    return [(step, group, rollouts) for (step, group), rollouts in found.items()]


def _row(rollouts: list[Rollout], trained_s: float, step: int, width: int) -> str:
    row = [" "] * width
    last = max(rollouts, key=lambda rollout: rollout.generated_s)
    _fill(row, last.opened_s, last.first_token_s, "-")
    _fill(row, last.generated_s, trained_s, ".")
    _fill(row, trained_s, trained_s + STEP_S, "#")
    at = last.first_token_s - TOKEN_S
    for span in last.versions:
        _fill(row, at, at + span.tokens * TOKEN_S, str(span.version))
        at += span.tokens * TOKEN_S
    staleness = step - min(rollout.first_version for rollout in rollouts)
    return "".join(row) + f"  staleness {staleness}"


def _column(at_s: float) -> int:
    return round(at_s / COLUMN_S)


def _fill(row: list[str], start_s: float, end_s: float, mark: str) -> None:
    for column in range(_column(start_s), min(len(row), max(_column(end_s), _column(start_s) + 1))):
        row[column] = mark


def _facts(outcome: Outcome) -> list[str]:
    steps = outcome.steps
    total_s = sum(step.step_s for step in steps)
    trainer = sum(step.trainer_wait_s for step in steps) / total_s
    generator = sum(step.generator_wait_ratio * step.step_s for step in steps) / total_s
    return [f"{steps[-1].time_s:.1f} s · trainer waits {trainer:.0%} · generator waits {generator:.0%}"]


def budgets() -> str:
    """What each budget gives."""
    columns = "samples/s | trainer waits | generator waits | trajectory staleness, mean (max) | token staleness, mean"
    lines = [f"| η | {columns} |", "| --- | --- | --- | --- | --- | --- |"]
    for budget in (0, 1, 2, 4, 8):
        outcome, _ = run(budget, steps=LONG)
        lines.append(f"| {budget} | " + " | ".join(_row_of(outcome)) + " |")
    return "\n".join(lines)


def publishing() -> str:
    """What publishing less often does, η = 4."""
    columns = "samples/s | trainer waits | generator waits | trajectory staleness, mean (max) | token staleness, mean"
    lines = [f"| steps_per_publish | {columns} |", "| --- | --- | --- | --- | --- | --- |"]
    for interval in (1, 2, 4):
        outcome, _ = run(4, steps=LONG, steps_per_publish=interval)
        lines.append(f"| {interval} | " + " | ".join(_row_of(outcome)) + " |")
    return "\n".join(lines)


def _row_of(outcome: Outcome) -> list[str]:
    steps = outcome.steps
    total_s = sum(step.step_s for step in steps)
    trajectory = [step.trajectory_staleness for step in steps]
    return [
        f"{sum(step.samples for step in steps) / total_s:.2f}",
        f"{sum(step.trainer_wait_s for step in steps) / total_s:.0%}",
        f"{sum(step.generator_wait_ratio * step.step_s for step in steps) / total_s:.0%}",
        f"{sum(one.mean for one in trajectory) / len(steps):.2f} ({max(one.max for one in trajectory):.0f})",
        f"{sum(step.tokens.staleness.mean for step in steps) / len(steps):.2f}",
    ]


def modes() -> str:
    """What each update mode does to rollouts that cross an update, η = 4."""
    lines = ["| mode | rollouts of several versions | resumed from parking | KV computed anew |"]
    lines.append("| --- | --- | --- | --- |")
    for mode in ("keep", "recompute", "abort"):
        outcome, _ = run(4, steps=LONG, generator={"update_mode": mode})
        rollouts = [sample.rollout for batch in outcome.trainer.batches for sample in batch.samples]
        lines.append(
            f"| `{mode}` | {sum(len(r.versions) > 1 for r in rollouts)} of {len(rollouts)} "
            f"| {sum(r.resumes for r in rollouts)} times | {sum(r.reprefills for r in rollouts)} times |"
        )
    return "\n".join(lines)


def policies() -> str:
    """`wait` and `drop` at η = 1, where the longest responses take longer than the budget gives them."""
    columns = "samples/s | rollouts trained | ended as overdue | mean length trained | trajectory staleness, max"
    lines = [f"| policy | {columns} |", "| --- | --- | --- | --- | --- | --- |"]
    for policy in ("wait", "drop"):
        outcome, _ = run(1, steps=LONG, longest=400, queue={"overdue": policy})
        steps = outcome.steps
        lengths = [len(s.rollout.response_ids) for batch in outcome.trainer.batches for s in batch.samples]
        lines.append(
            f"| `{policy}` | {len(lengths) / sum(step.step_s for step in steps):.2f} | {len(lengths)} "
            f"| {outcome.endings.get('overdue', 0)} | {sum(lengths) / len(lengths):.1f} "
            f"| {max(step.trajectory_staleness.max for step in steps):.0f} |"
        )
    return "\n".join(lines)


def surplus() -> str:
    """What becomes of groups that are unfinished when a batch is full; a heavy tail of lengths."""
    columns = "samples/s | trained / opened | tokens wasted | parked | mean length trained | staleness, mean (max)"
    lines = [f"| η | oversampling | surplus | {columns} |", "| --- " * 9 + "|"]
    rows: list[tuple[int, float | None, str]] = [
        *((0, None, "continue"), (0, 2.0, "discard"), (3, None, "continue")),
        *((3, 2.0, "continue"), (3, 2.0, "park"), (3, 2.0, "discard")),
    ]
    for budget, oversampling, kind in rows:
        queue = {"surplus": kind} | ({} if oversampling is None else {"oversampling": oversampling})
        outcome, _ = run(budget, steps=LONG, longest=400, queue=queue)
        steps = outcome.steps
        lengths = [len(s.rollout.response_ids) for batch in outcome.trainer.batches for s in batch.samples]
        ended: dict[str, int] = {}
        for step in steps:
            for ending, tokens in step.tokens.ended.items():
                ended[ending] = ended.get(ending, 0) + tokens
        wasted = 1.0 - ended["trained"] / sum(ended.values())
        trajectory = [step.trajectory_staleness for step in steps]
        lines.append(
            f"| {budget} | {'' if oversampling is None else oversampling} | `{kind}` "
            f"| {len(lengths) / sum(step.step_s for step in steps):.2f} "
            f"| {len(lengths)} / {sum(step.admitted_rollouts for step in steps)} | {wasted:.0%} "
            f"| {sum(step.parkings for step in steps)} times | {sum(lengths) / len(lengths):.1f} "
            f"| {sum(one.mean for one in trajectory) / len(steps):.2f} ({max(one.max for one in trajectory):.0f}) |"
        )
    return "\n".join(lines)


@cache
@cache
def figures() -> dict[str, str]:
    """Name of each figure in docs/async.md, and its text."""
    drawn = {f"timeline-{budget}": f"```text\n{timeline(budget)}\n```" for budget in (0, 1, 4)}
    tables = (budgets, publishing, surplus, modes, policies)
    return drawn | {table.__name__: table() for table in tables}


def with_figures(page: str) -> str:
    """``page`` with every figure between its markers replaced by what the loops do today."""
    for name, text in figures().items():
        page = re.sub(
            rf"(<!-- figure {name} -->\n).*?(<!-- end -->)", lambda m, t=text: f"{m[1]}{t}\n{m[2]}", page, flags=re.S
        )
    return page


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for name, text in figures().items():
            print(f"{name}\n{text}\n")
