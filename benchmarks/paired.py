"""Is this checkout as fast as another one, an earlier commit's say? Both in turn, round by round, on the same machine.

    git worktree add /tmp/before COMMIT && make -C /tmp/before install
    python benchmarks/paired.py /tmp/before [--rounds 8] [--only router ...]

Each round runs a benchmark of both checkouts, each with its own ``.venv``, the one first that was last in the round
before. A ratio is turned so that above 1 this checkout is better. Shown are the median over the rounds and its 95 %
interval (of 10,000 resampled medians); where that is wider than 0.10, rounds follow until it isn't, at most three
times as many. The machine must be quiet.

Last line, one JSON object: ``NAME.FIGURE`` -> ``median``, ``low``, ``high`` and ``rounds``; and ``worse``, the names of
those whose median is below 0.97 or whose interval ends below 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 900.0  # of one run
_LEAST, _WIDEST = 0.97, 0.10
_TRIES = 4  # of a benchmark that claims no figure


@dataclass(frozen=True)
class Pair:
    """A benchmark's command, and figures of its last line: those of which less is better are ``costs``."""

    command: tuple[str, ...]
    costs: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()


PAIRS = {
    "router": Pair(("router.py", "--only", "http", "--seconds", "20"), costs=("http_cpu_ms_per_request",)),
    "orchestrator": Pair(("orchestrator.py", "--only", "run", "--rounds", "1"), costs=("cpu_over_floor",)),
    "pipeline": Pair(
        ("pipeline.py", "--matched", "--rounds", "1", "--steps", "12"), rates=("efficiency", "asynchronous_of_together")
    ),
    "vs_trl": Pair(
        ("vs_trl.py", "--case", "fixed", "--rounds", "1", "--headway", "float32, 32 slots"),
        rates=("headway/float32, 32 slots",),
    ),
    "watch": Pair(
        ("watch.py", "--only", "open", "--rounds", "1", "--rollouts", "100000", "--events", "1000000"),
        costs=("open_now_s", "open_rollouts_s"),
    ),
}


def measured(checkout: Path, pair: Pair) -> dict[str, Any]:
    """The last line of the benchmark of ``checkout``, which is repeated where it claims no figure (`pipeline.py`, whose
    sides' rates differ too much now and then). Raises RuntimeError when it fails."""
    program = [str(checkout / ".venv/bin/python"), f"benchmarks/{pair.command[0]}", *pair.command[1:]]
    for _ in range(_TRIES):
        done = subprocess.run(program, cwd=checkout, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            command = " ".join(pair.command)
            raise RuntimeError(f"{checkout}: {command} ended with {done.returncode}: {done.stderr[-2000:]}")
        last_line = json.loads(lines[-1])
        if all(figure.split("/")[0] in last_line for figure in (*pair.costs, *pair.rates)):
            return last_line
    raise RuntimeError(f"{checkout}: {' '.join(pair.command)} claimed no figure in {_TRIES} tries: {lines[-2:]}")


def value(result: Any, figure: str) -> float:
    """The number of a figure, a path of names with / between them; of a list its mean."""
    for part in figure.split("/"):
        result = result[part]
    return statistics.fmean(result) if isinstance(result, list) else float(result)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median of ``ratios`` and the 95 % interval of the medians of their resamples."""
    medians = np.median(np.random.default_rng(0).choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return statistics.median(ratios), float(low), float(high)


def compare(name: str, before: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The figures of one benchmark, as the module says."""
    pair, found = PAIRS[name], dict[str, list[float]]()
    sides = [ROOT, before]
    for number in range(3 * rounds):
        results = {side: measured(side, pair) for side in (sides if number % 2 else sides[::-1])}
        for figure in (*pair.costs, *pair.rates):
            ratio = value(results[ROOT], figure) / value(results[before], figure)
            found.setdefault(figure, []).append(1 / ratio if figure in pair.costs else ratio)
        said = ", ".join(f"{figure} {ratios[-1]:.3f}" for figure, ratios in found.items())
        print(f"{name}, round {number + 1}: {said}", flush=True)
        spread = [interval(ratios) for ratios in found.values()]
        if number + 1 >= rounds and all(high - low <= _WIDEST for _, low, high in spread):
            break
    summary: dict[str, dict[str, float]] = {}
    for figure, ratios in found.items():
        median, low, high = interval(ratios)
        print(f"{name}.{figure}: {median:.3f} ({low:.3f} to {high:.3f}) of {len(ratios)} rounds", flush=True)
        summary[f"{name}.{figure}"] = {"median": median, "low": low, "high": high, "rounds": len(ratios)}
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other commit, with its environment")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS), help="these benchmarks alone")
    options = parser.parse_args()
    before = options.before.resolve()
    if not (before / ".venv/bin/python").exists():
        print(f"{before} has no .venv/bin/python: run make install there", file=sys.stderr)
        return 2
    found: dict[str, dict[str, float]] = {}
    for name in options.only:
        found |= compare(name, before, options.rounds)
    worse = [name for name, one in found.items() if one["median"] < _LEAST or one["high"] < 1]
    print(json.dumps({**found, "worse": worse}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
