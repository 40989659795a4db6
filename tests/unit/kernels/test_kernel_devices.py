"""Device tables: what drivers list, through their programs; leases, losses, devices set aside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.kernels import device_queries
from headway.kernels.backends import missing_for
from headway.kernels.device_queries import KernelDevice, core_devices, default_core_sets, query_gpus
from headway.kernels.devices import DeviceTable, DeviceUnavailable
from headway.kernels.evaluator import KernelEvaluator
from headway.kernels.isolation import COMPILER
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation
from headway.runtime.nodes import conditions

NVIDIA = """\
GPU-aa, NVIDIA H100 80GB HBM3, 9.0, 0, 37, 1024, 81559, 0
GPU-bb, NVIDIA H100 80GB HBM3, 9.0, 1, [N/A], [N/A], [GPU is lost], [N/A]
GPU-cc, NVIDIA H100 80GB HBM3, 9.0, 2, 0, 0, 81559, 0
"""
AMD = """WARNING: the fan can't be read
{"card0": {"Unique ID": "0x11", "GPU use (%)": "12", "VRAM Total Memory (B)": "206141652992",
 "VRAM Total Used Memory (B)": "297431040", "Card Series": "AMD Instinct MI300X", "GFX Version": "gfx942"},
 "card1": {"Unique ID": "0x22", "GPU use (%)": "N/A", "VRAM Total Memory (B)": "206141652992",
 "VRAM Total Used Memory (B)": "0", "Card series": "AMD Instinct MI300X", "GFX Version": "gfx942"},
 "system": {"Driver version": "6.8"}}
