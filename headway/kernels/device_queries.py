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
    count = len(machine_cores())
    return tuple(f"cpu:{core}" for core in range(count - max(1, count // 2), count))


def core_devices(names: Sequence[str]) -> tuple[KernelDevice, ...]:
    """Devices for sets of cores, cpu:N or cpu:N-M. Raises ConfigurationError for cores that this machine lacks."""
    for name in names:
        parse_device(name).check()
    try:
        model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return tuple(KernelDevice(name=name, vendor="cpu", model=model[1] if model else "") for name in names)


def query_gpus() -> tuple[KernelDevice, ...] | None:
    """The GPUs that this process may use, as their driver's program lists them, without GPUs that the driver has lost.
    None: an installed driver doesn't answer. Blocks for up to some seconds."""
    silent = False
    for driver in _DRIVERS:
        printed = driver.ask()
        try:
            listed = [*driver.parse(printed)] if printed else []
        except ValueError:
            printed, listed = None, []
        if listed:
            limits = next((os.environ[name] for name in driver.variables if name in os.environ), None)
            return _visible(listed, limits)
        silent |= printed is None
    return None if silent else ()


def _visible(listed: Sequence[KernelDevice], limits: str | None) -> tuple[KernelDevice, ...]:
    """The GPUs under torch's names for them. ``limits``: comma-separated indices or UUIDs, in torch's order, to which
    the process is limited; None: all GPUs."""
    if limits is None:
        return tuple(listed)
    visible = [part.strip() for part in limits.split(",") if part.strip()]
    return tuple(
        msgspec.structs.replace(gpu, name=f"cuda:{index}")
        for index, part in enumerate(visible)
        for gpu in listed
        if gpu.name == f"cuda:{part}" or (not part.isdecimal() and gpu.uuid.startswith(part))
    )


def _gpu(vendor: Literal["nvidia", "amd"], index: object, *facts: Any) -> KernelDevice:
    """A GPU; ``facts``: UUID, model, architecture, bytes of memory, those in use, percentage of time in use."""
    uuid, model, architecture, memory_bytes, used_bytes, busy = facts
    return KernelDevice(
        name=f"cuda:{index}",
        vendor=vendor,
        uuid=uuid,
        model=model,
        architecture=architecture,
        memory_bytes=int(memory_bytes),
        memory_used_bytes=int(used_bytes),
        busy_ratio=_number(busy) / 100,
    )


def _nvidia_program(printed: str) -> Iterator[KernelDevice]:
    for line in printed.splitlines():
        *named, rest = (cell.strip() for cell in line.split(",", 3))
        for gpu in parse_gpus(rest):
            if gpu.memory_bytes:  # a lost one has none
                uuid, model, capability = named
                facts = f"sm_{capability.replace('.', '')}", gpu.memory_bytes, gpu.memory_used_bytes
                yield _gpu("nvidia", gpu.index, uuid, model, *facts, gpu.busy_ratio * 100)


def _amd_program(printed: str) -> Iterator[KernelDevice]:
    cards: dict[str, dict[str, Any]] = json.loads(printed[printed.index("{") :])
    for card, raw in cards.items():
        facts = {str(key).lower(): value for key, value in raw.items()}  # capitals differ between versions
        named = (str(facts.get(key, "")) for key in ("unique id", "card series", "gfx version"))
        total, used = (_number(facts.get(f"vram total {key} (b)")) for key in ("memory", "used memory"))
        if card.startswith("card") and total:
            yield _gpu("amd", card.removeprefix("card"), *named, total, used, facts.get("gpu use (%)"))


class _Driver(NamedTuple):
    ask: Callable[[], str | None]
    parse: Callable[[str], Iterator[KernelDevice]]
    variables: tuple[str, ...]  # that limit a process to some GPUs


_ROCM_SMI = ("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showuse", "--json")
_DRIVERS = (
    _Driver(lambda: ask_nvidia_smi("uuid", "name", "compute_cap"), _nvidia_program, ("CUDA_VISIBLE_DEVICES",)),
    _Driver(lambda: ask_driver(*_ROCM_SMI), _amd_program, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # "N/A"
        return 0.0
