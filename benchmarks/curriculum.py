"""How many rollouts does a curriculum save? The same start and tasks, drawn uniformly and drawn by `[curriculum]`.

    python benchmarks/curriculum.py                 # five seeds; again: goes on where it stopped
    python benchmarks/curriculum.py --seeds 1

Of 1000 training tasks 55 % are solved every time (copy a number), 20 % never (their reference answers are wrong) and
25 % sometimes: the sums of examples/arithmetic, which the cold start slips in. Groups whose rewards are all equal are
filtered in both, so both train on groups that teach something, and the price of finding them is what differs.

Held-out sums are evaluated every few steps. A run's figure is the rollouts *generated* for training, that is opened,
until they are solved at the target rate (each evaluation averaged with its two neighbours, the crossing read off the
line between two of them). `rollouts_ratio` is adaptive over uniform, seed by seed, mean and standard error; the last
line is one JSON object. Times play no part. Sampling noise is large: an evaluation's standard error is 0.02, while the
curve rises by 0.003 a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from parts.trained_run import ARITHMETIC, CONFIG, headway, train_once

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger

SHARES = {"trivial": 550, "impossible": 200, "productive": 250}  # training tasks
HELD_OUT = 512  # productive ones
TEST = 64  # the experiment wants them; they are not used
SFT_SUMS, SFT_COPIES = 12000, 5000  # demonstrations
TARGET = 0.62  # held-out solve rate, over three evaluations in a row
SEEDS = (0, 1, 2, 3, 4)
GROUP_SIZE = 8
RECIPE = (
    "--run.steps=400",
    "--run.time_limit_s=100000",
    f"--rollout.group_size={GROUP_SIZE}",
    "--queue.groups_per_step=32",
    "--queue.budget=2",
    "--generator.slots=128",
    "--trainer.schedule=constant",
    "--trainer.learning_rate=5e-4",
    "--checkpoint.every_steps=1000",
    # a machine with other work on it takes its time, and changes nothing else
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    "--evaluation.every_steps=4",
    "--evaluation.every_s=100000",
    f"--evaluation.stop_at_solve_rate={TARGET + 0.03}",
    "--evaluation.test=never",
    "--ledger.trackers=[]",
    "--ledger.trace=false",
)
POLICIES: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "adaptive": ("--curriculum.mode=adaptive", "--curriculum.min_group_size=4", "--curriculum.max_group_size=12"),
    "fixed_size": ("--curriculum.mode=adaptive",),  # all groups of GROUP_SIZE
}


def write_tasks(folder: Path, seed: int) -> None:
    """``sft.jsonl``, ``train.jsonl`` (the three kinds, mixed) and ``validation.jsonl`` (productive ones alone)."""
    specification = importlib.util.spec_from_file_location("make_tasks", ARITHMETIC / "make_tasks.py")
    assert specification is not None
    assert specification.loader is not None
    sums: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sums)
    rng = random.Random(f"curriculum {seed}")
    wanted = SFT_SUMS + SHARES["productive"] + SHARES["impossible"] + HELD_OUT + TEST
    tasks: dict[str, str] = {}
    while len(tasks) < wanted:
        tasks.setdefault(*sums.make_task(rng))
    rows = list(tasks.items())
    rng.shuffle(rows)
    demonstrated, rows = rows[:SFT_SUMS], rows[SFT_SUMS:]
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    test, rows = rows[:TEST], rows[TEST:]
    productive, impossible = rows[: SHARES["productive"]], rows[SHARES["productive"] :]
    copies = [(f"{a}>{b}=", str(b)) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(copies)
    trivial, copies = copies[: SHARES["trivial"]], copies[SHARES["trivial"] :]
    training = [
        *({"prompt": prompt, "answer": answer, "kind": "trivial"} for prompt, answer in trivial),
        # no slip leads there: every number written is below 30
        *({"prompt": prompt, "answer": str(int(answer) + 50), "kind": "impossible"} for prompt, answer in impossible),
        *({"prompt": prompt, "answer": answer, "kind": "productive"} for prompt, answer in productive),
    ]
    rng.shuffle(training)
    sft = [{"prompt": prompt, "solution": sums.demonstrate(prompt, rng)} for prompt, _ in demonstrated]
    sft += [{"prompt": prompt, "solution": answer} for prompt, answer in copies[:SFT_COPIES]]
    rng.shuffle(sft)
    folder.mkdir(parents=True, exist_ok=True)
    validation, unused = ([{"prompt": p, "answer": a} for p, a in part] for part in (held_out, test))
    for name, objects in (("sft", sft), ("train", training), ("validation", validation), ("test", unused)):
        lines = [json.dumps(item) + "\n" for item in objects]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def cold_start(folder: Path) -> None:
    """Tasks, and a model that imitates slipping demonstrations of them. One for all runs: what differs is the rest."""
    tasks, initial, warm = folder / "tasks", folder / "init", folder / "sft"
    if not (tasks / "validation.jsonl").exists():
        write_tasks(tasks, seed=0)
    if not initial.exists():
        texts = ["--texts", f"{tasks}/sft.jsonl"]
        headway("init-model", str(initial), *texts, "--character-level", "--seed", "0", quiet=True)
    if not warm.exists():
        headway(
            *("sft", CONFIG, f"--model.path={initial}", f"--sft.data={tasks}/sft.jsonl"),
            *(f"--sft.output={warm}", f"--tasks.train.path={tasks}/train.jsonl", "--run.seed=0"),
            *(f"--tasks.validation.path={tasks}/validation.jsonl", f"--tasks.test.path={tasks}/test.jsonl"),
            quiet=True,
        )


class Point(NamedTuple):
    """A run's state when a version was evaluated."""

    rollouts: float  # generated for training by then
    solve_rate: float  # of held-out tasks


