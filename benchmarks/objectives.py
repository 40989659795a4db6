"""Which objective bears staleness? Trains one cold start at budget 8 with each, on equal samples and optimiser steps.

    python benchmarks/objectives.py                                # everything; again: goes on where it stopped
    python benchmarks/objectives.py --objectives "naive PPO" GSPO --seeds 1

Every objective gets the same grid of learning rates (`LEARNING_RATES`, one seed, scored on the validation tasks). Its
best one is then trained with new seeds and scored on the test tasks; naive PPO at budget 0 is the yardstick. Prints a
table, draws curves, and as the last line prints one JSON object: the grid, `after` per objective and seed, its mean and
standard error over seeds, and `decoupled_minus_naive` seed by seed. The limit is sampling noise: each run's line gives
the standard error over held-out tasks. Timing plays no part, but one run uses both cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from parts.trained_run import ARITHMETIC, standard_error, steps_and_end, train_once

from headway.report.plots import STYLE

LEARNING_RATES = (5e-4, 2.5e-4, 1.25e-4, 6.25e-5)  # peak; the same for every objective
SHOWN_RATE = 2.5e-4  # of the curves at an equal learning rate
GRID_SEED = 0
SEEDS = (1, 2, 3)  # of the best: none of them chose the learning rate
ATTEMPTS = {"validation": 8, "test": 4}  # 256 and 512 tasks
RECIPE = (
    "--run.steps=200",
    "--run.time_limit_s=100000",
    "--queue.groups_per_step=8",
    "--queue.budget=8",
    "--trainer.schedule=linear",
    "--trainer.warmup_steps=20",
    "--checkpoint.every_steps=200",
    # a machine with other work on it takes its time, and changes nothing else
    "--run.worker_start_timeout_s=1200",
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    # the last weights are scored, not the best: no validation during the run
    "--evaluation.every_s=100000",
    "--evaluation.stop_at_solve_rate=1.0",
    "--evaluation.before=false",
)
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "naive PPO": ("--algorithm.loss=ppo_clip",),
    "decoupled PPO": ("--algorithm.loss=decoupled_ppo",),
    "TIS": ("--algorithm.loss=reinforce",),
    # the experiment names a loss, which would win over the preset's
    "GSPO": ("--algorithm.preset=gspo", "--algorithm.loss=gspo"),
    "CISPO": ("--algorithm.loss=cispo",),
    "naive PPO, budget 0": ("--algorithm.loss=ppo_clip", "--queue.budget=0"),
}
COLOURS = dict(zip(OBJECTIVES, ("#2166ac", "#d6730f", "#2a8a55", "#7b3294", "#c0392b", "#8a8f98"), strict=True))
PARTS = 20  # of a run, one point of its curve each


class Outcome(NamedTuple):
    """What one run came to."""

    after: float  # solve rate of the last weights
    standard_error: float  # of it, within this run
    curve: list[tuple[int, float]]  # (samples trained, solve rate of the training tasks as sampled), over parts
    samples: int  # trained
    staleness: float  # mean trajectory staleness trained on, steps
    wall_s: float


def cold_start(folder: Path) -> None:
    """Tasks and a supervised model, as the quickstart makes them."""
    command = [sys.executable, str(ARITHMETIC / "quickstart.py"), "--cold-start-only", "--directory", str(folder)]
    subprocess.run(command, check=True)


def run(arguments: argparse.Namespace, objective: str, rate: float, seed: int, split: str) -> Outcome:
    """Train once, or read what an earlier call trained, and print a line. Scored on ``split``."""
    start: Path = arguments.directory / "start"
    other = "test" if split == "validation" else "validation"
    options = [
        *(f"--model.path={start}/sft", f"--run.seed={seed}"),
        *(f"--tasks.train.path={start}/tasks/train.jsonl", f"--tasks.test.path={start}/tasks/{split}.jsonl"),
        *(f"--tasks.validation.path={start}/tasks/{other}.jsonl", f"--evaluation.samples_per_task={ATTEMPTS[split]}"),
        *(*RECIPE, *OBJECTIVES[objective], f"--trainer.learning_rate={rate}"),
        f"--trainer.optimizer_steps_per_batch={arguments.optimizer_steps}",
    ]
    name = f"{objective.replace(' ', '-').replace(',', '')}-{rate:g}-{seed}"
    outcome = outcome_of(train_once(arguments.directory, name, options))
    print(
        f"{objective:20} learning rate {rate:.2e} seed {seed}: {split} {outcome.after:.3f} ± "
        f"{outcome.standard_error:.3f} after {outcome.samples} samples, staleness {outcome.staleness:.1f}, "
        f"{outcome.wall_s:.0f} s   " + " ".join(f"{rate:.2f}" for _, rate in outcome.curve[1::2]),
        flush=True,
    )
    return outcome


def outcome_of(folder: Path) -> Outcome:
    """The figures of a finished run, from its ledger."""
    steps, after, wall_s = steps_and_end(folder)
    curve: list[tuple[int, float]] = []
    samples = 0
    for part in range(PARTS):
        chosen = steps[len(steps) * part // PARTS : len(steps) * (part + 1) // PARTS]
        samples += sum(step.samples for step in chosen)
        groups = [sum(step.solve_rate_histogram) for step in chosen]  # that finished before each step
        if any(groups):
            solved = sum(step.solve_rate * count for step, count in zip(chosen, groups, strict=True))
            curve.append((samples, solved / sum(groups)))
    staleness = mean(step.trajectory_staleness.mean for step in steps)
    return Outcome(after.solve_rate, after.standard_error, curve, samples, staleness, wall_s)


def draw(path: Path, equal: Mapping[str, Sequence[Outcome]], best: Mapping[str, Sequence[Outcome]]) -> None:
    """Two panels of curves: at one learning rate for all, and at each one's best."""
    style: Any = {**STYLE, "svg.hashsalt": "objectives"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _curves(left, equal, f"all at learning rate {SHOWN_RATE:g}")
        _curves(right, best, "each at its best learning rate")
        left.set_ylabel("solve rate, training tasks as sampled")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _curves(axes: Axes, outcomes: Mapping[str, Sequence[Outcome]], title: str) -> None:
    """A thick line per objective, the mean of its seeds, and a thin one per seed."""
    seeds = max((len(runs) for runs in outcomes.values()), default=0)
    axes.set_title(f"{title} ({seeds} seed{'s' if seeds > 1 else ''})")
    axes.set_xlabel("samples trained")
    for name, runs in outcomes.items():
        for outcome in runs if len(runs) > 1 else ():
            axes.plot(*zip(*outcome.curve, strict=True), color=COLOURS[name], linewidth=0.5, alpha=0.4)
        points = [
            (mean(x for x, _ in part), mean(y for _, y in part))
            for part in zip(*(outcome.curve for outcome in runs), strict=False)
        ]
        axes.plot(*zip(*points, strict=True), color=COLOURS[name], linewidth=1.6, label=name)


def table(grid: Mapping[str, Mapping[float, Outcome]], best: Mapping[str, Sequence[Outcome]]) -> str:
    """Markdown: the grid's solve rates on the validation tasks, the seeds' on the test tasks."""
    rates = " | ".join(f"{rate:g}" for rate in LEARNING_RATES)
    lines = [
        f"| objective | {rates} | test, mean of seeds | staleness |",
        "| --- |" + " --- |" * (len(LEARNING_RATES) + 2),
    ]
    for name, row in grid.items():
        top = max(row, key=lambda rate: row[rate].after)
        cells = [f"**{row[rate].after:.3f}**" if rate == top else f"{row[rate].after:.3f}" for rate in LEARNING_RATES]
        after = [outcome.after for outcome in best.get(name, ())]
        final = f"{mean(after):.3f} ± {standard_error(after):.3f} ({len(after)})" if after else "not run"
        staleness = mean(outcome.staleness for outcome in best.get(name) or row.values())
        lines.append(f"| {name} | {' | '.join(cells)} | {final} | {staleness:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--objectives", nargs="*", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="of the best; none: the grid alone")
    parser.add_argument("--optimizer-steps", type=int, default=4, help="per batch; default: 4, as AReaL has")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-objectives"))
    parser.add_argument("--figure", type=Path, help="default: DIRECTORY/objectives.svg")
    arguments = parser.parse_args()
    cold_start(arguments.directory / "start")
    grid: dict[str, dict[float, Outcome]] = {name: {} for name in arguments.objectives}
    for rate in LEARNING_RATES:
        for name in arguments.objectives:
            grid[name][rate] = run(arguments, name, rate, GRID_SEED, "validation")
    chosen = {name: max(row, key=lambda rate: row[rate].after) for name, row in grid.items()}
    best: dict[str, list[Outcome]] = {name: [] for name in arguments.objectives}
    for seed in arguments.seeds:
        for name, rate in chosen.items():
            best[name].append(run(arguments, name, rate, seed, "test"))
    equal = {name: [row[SHOWN_RATE]] for name, row in grid.items()}
    draw(arguments.figure or arguments.directory / "objectives.svg", equal, best if arguments.seeds else equal)
    print("\n" + table(grid, best) + "\n")
    after = {name: [round(outcome.after, 4) for outcome in runs] for name, runs in best.items()}
    result: dict[str, object] = {
        "grid": {name: {f"{rate:g}": round(o.after, 4) for rate, o in row.items()} for name, row in grid.items()},
        "learning_rate": chosen,
        "after": after,
        "mean": {name: round(mean(rates), 4) for name, rates in after.items() if rates},
        "standard_error": {name: round(standard_error(rates), 4) for name, rates in after.items() if len(rates) > 1},
        "samples": {name: {o.samples for o in row.values()}.pop() for name, row in grid.items()},
    }
    if {"decoupled PPO", "naive PPO"} <= after.keys() and arguments.seeds:
        pairs = zip(after["decoupled PPO"], after["naive PPO"], strict=True)
        differences = [decoupled - naive for decoupled, naive in pairs]
        result["decoupled_minus_naive"] = round(mean(differences), 4)
        result["decoupled_minus_naive_standard_error"] = round(standard_error(differences), 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
