"""How fast the controller finds its way back when the run drifts.

    python benchmarks/drift.py [--quick] [--seeds 3]

The planner's simulation: the real loops, buffer and controller on the virtual clock; generator, trainer, verifier and
tools are described. At a training step something changes for good: responses three times as long, tools 2.5 times as
slow, 55 % of the tasks solved by every attempt (their groups are filtered), a trainer 2.5 times as slow or four times
as fast, a verifier 15 times as slow (and, one line, 25 times, for six steps; and sandboxes that start 10 times as
slowly for six steps). What fixed knobs reach after it is searched on a grid (open groups x concurrent rollouts; at the
best point steps per publish), each point a run of its own with the same change.

``recovered``: from ``steps_to_recover`` steps after the change on (of a spike: after its end), the useful samples/s
(advantage not 0) are at least 95 % of the best grid point's over the same steps, both of the next ten steps and of all
the next sixty; the limit is max(10, 2 (eta + 1)) steps. Means over the seeds; all runs of a seed draw the same random
lengths. ``share``: of the best grid point's, from the limit on. ``left alone``: what the knobs that the controller had
set before the change reach without it; where that is 95 % as well, nothing had to be done. ``staleness``: mean of the
trained trajectories after the limit, beside the best grid point's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from parts.simulated_runs import Result, held, run

from headway.records.control import Knobs

BUDGET, GROUPS_PER_STEP, GROUP, SLOTS = 4, 8, 4, 64
LIMIT_STEPS = max(10, 2 * (BUDGET + 1))
ENOUGH = 0.95
SETTLE = 40  # steps before the change
SOON = 10  # steps that a rate right after the change is measured over

LOAD: dict[str, Any] = {
    "rollout": {"group_size": GROUP, "max_response_tokens": 1500},
    "generator": {"slots": SLOTS},
    "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": BUDGET},
    "hardware": {
        "generator": {"decode_fixed_s": 0.006, "decode_request_s": 0.0002, "update_s": 0.005},
        "trainer": {"step_fixed_s": 0.05, "token_s": 8e-4, "publish_s": 0.01},
    },
    "workload": {
        "tasks": 200,
        "prompt_tokens": 2,
        "response_tokens": {"kind": "lognormal", "median": 30, "p99": 193},
        "verify_s": 0.002,
    },
}
TURNS: dict[str, Any] = {  # two tool calls in a rollout, and as many sampled tokens as without
    "workload": {
        "turns": 3,
        "turn_tokens": {"kind": "lognormal", "median": 10, "p99": 64},
        "reply_tokens": 4,
        "tool_s": {"kind": "lognormal", "median": 0.3, "p99": 1.2},
    },
    "environment": {"start_s": 0.2},
}


@dataclass(frozen=True)
class Scenario:
    """What changes after ``SETTLE`` steps, and what is described otherwise than ``LOAD``."""

    name: str
    key: str
    factor: float | None = None
    value: float | None = None
    other: dict[str, Any] = field(default_factory=dict)
    lasts: int | None = None  # steps; None: for good

    @property
    def drift(self) -> dict[str, Any]:
        change = {"key": self.key, "from_step": SETTLE, "factor": self.factor, "value": self.value}
        until = {} if self.lasts is None else {"until_step": SETTLE + self.lasts}
        return {"drift": [{name: given for name, given in change.items() if given is not None} | until]}


QUICK_TRAINER = {"hardware": {"trainer": {"token_s": 3.2e-4}}}
SCENARIOS = (
    Scenario("lengths x 3", "workload.response_tokens", 3.0),
    Scenario("tools x 2.5", "workload.tool_s", 2.5, other=TURNS),
    Scenario("55 % all solved", "workload.trivial_share", value=0.55),
    Scenario("slow trainer", "hardware.trainer.step_s", 2.5, other=QUICK_TRAINER),
    Scenario("fast trainer", "hardware.trainer.step_s", 0.25),
    Scenario("slow verifier", "workload.verify_s", 15.0),
    Scenario("verifier spike", "workload.verify_s", 25.0, lasts=6),
    Scenario("sandbox spike", "environment.start_s", 10.0, other=TURNS, lasts=6),
)


def grid(quick: bool) -> list[Knobs]:
    """Fixed knobs to compare with."""
    most = GROUPS_PER_STEP * (BUDGET + 1)
    opens = (None, most // 2) if quick else (None, most * 2 // 3, most * 4 // 10)
    concurrent = (72, 36) if quick else (72, 48, 28)
    return [
        Knobs(open_groups=a, concurrent_rollouts=b, steps_per_publish=1)
        for a, b in itertools.product(opens, concurrent)
    ]


@dataclass(frozen=True)
class Recovery:
    """A scenario's outcome."""

    name: str
    optimum_per_s: float
    knobs: Knobs
    recovered: bool
    steps_to_recover: int | None  # None: never
    share: float  # of the optimum, from the limit on
    staleness: float
    optimum_staleness: float
    unchanged_share: float  # of the optimum, with the knobs as the controller had them before the change


