"""Do samples of a part of the vocabulary teach what those of the whole do? The quickstart with top-p, and without.

    python benchmarks/truncated_sampling.py --seeds 3 --steps 600

For each seed the quickstart's cold start, and from it two runs of RL: one plain, one with rollout.top_p = 0.95 whose
kept sets are replayed in the trainer. Both are evaluated on their likeliest answers. Prints a line for each run and, as
the last line, one JSON object, means over the seeds: of the solve rate on the held-out test after the run
(`held_out_plain`, `held_out_truncated`) and of the truncated runs' divergence between engine and trainer, as it was
(`k3_replayed`) and as it would be of log-probabilities over the whole vocabulary (`k3_unreplayed`). Limits: two cores;
nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger

FIGURES = ("mismatch_k3", "mismatch_k3_unreplayed", "kept_ids", "entropy")


def headway(*words: object, log: Path) -> None:
    command = [sys.executable, "-m", "headway.cli.main", *map(str, words)]
    with log.open("a") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT)


def measured(folder: Path, seed: int, name: str, keys: list[str]) -> dict[str, Any]:
    """One run of RL from the seed's cold start."""
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    splits = [f"--tasks.{split}.path={folder}/tasks/{split}.jsonl" for split in ("train", "validation", "test")]
    words = ["train", folder / "experiment.toml", "--quiet", f"--model.path={folder}/sft", f"--run.directory={run}"]
    headway(*words, f"--run.seed={seed}", *splits, *keys, log=folder.with_suffix(".log"))
    lines = read_ledger(run)
    steps = [line.metrics for line in lines if isinstance(line, StepRecord)]
    tests = {line.phase: line for line in lines if isinstance(line, EvaluationRecord) and line.split == "test"}
    found: dict[str, Any] = {"seed": seed, "run": name, "steps": len(steps)}
    found |= {phase: round(test.solve_rate, 4) for phase, test in tests.items()}
    for metric in FIGURES:
        values = [metrics[metric] for metrics in steps if metric in metrics]
        found[metric] = round(fmean(values), 6) if values else None
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-truncated-sampling"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--top-p", type=float, default=0.95)
    arguments, extra = parser.parse_known_args()
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.2f}", flush=True)
    truncated = [f"--rollout.top_p={arguments.top_p}", "--algorithm.allow_truncated_sampling=true"]
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        folder = arguments.directory.absolute() / f"seed-{seed}"
        if not (folder / "sft").exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            headway("quickstart", folder, "--seed", seed, "--cold-start-only", log=folder.with_suffix(".log"))
        keys = [f"--run.steps={arguments.steps}", "--evaluation.temperature=0", *extra]
        runs += [measured(folder, seed, "plain", keys), measured(folder, seed, "truncated", [*keys, *truncated])]

    def mean(name: str, figure: str) -> float:
        return round(fmean(run[figure] for run in runs if run["run"] == name), 6)

    figures = {
        "held_out_truncated": mean("truncated", "after"),
        "held_out_plain": mean("plain", "after"),
        "k3_replayed": mean("truncated", "mismatch_k3"),
        "k3_unreplayed": mean("truncated", "mismatch_k3_unreplayed"),
    }
    print(json.dumps(figures | {"top_p": arguments.top_p, "runs": runs}))


if __name__ == "__main__":
    main()
