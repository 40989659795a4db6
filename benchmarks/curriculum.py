"""How many rollouts does a curriculum save? One cold start, the same tasks, drawn uniformly and drawn by `[curriculum]`.

    python benchmarks/curriculum.py                 # five seeds; again: goes on where it stopped
    python benchmarks/curriculum.py --seeds 1

Of 1000 training tasks 55 % are solved every time (copy a number), 20 % never (their reference answers are wrong) and
25 % sometimes: the sums of examples/arithmetic, which the cold start slips in. Groups whose rewards are all equal are
filtered in both, so both train on groups that teach something, and the price of finding them is what differs.

Held-out sums are evaluated every few steps. A run's figure is the rollouts *generated* for training until they are
solved at the target rate: those finished by then, of every ending, and those still open count as well (half of them
could be a step's worth). The crossing is read off the line between two evaluations. `rollouts_ratio` is adaptive over
uniform, seed by seed, mean and standard error; the last line is one JSON object. Times play no part.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.runtime.ledger import read_ledger

ARITHMETIC = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
SHARES = {"trivial": 550, "impossible": 200, "productive": 250}  # training tasks
HELD_OUT = 512  # productive ones
TEST = 64  # the experiment wants them; they are not used
SFT_SUMS, SFT_COPIES = 12000, 5000  # demonstrations
TARGET = 0.75  # held-out solve rate
SEEDS = (0, 1, 2, 3, 4)
GROUP_SIZE = 8
RECIPE = (
    "--run.steps=400",
    "--run.time_limit_s=100000",
    f"--rollout.group_size={GROUP_SIZE}",
    "--queue.groups_per_step=16",
    "--queue.budget=2",
    "--generator.slots=64",
    "--trainer.schedule=constant",
    "--trainer.learning_rate=3e-4",
    "--checkpoint.every_steps=1000",
    # a machine with other work on it takes its time, and changes nothing else
    "--run.worker_start_timeout_s=1200",
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    "--evaluation.every_steps=4",
    "--evaluation.every_s=100000",
    f"--evaluation.stop_at_solve_rate={TARGET + 0.02}",
    "--evaluation.before=false",
    "--evaluation.after=false",
    "--ledger.trackers=[]",
    "--ledger.trace=false",
)
POLICIES: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "adaptive": ("--curriculum.mode=adaptive",),
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


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "headway.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)


def cold_start(folder: Path) -> None:
    """Tasks, and a model that imitates slipping demonstrations of them. One for all runs: what differs is the rest."""
    tasks, initial, warm = folder / "tasks", folder / "init", folder / "sft"
    if not (tasks / "validation.jsonl").exists():
        write_tasks(tasks, seed=0)
    if not initial.exists():
        command("init-model", str(initial), "--texts", f"{tasks}/sft.jsonl", "--character-level", "--seed", "0")
    if not warm.exists():
        command(
            *("sft", str(ARITHMETIC / "experiment.toml"), f"--model.path={initial}", f"--sft.data={tasks}/sft.jsonl"),
            *(f"--sft.output={warm}", f"--tasks.train.path={tasks}/train.jsonl", "--run.seed=0"),
            *(f"--tasks.validation.path={tasks}/validation.jsonl", f"--tasks.test.path={tasks}/test.jsonl"),
        )
