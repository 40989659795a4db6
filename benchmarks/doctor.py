"""Whether what `headway doctor` predicts comes true.

    python benchmarks/doctor.py [--only straggling] [--rounds 3] [--steps 30]

Three live runs on two cores (the pipeline benchmark's model and forced long-tailed lengths), each bound by something
else: a generator with few slots, a budget too small for the longest responses, and a trainer. Each is trained once, for
three times as many steps as are measured later, so that the machine's swings even out; the doctor reads its ledger.
Then, ``--rounds`` times, the run is repeated as it was and with each of the recommendations applied, one after the
other. ``measured``: the median over the rounds of the rate with the change over the rate without it in the same round;
``predicted``: the doctor's. ``error`` = predicted / measured - 1; within 15 % counts as right. Rates are trained
samples/s of the steps after the warm-up, at equal speed of the machine (machine_speed.py). How each round's run without
a change compares with the one that the doctor read is printed as well, so that a machine that has changed meanwhile
shows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine_speed import Speedometer
from parts.pipeline_load import Placement, Shape, apart, experiment, prepare
from parts.pipeline_system import measure

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.control.tuning.diagnosis import Recommendation
from headway.report.doctor import diagnose_run, print_report

RIGHT = 0.15
LONGER = 3  # times as many steps of the run that the doctor reads


@dataclass(frozen=True)
class Case:
    """A run, and what it is bound by."""

    name: str
    placement: Placement
    budget: int
    uniform: float = 0.0  # share of tasks whose groups are filtered
    spread: float = 0.9  # of the logarithm of the lengths
    longest_tokens: int = 256


CASES = (
    Case("few slots", apart(2), 4),
    Case("straggling", apart(16), 1, uniform=0.5, spread=1.1, longest_tokens=400),
    Case("trainer-bound", apart(48), 4),
)


def shape_of(case: Case) -> Shape:
    return Shape(
        layers=4,
        width=128,
        heads=4,
        intermediate=384,
        prompt_tokens=24,
        median_tokens=24,
        spread=case.spread,
        longest_tokens=case.longest_tokens,
        uniform=case.uniform,
    )


def with_settings(settings: Experiment, changes: dict[str, str], directory: Path) -> Experiment:
    """``settings`` with the doctor's keys, in a folder of its own."""
    raw: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    for key, value in changes.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = tomllib.loads(f"value = {value}")["value"]
    raw["run"]["directory"] = str(directory)
    return validate_experiment(raw, "benchmark")


@dataclass(frozen=True)
class Trained:
    """A run, its warm-up left out."""

    per_s: float  # trained samples/s
    wait: float  # share of the time that the trainer waits
    machine: float  # mean speed of its cores, 1 as usual

    @property
    def at_usual_speed(self) -> float:
        """Samples/s that the machine would have shown had it been as fast as usual."""
        return self.per_s / self.machine

    def outline(self) -> str:
        return f"{self.per_s:.1f} samples/s, the trainer waits {self.wait:.0%}, machine {self.machine:.2f}"


def train(settings: Experiment, shape: Shape, steps: int, speed: Speedometer) -> Trained:
    steady = asyncio.run(measure(settings, shape, steps))
    ended_s = steady.usage.ended_s
    return Trained(
        per_s=steady.per_s,
        wait=steady.total("trainer_wait_s") / steady.total("step_s"),
        machine=speed.mean(ended_s - steady.seconds, ended_s),
    )


@dataclass(frozen=True)
class Verdict:
    """One recommendation against what came of it."""

    settings: dict[str, str]
    predicted: float  # rate with the change / rate without
    own_error: float  # what the doctor says of its own prediction
    measured: float
    spread: float  # half of (largest - smallest) of the rounds

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def outline(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in self.settings.items())
        right = "right" if abs(self.error) <= RIGHT else "WRONG"
        return (
            f"  {keys:<60} predicted x {self.predicted:.2f} (± {self.own_error:.0%})  measured x {self.measured:.2f} "
            f"(± {self.spread:.2f})  error {self.error:+.1%}  {right}"
        )


def judge(case: Case, folder: Path, speed: Speedometer, *, rounds: int, steps: int) -> list[Verdict]:
    """Train, ask the doctor, try what it says."""
    shape = shape_of(case)
    base = experiment(folder, "base", shape, placement=case.placement, budget=case.budget, steps=10_000)
    print(f"\n{case.name}: {train(base, shape, LONGER * steps, speed).outline()}", flush=True)
    report = diagnose_run(base.run.directory)
    print_report(report, None)
    changes = report.diagnosis.changes
    ratios: list[list[float]] = [[] for _ in changes]
    for number in range(rounds):
        again = train(with_settings(base, {}, folder / f"again-{number}"), shape, steps, speed)
        print(f"  round {number + 1}: {again.outline()}", flush=True)
        for index, change in enumerate(changes):
            changed = with_settings(base, change.settings, folder / f"change-{index}-{number}")
            ratios[index].append(train(changed, shape, steps, speed).at_usual_speed / again.at_usual_speed)
    return [_verdict(change, of) for change, of in zip(changes, ratios, strict=True)]


def _verdict(change: Recommendation, ratios: list[float]) -> Verdict:
    return Verdict(
        settings=change.settings,
        predicted=1 + change.gain,
        own_error=change.error,
        measured=statistics.median(ratios),
        spread=(max(ratios) - min(ratios)) / 2,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="measured, after the warm-up")
    options = parser.parse_args()
    found: dict[str, list[dict[str, object]]] = {}
    wrong = 0
    for case in CASES:
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory(prefix="headway-doctor-") as name, Speedometer() as speed:
            folder = Path(name)
            prepare(folder, shape_of(case))
            verdicts = judge(case, folder, speed, rounds=options.rounds, steps=options.steps)
        for verdict in verdicts:
            print(verdict.outline(), flush=True)
            wrong += abs(verdict.error) > RIGHT
        found[case.name] = [
            {
                "settings": v.settings,
                "predicted": round(v.predicted, 3),
                "measured": round(v.measured, 3),
                "error": round(v.error, 3),
            }
            for v in verdicts
        ]
    print(json.dumps({"all_right": not wrong, "within": RIGHT, "runs": found}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