class Outcome(NamedTuple):
    """What one run came to."""

    rollouts: float  # generated to reach the target; nan: it wasn't reached
    trained: int  # of those generated until the run's end
    points: list[Point]
    zero_variance_share: float  # over all groups
    step: int  # of the crossing, rounded up to an evaluation
    wall_s: float


def run(arguments: argparse.Namespace, policy: str, seed: int) -> Outcome:
    """Train once, or read what an earlier call trained, and print a line."""
    start: Path = arguments.directory / "start"
    options = [
        *(f"--model.path={start}/sft", f"--run.seed={seed}"),
        *(f"--tasks.{name}.path={start}/tasks/{name}.jsonl" for name in ("train", "validation", "test")),
        *(*RECIPE, *POLICIES[policy], *arguments.overrides),
    ]
    outcome = outcome_of(train_once(arguments.directory, f"{policy}-{seed}", options))
    print(
        f"{policy:9} seed {seed}: {outcome.rollouts:7.0f} rollouts in {outcome.step} steps to a held-out solve rate of "
        f"{TARGET}; {outcome.zero_variance_share:.0%} of groups flat, {outcome.wall_s:.0f} s   "
        + " ".join(f"{point.solve_rate:.2f}" for point in outcome.points),
        flush=True,
    )
    return outcome


def outcome_of(folder: Path) -> Outcome:
    """The figures of a finished run, from its ledger."""
    lines = list(read_ledger(folder))
    steps = [line for line in lines if isinstance(line, StepRecord)]
    generated, opened, flat, groups, trained = {0: 0.0}, 0, 0.0, 0, 0
    for step in steps:
        opened += step.admitted_rollouts
        generated[step.version] = opened
        finished = sum(step.rewards.solve_rate_histogram) if step.rewards else 0
        flat += step.rewards.zero_variance_share * finished if step.rewards else 0.0
        groups, trained = groups + finished, trained + step.samples
    evaluations = [line for line in lines if isinstance(line, EvaluationRecord) and line.split == "validation"]
    points = [Point(generated[line.step], line.solve_rate) for line in sorted(evaluations, key=lambda e: e.step)]
    versions = sorted(line.step for line in evaluations)
    rollouts, step_of = math.nan, 0
    smooth = [
        Point(p.rollouts, mean(q.solve_rate for q in points[max(0, i - 1) : i + 2])) for i, p in enumerate(points)
    ]
    for before, after, version in zip(smooth, smooth[1:], versions[1:], strict=False):
        if after.solve_rate >= TARGET:
            share = (TARGET - before.solve_rate) / (after.solve_rate - before.solve_rate)
            rollouts = before.rollouts + max(0.0, share) * (after.rollouts - before.rollouts)
            step_of = version
            break
    return Outcome(rollouts, trained, points, flat / max(1, groups), step_of, lines[-1].time_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES), default=["uniform", "adaptive"])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-curriculum"))
    parser.add_argument("overrides", nargs="*", help="--section.key=value of every run")
    arguments, extra = parser.parse_known_args()
    arguments.overrides += extra
    cold_start(arguments.directory / "start")
    results: dict[str, list[float]] = {policy: [] for policy in arguments.policies}
    for seed in arguments.seeds:
        for policy in arguments.policies:
            results[policy].append(run(arguments, policy, seed).rollouts)
    report: dict[str, object] = {"rollouts": {name: [round(value) for value in of] for name, of in results.items()}}
    for policy in arguments.policies:
        if policy != "uniform" and "uniform" in results:
            ratios = [a / u for a, u in zip(results[policy], results["uniform"], strict=True)]
            error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            name = "rollouts_ratio" if policy == "adaptive" else f"rollouts_ratio_{policy}"
            print(f"{name} = {mean(ratios):.3f} ± {error:.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")
            report[name] = round(mean(ratios), 4)
            report[f"{name}_standard_error"] = round(error, 4)
            report[f"{name}_by_seed"] = [round(ratio, 4) for ratio in ratios]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
