"""A trainer off its device for a while: its memory is free, and the next step is the one it would have taken."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import lay_out
from headway.config.load import validate_experiment
from headway.models import offload as offload_module
from headway.models.configuration import DecoderConfig
from headway.models.loading import build as build_model
from headway.models.loading import save_model
from headway.models.offload import PREFIX, OffloadedTensors
from headway.records.errors import StorageFailed
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.trainer.client import TrainerClient
from headway.trainer.service import TrainerService

torch.set_num_threads(1)
ADAPTER = {"model": {"adapter": {"rank": 4, "alpha": 8.0}}}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"untied": True},
    "adapter": ADAPTER,
    "bfloat16": {"trainer": {"dtype": "bfloat16"}},
    "plain torch": {"native": False},
    "reference": {"algorithm": {"kl_coefficient": 0.1}},
}
Build = Callable[..., TrainerService]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    def made(untied: bool = False, native: bool = True, **sections: Any) -> TrainerService:
        monkeypatch.setenv("HEADWAY_NATIVE_KERNELS", "1" if native else "0")
        model = tmp_path / f"model-{untied}"
        if not model.exists():
            make_model(model)
            if untied:
                config = DecoderConfig.from_pretrained(model)
                torch.manual_seed(0)
                other = build_model(dataclasses.replace(config, tied=False))
                for parameter in other.parameters():
                    if parameter.ndim > 1:
                        torch.nn.init.normal_(parameter, std=0.15)
                save_model(other, model)
        (tmp_path / "run").mkdir(exist_ok=True)
        sections["trainer"] = {"learning_rate": 1e-2} | sections.get("trainer", {})
        sections["model"] = {"path": str(model)} | sections.get("model", {})
        return TrainerService(
            Context, experiment=make_experiment(str(model), tmp_path / "run", **sections), run_id="offload"
        )

    return made


def step(trainer: TrainerService, number: int) -> None:
    trainer.train_step(lay_out(make_batch(number, step=number)))


def state_of(trainer: TrainerService) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in trainer.learner.resident()]


def leave_and_return(trainer: TrainerService) -> None:
    before = [id(parameter) for parameter in trainer.learner.parameters]
    expected = state_of(trainer)
    assert trainer.offload().moved_bytes > 0
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in trainer.learner.resident())
    assert trainer.offload().moved_bytes == 0  # it is away
    trainer.onload()
    assert [id(parameter) for parameter in trainer.learner.parameters] == before
    assert all(torch.equal(one, other) for one, other in zip(expected, state_of(trainer), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_is_the_same_bit_for_bit(build: Build, kind: str) -> None:
    stayed, left = build(**KINDS[kind]), build(**KINDS[kind])
    for trainer in (stayed, left):
        for number in range(4):
            if trainer is left:
                leave_and_return(trainer)
            step(trainer, number)
    assert all(torch.equal(one, other) for one, other in zip(state_of(stayed), state_of(left), strict=True))


def test_accumulated_parts_survive(build: Build) -> None:
    stayed, left = build(), build()
    for trainer in (stayed, left):
        for seed in (1, 2):
            trainer.forward_backward(lay_out(make_batch(seed)))
            if trainer is left:
                assert trainer.learner.parameters[0].grad is not None
                leave_and_return(trainer)
        trainer.optim_step()
    assert all(torch.equal(one, other) for one, other in zip(state_of(stayed), state_of(left), strict=True))


def test_a_full_disk_changes_nothing(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build()
    step(trainer, 0)
    before = state_of(trainer)
    trainer._offloaded = OffloadedTensors("/dev/full/no-folder")
    with pytest.raises(StorageFailed, match=r"offloading .* MB to /dev/full.*stays in memory"):
        trainer.offload()
    trainer._offloaded = OffloadedTensors(tmp_path)
    whole = offload_module._view

    def full(storage: torch.UntypedStorage) -> Any:
        if full.calls:  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        full.calls = 1  # type: ignore[attr-defined]
        return whole(storage)

    full.calls = 0  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(offload_module, "_view", full)
        with pytest.raises(StorageFailed, match="No space left"):
            trainer.offload()
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(trainer), strict=True))
    step(trainer, 1)


def test_views_and_memory_of_others_keep_their_meaning(tmp_path: Path) -> None:
    array = torch.arange(64.0)
    borrowed = torch.frombuffer(bytearray(array.numpy().tobytes()), dtype=torch.float32)
    own = torch.arange(32.0)
    views = [own, own[4:8], borrowed, borrowed[3:]]
    expected = [view.clone() for view in views]
    moved = OffloadedTensors(tmp_path)
    assert moved.offload(views).moved_bytes == 4 * (64 + 32)  # each storage once
    assert moved.offloaded
    moved.onload()
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    assert all(torch.equal(one, other) for one, other in zip(expected, views, strict=True))
    views[1].fill_(-1.0)
    views[3].fill_(-1.0)
    assert own[4] == -1.0  # still one memory
    assert borrowed[3] == -1.0


@pytest.mark.real
def test_a_ranks_memory_falls_by_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resident memory, shared memory included, of a rank's process, as the kernel counts it."""
    model = make_model(tmp_path / "model", width=320, layers=6, vocabulary=2048)
    (tmp_path / "run").mkdir()
    experiment = validate_experiment(make_experiment(model, tmp_path / "run"), "test")

    async def main() -> None:
        trainer = TrainerClient(LocalLauncher(RealClock()), experiment, "memory")
        await trainer.start()
        try:
            (pid,) = [worker.pid for worker in trainer.workers]
            await trainer.train_step(make_batch(0))
            await trainer.forward_backward(make_batch(1, step=1))  # there are gradients
            parameters = sum(
                one.numel() for one in build_model(DecoderConfig.from_pretrained(model)).parameters()
            )  # tied weights once
            before = resident_bytes(pid)
            (away,) = await trainer.offload()
            fell = before - resident_bytes(pid)
            (back,) = await trainer.onload()
            with capsys.disabled():
                speed = [move.moved_bytes / move.seconds / 1e6 for move in (away, back)]
                print(f"\n{parameters} parameters: fell {fell / 16 / parameters:.3f} x 16 P, MB/s {speed}")
            assert fell >= 0.8 * 16 * parameters
            assert away.freed_bytes >= 0.8 * 16 * parameters
            assert (await trainer.optim_step()).version == 2
        finally:
            await trainer.stop()

    asyncio.run(main())


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
