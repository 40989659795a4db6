"""Does a critic take nothing from a run with one reward, and does it make use of rewards by step?

    python benchmarks/critics.py                          # everything; again: goes on where it stopped
    python benchmarks/critics.py --seeds 0 --parts paired

`paired`: the quickstart's cold start of each seed is trained in groups of one by PPO with a critic, and by the same
objective without: each reward against the batch's mean. The critic is a network of its own, which begins as the cold
start's model. Both runs generate the same number of rollouts, and are scored on HELD_OUT tasks every EVERY steps. A
third run has the quickstart's groups of eight, and as many samples a step. `steps`: sums of eight operations
(examples/checked_steps), each operation a turn, by PPO with a critic on the policy's trunk: rewarded for each right
step and the answer, and for the answer alone.

Prints a line a run, and as the last line one JSON object: `ppo_minus_mean` (mean over seeds of the difference in solve
rate, each the mean of the last three evaluations), `ppo_minus_mean_interval` (95 %, of Student's distribution),
`explained_variance` (mean over seeds, of steps 90 to 99; every task is new at these, so that critic and policy haven't
been trained on it) and `lowest_explained_variance`, `first_token_explained_variance` (of the first loss tokens alone),
`ppo_over_grpo` (median ratio of the rollouts generated until the solve rate was GOOD; null: some run's never was),
`step_reward_gain` and `step_reward_gains`. The limit is sampling noise: standard errors of a mean of three evaluations
are about 0.01. Timing plays no part.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from parts.trained_run import ARITHMETIC, BESIDE_OTHERS, cold_start, standard_error, train_once

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger
from headway.telemetry.rollouts.joined import JoinedRollouts

CHECKED_STEPS = str(ARITHMETIC.with_name("checked_steps") / "experiment.toml")
MAKE_TASK = runpy.run_path(str(ARITHMETIC / "make_tasks.py"))["make_task"]
GOOD = 0.90  # solve rate
HELD_OUT = 1000  # tasks
EVERY = 20  # steps between two evaluations
SAMPLES = 128  # a step: 100 steps are less than an epoch of 14,000 tasks
EXPLAINED_STEPS = range(90, 100)
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by seeds: 97.5 % of Student's
COMMON = (*BESIDE_OTHERS, f"--evaluation.every_steps={EVERY}", "--evaluation.stop_at_solve_rate=1.0")
ALONE = ("--rollout.group_size=1", f"--queue.groups_per_step={SAMPLES}", "--queue.filter_zero_variance=false")
ARMS = {
    "ppo": (*ALONE, "--algorithm.advantage=gae", "--critic.gae=[1.0, 1.0]", "--critic.learning_rate=5e-4"),
    "mean": (*ALONE, "--algorithm.advantage=batch_mean_std"),
    "grpo": (f"--queue.groups_per_step={SAMPLES // 8}",),
}


def write_held_out(start: Path, seed: int) -> Path:
    """A file of HELD_OUT tasks that are in none of the quickstart's."""
    path = start / "held_out.jsonl"
    if not path.exists():
        rows = [row for file in (start / "tasks").glob("*.jsonl") for row in file.read_text("utf-8").splitlines()]
        known, draw, answers = {json.loads(row)["prompt"] for row in rows}, random.Random(1000 + seed), dict[str, str]()
        while len(answers) < HELD_OUT:
            prompt, answer = MAKE_TASK(draw)
            if prompt not in known:
                answers[prompt] = answer
        tasks = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in answers.items()]
        path.write_text("".join(tasks), encoding="utf-8")
    return path


def evaluations(folder: Path) -> list[EvaluationRecord]:
    """A run's evaluations, in their order."""
    return [line for line in read_ledger(folder) if isinstance(line, EvaluationRecord)]


def steps_of(folder: Path) -> list[StepRecord]:
    """A run's steps, in their order."""
    return [line for line in read_ledger(folder) if isinstance(line, StepRecord)]


def last_solve_rate(folder: Path) -> float:
    """The mean of a run's last three evaluations."""
    return mean(record.solve_rate for record in evaluations(folder)[-3:])


def rollouts_until_good(folder: Path) -> int | None:
    """The rollouts that a run had admitted when its solve rate was GOOD; None: it never was."""
    good_steps = [record.step for record in evaluations(folder) if record.solve_rate >= GOOD]
    return sum(step.admitted_rollouts for step in steps_of(folder) if step.step < good_steps[0]) if good_steps else None


def report(name: str, seed: int, folder: Path) -> None:
    """Print the curve of a run."""
    curve = " ".join(f"{record.solve_rate:.3f}" for record in evaluations(folder))
    print(f"seed {seed}, {name}: {last_solve_rate(folder):.3f}; every {EVERY} steps {curve}", flush=True)


