"""Does staleness cost learning? Trains from one cold start at budgets 0 and 8, on equal samples, for three seeds.

    python benchmarks/staleness.py --model runs/arithmetic-0/sft --tasks runs/arithmetic-0/tasks --steps 600

Budgets alternate seed by seed; every run trains on exactly steps x groups_per_step x group_size samples and is then
scored on the held-out test with held weights. Prints each run, and as the last line one JSON object:
`after` per budget and seed, and `difference`, the mean of budget 8 minus the mean of budget 0, with its standard
error over seeds. The limit is sampling noise: 512 tasks, 4 attempts each, the same for both budgets.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "arithmetic" / "experiment.toml"
BUDGETS = (0, 8)
ATTEMPTS = 4  # at each test task
# A budget counts steps, and what ages a sample is how far the policy moves meanwhile: small steps make eight of them a
# short way. Over eight of the quickstart's steps the tokens that matter move by more than PPO's usual bounds, 0.8 and
# 1.28: clipping there takes the gradient of 2 % of all tokens, a large part of those that decide. No bound at all
# (truncated importance weights alone) collapses. Without staleness every ratio is 1 and the bounds do nothing.
RECIPE = (
    "--queue.groups_per_step=8",
    "--trainer.learning_rate=2.5e-4",
    "--trainer.warmup_steps=40",
    "--algorithm.clip_low=0.5",
    "--algorithm.clip_high=1.0",
    "--algorithm.behaviour_weight_cap=3.0",
)


def run(arguments: argparse.Namespace, budget: int, seed: int, overrides: list[str]) -> tuple[float, int]:
    """One run at ``budget``: the solve rate on the test tasks after it, and the samples it trained on."""
    folder = arguments.directory / f"budget-{budget}-seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    tasks = [f"--tasks.{name}.path={arguments.tasks}/{name}.jsonl" for name in ("train", "validation", "test")]
    command = [
        *(sys.executable, "-m", "headway.cli.main", "train", str(CONFIG), "--json"),
        *(f"--model.path={arguments.model}", f"--run.directory={folder}", f"--run.seed={seed}"),
        *(f"--run.steps={arguments.steps}", "--run.time_limit_s=100000", f"--queue.budget={budget}"),
        # the last weights are scored, not the best: no validation during the run
        *("--evaluation.every_s=100000", "--evaluation.stop_at_solve_rate=1.0", "--evaluation.test=after"),
        f"--evaluation.samples_per_task={ATTEMPTS}",
        *RECIPE,
        *tasks,
        *overrides,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    summary = json.loads(done.stdout)
    assert summary["steps"] == arguments.steps, summary
    print(
        f"budget {budget}, seed {seed}: {summary['solve_rate_after']:.3f} after {summary['samples_trained']} samples, "
        f"{summary['trained_per_s']:.0f} samples/s, worst staleness {summary['max_trajectory_staleness']}",
        flush=True,
    )
    return float(summary["solve_rate_after"]), int(summary["samples_trained"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="cold-started model folder")
    parser.add_argument("--tasks", required=True, help="folder with train, validation and test.jsonl")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-staleness"))
    arguments, overrides = parser.parse_known_args()
    after: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    samples = 0
    for seed in arguments.seeds:
        for budget in BUDGETS:
            rate, samples = run(arguments, budget, seed, overrides)
            after[budget].append(rate)
    differences = [b - a for a, b in zip(after[BUDGETS[0]], after[BUDGETS[1]], strict=True)]
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / max(len(differences) - 1, 1))
    result = {
        "difference": round(mean, 4),
        "difference_standard_error": round(spread / math.sqrt(len(differences)), 4),
        "after": {str(budget): [round(rate, 4) for rate in rates] for budget, rates in after.items()},
        "samples": samples,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
