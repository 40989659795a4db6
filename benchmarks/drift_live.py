"""How fast the controller finds its way back in a live run whose responses become three times as long.

    python benchmarks/drift_live.py [--rounds 3]

The pipeline benchmark's model and forced lengths on two cores, one for each side. After ``--settle`` steps every new
response is three times as long as before, for good; the trainer was the slower side until then, and the controller has
seen to it that less is open. Fixed knobs (open groups / rollouts at once) run with the same change; each round runs
all of them and the controller one after the other, in turns. The optimum is the fixed setting with the best median.

``recovered``: from ``steps_to_recover`` steps after the change on, the useful samples/s (advantage not 0) are at least
95 % of the optimum's over the same steps of the same round (median over the rounds), both of the next eight steps and
of the next ``--count``; the limit is max(10, 2 (eta + 1)) steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts.pipeline_load import GROUPS_PER_STEP, Shape, apart, experiment, prepare
from parts.pipeline_system import measure
from parts.simulated_runs import Result, held, merged

from headway.config.load import validate_experiment
from headway.records.control import Knobs
from headway.records.ledger import EventRecord, LedgerLine, StepRecord

BUDGET = 4
LIMIT_STEPS = max(10, 2 * (BUDGET + 1))
ENOUGH = 0.95
SOON = 8  # steps that a rate right after the change is measured over
LONGEST = 600
CONTROLLER = "controller"
FIXED = {  # open groups (None: all that admission allows), rollouts at once
    "all/64": Knobs(open_groups=None, concurrent_rollouts=64, steps_per_publish=1),
    "20/64": Knobs(open_groups=20, concurrent_rollouts=64, steps_per_publish=1),
    "all/32": Knobs(open_groups=None, concurrent_rollouts=32, steps_per_publish=1),
}


@dataclass
class Drift:
    """Makes responses three times as long once the run has made so many steps."""

    at_step: int
    steps: list[StepRecord]
    actions: list[EventRecord]

    def __call__(self, line: LedgerLine) -> None:
        if isinstance(line, StepRecord):
            self.steps.append(line)
        elif isinstance(line, EventRecord) and line.event == "control":
            self.actions.append(line)

    def factor(self) -> int:
        return 3 if len(self.steps) >= self.at_step else 1


@dataclass(frozen=True)
class Drifting(Shape):
    """A shape whose lengths drift."""

    drift: Drift | None = None

    def length(self, seed: int) -> int:
        assert self.drift is not None
        return min(self.longest_tokens, super().length(seed) * self.drift.factor())


def run(folder: Path, name: str, settle: int, count: int, seed: int) -> Result:
    """One run with the knobs (or the controller) of that name."""
    drift = Drift(settle, [], [])
    shape = Drifting(**SIZES, drift=drift)
    steps = settle + LIMIT_STEPS + count
    base = experiment(
        folder, f"{name.replace('/', '-')}-{seed}", shape, placement=apart(64), budget=BUDGET, steps=10_000
    )
    raw = base.model_dump(mode="json", exclude_unset=True)
    how = {"control": {"mode": "act"}} if name == CONTROLLER else held(FIXED[name], GROUPS_PER_STEP)
    settings = validate_experiment(merged(raw, how, {"run": {"seed": seed}}), "benchmark")
    asyncio.run(measure(settings, shape, steps, warmup_steps=1, on_line=drift))
    return Result(drift.steps, drift.actions)


SIZES: dict[str, Any] = {
    "layers": 4,
    "width": 128,
    "heads": 4,
    "intermediate": 384,
    "prompt_tokens": 24,
    "median_tokens": 16,
    "spread": 0.9,
    "longest_tokens": LONGEST,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=int, default=40, help="steps before the change")
    parser.add_argument("--count", type=int, default=25, help="steps that a rate is measured over")
    options = parser.parse_args()
    names = [CONTROLLER, *FIXED]
    found: dict[str, list[Result]] = {name: [] for name in names}
    late = options.settle + LIMIT_STEPS
    with tempfile.TemporaryDirectory(prefix="headway-drift-") as at:
        folder = Path(at)
        prepare(folder, Shape(**SIZES))
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                one = run(folder, name, options.settle, options.count, number)
                found[name].append(one)
                before = one.rate(options.settle - 15, 15)
                print(
                    f"round {number + 1}  {name:<12}{before:8.1f} samples/s before, "
                    f"{one.rate(late, options.count):7.1f} from {LIMIT_STEPS} steps after",
                    flush=True,
                )
                for action in one.actions:
                    print(f"      step {action.step}: {action.detail}")

    def shares(rival: str, after: int, steps: int) -> list[float]:
        first = options.settle + after
        return [
            ours.rate(first, steps) / theirs.rate(first, steps)
            for ours, theirs in zip(found[CONTROLLER], found[rival], strict=True)
        ]

    best = max(FIXED, key=lambda name: statistics.median(one.rate(late, options.count) for one in found[name]))

    def enough(after: int) -> bool:
        return all(statistics.median(shares(best, after, steps)) >= ENOUGH for steps in (SOON, options.count))

    reached = next((after for after in range(LIMIT_STEPS + 1) if enough(after)), None)
    late_shares = shares(best, LIMIT_STEPS, options.count)
    result = {
        "optimum": best,
        "recovered": reached is not None,
        "steps_to_recover": reached,
        "share": round(statistics.median(late_shares), 3),
        "shares": [round(share, 3) for share in late_shares],
        "limit_steps": LIMIT_STEPS,
    }
    print(json.dumps(result))
    return 0 if result["recovered"] else 1


if __name__ == "__main__":
    sys.exit(main())
