"""How evenly are sequences spread over ranks? Heaviest over mean load, against the textbook methods.

    python benchmarks/packing.py

For 2 to 8 ranks and four shapes of lengths: Headway's `balanced`, AReaL's Algorithm 1, longest-first (Graham, 1969),
Karmarkar & Karp with pairwise swaps until none helps, and `fixed`: micro-batches of equally many sequences, as they
come, the most that keep the heaviest within the budget. Limit: the lower bound, the larger of the mean (rounded up)
and the longest sequence. Last line, one JSON object: `worst_ratio_to_kk_swaps` (balanced over Karmarkar-Karp with
swaps, largest of all cases: at most 1), `pareto_256_over_8` (heaviest over mean, mean and largest over the seeds),
`seconds_100k` (one call for 100,000 lengths, median and largest).

`balanced_over_fixed_8_ranks`: the heaviest rank's tokens under `fixed` over those under `balanced`, Pareto lengths: the
ratio of the steps' times where a token costs the same everywhere (published, on GPUs: 1.30). `balanced_over_fixed`: the
same measured on one core, in turn, by steps of the real trainer, a model of 2.4 M parameters, prompts not shared, the
median over the rounds. Nothing is padded here: `padded_over_balanced` is what padding to the longest sample of each
micro-batch would add, tokens over tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from trainer import MODELS, batch, trainer, write_model

from headway.algorithms.packing import Plan, _largest_differencing, _longest_first, pack, pack_in_order
from headway.algorithms.samples import lay_out

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


def fixed(lengths: Sequence[int], budget: int, ranks: int = 1) -> tuple[int, Plan]:
    """The most sequences of a micro-batch whose heaviest keeps to the budget (one, where none does), and the plan."""
    for size in range(len(lengths), 1, -1):
        plan = pack_in_order(len(lengths), size, ranks)
        if max(sum(lengths[i] for i in part) for rank in plan for part in rank) <= budget:
            return size, plan
    return 1, pack_in_order(len(lengths), 1, ranks)


def trained(rounds: int) -> dict[str, float | int]:
    """Steps of the real trainer with both packings."""
    size, budget, prompt, group = MODELS["2.4M"], 2048, 32, 8
    lengths = (48 * (1 + np.random.default_rng(0).pareto(1.2, 64))).clip(16, 1024).astype(int).tolist()
    fed = [prompt + length - 1 for length in lengths]
    count, plan = fixed(fed, budget)
    with tempfile.TemporaryDirectory() as folder:
        write_model(size, Path(folder))
        keys = {"balanced": {}, "fixed": {"packing": "fixed", "micro_batch_samples": count}}
        sides = {name: trainer(Path(folder), "float32", budget, False, **given) for name, given in keys.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        micro_batches: dict[str, int] = {}
        for step in range(rounds + 1):
            samples = batch(step, len(lengths) // group, group, prompt, lengths, size.vocabulary)
            for name in sides if step % 2 else reversed(sides):
                started = time.perf_counter()
                report = sides[name].train_step(lay_out(samples))
                seconds[name].append(time.perf_counter() - started)
                micro_batches[name] = report.micro_batches
    ratios = [a / b for a, b in zip(seconds["fixed"][1:], seconds["balanced"][1:], strict=True)]  # the first warms up
    padded = sum(len(part) * max(fed[i] for i in part) for part in plan[0] if part)
    return {
        "balanced_over_fixed": round(statistics.median(ratios), 3),
        "balanced_over_fixed_min": round(min(ratios), 3),
        "balanced_over_fixed_max": round(max(ratios), 3),
        "padded_over_balanced": round(padded / sum(fed), 3),
        "micro_batches_balanced": micro_batches["balanced"],
        "micro_batches_fixed": micro_batches["fixed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="of training steps")
    arguments = parser.parse_args()
    worst = 0.0
    pareto: list[float] = []
    fixed_8: list[float] = []
    print(f"{arguments.count} lengths, budget {BUDGET_TOKENS} tokens, {arguments.seeds} seeds; heaviest / mean load")
    print(
        f"{'shape':12} {'ranks':>5}  {'balanced':>9} {'KK+swaps':>9} {'longest':>9} {'areal':>9} "
        f"{'fixed':>9} {'bound':>9}"
    )
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
                        heaviest(lengths, flat(fixed(lengths, BUDGET_TOKENS, ranks)[1])) / mean,
                        max(-(-sum(lengths) // ranks), max(lengths)) / mean,
                    ]
                )
                worst = max(worst, ours / kk)
                if shape == "pareto" and ranks == 8:
                    pareto.append(ours / mean)
                    fixed_8.append(rows[-1][4] / rows[-1][0])
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
        "balanced_over_fixed_8_ranks": round(statistics.mean(fixed_8), 3),
        "seconds_100k": round(statistics.median(seconds), 3),
        "seconds_100k_max": round(max(seconds), 3),
        **trained(arguments.rounds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
