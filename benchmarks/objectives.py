"""When is asynchronous learning equal? One cold start, trained by several objectives at several budgets.

    python benchmarks/objectives.py                                # everything; again: goes on where it stopped
    python benchmarks/objectives.py --objectives "naive PPO" SAPO --budgets 8 --claims

The grid: every objective at every budget, with one and with four optimiser steps per batch, at two learning rates, one
seed, scored on the validation tasks. Then `CLAIMS`: pairs that are trained with five new seeds each and scored on the
test tasks, on equal samples and optimiser steps. Prints a line a run, the grid as a table, the claims with their
standard errors over seeds, draws both, and as the last line prints one JSON object: `grid`, `claims`, `samples`. The
limit is sampling noise: each run's line gives the standard error over held-out tasks. Timing plays no part, but one run
uses both cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from parts.trained_run import headway, standard_error, steps_and_end, train_once

STYLE = {
    **{"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9},  # text stays text
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "grid.color": "#e3e6ea", "legend.frameon": False, "legend.fontsize": 8},
}
LEARNING_RATES = (2.5e-4, 1.25e-4)  # peak; the same for every objective
BUDGETS = (0, 2, 8, 16)
OPTIMIZER_STEPS = (1, 4)  # per batch
GRID_SEED = 0
SEEDS = (1, 2, 3, 4, 5)  # of the claims: none of them chose a learning rate
ATTEMPTS = {"validation": 8, "test": 4}  # 256 and 512 tasks
RECIPE = (
    "--run.steps=200",
    "--run.time_limit_s=100000",
    "--queue.groups_per_step=8",
    "--trainer.schedule=linear",
    "--trainer.warmup_steps=20",
    "--checkpoint.every_steps=200",
    # a machine with other work on it takes its time, and changes nothing else
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    # the last weights are scored, not the best: no validation during the run
    "--evaluation.every_s=100000",
    "--evaluation.stop_at_solve_rate=1.0",
    "--evaluation.test=after",
)
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "naive PPO": ("--algorithm.loss=ppo_clip",),
    "decoupled PPO": ("--algorithm.loss=decoupled_ppo",),
    "TIS": ("--algorithm.loss=reinforce",),
    "TIS, sequence mask": ("--algorithm.loss=reinforce", "--algorithm.sequence_mask=[0.5, 2.0]"),
    # the experiment names a loss, which would win over the preset's
    "SAPO": ("--algorithm.preset=sapo", "--algorithm.loss=sapo"),
    # not in the grid by default
    "GSPO": ("--algorithm.preset=gspo", "--algorithm.loss=gspo"),
    "CISPO": ("--algorithm.loss=cispo",),
    "unclipped IS": ("--algorithm.loss=reinforce", "--algorithm.behaviour_weight_cap=1e9"),
    "decoupled PPO, damped": ("--algorithm.loss=decoupled_ppo", "--algorithm.token_mask=[0.8, 1.28]"),
}
IN_GRID = tuple(OBJECTIVES)[:5]
COLOURS = dict(
    zip(
        OBJECTIVES,
        ("#2166ac", "#d6730f", "#2a8a55", "#7b3294", "#c0392b", "#8a8f98", "#5f9ea0", "#111111", "#b8860b"),
        strict=True,
    )
)
PARTS = 20  # of a run, one point of its curve each


class Setting(NamedTuple):
    """What is compared."""

    objective: str
    budget: int
    optimizer_steps: int
    rate: float

    def __str__(self) -> str:
        plural = "s" if self.optimizer_steps > 1 else ""
        return f"{self.objective}, budget {self.budget}, {self.optimizer_steps} step{plural}, {self.rate:g}"


class Outcome(NamedTuple):
    """What one run came to."""

    after: float  # solve rate of the last weights
    standard_error: float  # of it, within this run
    curve: list[tuple[int, float]]  # (samples trained, solve rate of the training tasks as sampled), over parts
    samples: int  # trained
    staleness: float  # mean trajectory staleness trained on, steps
    clipped: float  # mean share of tokens whose gradient the clip range took
    mismatch: float  # mean KL of the policy that sampled from the one at the start of a step (k3), nats per token
    wall_s: float


CLAIMS: dict[str, tuple[Setting, ...]] = {
    "at a high rate the decoupled objective loses what the naive one's clip range damps": (
        Setting("naive PPO", 8, 4, 2.5e-4),
        Setting("decoupled PPO", 8, 4, 2.5e-4),
        Setting("decoupled PPO, damped", 8, 4, 2.5e-4),
    ),
    "at a low rate they are equal": (Setting("naive PPO", 8, 4, 1.25e-4), Setting("decoupled PPO", 8, 4, 1.25e-4)),
    "a small budget costs nothing": (Setting("naive PPO", 0, 1, 2.5e-4), Setting("naive PPO", 2, 1, 2.5e-4)),
    "without a clip range importance sampling collapses at budget 3": (
        Setting("naive PPO", 3, 4, 2.5e-4),
        Setting("unclipped IS", 3, 4, 2.5e-4),
    ),
}


def cold_start(folder: Path) -> None:
    """Tasks and a supervised model, as the quickstart makes them."""
    headway("quickstart", str(folder), "--cold-start-only")


def run(directory: Path, setting: Setting, seed: int, split: str) -> Outcome:
    """Train once, or read what an earlier call trained, and print a line. Scored on ``split``."""
    start = directory / "start"
    other = "test" if split == "validation" else "validation"
    options = [
        *(f"--model.path={start}/sft", f"--run.seed={seed}"),
        *(f"--tasks.train.path={start}/tasks/train.jsonl", f"--tasks.test.path={start}/tasks/{split}.jsonl"),
        *(f"--tasks.validation.path={start}/tasks/{other}.jsonl", f"--evaluation.samples_per_task={ATTEMPTS[split]}"),
        *(*RECIPE, *OBJECTIVES[setting.objective], f"--queue.budget={setting.budget}"),
        *(f"--trainer.learning_rate={setting.rate}",),
        f"--trainer.optimizer_steps_per_batch={setting.optimizer_steps}",
    ]
    name = "-".join(str(part).replace(" ", "-").replace(",", "") for part in (*setting, seed))
    outcome = outcome_of(train_once(directory, name, options))
    print(
        f"{setting!s:52} seed {seed}: {split} {outcome.after:.3f} ± {outcome.standard_error:.3f} after "
        f"{outcome.samples} samples, staleness {outcome.staleness:.1f}, clipped {100 * outcome.clipped:.1f} %, "
        f"mismatch {outcome.mismatch:.1e} nats, {outcome.wall_s:.0f} s   "
        + " ".join(f"{rate:.2f}" for _, rate in outcome.curve[1::2]),
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
        finished = [step.rewards for step in chosen if step.rewards]
        groups = [sum(rewards.solve_rate_histogram) for rewards in finished]  # that finished before each step
        if any(groups):
            solved = sum(rewards.solve_rate * count for rewards, count in zip(finished, groups, strict=True))
            curve.append((samples, solved / sum(groups)))
    return Outcome(
        after=after.solve_rate,
        standard_error=after.standard_error,
        curve=curve,
        samples=samples,
        staleness=mean(step.trajectory_staleness.mean for step in steps),
        clipped=mean(step.metrics["clip_fraction"] for step in steps),
        mismatch=mean(step.metrics["mismatch_k3"] for step in steps),
        wall_s=wall_s,
    )


def draw(
    path: Path, grid: Mapping[Setting, Outcome], claims: Mapping[str, Mapping[Setting, Sequence[Outcome]]]
) -> None:
    """Solve rates over budgets, and below the curves of the claims: a thick line is the mean of its seeds."""
    thin: Any = {"linewidth": 0.5, "alpha": 0.4}
    style: Any = {**STYLE, "svg.hashsalt": "objectives"}
    shown = [rates for rates in itertools.product(OPTIMIZER_STEPS, LEARNING_RATES)]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 6.4 if claims else 3.4), layout="constrained")
        axes = figure.subplots(2 if claims else 1, 4, squeeze=False, sharey="row")
        for panel, (steps, rate) in zip(axes[0], shown, strict=True):
            panel.set_title(f"{steps} optimiser step{'s' if steps > 1 else ''}, learning rate {rate:g}", fontsize=9)
            panel.set_xlabel("budget, steps")
            for name in IN_GRID:
                points = [(at.budget, o) for at, o in grid.items() if (at.objective, *at[2:]) == (name, steps, rate)]
                if points:
                    x, y = [budget for budget, _ in points], [outcome.after for _, outcome in points]
                    error = [outcome.standard_error for _, outcome in points]
                    panel.errorbar(x, y, error, color=COLOURS[name], label=name, marker="o", markersize=3, capsize=2)
        axes[0][0].set_ylabel("solve rate after training")
        for panel, (title, settings) in zip(axes[1] if claims else (), claims.items(), strict=False):
            panel.set_title(textwrap.fill(title, 44), fontsize=8)
            panel.set_xlabel("samples trained, thousands")
            for number, (setting, outcomes) in enumerate(settings.items()):
                colour = COLOURS[setting.objective] if len({at.objective for at in settings}) > 1 else f"C{number}"
                for outcome in outcomes:
                    panel.plot([x / 1e3 for x, _ in outcome.curve], [y for _, y in outcome.curve], color=colour, **thin)
                points = [
                    (mean(x for x, _ in part) / 1e3, mean(y for _, y in part))
                    for part in zip(*(outcome.curve for outcome in outcomes), strict=False)
                ]
                panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=str(setting))
            panel.legend(fontsize=6)
        axes[-1][0].set_ylabel("solve rate")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(IN_GRID))
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def table(grid: Mapping[Setting, Outcome]) -> str:
    """Markdown: the grid's solve rates on the validation tasks, a column a budget."""
    budgets = sorted({setting.budget for setting in grid})
    lines = [
        "| objective | optimiser steps | learning rate | "
        + " | ".join(f"budget {budget}" for budget in budgets)
        + " |",
        "| --- |" + " --- |" * (len(budgets) + 2),
    ]
    for steps, rate, name in dict.fromkeys((at.optimizer_steps, at.rate, at.objective) for at in grid):
        found = [grid.get(Setting(name, budget, steps, rate)) for budget in budgets]
        cells = " | ".join("" if one is None else f"{one.after:.3f}" for one in found)
        lines.append(f"| {name} | {steps} | {rate:g} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--objectives", nargs="*", choices=list(OBJECTIVES), default=IN_GRID)
    parser.add_argument("--budgets", nargs="*", type=int, default=BUDGETS)
    parser.add_argument("--optimizer-steps", nargs="*", type=int, default=OPTIMIZER_STEPS)
    parser.add_argument(
        "--claims", nargs="*", type=int, default=range(len(CLAIMS)), help="numbers; none: the grid alone"
    )
    parser.add_argument("--rates", nargs="*", type=float, default=LEARNING_RATES)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="of the claims")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-objectives"))
    parser.add_argument("--figure", type=Path, help="default: DIRECTORY/objectives.svg")
    arguments = parser.parse_args()
    cold_start(arguments.directory / "start")
    grid: dict[Setting, Outcome] = {}
    for steps, budget, rate, name in itertools.product(
        sorted(arguments.optimizer_steps, reverse=True),
        sorted(arguments.budgets, reverse=True),
        arguments.rates,
        arguments.objectives,
    ):
        if budget or steps > 1 or name == IN_GRID[0]:  # on policy, in one step, all are the same gradient
            setting = Setting(name, budget, steps, rate)
            grid[setting] = run(arguments.directory, setting, GRID_SEED, "validation")
    claims: dict[str, dict[Setting, list[Outcome]]] = {}
    for title in [list(CLAIMS)[number] for number in arguments.claims]:
        claims[title] = {
            setting: [run(arguments.directory, setting, seed, "test") for seed in arguments.seeds]
            for setting in CLAIMS[title]
        }
    draw(arguments.figure or arguments.directory / "objectives.svg", grid, claims)
    print("\n" + table(grid) + "\n")
    found: dict[str, object] = {}
    for title, settings in claims.items():
        after = {str(at): [round(outcome.after, 4) for outcome in outcomes] for at, outcomes in settings.items()}
        first = next(iter(after.values()))
        print(title)
        for name, rates in after.items():
            differences = [mine - its for mine, its in zip(rates, first, strict=True)]
            against = f", {mean(differences):+.3f} ± {standard_error(differences):.3f}" if rates is not first else ""
            print(f"  {name:52} {mean(rates):.3f} ± {standard_error(rates):.3f} ({len(rates)} seeds){against}")
        found[title] = after
    result = {
        "grid": {str(setting): round(outcome.after, 4) for setting, outcome in grid.items()},
        "claims": found,
        "samples": sorted({outcome.samples for outcome in grid.values()}),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
