"""Which objective bears staleness? Trains from one cold start at budget 8 with each, on equal samples.

    python benchmarks/objectives.py --model runs/arithmetic-0/sft --tasks runs/arithmetic-0/tasks

Objectives: naive PPO, decoupled PPO (proximal log-probabilities recomputed), truncated importance sampling, GSPO,
CISPO, and naive PPO at budget 0 as the yardstick. Prints each one's curve, the solve rate of its training tasks as
sampled over tenths of the run, and as the last line one JSON object: `after` per objective and seed (held-out test,
held weights), and `decoupled_minus_naive`, the difference of their means. The limit is sampling noise: 512 tasks, 4
attempts each, the same for all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

from headway.records.ledger import StepRecord
from headway.runtime.ledger import read_ledger

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "experiment.toml"
RECIPE = ("--queue.groups_per_step=8", "--trainer.learning_rate=2.5e-4", "--trainer.warmup_steps=40")
WIDE = ("--algorithm.clip_low=0.5", "--algorithm.clip_high=1.0", "--algorithm.behaviour_weight_cap=3.0")
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "synchronous": ("--queue.budget=0", "--algorithm.loss=ppo_clip"),
    "naive PPO": ("--algorithm.loss=ppo_clip",),
    "naive PPO, wide bounds": ("--algorithm.loss=ppo_clip", *WIDE),
    "decoupled PPO": (
        "--algorithm.loss=decoupled_ppo",
        "--algorithm.proximal=recompute",
        "--trainer.optimizer_steps_per_batch=2",
    ),
    "TIS": ("--algorithm.loss=reinforce",),
    # the experiment names a loss, which would win over the preset's
    "GSPO": ("--algorithm.preset=gspo", "--algorithm.loss=gspo"),
    "CISPO": ("--algorithm.loss=cispo",),
}
TENTHS = 10


def run(arguments: argparse.Namespace, name: str, seed: int, overrides: list[str]) -> float:
    """One run; prints its curve and returns the solve rate on the test tasks after it."""
    folder = arguments.directory / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "headway.cli.main", "train", str(CONFIG), "--json"),
        *(f"--model.path={arguments.model}", f"--run.directory={folder}", f"--run.seed={seed}"),
        *(f"--run.steps={arguments.steps}", "--run.time_limit_s=100000", "--queue.budget=8"),
        # the last weights are scored, not the best: no validation during the run
        *("--evaluation.every_s=100000", "--evaluation.stop_at_solve_rate=1.0", "--evaluation.before=false"),
        "--evaluation.samples_per_task=4",
        *(f"--tasks.{split}.path={arguments.tasks}/{split}.jsonl" for split in ("train", "validation", "test")),
        *RECIPE,
        *OBJECTIVES[name],
        *overrides,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = float(json.loads(done.stdout)["solve_rate_after"])
    steps = [line for line in read_ledger(folder) if isinstance(line, StepRecord) and line.samples]
    part = max(1, len(steps) // TENTHS)
    curve = [mean(step.solve_rate for step in steps[at : at + part]) for at in range(0, part * TENTHS, part)]
    print(f"{name:24} seed {seed}: {after:.3f}   " + " ".join(f"{rate:.2f}" for rate in curve), flush=True)
    return after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="cold-started model folder")
    parser.add_argument("--tasks", required=True, help="folder with train, validation and test.jsonl")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-objectives"))
    arguments, overrides = parser.parse_known_args()
    after: dict[str, list[float]] = {name: [] for name in arguments.only}
    for seed in arguments.seeds:
        for name in arguments.only:
            after[name].append(round(run(arguments, name, seed, overrides), 4))
    result: dict[str, object] = {"after": after}
    if {"decoupled PPO", "naive PPO"} <= after.keys():
        result["decoupled_minus_naive"] = round(mean(after["decoupled PPO"]) - mean(after["naive PPO"]), 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