"""
H100 = KernelDevice(name="cuda:0", vendor="nvidia", model="NVIDIA H100 80GB HBM3", architecture="sm_90")


@pytest.fixture(autouse=True)
def no_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for fake programs: the only one of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def program(folder: Path, name: str, text: str, exit_code: int = 0) -> None:
    (folder / f"{name}.txt").write_text(text)
    (folder / name).write_text(f"#!/bin/sh\n/bin/cat '{folder / name}.txt'\nexit {exit_code}\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_drivers_has_no_gpu() -> None:
    assert query_gpus() == ()


def test_nvidia_smi_lists_gpus_without_the_lost_one(no_drivers: Path) -> None:
    program(no_drivers, "nvidia-smi", NVIDIA)
    found = query_gpus()
    assert found is not None
    assert found[0] == KernelDevice(
        name="cuda:0",
        vendor="nvidia",
        uuid="GPU-aa",
        model="NVIDIA H100 80GB HBM3",
        architecture="sm_90",
        memory_bytes=81559 << 20,
        memory_used_bytes=1 << 30,
        busy_ratio=0.37,
    )
    assert [one.name for one in found] == ["cuda:0", "cuda:2"]


def test_rocm_smi_lists_gpus_in_the_same_schema(no_drivers: Path) -> None:
    program(no_drivers, "rocm-smi", AMD)
    found = query_gpus()
    assert found is not None
    assert found[0] == KernelDevice(
        name="cuda:0",
        vendor="amd",
        uuid="0x11",
        model="AMD Instinct MI300X",
        architecture="gfx942",
        memory_bytes=206141652992,
        memory_used_bytes=297431040,
        busy_ratio=0.12,
    )
    assert [(one.name, one.model) for one in found] == [(f"cuda:{n}", "AMD Instinct MI300X") for n in (0, 1)]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [("2,0", ["GPU-cc", "GPU-aa"]), ("GPU-cc", ["GPU-cc"]), ("", []), ("1", [])],
)
def test_gpus_are_named_as_the_process_counts_them(
    no_drivers: Path, monkeypatch: pytest.MonkeyPatch, visible: str, uuids: list[str]
) -> None:
    program(no_drivers, "nvidia-smi", NVIDIA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = query_gpus()
    assert found is not None
    assert [one.uuid for one in found] == uuids
    assert [one.name for one in found] == [f"cuda:{place}" for place in range(len(uuids))]


def test_a_driver_that_hangs_says_nothing(no_drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_drivers / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (no_drivers / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(conditions, "_ANSWER_S", 0.2)
    assert query_gpus() is None


def test_an_evaluator_names_its_cores_as_this_process_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.devices._MACHINE_CORES", (2, 5, 6))

    evaluator = KernelEvaluator(state=tmp_path)
    assert evaluator._devices.names() == ("cpu:2",)  # pyright: ignore


def test_cores_are_named_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queries, "machine_cores", lambda: tuple(range(10, 17)))
    assert default_core_sets() == ("cpu:4", "cpu:5", "cpu:6")
    monkeypatch.setattr(device_queries, "machine_cores", lambda: (3,))
    assert default_core_sets() == ("cpu:0",)
    with pytest.raises(ConfigurationError, match="this machine has"):
        core_devices(("cpu:4096",))


class Setting:
    """A table over GPUs that a test takes away and gives back."""

    def __init__(self, gpus: int = 2, memory_faults: int = 3) -> None:
        self.gpus: list[KernelDevice] | None = [named(index) for index in range(gpus)]
        self.events: list[str] = []
        cores = [KernelDevice(name="cpu:1", vendor="cpu")]
        self.table = DeviceTable(cores, lambda: self.gpus, lambda name, _: self.events.append(name), memory_faults)
        asyncio.run(self.table.refresh())

    def states(self) -> list[str]:
        return [one["state"] for one in self.table.describe()]


def named(index: int) -> KernelDevice:
    return KernelDevice(name=f"cuda:{index}", vendor="nvidia")


def test_a_device_has_one_holder() -> None:
    setting = Setting()
    with setting.table.lease("gpu", "cuda:1") as first, setting.table.lease("gpu", "cuda:1") as second:
        assert (first, second) == ("cuda:1", "cuda:0")
        assert setting.states() == ["leased", "leased", "free"]
        with pytest.raises(DeviceUnavailable, match="cuda:0 is leased, cuda:1 is leased"), setting.table.lease("gpu"):
            pass
    assert setting.states() == ["free", "free", "free"]


def test_a_lost_gpu_keeps_its_place_and_returns() -> None:
    setting = Setting()
    setting.gpus = [named(1)]
    asyncio.run(setting.table.refresh())
    assert setting.states() == ["lost", "free", "free"]
    assert setting.table.usable("gpu") == 1
    with setting.table.lease("gpu", "cuda:0") as name:
        assert name == "cuda:1"
    setting.gpus = None  # the driver says nothing: nothing is concluded
    asyncio.run(setting.table.refresh())
    assert setting.states() == ["lost", "free", "free"]
    setting.gpus = [named(0), named(1)]
    asyncio.run(setting.table.refresh())
    assert setting.states() == ["free", "free", "free"]
    assert setting.events == ["device_lost", "devices_unknown", "device_returned"]


def test_memory_faults_in_a_row_set_a_gpu_aside_until_its_reset() -> None:
    setting = Setting()
    fault, right = KernelEvaluation(fault="illegal_memory_access"), KernelEvaluation(compiled=True)
    for evaluation in (fault, fault, right, fault, fault):
        setting.table.note("cuda:0", evaluation)
    assert setting.states() == ["free", "free", "free"]
    setting.table.note("cuda:0", KernelEvaluation(fault="memory_fault"))
    assert setting.states() == ["set_aside", "free", "free"]
    assert setting.table.describe()[0]["faults"] == {"illegal_memory_access": 4, "memory_fault": 1}
    assert setting.table.reset(("cuda:0",)) == ["cuda:0", "cuda:1", "cpu:1"]
    assert setting.table.describe()[0]["faults"] == {}
    for _ in range(5):
        setting.table.note("cpu:1", fault)  # a process's fault ends with it
    assert setting.states() == ["free", "free", "free"]


def test_cpp_needs_the_compiler_that_evaluators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    assert "there is no g++" in missing_for("cpp", gpus=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert missing_for("cpp", gpus=False) == ""
    assert COMPILER[0] == "g++"
