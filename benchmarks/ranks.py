"""What a second rank gives the trainer on this machine: the doctor's predictions rest on it.

    python benchmarks/ranks.py [--rounds 3]

The pipeline benchmark's model and batches, the trainer alone, on one core and on two, in turns.
``rank_efficiency`` = samples/s on two cores / samples/s on one / 2, [median, least, most of the rounds]. What is lost:
the sum of the gradients, what every rank does in full (optimiser), unequal shares of the tokens. ``batch_bytes`` =
bytes sent to both ranks / bytes of the batches. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import sys
import tempfile
from pathlib import Path

from doctor import CASES, shape_of
from parts.pipeline_load import Placement, alone_consumption, alone_production, apart, experiment, prepare

from headway.algorithms.samples import FlatBatch, lay_out
from headway.algorithms.step_plan import divide

ONE, TWO = ("cpu:0",), ("cpu:0", "cpu:1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    shape = shape_of(CASES[-1])
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        folder = Path(name)
        prepare(folder, shape)
        made = experiment(folder, "made", shape, placement=apart(32), budget=0, steps=1)
        groups = range(4, 4 + options.batches * made.queue.groups_per_step)
        _, batches = asyncio.run(alone_production(made, shape, groups))
        ratios: list[float] = []
        for number in range(options.rounds):
            rates: list[float] = []
            for devices in (ONE, TWO):
                placement = Placement(("cpu:0",), devices, 32)
                settings = experiment(folder, f"{len(devices)}-{number}", shape, placement=placement, budget=0, steps=1)
                rates.append(asyncio.run(alone_consumption(settings, batches))[0].per_s)
            ratios.append(rates[1] / rates[0] / 2)
            print(f"one rank {rates[0]:.1f} samples/s, two {rates[1]:.1f}: efficiency {ratios[-1]:.3f}", flush=True)
        settings = experiment(folder, "bytes", shape, placement=Placement(("cpu:0",), TWO, 32), budget=0, steps=1)
        laid_out = [lay_out(batch) for batch in batches]
        sent = [sum(size(batch.take(share)) for share in divide(batch, settings.trainer, 2)) for batch in laid_out]
        batch_bytes = sum(sent) / sum(map(size, laid_out))
    found = [statistics.median(ratios), min(ratios), max(ratios)]
    print(json.dumps({"rank_efficiency": [round(value, 3) for value in found], "batch_bytes": round(batch_bytes, 3)}))
    return 0


def size(batch: FlatBatch) -> int:
    """Bytes of a batch, or share, as it is sent to a worker."""
    return len(pickle.dumps(batch, protocol=5))


if __name__ == "__main__":
    sys.exit(main())
