"""Is the quickstart reliable? Runs it for several seeds, and once with a learning rate of 0 as the control.

    python benchmarks/quickstart.py --seeds 0 1 2 3 4 --control 0

Prints each run's validation curve (seconds: solve rate) and, as the last line, one JSON object: per seed the
solve rate on the held-out test before and after, its standard error and the wall-clock of the whole quickstart;
`reached` counts the seeds with before in 0.2..0.6 and after >= 0.9; `control_change` is the control's change.
Limits: two cores, one for the generator and one for the trainer; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from headway.records.ledger import EvaluationRecord
from headway.telemetry.ledger import read_ledger


class Figures(NamedTuple):
    """What one quickstart came to; solve rates are those of the held-out test."""

    seed: int
    before: float
    after: float
    standard_error: float  # of after
    test_tasks: int
    wall_s: float  # of the whole quickstart
    curve: list[tuple[int, float]]  # (seconds, solve rate) on the validation tasks


def run_seed(folder: Path, seed: int, overrides: list[str]) -> Figures:
    """Run one quickstart in ``folder``."""
    started = time.monotonic()
    command = [sys.executable, "-m", "headway.cli.main", "quickstart", str(folder), "--seed", str(seed), *overrides]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    wall_s = time.monotonic() - started
    records = [line for line in read_ledger(folder / "rl") if isinstance(line, EvaluationRecord)]
    curve = [(round(r.time_s), round(r.solve_rate, 3)) for r in records if r.split == "validation"]
    before, after = (
        next(r for r in records if r.split == "test" and r.phase == phase) for phase in ("before", "after")
    )
    print(f"{folder.name}: {before.solve_rate:.3f} -> {after.solve_rate:.3f} in {wall_s:.0f} s", flush=True)
    print("  validation  " + "  ".join(f"{s}s {rate}" for s, rate in curve), flush=True)
    return Figures(
        seed=seed,
        before=round(before.solve_rate, 4),
        after=round(after.solve_rate, 4),
        standard_error=round(after.standard_error, 4),
        test_tasks=after.tasks,
        wall_s=round(wall_s, 1),
        curve=curve,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-quickstart"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--control", type=int, help="seed of the control run with learning rate 0")
    arguments, overrides = parser.parse_known_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.2f}", flush=True)
    runs = [run_seed(arguments.directory / f"seed-{seed}", seed, overrides) for seed in arguments.seeds]
    reached = sum(0.2 <= run.before <= 0.6 and run.after >= 0.9 for run in runs)
    result: dict[str, object] = {"reached": reached, "of": len(runs), "runs": [run._asdict() for run in runs]}
    if arguments.control is not None:
        off = [*overrides, "--trainer.learning_rate=0.0"]
        control = run_seed(arguments.directory / f"control-{arguments.control}", arguments.control, off)
        result |= {"control": control._asdict(), "control_change": round(control.after - control.before, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
