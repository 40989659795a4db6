"""What early pruning saves, and what it costs: one cold start trained with and without it, on equal training samples.

    python benchmarks/pruning.py                     # five seeds; again: goes on where it stopped
    python benchmarks/pruning.py --seeds 1 --steps 20

Task and cold start are the quickstart's, and then the model learns for some steps from demonstrations of which a share
(`CIRCLES`) goes round in circles instead of coming to an end, as models do that are hardly trained. Those responses
are long and useless. Each seed is trained twice, with `[pruning]` off and on (`PRUNING`), one core for the generator
and one for the trainer.

Prints a line per run, a table of what was pruned, and as the last line one JSON object:

- `tokens_saved`: 1 - (response tokens per trained sample with pruning / without), from the ledgers, the mean over
  seeds, with its standard error and the least; `tokens_saved_estimated`: the same share as the pruned run
  alone knows it, from what its audits went on for.
- `reward_difference`: final reward on the test tasks (last weights, sampled) with pruning less without, the mean over
  seeds, with its standard error over seeds. The limit is sampling noise: each run's line has its standard error.

Timing plays no part in either, so other work on the machine changes nothing but the time it takes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from parts.trained_run import ARITHMETIC, CONFIG, headway, standard_error, steps_and_end, train_once

from headway.records.ledger import PrunerFigures

SEEDS = (1, 2, 3, 4, 5)
CIRCLES = 0.5  # share of the demonstrations that go round in circles
CIRCLE_TOKENS = 200  # ... for so many tokens
LONGEST = 512  # tokens of a response
SPOILT = (
    "--sft.steps=60",
    "--sft.learning_rate=5e-4",
    "--sft.warmup_steps=5",
    "--sft.stop_at_solve_rate=1.0",
    "--sft.evaluate_every_steps=0",
)
RECIPE = (
    f"--rollout.max_response_tokens={LONGEST}",
    "--run.time_limit_s=100000",
    "--queue.groups_per_step=8",
    "--trainer.warmup_steps=5",
    "--trainer.learning_rate=2.5e-4",
    "--checkpoint.every_steps=1000",
    "--evaluation.samples_per_task=2",
    # the last weights are scored, not the best: no validation during the run
    "--evaluation.every_s=100000",
    "--evaluation.stop_at_solve_rate=1.0",
    "--evaluation.before=false",
    # a machine with other work on it takes its time, and changes nothing else
    "--run.worker_start_timeout_s=1200",
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    "--ledger.trackers=[]",
    "--ledger.trace=false",
)
PRUNING = (
    "--pruning.every_tokens=8",
    "--pruning.repetition.longest_period=32",
    "--pruning.repetition.repeats=3",
    "--pruning.repetition.loop_tokens=24",
    "--pruning.repetition.window_tokens=64",
    "--pruning.relative_length.times_median=4",
    "--pruning.relative_length.least_tokens=64",
)


class Outcome(NamedTuple):
    """What one run came to."""

    reward: float  # of the last weights on the test tasks
    standard_error: float  # of it, within this run
    tokens_per_sample: float  # response tokens of all rollouts that ended, trained or not / samples trained
    samples: int  # trained
    solve_rates: list[float]  # of the training tasks as sampled, over tenths of the run
    pruning: dict[str, PrunerFigures]
    tokens: int  # response tokens of all rollouts that ended
    wall_s: float


def cold_start(folder: Path, seed: int = 0) -> None:
    """The quickstart's tasks and model, and what becomes of it by demonstrations that go round in circles."""
    tasks, warm, spoilt = folder / "tasks", folder / "sft", folder / "circles"
    if not warm.exists():
        command = [sys.executable, str(ARITHMETIC / "quickstart.py"), "--cold-start-only"]
        subprocess.run([*command, "--directory", str(folder), "--seed", str(seed)], check=True, stdout=sys.stderr)
    if not spoilt.exists():
        rng = random.Random(f"circles {seed}")
        rows = [json.loads(line) for line in (tasks / "sft.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"solution": in_circles(row["solution"], rng)}) for row in rows]
        (folder / "circles.jsonl").write_text("\n".join(lines) + "\n")
        paths = [f"--tasks.{split}.path={tasks}/{split}.jsonl" for split in ("train", "validation", "test")]
        data = [f"--model.path={warm}", f"--sft.data={folder}/circles.jsonl", f"--sft.output={spoilt}"]
        headway("sft", CONFIG, *paths, *data, *SPOILT, f"--run.seed={seed}")


def in_circles(solution: str, rng: random.Random) -> str:
    """``solution``; or, with probability CIRCLES, some of its steps and then one sign again and again."""
    steps = solution.split("=")
    if len(steps) < 2 or rng.random() >= CIRCLES:
        return solution
    stuck = rng.randrange(1, len(steps))  # before the last one: that would be an answer
    return "=".join(steps[:stuck]) + "=" * CIRCLE_TOKENS


def train(directory: Path, seed: int, steps: int, pruned: bool) -> Outcome:
    """Train once, or read what an earlier call trained, and print a line."""
    start = directory / "start"
    options = [
        *(f"--model.path={start}/circles", f"--run.seed={seed}", f"--run.steps={steps}"),
        *(f"--tasks.{split}.path={start}/tasks/{split}.jsonl" for split in ("train", "validation", "test")),
        *(*RECIPE, *(PRUNING if pruned else ())),
    ]
    outcome = outcome_of(train_once(directory, f"{'pruned' if pruned else 'plain'}-{seed}", options))
    curve = " ".join(f"{rate:.2f}" for rate in outcome.solve_rates)
    print(
        f"seed {seed}, {'pruned' if pruned else 'plain '}: reward {outcome.reward:.3f} ± {outcome.standard_error:.3f}, "
        f"{outcome.tokens_per_sample:.1f} response tokens per trained sample, {outcome.samples} samples, "
        f"{outcome.wall_s:.0f} s   {curve}",
        flush=True,
    )
    return outcome


def outcome_of(folder: Path) -> Outcome:
    """The figures of a finished run, from its ledger."""
    steps, after, wall_s = steps_and_end(folder)
    tenths = [steps[len(steps) * part // 10 : len(steps) * (part + 1) // 10] for part in range(10)]
    samples = sum(step.samples for step in steps)
    tokens = sum(sum(step.ended_tokens.values()) for step in steps)
    pruners = sorted({pruner for step in steps for pruner in step.pruning})
    return Outcome(
        reward=after.reward_mean,
        standard_error=after.standard_error,
        tokens_per_sample=tokens / samples,
        samples=samples,
        solve_rates=[mean(step.solve_rate for step in part) for part in tenths if part],
        pruning={
            pruner: PrunerFigures.total(step.pruning[pruner] for step in steps if pruner in step.pruning)
            for pruner in pruners
        },
        tokens=tokens,
        wall_s=wall_s,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what each pruner did, over all seeds."""
    lines = [
        "| pruner | pruned rollouts | tokens saved each, estimated | audits | wrong | reward bias |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for pruner in sorted({pruner for outcome in outcomes for pruner in outcome.pruning}):
        total = PrunerFigures.total(o.pruning[pruner] for o in outcomes if pruner in o.pruning)
        each = total.saving_tokens / total.rollouts if total.rollouts else 0.0
        lines.append(
            f"| {pruner} | {total.rollouts} | {each:.0f} | {total.audits} | {total.wrong} ({total.wrong_rate:.1%}) | "
            f"{total.reward_bias:+.4f} |"
        )
    return "\n".join(lines)


def result_of(plain: Sequence[Outcome], pruned: Sequence[Outcome]) -> dict[str, float | int | list[float]]:
    """The figures of the last line."""
    pairs = list(zip(plain, pruned, strict=True))
    saved = [1 - after.tokens_per_sample / before.tokens_per_sample for before, after in pairs]
    difference = [after.reward - before.reward for before, after in pairs]
    saved_tokens = [sum(figures.saving_tokens for figures in one.pruning.values()) for one in pruned]
    estimated = [more / (more + one.tokens) for more, one in zip(saved_tokens, pruned, strict=True)]
    total = PrunerFigures.total(figures for one in pruned for figures in one.pruning.values())
    return {
        "tokens_saved": round(mean(saved), 4),
        "tokens_saved_standard_error": round(standard_error(saved), 4),
        "tokens_saved_least": round(min(saved), 4),
        "tokens_saved_estimated": round(mean(estimated), 4),
        "reward_difference": round(mean(difference), 4),
        "reward_difference_standard_error": round(standard_error(difference), 4),
        "reward_difference_by_seed": [round(value, 4) for value in difference],
        "reward_plain": round(mean(one.reward for one in plain), 4),
        "reward_pruned": round(mean(one.reward for one in pruned), 4),
        "wrong_prune_rate": round(total.wrong_rate, 4),
        "audits": total.audits,
        "reward_bias": round(total.reward_bias, 4),
        "seeds": len(pairs),
        "samples": plain[0].samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=100, help="of 8 groups of 8")
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-pruning"))
    arguments = parser.parse_args()
    cold_start(arguments.directory / "start")
    plain: list[Outcome] = []
    pruned: list[Outcome] = []
    for seed in arguments.seeds:
        plain.append(train(arguments.directory, seed, arguments.steps, pruned=False))
        pruned.append(train(arguments.directory, seed, arguments.steps, pruned=True))
    print("\n" + table(pruned) + "\n")
    print(json.dumps(result_of(plain, pruned)))


if __name__ == "__main__":
    main()
