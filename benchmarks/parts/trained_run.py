"""What benchmarks that train several runs share: how one is trained, once or alone on the machine, and read."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger
from parts.pipeline_machine import snapshot, wait_until_quiet

ARITHMETIC = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
QUIET_CORES = 0.05  # others' before a run that is timed
CONFIG = str(ARITHMETIC / "experiment.toml")
NO_TIME_LIMIT = "--run.time_limit_s=100000"
# A machine with other work on it takes its time, and changes nothing else.
BESIDE_OTHERS = (
    NO_TIME_LIMIT,
    "--rollout.timeout_s=3600",
    "--verifier.timeout_s=300",
    "--evaluation.every_s=100000",
    "--evaluation.test=never",
)
# A model that doesn't learn, and nothing beside its steps: the load stays what it is.
SAME_LOAD = (
    "trainer.learning_rate=0",
    "trainer.warmup_steps=0",
    "trainer.schedule=constant",
    "checkpoint.every_steps=100000",
    "evaluation.every_s=100000",
    "evaluation.stop_at_solve_rate=1.0",
    "evaluation.test=never",
    "ledger.trackers=[]",
    "ledger.trace=false",
)


def headway(*arguments: str, quiet: bool = False) -> None:
    """A `headway` command. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else sys.stderr)


def cold_start(directory: Path, seed: int) -> Path:
    """The folder with the quickstart's tasks and supervised model of ``seed``."""
    start = directory / f"start-{seed}"
    if not (start / "sft" / "config.json").exists():
        # Ended by its solve rate: a time limit would make a worse model on a busy machine.
        headway("quickstart", str(start), "--seed", str(seed), "--cold-start-only", NO_TIME_LIMIT)
    return start


def train_once(directory: Path, name: str, options: Sequence[str], config: str = CONFIG) -> Path:
    """The folder of the run of ``config`` with ``options``: trained now, to its end, unless an earlier call has done
    so."""
    # Named by all that decides the outcome, so a finished one is never taken for another.
    digest = hashlib.blake2b(json.dumps(options).encode(), digest_size=4).hexdigest()
    folder = directory / f"{name}-{digest}"
    summary = folder / "summary.json"
    if not (summary.exists() and json.loads(summary.read_text())["finished"]):  # an interrupted one has a summary, too
        resume = ["--resume"] if (folder / "config.json").exists() else []
        headway("train", config, "--json", *resume, f"--run.directory={folder}", *options, quiet=True)
    return folder


def train_alone(folder: Path, start: Path, name: str, options: Sequence[str]) -> float:
    """Train CONFIG anew from the cold start in ``start``, once the machine is quiet; the folder of the run before is
    removed. Returns the cores that others kept busy meanwhile. Raises SystemExit when it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    wait_until_quiet(QUIET_CORES, 20.0)
    tasks = [f"--tasks.{split}.path={start}/tasks/{split}.jsonl" for split in ("train", "validation", "test")]
    own = [f"--run.directory={folder}", f"--model.path={start}/sft"]
    command = [sys.executable, "-m", "headway.cli.main", "train", CONFIG, "--json", *own, *tasks, *options]
    before, ours_before_s = snapshot(), _children_s()
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}\n{process.stdout[-2000:]}")
    after = snapshot()
    busy_s = after.busy_s - before.busy_s + after.stolen_s - before.stolen_s
    return max(0.0, busy_s - (_children_s() - ours_before_s)) / (after.time_s - before.time_s)


def _children_s() -> float:
    """CPU seconds of this process and of all it started that have ended, with those that they had waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def steps_and_end(folder: Path) -> tuple[list[StepRecord], EvaluationRecord, float]:
    """(steps, evaluation after them, seconds it took) of a finished run, from its ledger."""
    lines = list(read_ledger(folder))
    after = next(line for line in lines if isinstance(line, EvaluationRecord) and line.phase == "after")
    return [line for line in lines if isinstance(line, StepRecord)], after, lines[-1].time_s


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; nan for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
