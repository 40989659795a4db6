"""What a second rank gives the trainer on this machine, and what a divided model costs.

    python benchmarks/ranks.py [--rounds 3]

``rank_efficiency``: the pipeline benchmark's model and batches, the trainer alone, on one core and on two, in turns;
samples/s on two cores / samples/s on one / 2. The doctor's predictions rest on it. What is lost: the sum of the
gradients, what every rank does in full (optimiser), unequal shares of the tokens. ``batch_bytes`` = bytes sent to both
ranks / bytes of the batches.

The rest is of a random model of 43 M parameters in float32 on two ranks, of which one trainer has copies and another
divides one, step by step in turns:

- ``sharded_over_copies``: CPU seconds of a step with copies / with a divided model, at micro-batches of 2,048 tokens
  (those at 1,024 are printed)
- ``parts_overhead``: CPU seconds of a divided model's step in two parts / in one call, less 1
- ``publish_over_whole``: seconds of publishing a version in bfloat16 by both ranks / by rank 0 alone
- ``state_share_4``: live storages of weights, gradients and moments on one of four ranks / on one rank alone

Ratios are [median, least, most of the rounds]. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from doctor import CASES, shape_of
from parts.pipeline_load import Placement, alone_consumption, alone_production, apart, experiment, prepare
from parts.rank_load import batch, cpu_s, parts_of, rank_experiment, started, write_model

from headway.algorithms.samples import FlatBatch, lay_out
from headway.algorithms.step_plan import divide
from headway.trainer.client import TrainerClient

ONE, TWO = ("cpu:0",), ("cpu:0", "cpu:1")
SIZES = (2048, 1024)  # tokens of a micro-batch
MICRO_BATCHES = 2  # of a rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        figures = efficiency(Path(name), options.rounds, options.batches)
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        figures |= asyncio.run(divided(Path(name), options.rounds))
    print(json.dumps(figures))
    return 0


def efficiency(folder: Path, rounds: int, batch_count: int) -> dict[str, Any]:
    """`rank_efficiency` and `batch_bytes`."""
    shape = shape_of(CASES[-1])
    prepare(folder, shape)
    made = experiment(folder, "made", shape, placement=apart(32), budget=0, steps=1)
    groups = range(4, 4 + batch_count * made.queue.groups_per_step)
    _, batches = asyncio.run(alone_production(made, shape, groups))
    ratios: list[float] = []
    for number in range(rounds):
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
    return {"rank_efficiency": of(ratios), "batch_bytes": round(sum(sent) / sum(map(size, laid_out)), 3)}


async def divided(folder: Path, rounds: int) -> dict[str, Any]:
    """What the model of 43 M costs and needs where ranks divide it."""
    print(f"a model of {write_model(folder):.1f} M parameters", flush=True)
    figures: dict[str, Any] = {}
    for tokens in SIZES:
        async with AsyncExitStack() as stack:
            copies, sharded = [
                await stack.enter_async_context(
                    started(rank_experiment(folder, f"{shards}-{tokens}", 2, shards=shards, micro_batch_tokens=tokens))
                )
                for shards in (1, 2)
            ]
            ratios = await in_turns(copies, sharded, tokens, rounds, further=tokens == SIZES[0])
        figures |= ratios
    states: dict[int, int] = {}
    for ranks in (1, 4):
        async with started(rank_experiment(folder, f"state-{ranks}", ranks, shards="all", micro_batch_tokens=512)) as t:
            await t.train_step(batch(0, 2048))
            await t.forward_backward(batch(1, 2048))
            states[ranks] = max(await t.call_all("state_bytes"))
    print(f"state of a rank: {states[1] / 2**20:.1f} MiB alone, {states[4] / 2**20:.1f} MiB of four", flush=True)
    return figures | {"state_share_4": round(states[4] / states[1], 3)}


async def in_turns(
    copies: TrainerClient, sharded: TrainerClient, tokens: int, rounds: int, *, further: bool
) -> dict[str, Any]:
    """Steps and versions of both trainers, one after the other; the first of each isn't counted."""
    versions = {copies: 0, sharded: 0}

    async def step_s(trainer: TrainerClient, parts: int = 1) -> float:
        whole, former_s = batch(versions[trainer], 2 * MICRO_BATCHES * tokens), cpu_s(trainer)
        if parts == 1:
            await trainer.train_step(whole)
        else:
            for part in parts_of(whole, parts):
                await trainer.forward_backward(part)
            await trainer.optim_step()
        versions[trainer] += 1
        return cpu_s(trainer) - former_s

    async def publish_s(trainer: TrainerClient) -> float:
        began = time.perf_counter()
        await trainer.publish(versions[trainer])
        return time.perf_counter() - began

    over_copies, overheads, publishing = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        of_copies, of_shards = await step_s(copies), await step_s(sharded)
        line = f"{tokens} tokens: a step {of_copies:.1f} CPU s with copies, {of_shards:.1f} sharded"
        over_copies.append(of_copies / of_shards)
        if further:
            in_parts = await step_s(sharded, parts=2)
            whole_s, rows_s = await publish_s(copies), await publish_s(sharded)
            overheads.append(in_parts / of_shards - 1)
            publishing.append(rows_s / whole_s)
            line += f", {in_parts:.1f} in two parts; published in {whole_s:.3f} s by one rank, {rows_s:.3f} s by both"
        print(line + ("" if number else " (not counted)"), flush=True)
    print(f"{tokens} tokens: sharded_over_copies {of(over_copies[1:])}", flush=True)
    return (
        {
            "sharded_over_copies": of(over_copies[1:]),
            "parts_overhead": of(overheads[1:]),
            "publish_over_whole": of(publishing[1:]),
        }
        if further
        else {}
    )


def of(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def size(batch: FlatBatch) -> int:
    """Bytes of a batch, or share, as it is sent to a worker."""
    return len(pickle.dumps(batch, protocol=5))


if __name__ == "__main__":
    sys.exit(main())
