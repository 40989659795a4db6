"""Does a teacher save rollouts, and do hints that only the teacher reads help?

    python benchmarks/teachers.py                          # everything; again: goes on where it stopped
    python benchmarks/teachers.py --seeds 0 --parts paired self

`paired`: for each seed the quickstart's cold start is trained by RL until validation is solved well; the result is the
teacher of a second run from the same cold start, without rewards, and so in groups of one: 64 rollouts a step, the
quickstart's 256 in groups of eight by rewards. Validation is scored every five steps; compared are the rollouts that
were admitted until its solve rate was GOOD. `self`: the weights at the start of a step teach themselves beside rewards,
which must change nothing. `hints`: a cold start with a quarter of rows whose prompts end with the solution; these
weights then teach what they know with a task's hint to a policy that doesn't see it, and for comparison with hints that
were shuffled among the tasks; scored on the held-out test, without hints.

Prints a line a run, and as the last line one JSON object: `distilled_over_rl` (median over seeds of the ratio of
rollouts), `worst_distilled_over_rl`, `ratios`, `self_loss` (largest of all steps, nats a token), `self_slope` (largest
sum of |d loss / d log pi| over that of the policy stream), `self_gain` and `shuffled_gain` (change of the solve rate).
The limit is sampling noise: standard errors of solve rates are about 0.02. Timing plays no part.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from parts.trained_run import BESIDE_OTHERS, CONFIG, cold_start, headway, steps_and_end, train_once

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger

GOOD = 0.90  # solve rate of the validation
HINTED_SHARE = 0.25  # of the demonstrations
DEMONSTRATE = runpy.run_path(str(Path(CONFIG).with_name("make_tasks.py")))["demonstrate"]
PAIRED = (*BESIDE_OTHERS, "--evaluation.every_steps=5")
TAUGHT = ("--algorithm.teacher=taught", "--algorithm.policy_coefficient=0")
ALONE = ("--rollout.group_size=1", "--queue.groups_per_step=64")
HINTS = (
    *BESIDE_OTHERS,
    "--run.steps=150",
    "--evaluation.test=both",
    "--evaluation.stop_at_solve_rate=1.0",
    "--rollout.max_prompt_tokens=240",
    *TAUGHT,
    "--teachers.taught.context={prompt}{hint}",
)


class NoHints(random.Random):
    """Draws no slip: solutions that are right."""

    def random(self) -> float:
        return 1.0


def solution_of(prompt: str) -> str:
    """The right solution of a task."""
    return DEMONSTRATE(prompt, NoHints())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write ``rows`` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def task_options(start: Path, train: Path | None = None) -> list[str]:
    """The options for the tasks in ``start``; ``train``: others to learn from."""
    paths = {split: start / "tasks" / f"{split}.jsonl" for split in ("train", "validation", "test")}
    return [f"--tasks.{split}.path={path}" for split, path in (paths | ({"train": train} if train else {})).items()]


def rollouts_until_good(folder: Path) -> int | None:
    """The rollouts that a run had admitted when its validation reached GOOD."""
    lines = list(read_ledger(folder))
    good_steps = [
        line.step
        for line in lines
        if isinstance(line, EvaluationRecord) and line.split == "validation" and line.solve_rate >= GOOD
    ]
    steps = [line for line in lines if isinstance(line, StepRecord)]
    return sum(step.admitted_rollouts for step in steps if step.step < min(good_steps)) if good_steps else None


def paired(directory: Path, seeds: list[int]) -> Iterator[tuple[int, float]]:
    """Train each seed by rewards, then by the result; yields the ratios of rollouts."""
    for seed in seeds:
        start = cold_start(directory, seed)
        options = [*PAIRED, *task_options(start), f"--model.path={start}/sft", f"--run.seed={seed}"]
        by_rewards = train_once(directory, f"rewards-{seed}", options)
        teacher = [f"--teachers.taught.path={by_rewards}/best", f"--evaluation.stop_at_solve_rate={GOOD}"]
        taught = train_once(directory, f"taught-{seed}", [*options, *TAUGHT, *ALONE, *teacher])
        taught_count, reward_count = rollouts_until_good(taught), rollouts_until_good(by_rewards)
        print(f"seed {seed}: {taught_count} rollouts taught, {reward_count} by rewards until {GOOD:g}", flush=True)
        if not taught_count or not reward_count:
            raise SystemExit(f"seed {seed}: a run never reached {GOOD:g}, or was there before its first step")
        yield seed, taught_count / reward_count


def taught_by_itself(directory: Path) -> dict[str, float]:
    """The figures of a run whose teacher is its own policy at the start of each step."""
    start = cold_start(directory, 0)
    options = [*BESIDE_OTHERS, *task_options(start), f"--model.path={start}/sft", "--run.steps=10"]
    teacher = ["--algorithm.teacher=taught", "--teachers.taught.path=self"]
    lines = read_ledger(train_once(directory, "self", [*options, *teacher]))
    metrics = [line.metrics for line in lines if isinstance(line, StepRecord)]
    return {
        "self_loss": max(abs(step["stream_teacher_loss"]) for step in metrics),
        "self_slope": max(step["stream_teacher_slope"] / step["stream_policy_slope"] for step in metrics),
    }


def hinted_start(directory: Path) -> Path:
    """A cold start whose model has learned to use hints, with the tasks' hints in the files ``hinted`` and
    ``shuffled``."""
    plain = cold_start(directory, 0)
    folder = directory / "hinted-start"
    folder.mkdir(exist_ok=True)
    if not (folder / "sft" / "config.json").exists():
        draw, rows = random.Random(0), read_rows(plain / "tasks" / "sft.jsonl")
        for row in rows:
            if draw.random() < HINTED_SHARE:
                solution = solution_of(row["prompt"])
                row |= {"prompt": f"{row['prompt']}{solution};", "solution": solution}
        write_rows(folder / "sft.jsonl", rows)
        options = [f"--sft.data={folder}/sft.jsonl", f"--sft.output={folder}/sft", "--sft.steps=1800"]
        limits = ["--rollout.max_prompt_tokens=240", "--sft.stop_at_solve_rate=1.0"]
        headway("sft", CONFIG, f"--model.path={plain}/init", *task_options(plain), *options, *limits)
        tasks = read_rows(plain / "tasks" / "train.jsonl")
        hints = [f"{solution_of(task['prompt'])};" for task in tasks]
        shuffled = draw.sample(hints, len(hints))
        for name, given in (("hinted", hints), ("shuffled", shuffled)):
            write_rows(
                folder / f"{name}.jsonl", [task | {"hint": hint} for task, hint in zip(tasks, given, strict=True)]
            )
    return folder


def gain(directory: Path, name: str) -> float:
    """The change of the test's solve rate by the hints in the file ``name``."""
    start, plain = hinted_start(directory), cold_start(directory, 0)
    options = [*HINTS, *task_options(plain, start / f"{name}.jsonl"), f"--model.path={start}/sft"]
    folder = train_once(directory, name, [*options, f"--teachers.taught.path={start}/sft"])
    _, after, _ = steps_and_end(folder)
    lines = read_ledger(folder)
    first = next(line for line in lines if isinstance(line, EvaluationRecord) and line.phase == "before")
    print(f"{name} hints: {first.solve_rate:.3f} -> {after.solve_rate:.3f} ± {after.standard_error:.3f}", flush=True)
    return after.solve_rate - first.solve_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-teachers"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parts", nargs="*", default=["paired", "self", "hints"], choices=["paired", "self", "hints"])
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    if "self" in arguments.parts:
        figures |= taught_by_itself(directory)
    if "hints" in arguments.parts:
        figures |= {"self_gain": gain(directory, "hinted"), "shuffled_gain": gain(directory, "shuffled")}
    if "paired" in arguments.parts:
        ratios = dict(paired(directory, arguments.seeds))
        figures |= {"distilled_over_rl": median(ratios.values()), "worst_distilled_over_rl": max(ratios.values())}
        figures["ratios"] = ratios
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
