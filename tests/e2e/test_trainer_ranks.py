"""The trainer as processes: two ranks equal one, a killed rank is an error and a restart, errors keep their type."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from critic_batches import rewarded
from tiny_trainer import make_batch, make_experiment, make_model

from headway.config.load import validate_experiment
from headway.records.errors import CheckpointCorrupt, ConfigurationError, WorkerDied
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores
from headway.runtime.workers import LocalLauncher
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.client import TrainerClient
from tests.unit.trainer.test_kept_sets import sampled, with_tokenizer

pytestmark = pytest.mark.real


def client(folder: Path, ranks: int, run_id: str, **sections) -> TrainerClient:
    model = folder / "model"
    if not model.exists():
        make_model(model)
    last = len(machine_cores()) - 1
    devices = [f"cpu:{min(rank, last)}" for rank in range(ranks)]
    trainer = {"devices": devices, "learning_rate": 1e-3, "micro_batch_tokens": 40, **sections}
    own = {"algorithm": trainer.pop("algorithm", {}), "model": {"path": str(model)} | trainer.pop("model", {})}
    experiment = validate_experiment(make_experiment(str(model), folder, trainer=trainer, **own), "test")
    return TrainerClient(LocalLauncher(RealClock()), experiment, run_id)


def published_file(path: str) -> bool:
    return Path(path).is_file()


async def train(trainer: TrainerClient, folder: Path, name: str) -> tuple[list[dict[str, float]], Path]:
    await trainer.start()
    try:
        reports = [await trainer.train_step(make_batch(step, step=step)) for step in range(3)]
        assert [report.version for report in reports] == [1, 2, 3]
        await trainer.save_weights(str(folder / name))
        # Checkpoints of one rank count load on two, and back.
        await trainer.save_checkpoint(str(checkpoint_path(folder / f"run-{name}", 3)), {0: [0]})
        assert await trainer.load_checkpoint(str(checkpoint_path(folder / f"run-{name}", 3))) == 3
        published = await trainer.publish(3)
        assert published_file(published.path)
    finally:
        await trainer.stop()
    assert not published_file(published.path)
    return [
        report.metrics | {"tokens": report.tokens, "loss_tokens": report.loss_tokens} for report in reports
    ], folder / name


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_ranks_equal_one(tmp_path: Path, steps: int, shards: int) -> None:
    async def main() -> None:
        one, one_path = await train(client(tmp_path, 1, "one", optimizer_steps_per_batch=steps), tmp_path, "one")
        two, two_path = await train(
            client(tmp_path, 2, "two", optimizer_steps_per_batch=steps, shards=shards), tmp_path, "two"
        )
        for a, b in zip(one, two, strict=True):
            assert a == pytest.approx(b, abs=1e-4, rel=1e-4)
        compare_weights(one_path, two_path)

    asyncio.run(main())


def test_two_ranks_replay_kept_sets_as_one_does(tmp_path: Path) -> None:
    batch = sampled(with_tokenizer(make_model(tmp_path / "model")))

    async def main(ranks: int) -> dict[str, float]:
        trainer = client(tmp_path, ranks, f"kept-{ranks}")
        await trainer.start()
        try:
            return (await trainer.train_step(batch)).metrics
        finally:
            await trainer.stop()

    one, two = asyncio.run(main(1)), asyncio.run(main(2))
    assert one == pytest.approx(two, abs=1e-4, rel=1e-4)
    assert one["mismatch_k3_unreplayed"] > one["mismatch_k3"]
    assert one["kept_ids"] > 1.0 > one["kept_constrained_share"] > 0.0


def test_two_ranks_report_advantages_in_the_order_of_the_batch(tmp_path: Path) -> None:
    batch = rewarded(2, groups=9)

    async def main(ranks: int) -> tuple[float, ...]:
        trainer = client(tmp_path, ranks, f"values-{ranks}", algorithm={"preset": "ppo"})
        await trainer.start()
        try:
            return (await trainer.train_step(batch)).sample_advantages
        finally:
            await trainer.stop()

    one, two = asyncio.run(main(1)), asyncio.run(main(2))
    assert one == pytest.approx(two, abs=1e-4)
    assert len(set(one)) == 9


def test_two_ranks_end_the_updates_of_a_batch_together(tmp_path: Path) -> None:
    async def main() -> None:
        early = {"optimizer_steps_per_batch": 3, "algorithm": {"early_stop_ratio": 1e-6, "loss": "ppo_clip"}}
        one, one_path = await train(client(tmp_path, 1, "one", **early), tmp_path, "one")
        two, two_path = await train(client(tmp_path, 2, "two", **early), tmp_path, "two")
        assert [found["skipped_minibatches"] for found in one] == [found["skipped_minibatches"] for found in two]
        assert all(found["skipped_minibatches"] > 0 for found in one)
        compare_weights(one_path, two_path)

    asyncio.run(main())


def test_two_ranks_train_the_adapter_that_one_does(tmp_path: Path) -> None:
    async def main() -> None:
        model = {"adapter": {"rank": 4, "alpha": 8.0}}
        one, one_path = await train(client(tmp_path, 1, "one", model=model), tmp_path, "one")
        two, two_path = await train(client(tmp_path, 2, "two", model=model), tmp_path, "two")
        for a, b in zip(one, two, strict=True):
            assert a == pytest.approx(b, abs=1e-4, rel=1e-4)
        compare_weights(one_path, two_path, "adapter_model.safetensors")

    asyncio.run(main())


def compare_weights(one: Path, two: Path, pattern: str = "model*.safetensors") -> None:
    from safetensors.numpy import load_file

    a, b = ({k: v for file in path.glob(pattern) for k, v in load_file(file).items()} for path in (one, two))
    assert a
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert abs(values - b[name]).max() < 1e-5, name


@pytest.mark.parametrize("shards", [1, 2])
def test_killed_rank_is_an_error_and_restart_recovers(tmp_path: Path, shards: int) -> None:
    async def main() -> None:
        trainer = client(tmp_path, 2, "killed", shards=shards)
        await trainer.start()
        try:
            await trainer.train_step(make_batch(0))
            path = str(checkpoint_path(tmp_path / "run", 1))
            await trainer.save_checkpoint(path, {0: [0, 1, 2, 3]})
            # Stopped, the rank can't take part in the sum: the other one waits for it until it is killed.
            os.kill(trainer.workers[1].pid, signal.SIGSTOP)
            step = asyncio.ensure_future(trainer.train_step(make_batch(1, step=1)))
            await asyncio.wait([step], timeout=0.5)
            assert not step.done()
            os.kill(trainer.workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="trainer"):
                await step
            await trainer.restart()
            assert await trainer.load_checkpoint(path) == 1
            assert (await trainer.train_step(make_batch(1, step=1))).version == 2
        finally:
            await trainer.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_errors_keep_their_type(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = client(tmp_path, 1, "errors")
        await trainer.start()
        try:
            with pytest.raises(CheckpointCorrupt, match=r"state\.json"):
                await trainer.load_checkpoint(str(tmp_path / "nothing"))
        finally:
            await trainer.stop()
        (tmp_path / "model" / "config.json").unlink()
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            await client(tmp_path, 2, "missing").start()

    asyncio.run(main())