def measure(scenario: Scenario, *, seeds: int, count: int, quick: bool) -> tuple[Recovery, Result]:
    """``count``: steps that a rate is measured over."""
    start = SETTLE + (scenario.lasts or 0)
    steps = start + 2 * LIMIT_STEPS + count + 2 * (BUDGET + 1)  # the last ones drain the queue
    late = start + LIMIT_STEPS

    def tried_with(*parts: dict[str, Any]) -> list[Result]:
        return [run(LOAD, scenario.other, scenario.drift, *parts, steps=steps, seed=seed) for seed in range(seeds)]

    tried = {knobs: tried_with(held(knobs, GROUPS_PER_STEP)) for knobs in grid(quick)}
    seldom = [msgspec.structs.replace(_best(tried, late, count), steps_per_publish=k) for k in (2, 3)]
    tried |= {knobs: tried_with(held(knobs, GROUPS_PER_STEP)) for knobs in seldom}
    best = _best(tried, late, count)
    runs = tried_with({"control": {"mode": "act"}})

    def share(after: int, steps: int) -> float:
        return _rate(runs, start + after, steps) / _rate(tried[best], start + after, steps)

    back = (s for s in range(2 * LIMIT_STEPS) if share(s, SOON) >= ENOUGH and share(s, count) >= ENOUGH)
    reached = next(back, None)
    alone = [
        run(LOAD, scenario.other, scenario.drift, held(one.knobs_at(SETTLE - 1), GROUPS_PER_STEP), steps=steps, seed=i)
        for i, one in enumerate(runs)
    ]
    recovery = Recovery(
        name=scenario.name,
        optimum_per_s=_rate(tried[best], late, count),
        knobs=best,
        recovered=reached is not None and reached <= LIMIT_STEPS,
        steps_to_recover=reached,
        share=share(LIMIT_STEPS, count),
        staleness=statistics.fmean(one.staleness(late, count) for one in runs),
        optimum_staleness=statistics.fmean(one.staleness(late, count) for one in tried[best]),
        unchanged_share=_rate(alone, late, count) / _rate(tried[best], late, count),
    )
    return recovery, runs[0]


def _rate(runs: Sequence[Result], first: int, count: int) -> float:
    return statistics.fmean(one.rate(first, count) for one in runs)


def _best(tried: dict[Knobs, list[Result]], first: int, count: int) -> Knobs:
    return max(tried, key=lambda knobs: _rate(tried[knobs], first, count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a coarse grid, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--log", action="store_true", help="what the controller did, of the first seed")
    options = parser.parse_args()
    seeds, count = (1, 40) if options.quick else (options.seeds, 60)
    results: dict[str, dict[str, object]] = {}
    print("scenario            optimum/s  share  recovered  steps  staleness (optimum's)  left alone  best fixed knobs")
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        found, one = measure(scenario, seeds=seeds, count=count, quick=options.quick)
        best = found.knobs
        print(
            f"{found.name:<20}{found.optimum_per_s:9.1f}{found.share:7.2f}{found.recovered!s:>11}"
            f"{'never' if found.steps_to_recover is None else found.steps_to_recover:>7}"
            f"{found.staleness:11.2f} ({found.optimum_staleness:.2f}){found.unchanged_share:12.2f}"
            f"     {best.open_groups or 'all'}/{best.concurrent_rollouts}/{best.steps_per_publish}",
            flush=True,
        )
        if options.log:
            for action in one.actions:
                print(f"      step {action.step}: {action.detail}")
        results[found.name] = {
            "recovered": found.recovered,
            "steps_to_recover": found.steps_to_recover,
            "share": round(found.share, 4),
            "unchanged_share": round(found.unchanged_share, 4),
        }
    print(json.dumps({"recovered": all(r["recovered"] for r in results.values()), "limit_steps": LIMIT_STEPS,
                      "scenarios": results}))  # fmt: skip
    return 0 if all(r["recovered"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
