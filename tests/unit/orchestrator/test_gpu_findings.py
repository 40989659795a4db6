"""`check` names what is wrong with GPUs and what they would be idle of, by a machine's facts."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config.auto import Gpu, Machine, resolve
from headway.config.load import validate_experiment
from headway.orchestrator.preflight import devices
from headway.orchestrator.preflight.devices import device_findings
from headway.orchestrator.preflight.engine import engine_findings

BARE: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
FACTS: dict[str, Any] = {"driver": "580.65.06", "torch_cuda": "13.0"}


def cards(count: int, **facts: Any) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=n, name="H100", memory_bytes=80 << 30, free_bytes=80 << 30, **facts) for n in range(count))


def find(machine: Machine, **sections: dict[str, Any]) -> dict[str, str]:
    experiment = validate_experiment(BARE | sections, "test")
    return {f"{found.level} {found.key}": found.message for found in device_findings(experiment, machine)}


def on(generator: list[str], trainer: list[str], **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"generator": {"devices": generator}, "trainer": {"devices": trainer}} | sections


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.devices.cuda_device_count", lambda: 8)
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 8)


def test_resolved_devices_leave_nothing_to_say() -> None:
    for count in (1, 2, 8):
        machine = Machine(gpus=cards(count), **FACTS)
        assert device_findings(validate_experiment(resolve(BARE, machine), "test"), machine) == []


def test_idle_gpus_and_the_key_that_would_use_them() -> None:
    machine = Machine(gpus=cards(4), **FACTS)
    message = find(machine, **on(["cuda:0"], ["cuda:1"]))["warning generator.devices"]
    assert message == (
        'cuda:2, cuda:3 of this machine would be idle; generator.devices = ["cuda:0", "cuda:2", "cuda:3"] uses all'
    )
    on_cores = find(machine, **on(["cpu:0"], ["cpu:0"]))["warning generator.devices"]
    assert 'generator.devices and trainer.devices = "auto" uses all' in on_cores
    busy = Machine(gpus=(*cards(2), *(Gpu(index=n, name="H100", memory_bytes=1, free_bytes=1, users="process 7")
                                      for n in (2, 3))), **FACTS)  # fmt: skip
    assert find(busy, **on(["cuda:0"], ["cuda:1"])) == {
        "info generator.devices": "left out, because others use them: cuda:2 (process 7), cuda:3 (process 7)"
    }
    ranks = on(["cuda:0"], ["cuda:2"])
    ranks["generator"] |= {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": 2}}
    assert find(machine, **ranks) == {}  # one GPU alone can't hold a further replica
    ranks["trainer"]["devices"] = ["cuda:3"]
    six = Machine(gpus=cards(6), **FACTS)
    assert find(six, **ranks)["warning generator.devices"] == (
        'cuda:4, cuda:5 of this machine would be idle; generator.devices = ["cuda:0", "cuda:4"] uses all'
    )  # cuda:2 has no neighbour
    servers = on(["http://h:1"], ["cuda:0"])
    servers["generator"]["engine"] = "vllm-server"
    assert find(machine, **servers) == {}  # devices can't stand beside addresses


def test_gpus_in_use_by_others() -> None:
    machine = Machine(gpus=cards(2, users="process 7 of alice"), **FACTS)
    found = find(machine, **on(["cuda:0"], ["cuda:1"]))
    assert found["warning trainer.devices"] == "cuda:1 (H100) is in use by others: process 7 of alice"


def test_a_card_without_bfloat16() -> None:
    machine = Machine(gpus=cards(2, bfloat16=False), **FACTS)
    found = find(machine, **on(["cuda:0"], ["cuda:1"], model={"path": "m", "dtype": "bfloat16"}))
    assert found.keys() == {"error generator.dtype", "error trainer.dtype"}
    assert "cuda:1 (H100) can't multiply it" in found["error trainer.dtype"]
    assert "valid: float32" in found["error trainer.dtype"]


@pytest.mark.parametrize(("driver", "cuda", "refused"), [
    ("575.1", "13.0", True), ("580.65.06", "13.0", False), ("524.9", "12.8", True), ("535.1", "12.8", False),
    ("[N/A]", "13.0", False), ("580.1", "14.0", False),
])  # fmt: skip
def test_a_driver_that_is_too_old(driver: str, cuda: str, refused: bool) -> None:
    found = find(Machine(gpus=cards(2), driver=driver, torch_cuda=cuda), **on(["cuda:0"], ["cuda:1"]))
    assert ("error generator.devices" in found) is refused
    if refused:
        assert f"the driver, {driver}, is too old for torch's CUDA {cuda}" in found["error generator.devices"]


def test_a_torch_for_cpus() -> None:
    found = find(Machine(gpus=cards(2), driver="580.1"), **on(["cuda:0"], ["cuda:1"]))
    assert "torch is a build for CPUs" in found["error generator.devices"]
    on_cores = find(Machine(gpus=cards(2), driver="580.1"), **on(["cpu:0"], ["cpu:0"]))
    assert on_cores == {"warning generator.devices": found["error generator.devices"]}
    hidden = Machine(gpus=cards(2), driver="580.1", torch_cuda="13.0", visible="")
    assert find(hidden, **on(["cpu:0"], ["cpu:0"])) == {}


def test_slices_of_a_gpu_are_named() -> None:
    machine = Machine(gpus=cards(1), visible="MIG-7f3a", **FACTS)
    assert "slices of a GPU (MIG)" in find(machine, **on(["cpu:0"], ["cpu:0"]))["warning generator.devices"]
    assert find(machine, **on(["cuda:0"], ["cuda:1"])) == {}


def test_devices_that_a_described_machine_has_not() -> None:
    described = Machine(gpus=cards(2), torch_cuda="any", described="pool.toml")
    found = find(described, **on(["cuda:0"], ["cuda:2"]))
    assert found["error trainer.devices"] == "device cuda:2: pool.toml describes 2 GPU(s)"


def test_a_driver_that_lists_nothing() -> None:
    assert (
        "doesn't list this machine's GPUs" in find(Machine(), **on(["cpu:0"], ["cpu:0"]))["warning generator.devices"]
    )


def test_vllm_of_another_version_or_none() -> None:
    experiment = validate_experiment(BARE | on(["cuda:0"], ["cuda:1"]) | {
        "generator": {"engine": "vllm", "devices": ["cuda:0"]}}, "test")  # fmt: skip
    [missing] = engine_findings(experiment, None, Machine(gpus=cards(2), **FACTS))
    assert "vLLM is not installed; on a CPU: pip install" in missing.message
    other = engine_findings(experiment, None, Machine(gpus=cards(2), vllm="0.26.0", **FACTS))
    assert "version 0.26.0 is installed, and Headway works with 0.32.x" in other[-1].message
    assert engine_findings(experiment, None, Machine(gpus=cards(2), vllm="0.32.0", described="p.toml", **FACTS)) == []
