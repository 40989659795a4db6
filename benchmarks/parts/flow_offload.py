"""What it costs to leave a device and come back, trainer and engine, beside what the disk itself does.

python -m benchmarks.parts.flow_offload [--directory FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from tiny_trainer import make_batch, make_experiment, make_model

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.models.configuration import DecoderConfig
from headway.models.loading import build
from headway.records.execution import MemoryMove
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.trainer.client import TrainerClient

ROUNDS = 5
DISK_BYTES = 128 << 20
Moves = list[tuple[MemoryMove, MemoryMove]]  # away and back


async def trainer_moves(experiment: Experiment) -> Moves:
    """A rank with accumulated gradients and the optimiser's state, which takes a step between its moves."""
    trainer = TrainerClient(LocalLauncher(RealClock()), experiment, "benchmark-offload")
    await trainer.start()
    try:
        found: Moves = []
        for step in range(ROUNDS):
            await trainer.train_step(make_batch(step, step=step))
            await trainer.forward_backward(make_batch(step, step=step + 1))
            found.append(((await trainer.offload())[0], (await trainer.onload())[0]))
        return found
    finally:
        await trainer.stop()


async def engine_moves(experiment: Experiment) -> Moves:
    """A replica, loaded by weights that come: alone it would stay away."""
    pool = GeneratorPool(LocalLauncher(RealClock()), experiment, RealClock())
    trainer = TrainerClient(LocalLauncher(RealClock()), experiment, "benchmark-offload-engine")
    await asyncio.gather(pool.start(), trainer.start())
    try:
        found: Moves = []
        for version in range(ROUNDS):
            await pool.pause_replicas([0])
            (away,) = await pool.offload(0)
            await pool.resume_replicas([0])
            await pool.onload(0)
            await pool.update_weights(await trainer.publish(version))
            (back,) = await pool.onload(0)
            found.append((away, back))
        return found
    finally:
        await asyncio.gather(pool.stop(), trainer.stop())


def disk_mb_s(directory: Path) -> tuple[float, float]:
    """The disk's own writing, until it is there, and reading, past the cache where that is allowed."""
    data = memoryview(os.urandom(1 << 20))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            file.write(data)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started, target = time.perf_counter(), bytearray(1 << 20)
        while file.readinto(target):
            pass
        return DISK_BYTES / write_s / 1e6, DISK_BYTES / (time.perf_counter() - started) / 1e6


def offload_seconds(directory: Path) -> dict[str, float]:
    """On- and offloading of a model of 7.4 million parameters. ``offload_freed``: the least that a trainer's resident
    memory fell, as a share of its 16 bytes a parameter."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        folder = Path(name)
        model = make_model(folder / "model", width=320, layers=6, vocabulary=2048)
        (folder / "run").mkdir()
        experiment = validate_experiment(make_experiment(model, folder / "run"), "benchmark")
        parameters = sum(one.numel() for one in build(DecoderConfig.from_pretrained(model)).parameters())
        sides = {"trainer": asyncio.run(trainer_moves(experiment)), "engine": asyncio.run(engine_moves(experiment))}
        write, read = disk_mb_s(folder)
    speeds: dict[str, tuple[float, float]] = {}
    for side, moves in sides.items():
        away, back = (statistics.median(_mb_s(pair[which]) for pair in moves) for which in (0, 1))
        speeds[side] = away, back
        print(
            f"offload: {side}: {moves[0][0].moved_bytes / 1e6:.0f} MB, away {away:.0f} MB/s, back {back:.0f} MB/s; "
            f"the disk writes {write:.0f} MB/s, reads {read:.0f} MB/s",
            flush=True,
        )
    return {
        "offload_freed": min(away.freed_bytes for away, _ in sides["trainer"]) / (16 * parameters),
        "offload_mb_s": min(away for away, _ in speeds.values()),
        "onload_mb_s": min(back for _, back in speeds.values()),
        "disk_write_mb_s": write,
        "disk_read_mb_s": read,
    }


def _mb_s(move: MemoryMove) -> float:
    return move.moved_bytes / move.seconds / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "headway-benchmark-flow")
    print(json.dumps(offload_seconds(parser.parse_args().directory)))