def start_options(start: Path, seed: int) -> list[str]:
    """The options of a seed's model and tasks, to be scored on held-out ones."""
    paths = {"train": start / "tasks" / "train.jsonl", "validation": write_held_out(start, seed)}
    paths["test"] = start / "tasks" / "test.jsonl"
    tasks = [f"--tasks.{split}.path={path}" for split, path in paths.items()]
    return [*tasks, f"--model.path={start}/sft", f"--run.seed={seed}"]


def explained_variances(folder: Path) -> tuple[float, float]:
    """The means over EXPLAINED_STEPS of the explained variance, of all loss tokens and of first ones. The record has
    advantages, which are return - value, normalised over the loss tokens, as discount and decay are 1."""
    by_step = {
        step.step: step.metrics["explained_variance"] for step in steps_of(folder) if step.step in EXPLAINED_STEPS
    }
    rows_by_step: dict[int, list[dict[str, Any]]] = {step: [] for step in by_step}
    for batch in JoinedRollouts(folder).batches():
        for row in batch.select(["step", "reward", "trainer_advantages"]).to_pylist():
            if row["step"] in rows_by_step:
                rows_by_step[row["step"]].append(row)
    of_first_tokens = list[float]()
    for step, rows in rows_by_step.items():
        rewards_s = np.array([row["reward"] for row in rows])
        lengths_s = [len(row["trainer_advantages"]) for row in rows]
        first_advantages_s = np.array([row["trainer_advantages"][0] for row in rows])
        unexplained = (1 - by_step[step]) * np.repeat(rewards_s, lengths_s).var()
        of_first_tokens.append(1 - unexplained * first_advantages_s.var() / rewards_s.var())
    return mean(by_step.values()), mean(of_first_tokens)


def paired(directory: Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """The figures of runs with a critic, with the batch's mean, and in groups of eight."""
    differences, explained, ratios = list[float](), list[tuple[float, float]](), list[float]()
    for seed in seeds:
        start = cold_start(directory, seed)
        common = [*COMMON, *start_options(start, seed), f"--run.steps={steps}"]
        arms = ARMS | {"ppo": (*ARMS["ppo"], f"--critic.path={start}/sft")}
        folders = {name: train_once(directory, f"{name}-{seed}", [*common, *arm]) for name, arm in arms.items()}
        for name, folder in folders.items():
            report(name, seed, folder)
        differences.append(last_solve_rate(folders["ppo"]) - last_solve_rate(folders["mean"]))
        explained.append(explained_variances(folders["ppo"]))
        ppo_count, grpo_count = (rollouts_until_good(folders[name]) for name in ("ppo", "grpo"))
        ratios += [ppo_count / grpo_count] if ppo_count and grpo_count else []
        print(f"seed {seed}: {ppo_count} rollouts by PPO, {grpo_count} by GRPO until {GOOD:g}", flush=True)
    of_all_tokens, of_first_tokens = zip(*explained, strict=True)
    return {
        **{"ppo_minus_mean": mean(differences), "ppo_minus_mean_interval": interval(differences)},
        **{"explained_variance": mean(of_all_tokens), "lowest_explained_variance": min(of_all_tokens)},
        "first_token_explained_variance": mean(of_first_tokens),
        "ppo_over_grpo": median(ratios) if len(ratios) == len(seeds) else None,
    }


def by_step(directory: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The figures of runs with rewards by step, and by the outcome alone."""
    gains = list[float]()
    for seed in seeds:
        options = [*COMMON, f"--model.path={cold_start(directory, seed)}/sft", f"--run.seed={seed}"]
        rates = list[float]()
        for rollout in ("by_step", "by_outcome"):
            chosen = [*options, f"--hooks.rollout=examples.checked_steps.steps:{rollout}"]
            folder = train_once(directory, f"{rollout}-{seed}", chosen, CHECKED_STEPS)
            report(rollout, seed, folder)
            rates.append(last_solve_rate(folder))
        gains.append(rates[0] - rates[1])
    return {"step_reward_gain": mean(gains), "step_reward_gains": gains}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean, by Student's distribution."""
    half_width = STUDENT.get(len(differences), 1.96) * standard_error(differences)
    return mean(differences) - half_width, mean(differences) + half_width


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-critics"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=240, help="of each run of the part paired")
    parser.add_argument("--parts", nargs="*", default=["paired", "steps"], choices=["paired", "steps"])
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    if "paired" in arguments.parts:
        figures |= paired(directory, arguments.seeds, arguments.steps)
    if "steps" in arguments.parts:
        figures |= by_step(directory, arguments.seeds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
