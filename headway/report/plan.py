"""`headway train --dry-run`: what the run would do."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.config.schema import Experiment, TaskSource
from headway.report.formats import duration


def plan_rows(experiment: Experiment) -> list[tuple[str, str]]:
    """(what, how) of the run, in the order things happen."""
    run, rollout, queue = experiment.run, experiment.rollout, experiment.queue
    samples = queue.groups_per_step * rollout.group_size
    slots = experiment.generator.slots * len(experiment.generator.devices)
    mode = "synchronous, on-policy" if queue.budget == 0 else f"asynchronous, budget {queue.budget} ({queue.overdue})"
    until = f"{run.steps:,} steps" + (f" or {duration(run.time_limit_s)}" if run.time_limit_s else "")
    if experiment.evaluation.stop_at_solve_rate is not None:
        until += f", or a validation solve rate of {experiment.evaluation.stop_at_solve_rate:g}"
    return [
        ("run", f"{run.directory}, seed {run.seed}, until {until}"),
        ("model", f"{experiment.model.path} ({experiment.model.template} prompts)"),
        ("train on", _source(experiment.tasks.train)),
        ("evaluate on", _evaluation(experiment)),
        (
            "batch",
            f"{queue.groups_per_step} groups × {rollout.group_size} rollouts = {samples} samples a step, at most "
            f"{rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens each",
        ),
        ("queue", f"{mode}; at most {queue.groups_per_step * (queue.budget + 1)} groups open before the first step"),
        (
            "generator",
            f"{', '.join(experiment.generator.devices)} ({experiment.generator.dtype}), {slots} slots, "
            f"{experiment.concurrent_rollouts} rollouts at once, updates: {experiment.generator.update_mode}",
        ),
        (
            "trainer",
            f"{', '.join(experiment.trainer.devices)} ({experiment.trainer.dtype}), {experiment.algorithm.loss}, "
            f"{experiment.algorithm.advantage}, learning rate {experiment.trainer.learning_rate:g} "
            f"({experiment.trainer.schedule})",
        ),
        ("weights", f"published every {_every(experiment.weights.steps_per_publish, 'step')}"),
        (
            "checkpoints",
            f"every {_every(experiment.checkpoint.every_steps, 'step')}, the last {experiment.checkpoint.keep_last} "
            "kept",
        ),
        ("verifier", f"{experiment.verifier.name}, {experiment.verifier.timeout_s:g} s limit"),
    ]


def print_plan(experiment: Experiment, console: Console | None = None) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, how in plan_rows(experiment):
        table.add_row(what, Text(how))
    (console or Console(highlight=False)).print(table)


def _source(source: TaskSource) -> str:
    limited = f", the first {source.limit:,}" if source.limit is not None else ""
    if source.source == "jsonl":
        return source.path + limited
    return f"reasoning-gym {source.name}, {source.size:,} tasks, seed {source.seed}{limited}"


def _evaluation(experiment: Experiment) -> str:
    tasks, evaluation = experiment.tasks, experiment.evaluation
    parts: list[str] = []
    if tasks.validation is not None and (evaluation.every_steps or evaluation.every_s is not None):
        when = [f"every {_every(evaluation.every_steps, 'step')}"] if evaluation.every_steps else []
        when += [f"every {duration(evaluation.every_s)}"] if evaluation.every_s is not None else []
        parts.append(f"validation ({_source(tasks.validation)}) {' and '.join(when)}")
    if tasks.test is not None and (evaluation.before or evaluation.after):
        when = [word for word, wanted in (("before", evaluation.before), ("after", evaluation.after)) if wanted]
        parts.append(f"test ({_source(tasks.test)}) {' and '.join(when)}")
    return "; ".join(parts) or "nothing"


def _every(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count} {noun}s"
