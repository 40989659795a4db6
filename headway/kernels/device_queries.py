"""The devices of this machine as its drivers list them: NVIDIA and AMD GPUs in one schema, and sets of cores."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from headway.kernels.backends import DeviceKind
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.nodes.conditions import ask_driver, ask_nvidia_smi, parse_gpus


class KernelDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that evaluates kernels: a GPU, or a set of cores."""

    name: str  # cuda:0, AMD's too, as torch has it; cpu:2-3
    vendor: Literal["cpu", "nvidia", "amd"]
    uuid: str = ""
    model: str = ""
    architecture: str = ""  # sm_90, gfx942
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    busy_ratio: float = 0.0  # share of the last second in which a GPU computed

    @property
    def kind(self) -> DeviceKind:
        return "cpu" if self.vendor == "cpu" else "gpu"


def default_core_sets() -> tuple[str, ...]:
    """The default cores of timed evaluations: the upper half of this machine's cores, each a separate device."""
    core_count = len(machine_cores())
    return tuple(f"cpu:{core}" for core in range(core_count - max(1, core_count // 2), core_count))


def core_devices(names: Sequence[str]) -> tuple[KernelDevice, ...]:
    """Devices for sets of cores, cpu:N or cpu:N-M. Raises ConfigurationError for cores that this machine lacks."""
    for name in names:
        parse_device(name).check()
    try:
        model_match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model_match = None
    return tuple(KernelDevice(name=name, vendor="cpu", model=model_match[1] if model_match else "") for name in names)


def query_gpus() -> tuple[KernelDevice, ...] | None:
    """The GPUs that this process may use, as their driver's program lists them, without GPUs that the driver has lost.
    None: an installed driver doesn't answer. Blocks for up to some seconds."""
    any_silent = False
    for driver in _DRIVERS:
        printed_text = driver.ask()
        try:
            gpus = [*driver.parse(printed_text)] if printed_text else []
        except ValueError:
            printed_text, gpus = None, []
        if gpus:
            visible_ids_text = next((os.environ[name] for name in driver.variables if name in os.environ), None)
            return _visible(gpus, visible_ids_text)
        any_silent |= printed_text is None
    return None if any_silent else ()


def _visible(listed: Sequence[KernelDevice], limits: str | None) -> tuple[KernelDevice, ...]:
    """The GPUs under torch's names for them. ``limits``: comma-separated indices or UUIDs, in torch's order, to which
    the process is limited; None: all GPUs."""
    if limits is None:
        return tuple(listed)
    visible_ids = [gpu_id.strip() for gpu_id in limits.split(",") if gpu_id.strip()]
    return tuple(
        msgspec.structs.replace(gpu, name=f"cuda:{index}")
        for index, gpu_id in enumerate(visible_ids)
        for gpu in listed
        if gpu.name == f"cuda:{gpu_id}" or (not gpu_id.isdecimal() and gpu.uuid.startswith(gpu_id))
    )


def _gpu(vendor: Literal["nvidia", "amd"], index: object, *facts: Any) -> KernelDevice:
    """A GPU; ``facts``: UUID, model, architecture, bytes of memory, those in use, percentage of time in use."""
    uuid, model, architecture, memory_bytes, used_bytes, busy_percent = facts
    return KernelDevice(
        name=f"cuda:{index}",
        vendor=vendor,
        uuid=uuid,
        model=model,
        architecture=architecture,
        memory_bytes=int(memory_bytes),
        memory_used_bytes=int(used_bytes),
        busy_ratio=_number(busy_percent) / 100,
    )


def _parse_nvidia_smi(printed: str) -> Iterator[KernelDevice]:
    for line in printed.splitlines():
        *id_cells, memory_cells = (cell.strip() for cell in line.split(",", 3))
        for gpu in parse_gpus(memory_cells):
            if gpu.memory_bytes:  # a lost one has none
                uuid, model, capability = id_cells
                facts = f"sm_{capability.replace('.', '')}", gpu.memory_bytes, gpu.memory_used_bytes
                yield _gpu("nvidia", gpu.index, uuid, model, *facts, gpu.busy_ratio * 100)


def _parse_rocm_smi(printed: str) -> Iterator[KernelDevice]:
    cards: dict[str, dict[str, Any]] = json.loads(printed[printed.index("{") :])
    for card, raw_facts in cards.items():
        facts = {str(key).lower(): value for key, value in raw_facts.items()}  # capitals differ between versions
        id_texts = (str(facts.get(key, "")) for key in ("unique id", "card series", "gfx version"))
        total_bytes, used_bytes = (_number(facts.get(f"vram total {key} (b)")) for key in ("memory", "used memory"))
        if card.startswith("card") and total_bytes:
            yield _gpu("amd", card.removeprefix("card"), *id_texts, total_bytes, used_bytes, facts.get("gpu use (%)"))


class _Driver(NamedTuple):
    ask: Callable[[], str | None]
    parse: Callable[[str], Iterator[KernelDevice]]
    variables: tuple[str, ...]  # that limit a process to some GPUs


_ROCM_SMI = ("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showuse", "--json")
_DRIVERS = (
    _Driver(lambda: ask_nvidia_smi("uuid", "name", "compute_cap"), _parse_nvidia_smi, ("CUDA_VISIBLE_DEVICES",)),
    _Driver(lambda: ask_driver(*_ROCM_SMI), _parse_rocm_smi, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # "N/A"
        return 0.0
