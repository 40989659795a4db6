"""Memory and reads of trainers whose ranks divide the model, and kills of ranks that save, as processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from critic_batches import rewarded
from tiny_trainer import make_batch, make_experiment, make_model

from headway.config.load import validate_experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.errors import WorkerDied
from headway.records.training import TrainBatch
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.trainer.checkpoints import checkpoint_path, find_checkpoints, latest_valid, remove_leftovers
from headway.trainer.client import TrainerClient
from tests.e2e.test_trainer_ranks import client

pytestmark = pytest.mark.real


async def peak_of(
    folder: Path, model: str, ranks: int, batch_of: Callable[..., TrainBatch] = make_batch, /, **sections: Any
) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """What each rank measured from its start through steps, publishing and checkpoints, and `check`'s parts."""
    trainer = {"devices": ["cpu:0"] * ranks, "shards": ranks, "micro_batch_tokens": 64}
    experiment = validate_experiment(make_experiment(model, folder, trainer=trainer, **sections), "test")
    run = TrainerClient(LocalLauncher(RealClock()), experiment, f"memory-{folder.name}")
    run._factory = "rank_memory:MeasuredTrainer"
    await run.start()
    saved: asyncio.Future[Any] | None = None
    try:
        for step in range(3):
            await run.train_step(batch_of(step, step=step))
            if saved is not None:  # beside the step
                await saved
            await run.begin_publish(step + 1)
            path = str(checkpoint_path(folder, step + 1))
            await run.begin_checkpoint(path, {})
            saved = asyncio.ensure_future(run.save_checkpoint(path, {}))
            await run.publish(step + 1)
        assert saved is not None
        await saved
        await run.save_weights(str(folder / "best"))
        measured = [await worker.call("measured") for worker in run.workers]
    finally:
        await run.stop()
    uses = [use for use in memory_uses(experiment, sizes_of(model)) if use.name == "trainer-0"]
    return measured, {name: nbytes for use in uses for name, nbytes in use.parts.items()}


@pytest.mark.long
def test_ranks_need_their_share_of_memory_and_read_their_share(tmp_path: Path) -> None:
    models = {"tiny": make_model(tmp_path / "tiny"), "large": make_model(tmp_path / "large", width=320, layers=32)}
    total = sizes_of(models["large"]).parameters
    stored_bytes = 4 * total
    for ranks in (1, 2, 4):
        measured: dict[str, Any] = {}
        for name, model in models.items():
            measured[name], parts = asyncio.run(peak_of(tmp_path / f"{name}-{ranks}", model, ranks))
        unit_bytes = 4 * max(layer.parameters for layer in sizes_of(models["large"]).layers)
        limit = 28 * total / ranks + 2 * unit_bytes * (ranks > 1) + parts["activations"] + parts["logits"]
        for rank in range(ranks):
            (peak_bytes, read_bytes), others = measured["large"][rank], measured["tiny"][rank]  # others: of modules
            read_share = (read_bytes - others[1]) / stored_bytes
            print(f"rank {rank} of {ranks}: {(peak_bytes - others[0]) / limit:.3f} of the limit, read {read_share:.4f}")
            assert peak_bytes - others[0] <= 1.15 * limit
            assert ranks == 1 or read_share == pytest.approx(1 / ranks, rel=0.02), "one rank maps the file"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["trunk", "adapter", "folder"])
@pytest.mark.long
def test_a_run_with_a_critic_needs_the_memory_of_check(tmp_path: Path, path: str) -> None:
    """Within 15 %, less what a tiny model's run needs, which is modules."""
    layers = 40 if path == "adapter" else 16  # most of whose weights are frozen
    models = {"tiny": make_model(tmp_path / "tiny"), "large": make_model(tmp_path / "large", width=320, layers=layers)}
    sections: dict[str, Any] = {"algorithm": {"preset": "ppo"}}
    sections["rollout"] = {"max_prompt_tokens": 16, "max_response_tokens": 16}
    if path == "adapter":
        sections["model"] = {"adapter": {"rank": 8, "alpha": 16.0}}
    peaks, needs = dict[str, int](), dict[str, int]()
    for name, model in models.items():
        critic = make_model(tmp_path / f"critic-{name}", *((320, layers) if name == "large" else ()), seed=1)
        sections["critic"] = {"path": critic if path == "folder" else path}
        measured, parts = asyncio.run(peak_of(tmp_path / name, model, 1, rewarded, **sections))
        peaks[name], needs[name] = measured[0][0], sum(parts.values()) - parts["base"]
        print(name, parts, peaks[name])
    ratio = (peaks["large"] - peaks["tiny"]) / (needs["large"] - needs["tiny"])
    print(f"{path}: {ratio:.3f} of what check counts, {needs['large'] / 2**20:.1f} MiB")
    assert ratio == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path, shards: int) -> None:
    first, second = (checkpoint_path(tmp_path, version) for version in (1, 2))

    async def main() -> None:
        trainer = client(tmp_path, 2, "saving", shards=shards)
        await trainer.start()
        try:
            await trainer.train_step(make_batch(0))
            await trainer.save_checkpoint(str(first), {0: [0]})
            await trainer.train_step(make_batch(1, step=1))
            await trainer.begin_checkpoint(str(second), {0: [0], 1: [1]})
            os.kill(trainer.workers[1].pid, signal.SIGSTOP)
            save = asyncio.ensure_future(trainer.save_checkpoint(str(second), {0: [0], 1: [1]}))
            await asyncio.wait([save], timeout=0.3)
            assert not save.done()
            os.kill(trainer.workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="trainer-1"):
                await save
            assert find_checkpoints(tmp_path) == [first]
            assert latest_valid(tmp_path) == first
            await trainer.restart()
            assert await trainer.load_checkpoint(str(first)) == 1
            assert (await trainer.train_step(make_batch(1, step=1))).version == 2
            await trainer.save_checkpoint(str(second), {0: [0], 1: [1]})
            assert latest_valid(tmp_path) == second
            assert remove_leftovers(tmp_path) == [], "the next save removes what the killed one left"
        finally:
            await trainer.stop()

    asyncio.run(main())
