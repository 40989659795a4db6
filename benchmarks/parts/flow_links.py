"""What links between workers of a workflow cost: point to point over relayed, many tensors over one.

python -m benchmarks.parts.flow_links [--pairs 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from flow_peer import workflow

SIZE_BYTES = 100 << 20
WARM_UP = 2  # pairs, in which memory is taken
Ratio = dict[str, float]


async def direct_over_relayed(pairs: int = 15) -> Ratio:
    """100 MB from worker to worker by send and receive, over the same by two ordinary calls through the orchestrator.
    Both ends with a NumPy array, which ordinary calls carry best."""
    direct, relayed = [], []
    async with workflow("a", "b") as (_, workers, _start):
        a, b = workers["a"], workers["b"]
        await a.call("make_array", "x", SIZE_BYTES)
        for _ in range(pairs + WARM_UP):
            began = time.perf_counter()
            await asyncio.gather(a.call("send", "b", "x"), b.call("take", "a"))
            direct.append(time.perf_counter() - began)
            began = time.perf_counter()
            await b.call("read", await a.call("give", "x"))
            relayed.append(time.perf_counter() - began)
    return _ratio(direct, relayed)


async def many_over_flat(pairs: int = 15) -> Ratio:
    """A message of 1,000 tensors from worker to worker, over one tensor of as many bytes (100 MB)."""
    times: dict[str, list[float]] = {"many": [], "flat": []}
    async with workflow("a", "b") as (_, workers, _start):
        a, b = workers["a"], workers["b"]
        await a.call("make", "many", 0, 1000, SIZE_BYTES // 4000)
        await a.call("make", "flat", 0, 1, SIZE_BYTES // 4)
        for _ in range(pairs + WARM_UP):
            for name, found in times.items():
                began = time.perf_counter()
                await asyncio.gather(a.call("send", "b", name), b.call("take", "a"))
                found.append(time.perf_counter() - began)
    return _ratio(times["many"], times["flat"])


def _ratio(ours: list[float], theirs: list[float]) -> Ratio:
    ours, theirs = ours[WARM_UP:], theirs[WARM_UP:]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "smallest": min(ratios),
        "largest": max(ratios),
        "ours_ms": 1e3 * statistics.median(ours),
        "theirs_ms": 1e3 * statistics.median(theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    found: dict[str, Any] = {}
    for measure in (direct_over_relayed, many_over_flat):
        found[measure.__name__] = asyncio.run(measure(pairs))
        print(measure.__name__, {name: round(value, 3) for name, value in found[measure.__name__].items()})
    print(json.dumps({name: round(result["ratio"], 3) for name, result in found.items()}))


if __name__ == "__main__":
    main()
