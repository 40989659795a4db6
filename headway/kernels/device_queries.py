"""The devices of this machine as its drivers list them: NVIDIA's and AMD's GPUs in one schema, and sets of cores."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from headway.kernels.backends import DeviceKind
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.nodes.conditions import parse_gpus

_ANSWER_S = 5.0  # the drivers' programs hang when a GPU has fallen off the bus
_MIB = 1 << 20


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
    """The cores of timed evaluations by default: the upper half of this machine's, each a device of its own."""
    count = len(machine_cores())
    return tuple(f"cpu:{core}" for core in range(count - max(1, count // 2), count))


def core_devices(names: Sequence[str]) -> tuple[KernelDevice, ...]:
    """Sets of cores, cpu:N or cpu:N-M, as devices. Raises ConfigurationError for cores that this machine lacks."""
    for name in names:
        parse_device(name).check()
    try:
        found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return tuple(KernelDevice(name=name, vendor="cpu", model=found[1] if found else "") for name in names)


def query_gpus() -> tuple[KernelDevice, ...] | None:
    """The GPUs that this process may use, through their driver's library or else its program; one that the driver has
    lost isn't among them. None: a driver that is installed doesn't answer. Blocks, for up to some seconds."""
    silent = False
    for driver in _DRIVERS:
        try:
            listed = [*driver.read(importlib.import_module(driver.library))]
        except Exception:  # the boundary to a library of the driver's: whatever it raises, its program may know more
            printed = _printed(driver.program)
            try:
                listed = [*driver.parse(printed)] if printed else []
            except ValueError:
                printed, listed = None, []
            silent |= printed is None
        if listed:
            limits = next((os.environ[name] for name in driver.variables if name in os.environ), None)
            return _visible(listed, limits)
    return None if silent else ()


def _visible(listed: Sequence[KernelDevice], limits: str | None) -> tuple[KernelDevice, ...]:
    """The GPUs under the names that torch has for them. ``limits``: the indices or UUIDs that a process is limited to,
    in the order in which it counts them; None: all."""
    if limits is None:
        return tuple(listed)
    wanted = [part.strip() for part in limits.split(",") if part.strip()]
    return tuple(
        msgspec.structs.replace(gpu, name=f"cuda:{place}")
        for place, part in enumerate(wanted)
        for gpu in listed
        if gpu.name == f"cuda:{part}" or (not part.isdecimal() and gpu.uuid.startswith(part))
    )


def _gpu(vendor: Literal["nvidia", "amd"], index: object, *facts: Any) -> KernelDevice:
    """A GPU; ``facts``: UUID, model, architecture, bytes of memory, those in use, percentage of time in use."""
    uuid, model, architecture, memory_bytes, used_bytes, busy = facts
    return KernelDevice(
        name=f"cuda:{index}",
        vendor=vendor,
        uuid=_text(uuid),
        model=_text(model),
        architecture=architecture,
        memory_bytes=int(memory_bytes),
        memory_used_bytes=int(used_bytes),
        busy_ratio=_number(busy) / 100,
    )


def _nvidia_library(nvml: Any) -> Iterator[KernelDevice]:
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # the GPU is lost
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            memory, busy = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            architecture = "sm_{}{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(gpu))
            named = nvml.nvmlDeviceGetUUID(gpu), nvml.nvmlDeviceGetName(gpu)
            yield _gpu("nvidia", index, *named, architecture, memory.total, memory.used, busy)


def _nvidia_program(printed: str) -> Iterator[KernelDevice]:
    for line in printed.splitlines():
        *named, rest = (cell.strip() for cell in line.split(",", 3))
        for gpu in parse_gpus(rest):
            if gpu.memory_bytes:  # a lost one has none
                uuid, model, capability = named
                facts = f"sm_{capability.replace('.', '')}", gpu.memory_bytes, gpu.memory_used_bytes
                yield _gpu("nvidia", gpu.index, uuid, model, *facts, gpu.busy_ratio * 100)


def _amd_library(smi: Any) -> Iterator[KernelDevice]:
    smi.amdsmi_init()
    for index, gpu in enumerate(smi.amdsmi_get_processor_handles()):
        with suppress(smi.AmdSmiException):  # the GPU is lost
            chip, memory = smi.amdsmi_get_gpu_asic_info(gpu), smi.amdsmi_get_gpu_vram_usage(gpu)
            named = smi.amdsmi_get_gpu_device_uuid(gpu), chip["market_name"], chip["target_graphics_version"]
            used = memory["vram_total"] * _MIB, memory["vram_used"] * _MIB
            yield _gpu("amd", index, *named, *used, smi.amdsmi_get_gpu_activity(gpu)["gfx_activity"])


def _amd_program(printed: str) -> Iterator[KernelDevice]:
    cards: dict[str, dict[str, Any]] = json.loads(printed[printed.index("{") :])
    for card, raw in cards.items():
        facts = {str(key).lower(): value for key, value in raw.items()}  # capitals differ between versions
        named = (str(facts.get(key, "")) for key in ("unique id", "card series", "gfx version"))
        total, used = (_number(facts.get(f"vram total {key} (b)")) for key in ("memory", "used memory"))
        if card.startswith("card") and total:
            yield _gpu("amd", card.removeprefix("card"), *named, total, used, facts.get("gpu use (%)"))


class _Driver(NamedTuple):
    library: str
    read: Callable[[Any], Iterator[KernelDevice]]  # the library
    program: tuple[str, ...]
    parse: Callable[[str], Iterator[KernelDevice]]  # what the program prints
    variables: tuple[str, ...]  # that limit a process to some GPUs


_NVIDIA_SMI = (  # the columns from the index on are those that parse_gpus reads
    "nvidia-smi",
    "--query-gpu=uuid,name,compute_cap,index,utilization.gpu,memory.used,memory.total,"
    "ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader,nounits",
)
_ROCM_SMI = ("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showuse", "--json")
_DRIVERS = (
    _Driver("pynvml", _nvidia_library, _NVIDIA_SMI, _nvidia_program, ("CUDA_VISIBLE_DEVICES",)),
    _Driver("amdsmi", _amd_library, _ROCM_SMI, _amd_program, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
)


def _printed(command: Sequence[str]) -> str | None:
    """The output of a driver's program; "" where it isn't installed, None where it doesn't answer."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # "N/A"
        return 0.0
