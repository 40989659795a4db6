"""Where a trainer's versions lie, on a stand-in of a GPU, and what happens where its memory ends outside of a pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from device_stand_in import SharedDevice
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import lay_out
from headway.config.load import validate_experiment
from headway.records.errors import OutOfDeviceMemory
from headway.records.generation import PublishedWeights
from headway.trainer.client import TrainerClient
from headway.trainer.service import TrainerService
from headway.weights.device_memory import CudaMemory
from headway.weights.shared_memory import Subscriber

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedDevice:
    """The memory of cuda:0; cuda:1 reads it, cuda:2 has no access to it."""
    stand_in = SharedDevice(tmp_path)
    monkeypatch.setattr(CudaMemory, "of", lambda device: stand_in)
    monkeypatch.setattr(CudaMemory, "reaches", lambda reader, owner: reader != "cuda:2")
    return stand_in


@pytest.fixture
def make(model: str, tmp_path: Path) -> Callable[..., TrainerService]:
    def build(devices: list[str], *, exports_weights: bool = True, **sections: Any) -> TrainerService:
        sections = {"generator": {"devices": devices}, "trainer": {"devices": ["cuda:0"]}} | sections
        raw = make_experiment(model, tmp_path / "run", **sections)
        return TrainerService(Context, experiment=raw, run_id=tmp_path.name, exports_weights=exports_weights)

    return build


@pytest.mark.parametrize(("devices", "exports_weights", "transport"), [
    (["cuda:0", "cuda:1"], True, "cuda ipc"),
    (["cuda:0", "cuda:1"], False, "shared memory"),
    (["cuda:1", "cuda:2"], True, "shared memory"),
])  # fmt: skip
def test_versions_stay_on_the_gpu_where_there_is_space_and_all_replicas_read_it(
    make: Any, memory: SharedDevice, devices: list[str], exports_weights: bool, transport: str
) -> None:
    trainer = make(devices, exports_weights=exports_weights)
    published: PublishedWeights = trainer.publish(0)
    assert published.transport == transport
    fetched = Subscriber(memory).fetch(published)
    assert all(torch.equal(tensor, fetched[name]) for name, tensor in trainer.learner.weights().items())
    trainer.close()


def test_an_export_that_finds_no_memory_goes_through_the_host_and_the_log_says_so(
    make: Any, memory: SharedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(["cuda:1"])
    first: PublishedWeights = trainer.publish(0)
    memory.capacity_bytes = 1.5 * memory.used_bytes
    with caplog.at_level(logging.WARNING):
        transports = [first.transport, *(trainer.publish(version).transport for version in (1, 2))]
    assert transports == ["cuda ipc", "shared memory", "shared memory"]
    assert caplog.messages == ["no memory for version 1 on the GPU: weights go through the host from now on"]
    trainer.close()


@pytest.mark.parametrize("offload", [False, True])
def test_sides_that_take_turns_need_no_snapshot(make: Any, memory: SharedDevice, offload: bool) -> None:
    trainer = make(["cuda:0"], exports_weights=False, run={"offload": offload})
    begun = trainer._begin(0)
    assert bool(memory.used_bytes) is not offload
    trainer._finish(begun)
    assert memory.used_bytes == 0
    assert len(memory.pinned) == 1
    trainer.close()


def test_an_optimiser_without_memory_changes_nothing(make: Any) -> None:
    trainer, other = make(["cpu:0"]), make(["cpu:0"])
    made, state_of = list[torch.Tensor](), trainer.learner.optimiser._state_of
    weights = [parameter.detach().clone() for parameter in trainer.learner.parameters]

    def short(parameter: torch.Tensor) -> Any:
        made.append(parameter)
        if len(made) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        return state_of(parameter)

    def unchanged() -> bool:
        return all(map(torch.equal, trainer.learner.parameters, weights)) and trainer.version == 0

    trainer.learner.optimiser._state_of = short
    with pytest.raises(OutOfDeviceMemory, match=r"optimiser .*\(CUDA out of memory\); valid: model.adapter"):
        trainer.train_step(lay_out(make_batch(1)))
    assert unchanged()
    made.clear()
    trainer.forward_backward(lay_out(make_batch(1)))
    with pytest.raises(OutOfDeviceMemory):
        trainer.optim_step()
    assert unchanged()
    for each in (trainer, other):
        each.train_step(lay_out(make_batch(1)))
    assert all(map(torch.equal, trainer.learner.parameters, other.learner.parameters))


def test_a_publication_without_memory_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer = make(["cpu:0"])
    monkeypatch.setattr(trainer.learner, "weights", short)
    for publish in (trainer.publish, trainer.begin_publish):
        with pytest.raises(OutOfDeviceMemory, match="published weights don't fit"):
            publish(0)


def test_a_trainer_that_moved_exports_nothing(model: str) -> None:
    raw = make_experiment(model, Path("/nowhere"))
    client = TrainerClient(cast(Any, None), validate_experiment(raw, "t"), "run", exports_weights=True)
    assert client._spec(0, "cuda:0").arguments["exports_weights"] is True
    client.set_devices(("cuda:1",))
    assert client._spec(0, "cuda:1").arguments["exports_weights"] is False
