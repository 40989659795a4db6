"""What an adapter costs and saves beside training the whole model.

    python benchmarks/lora.py [--quick]

The 48 M model of `benchmarks/trainer.py`, rank 16 beside every linear matrix, float32, one core. Rounds of both sides
alternate in one process; a ratio is the median over rounds, with the smallest and largest beside it.

- `step_over_full`: speed of a training step over that of a full one. A full step computes three products a matrix
  (forward, the gradient of its input, its own), one with an adapter the first two and a few percent for the adapter:
  with the attention and the head common to both, at most about 1.4. `step_over_full_cpu`: the same of the process's CPU
  seconds, which other programs on the machine hardly change.
- `memory_over_full`: bytes of gradients, optimiser and one published version over those of a full run's. Peak resident
  memory of both, in processes of their own, is printed.
- `update_bytes_over_adapter`: bytes published over 4 for each of the adapter's weights.
- `engine_over_merged`: the own engine's tokens a second with the adapter apart over those with merged weights, at 64
  concurrent requests (`parts/lora_engine.py`, with eight adapters at once as well).

Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.runtime.devices import ALLOCATOR_ENVIRONMENT, parse_device

if os.environ.keys().isdisjoint(ALLOCATOR_ENVIRONMENT):  # read at the start of a process
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | parse_device("cpu:0").environment())

import torch
from parts.lora_engine import measure_engine
from trainer import MODELS, QUICK, Context, batch, write_model

from headway.algorithms.samples import lay_out
from headway.models.sizes import sizes_of
from headway.trainer.service import TrainerService

ADAPTER = {"rank": 16, "alpha": 32}
GROUP, TOKENS = 4, 128  # members of a group; of each prompt and of each response


def service(folder: Path, adapter: bool) -> TrainerService:
    """A trainer of the model in ``folder``: of all its weights, or of an adapter."""
    experiment: dict[str, Any] = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder), **({"adapter": ADAPTER} if adapter else {})},
        "tasks": {"train": {"path": "unused.jsonl"}},
        "trainer": {"learning_rate": 1e-4, "micro_batch_tokens": 1024, "shared_prefix": False},
    }
    return TrainerService(Context, experiment=experiment, run_id=f"lora-{'adapter' if adapter else 'full'}")


def step_s(trainer: TrainerService, groups: int, vocabulary: int) -> tuple[float, float]:
    """Seconds of one training step: by the clock, and of the CPU."""
    rows = lay_out(batch(trainer.version, groups, GROUP, TOKENS, TOKENS, vocabulary))
    started = time.perf_counter(), time.process_time()
    trainer.train_step(rows)
    return time.perf_counter() - started[0], time.process_time() - started[1]


def ratio(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median of the ratios of ``pairs`` (full, adapter) under ``name``, and their range."""
    ratios = [whole / apart for whole, apart in pairs]
    return {
        name: round(statistics.median(ratios), 3),
        f"{name}_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def bytes_of(trainer: TrainerService) -> dict[str, int]:
    """Bytes of gradients, optimiser and a published version, and of the weights that are trained."""
    trained = trainer.learner.weights().values()
    state = [shard.tensor for shard in trainer.learner.optimiser_shards()]
    return {
        "gradients": sum(one.nbytes for one in trainer.learner.gradients()),
        "optimiser": sum(one.nbytes for one in state),
        "published": trainer.publish(trainer.version).size_bytes,
        "trained": sum(one.nbytes for one in trained),
    }


def measure_training(folder: Path, groups: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """The training side's keys."""
    torch.set_num_threads(1)
    full, adapter = service(folder, False), service(folder, True)
    rounds_s: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(rounds + 1):  # the first warms up
        sides = (full, adapter) if number % 2 else (adapter, full)
        seconds = {id(side): step_s(side, groups, vocabulary) for side in sides}
        rounds_s.append((seconds[id(full)], seconds[id(adapter)]))
    wall, cpu = ([(whole[i], apart[i]) for whole, apart in rounds_s[1:]] for i in range(2))
    columns = list(zip(*wall, strict=True))
    sizes = {"full": bytes_of(full), "adapter": bytes_of(adapter)}
    for side in (full, adapter):
        side.close()
    for name, parts in sizes.items():
        print(f"  {name:8} " + ", ".join(f"{part} {size / 1e6:.1f} MB" for part, size in parts.items()))
    kept = {name: sum(size for part, size in parts.items() if part != "trained") for name, parts in sizes.items()}
    return {
        **ratio("step_over_full", wall),
        **ratio("step_over_full_cpu", cpu),
        "step_s": {name: round(statistics.median(column), 3) for name, column in zip(sizes, columns, strict=True)},
        "memory_over_full": round(kept["adapter"] / kept["full"], 4),
        "update_bytes_over_adapter": round(sizes["adapter"]["published"] / sizes["adapter"]["trained"], 4),
    }


def peak_bytes(folder: Path, adapter: bool, groups: int, vocabulary: int) -> int:
    """Peak resident memory of a process that takes two steps."""
    command = [sys.executable, __file__, "--peak", str(folder), str(int(adapter)), str(groups), str(vocabulary)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def print_peak(folder: str, adapter: str, groups: str, vocabulary: str) -> None:
    torch.set_num_threads(1)
    trainer = service(Path(folder), bool(int(adapter)))
    for _ in range(2):
        step_s(trainer, int(groups), int(vocabulary))
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage's peak is that of the process before exec
    print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(*arguments.peak)
        return
    size, groups, rounds = (QUICK["tiny"], 1, 1) if arguments.quick else (MODELS["48M"], 2, 7)
    with tempfile.TemporaryDirectory() as folder:
        write_model(size, Path(folder))
        print(f"{sizes_of(folder).parameters / 1e6:.1f} M parameters, {groups * GROUP} samples a step")
        found = measure_training(Path(folder), groups, size.vocabulary, rounds)
        peaks = {name: peak_bytes(Path(folder), name == "adapter", groups, size.vocabulary) for name in found["step_s"]}
    print("  peak resident: " + ", ".join(f"{name} {peak / 1e6:.0f} MB" for name, peak in peaks.items()))
    found |= {"peak_bytes": peaks}
    found |= measure_engine(1, 16, 16) if arguments.quick else measure_engine()
    for name, rate in found["tokens_per_s"].items():
        print(f"  engine, {name:7} {rate:7,} tokens/s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
