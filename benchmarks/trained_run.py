"""What benchmarks that train several runs share: each run is trained once, and then read from its ledger."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.runtime.ledger import read_ledger

ARITHMETIC = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
CONFIG = str(ARITHMETIC / "experiment.toml")


def headway(*arguments: str, quiet: bool = False) -> None:
    """A `headway` command. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else sys.stderr)


def train_once(directory: Path, name: str, options: Sequence[str]) -> Path:
    """The folder of the run of CONFIG with ``options``: trained now, to its end, unless an earlier call has done so."""
    # Named by all that decides the outcome, so a finished one is never taken for another.
    digest = hashlib.blake2b(json.dumps(options).encode(), digest_size=4).hexdigest()
    folder = directory / f"{name}-{digest}"
    summary = folder / "summary.json"
    if not (summary.exists() and json.loads(summary.read_text())["finished"]):  # an interrupted one has a summary, too
        resume = ["--resume"] if (folder / "config.json").exists() else []
        headway("train", CONFIG, "--json", *resume, f"--run.directory={folder}", *options, quiet=True)
    return folder


def steps_and_end(folder: Path) -> tuple[list[StepRecord], EvaluationRecord, float]:
    """(steps, evaluation after them, seconds it took) of a finished run, from its ledger."""
    lines = list(read_ledger(folder))
    after = next(line for line in lines if isinstance(line, EvaluationRecord) and line.phase == "after")
    return [line for line in lines if isinstance(line, StepRecord)], after, lines[-1].time_s


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; nan for fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
