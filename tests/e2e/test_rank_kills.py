"""A rank that divides a model dies in each call of the trainer, at a collective that is drawn: the others end, nothing
of what was saved or published is lost, and training goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_ranks import SAVING
from safetensors.numpy import load_file
from tiny_trainer import make_batch, make_experiment, make_model

from headway.config.load import validate_experiment
from headway.records.errors import WeightsCorrupt, WorkerDied
from headway.records.generation import PublishedWeights
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores
from headway.runtime.workers import LocalLauncher
from headway.trainer.checkpoints import checkpoint_path, latest_valid
from headway.trainer.client import TrainerClient
from headway.weights.shared_memory import Subscriber

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]

STARTING = ("load", "compare_with_one_rank")
CALLS = (*STARTING, "train_step", "complete_publish", *SAVING, "save_weights", "load_checkpoint", "offload")
KILLS = 24
ENDS_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank-kills")
    make_model(folder / "model")
    return folder


def client(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> TrainerClient:
    monkeypatch.setattr("headway.trainer.client.SERVICE", "killed_ranks:KilledRank")
    run.mkdir(exist_ok=True)
    last_core = len(machine_cores()) - 1
    settings = {"devices": [f"cpu:{min(rank, last_core)}" for rank in range(ranks)], "shards": "all"}
    raw = make_experiment(str(folder / "model"), run, trainer={**settings, "micro_batch_tokens": 40})
    return TrainerClient(LocalLauncher(RealClock()), validate_experiment(raw, "test"), run.name)


async def run_to_the_end(trainer: TrainerClient, run: Path, until: int = 3) -> PublishedWeights:
    """Steps from the trainer's version on, each published and saved; returns the last version."""
    checkpoint = latest_valid(run)
    version = 0 if checkpoint is None else await trainer.load_checkpoint(str(checkpoint))
    published = await trainer.publish(version)
    while version < until:
        version = (await trainer.train_step(make_batch(version, step=version))).version
        published = await trainer.publish(version)
        await trainer.save_checkpoint(str(checkpoint_path(run, version)), {version: [version]})
        await trainer.offload()
        await trainer.onload()
    await trainer.save_weights(str(run / "best"))
    return published


def stored_weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def readable(published: PublishedWeights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Subscriber().fetch(published).items()}


async def undisturbed(trainer: TrainerClient, run: Path) -> tuple[list[dict[str, int]], dict[str, np.ndarray]]:
    await trainer.start()
    try:
        await run_to_the_end(trainer, run)
        await trainer.load_checkpoint(str(latest_valid(run)))
        counted = [await worker.call("counted") for worker in trainer.workers]
    finally:
        await trainer.stop()
    return counted, stored_weights(run / "best")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The number of points of each call of each rank, and the weights of a run without a kill."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return asyncio.run(undisturbed(client(folder, folder / "undisturbed", monkeypatch), folder / "undisturbed"))


async def dying(call: Callable[[], Awaitable[Any]], plan: dict[str, Any], run: Path) -> float:
    """Make the call, which a rank doesn't survive; returns the seconds from its SIGKILL to the error."""
    task = asyncio.ensure_future(call())
    while not (run / "kill.done").exists():
        assert not task.done(), f"{plan} never came about: {task}"
        await asyncio.sleep(0.01)
    if plan["stops"]:
        await asyncio.sleep(0.3)
        pid = int((run / "kill.pid").read_text())
        os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(WorkerDied):
        await task
    return time.monotonic() - killed_s


@pytest.mark.parametrize("seed", range(KILLS))
def test_training_survives_a_killed_rank(
    seed: int, folder: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points_by_rank, weights = expected
    chance, call, run = random.Random(seed), CALLS[seed % len(CALLS)], tmp_path / f"kill-{seed}"
    rank = chance.choice([rank for rank, points in enumerate(points_by_rank) if call in points])
    plan = {"rank": rank, "call": call, "point": chance.randrange(points_by_rank[rank][call]), "stops": seed >= 16}
    trainer = client(folder, run, monkeypatch)

    async def main() -> None:
        former, fatal = None, trainer.start
        if call not in STARTING:
            await trainer.start()
            await run_to_the_end(trainer, run, until=1)
            former = await trainer.publish(1)
            former_weights = readable(former)
            fatal = lambda: run_to_the_end(trainer, run)  # noqa: E731
        (run / "kill.json").write_text(json.dumps(plan))
        assert await dying(fatal, plan, run) < ENDS_S, plan
        if former is not None:
            with suppress(WeightsCorrupt):  # overwritten by a newer version, and never half of one
                assert all(torch.equal(tensor, former_weights[name]) for name, tensor in readable(former).items())
        await trainer.restart()
        try:
            assert readable(await run_to_the_end(trainer, run))
        finally:
            await trainer.stop()

    asyncio.run(main())
    saved = stored_weights(run / "best")
    assert saved.keys() == weights.keys()
    assert all(np.array_equal(saved[name], weights[name]) for name in weights), plan


def test_a_move_survives_a_rank_that_dies_while_it_loads(
    folder: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two ranks to one and back, by checkpoints: a rank of the second start dies amid loading them."""
    run = tmp_path / "moved"
    trainer = client(folder, run, monkeypatch)

    async def main() -> None:
        await trainer.start()
        await run_to_the_end(trainer, run, until=1)
        both = trainer.devices
        await trainer.kill()
        trainer.set_devices(both[:1])
        await trainer.start()
        await run_to_the_end(trainer, run, until=2)
        await trainer.kill()
        trainer.set_devices(both)
        plan = {"rank": 1, "call": "load_checkpoint", "point": 0, "stops": False}
        (run / "kill.json").write_text(json.dumps(plan))
        await trainer.start()
        assert await dying(lambda: run_to_the_end(trainer, run), plan, run) < ENDS_S
        await trainer.restart()
        await run_to_the_end(trainer, run)
        await trainer.stop()

    asyncio.run(main())
    saved, (_, weights) = stored_weights(run / "best"), expected
    assert all(np.allclose(saved[name], weights[name], atol=1e-5) for name in weights)
