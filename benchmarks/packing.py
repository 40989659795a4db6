"""How evenly are sequences spread over ranks? Heaviest over mean load, against the textbook methods.

    python benchmarks/packing.py

For 2 to 8 ranks and four shapes of lengths: Headway's `balanced`, AReaL's Algorithm 1, longest-first (Graham, 1969),
and Karmarkar & Karp with pairwise swaps until none helps. Limit: the lower bound, the larger of the mean (rounded up)
and the longest sequence. Last line, one JSON object: `worst_ratio_to_kk_swaps` (balanced over Karmarkar-Karp with
swaps, largest of all cases: at most 1), `pareto_256_over_8` (heaviest over mean, mean and largest over the seeds),
`seconds_100k` (one call for 100,000 lengths, median and largest).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from headway.algorithms.packing import _largest_differencing, _longest_first, pack

BUDGET_TOKENS = 32768
SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "pareto": lambda random, n: (64 * (1 + random.pareto(1.2, n))).clip(16, 8192),
    "bimodal": lambda random, n: np.where(
        random.random(n) < 0.8, random.normal(200, 40, n), random.normal(4000, 300, n)
    ),
    "uniform": lambda random, n: random.integers(16, 4096, n),
    # a few giants, nearly equal, and dust that can't even them out
    "adversarial": lambda random, n: np.where(np.arange(n) % 17 == 0, 8000 - np.arange(n) % 5, 16 + np.arange(n) % 3),
}


def with_swaps(lengths: Sequence[int], parts: list[list[int]]) -> list[list[int]]:
    """Swap pairs, or move one, between the heaviest part and any other while that lowers the larger of the two."""
    parts = [list(part) for part in parts]
    loads = [sum(lengths[i] for i in part) for part in parts]
    improved = True
    while improved:
        improved = False
        heavy = max(range(len(parts)), key=loads.__getitem__)
        for light in sorted(range(len(parts)), key=loads.__getitem__):
            gap = loads[heavy] - loads[light]
            for a, i in enumerate(parts[heavy]):
                for b, j in [*enumerate(parts[light]), (-1, -1)]:
                    moved = lengths[i] - (lengths[j] if b >= 0 else 0)
                    if 0 < moved < gap:
                        if b >= 0:
                            parts[heavy][a], parts[light][b] = j, i
                        else:
                            parts[light].append(parts[heavy].pop(a))
                        loads[heavy] -= moved
                        loads[light] += moved
                        improved = True
                        break
                if improved:
                    break
            if improved:
                break
    return parts


def heaviest(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return max(sum(lengths[i] for i in part) for part in parts)


def flat(plan: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [[i for batch in rank for i in batch] for rank in plan]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--count", type=int, default=256)
    arguments = parser.parse_args()
    worst = 0.0
    pareto: list[float] = []
    print(f"{arguments.count} lengths, budget {BUDGET_TOKENS} tokens, {arguments.seeds} seeds; heaviest / mean load")
    print(f"{'shape':12} {'ranks':>5}  {'balanced':>9} {'KK+swaps':>9} {'longest':>9} {'areal':>9} {'bound':>9}")
    for shape, draw in SHAPES.items():
        for ranks in range(2, 9):
            rows: list[list[float]] = []
            for seed in range(arguments.seeds):
                lengths = draw(np.random.default_rng(seed), arguments.count).astype(int).clip(1).tolist()
                indices, mean = list(range(len(lengths))), sum(lengths) / ranks
                kk = heaviest(lengths, with_swaps(lengths, _largest_differencing(lengths, indices, ranks)))
                ours = heaviest(lengths, flat(pack(lengths, BUDGET_TOKENS, ranks)))
                rows.append(
                    [
                        ours / mean,
                        kk / mean,
                        heaviest(lengths, _longest_first(lengths, indices, ranks)) / mean,
                        heaviest(lengths, flat(pack(lengths, BUDGET_TOKENS, ranks, "areal"))) / mean,
                        max(-(-sum(lengths) // ranks), max(lengths)) / mean,
                    ]
                )
                worst = max(worst, ours / kk)
                if shape == "pareto" and ranks == 8:
                    pareto.append(ours / mean)
            print(f"{shape:12} {ranks:5}  " + " ".join(f"{statistics.mean(c):9.5f}" for c in zip(*rows, strict=True)))
    seconds: list[float] = []
    for seed in range(3):
        many = SHAPES["pareto"](np.random.default_rng(seed), 100_000).astype(int).tolist()
        started = time.perf_counter()
        pack(many, BUDGET_TOKENS, 8)
        seconds.append(time.perf_counter() - started)
    result = {
        "worst_ratio_to_kk_swaps": round(worst, 6),
        "pareto_256_over_8": round(statistics.mean(pareto), 6),
        "pareto_256_over_8_max": round(max(pareto), 6),
        "seconds_100k": round(statistics.median(seconds), 3),
        "seconds_100k_max": round(max(seconds), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
