"""The controller against the best fixed knobs, in virtual time.

    python benchmarks/policies_simulated.py [--seeds 3]

The planner's simulation of four stationary loads, responses with p99 = 8 x median and lengths that are alike in a
group: the trainer is the slower side, both are as fast, the generator is the slower side, and rollouts call tools. For
each load a grid of fixed knobs (open groups x concurrent rollouts x steps per publish) and the policies that
benchmarks/policies.py runs live; the best of them all is what the controller is compared with, those left out that
train shorter samples than there are (length bias, or fewer tokens a sample). Rates are useful samples/s (advantage not
0), the first steps left out; ``ratio``: controller over best, each seed by itself, mean of the seeds. ``age``: mean
staleness of what was trained, versions. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from typing import Any, NamedTuple

from parts.simulated_runs import Raw, held, run

from headway.records.control import Knobs

BUDGET, GROUPS_PER_STEP, GROUP, SLOTS = 8, 8, 8, 64
STEPS, WARM, DRAIN = 140, 30, BUDGET + 1
BASE: dict[str, Any] = {
    "rollout": {"group_size": GROUP, "max_response_tokens": 1024},
    "generator": {"slots": SLOTS},
    "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": BUDGET},
    "hardware": {
        "generator": {"decode_fixed_s": 0.006, "decode_request_s": 0.0002, "update_s": 0.005},
        "trainer": {"step_fixed_s": 0.05, "publish_s": 0.01},
    },
    "workload": {
        "tasks": 400,
        "prompt_tokens": 16,
        "response_tokens": {"kind": "lognormal", "median": 40, "p99": 320},
        "group_correlation": 0.4,
        "solve_rate": {"kind": "quantiles", "at": [[0, 0.1], [1, 0.9]]},
        "verify_s": 0.001,
    },
}
LOADS: dict[str, dict[str, Any]] = {
    "slow trainer": {"hardware": {"trainer": {"token_s": 6e-4}}},
    "matched": {"hardware": {"trainer": {"token_s": 2.6e-4}}},
    "slow generator": {"hardware": {"trainer": {"token_s": 1e-4}}},
    "tools": {
        "hardware": {"trainer": {"token_s": 2.6e-4}},
        "workload": {
            "turns": 3,
            "turn_tokens": {"kind": "lognormal", "median": 14, "p99": 112},
            "reply_tokens": 4,
            "tool_s": {"kind": "lognormal", "median": 0.1, "p99": 0.8},
        },
    },
}
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {"queue": {"budget": 0}},
    "sync, discard": {"queue": {"budget": 0, "oversampling": 2.0, "surplus": "discard"}},
    "small budget": {"queue": {"budget": 2}},
    "oversample, park": {"queue": {"oversampling": 4.0, "surplus": "park"}},
    "oversample, discard": {"queue": {"oversampling": 4.0, "surplus": "discard"}},
}
LENGTH_BIAS_LIMIT = 0.1  # KS by scheduling, as the controller's: faster because shorter is no rival, ...
SHORTER_LIMIT = 0.95  # ... nor is one whose samples have fewer tokens: the tail that KS hardly sees is most of the work
PLAIN = f"all/{SLOTS + 16}/1"  # of the grid: it trains every length


def grid() -> dict[str, Raw]:
    """Fixed knobs by name."""
    most = GROUPS_PER_STEP * (BUDGET + 1)
    found: dict[str, Raw] = {}
    for share, concurrent, publish in itertools.product((1.0, 0.6, 0.35, 0.2), (80, 56, 32), (1, 3)):
        opened = None if share == 1.0 else math.ceil(most * share)
        knobs = Knobs(open_groups=opened, concurrent_rollouts=concurrent, steps_per_publish=publish)
        found[f"{opened or 'all'}/{concurrent}/{publish}"] = held(knobs, GROUPS_PER_STEP)
    return found


class Measured(NamedTuple):
    """One run, its first and last steps left out."""

    rate: float  # useful samples/s
    age: float  # mean staleness of what was trained, versions
    bias: float  # of lengths, by scheduling (KS)
    tokens: float  # response tokens of a trained sample


def measured(load: Raw, policy: Raw, seed: int) -> Measured:
    result = run(BASE, load, policy, steps=STEPS, seed=seed)
    count = STEPS - WARM - DRAIN
    kept = result.steps[WARM : WARM + count]
    return Measured(
        rate=result.rate(WARM, count),
        age=result.staleness(WARM, count),
        bias=kept[-1].length_bias.scheduling_ks,
        tokens=sum(step.tokens.ended["trained"] for step in kept) / sum(step.samples for step in kept),
    )


def mean(runs: list[Measured], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in runs)


def all_lengths(runs: list[Measured], plain: list[Measured]) -> bool:
    """Whether these runs (a seed each) train samples as long as there are, as ``plain`` does."""
    shorter = statistics.fmean(one.tokens / other.tokens for one, other in zip(runs, plain, strict=True))
    return max(one.bias for one in runs) <= LENGTH_BIAS_LIMIT and shorter >= SHORTER_LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(LOADS), default=list(LOADS))
    options = parser.parse_args()
    seeds = range(options.seeds)
    results: dict[str, dict[str, object]] = {}
    print("load            best fixed            samples/s   age   controller   age   ratio [least]   over synchronous")
    for name in options.only:
        tried = {
            label: [measured(LOADS[name], policy, seed) for seed in seeds]
            for label, policy in (grid() | POLICIES).items()
        }
        rivals = [label for label, runs in tried.items() if all_lengths(runs, tried[PLAIN])]
        best = max(rivals, key=lambda label: mean(tried[label], "rate"))
        controller = [measured(LOADS[name], {"control": {"mode": "act"}}, seed) for seed in seeds]
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(controller, tried[best], strict=True)]
        over = [ours.rate / theirs.rate for ours, theirs in zip(controller, tried["synchronous"], strict=True)]
        print(
            f"{name:<16}{best:<20}{mean(tried[best], 'rate'):11.1f}{mean(tried[best], 'age'):6.1f}"
            f"{mean(controller, 'rate'):13.1f}{mean(controller, 'age'):6.1f}"
            f"{statistics.fmean(ratios):8.3f} [{min(ratios):.3f}]{statistics.fmean(over):13.2f}",
            flush=True,
        )
        results[name] = {
            "best_fixed": best,
            "controller_vs_best_fixed": round(statistics.fmean(ratios), 4),
            "controller_vs_sync": round(statistics.fmean(over), 3),
        }
    least = min(float(str(result["controller_vs_best_fixed"])) for result in results.values())
    print(json.dumps({"least_controller_vs_best_fixed": least, "loads": results}))


if __name__ == "__main__":
    main()
