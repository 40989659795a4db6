"""The conditions on this machine: how busy its cores and GPUs are, what memory and disk are left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from headway.records.node import GpuConditions, NodeConditions

CONDITIONS_EVERY_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
_GPU_COLUMNS = ("index", "utilization.gpu", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")
_MIB = 1 << 20
_ANSWER_S = 5.0  # a driver's program hangs when a GPU has fallen off the bus


class ConditionsReader:
    """Reads the conditions of this machine; shares of time are those since the last reading."""

    def __init__(self, scratch: Path, name: str = "") -> None:
        self._scratch, self._name = scratch, name
        self._busy_s, self._total_s = _cpu_s()

    def read(self, processes: int = 0) -> NodeConditions:
        """The conditions now; ``processes``: of workers, running. Blocks for up to 5 s where there are GPUs."""
        busy_s, total_s = _cpu_s()
        elapsed_s = total_s - self._total_s
        cpu_ratio = (busy_s - self._busy_s) / elapsed_s if elapsed_s > 0 else 0.0
        self._busy_s, self._total_s = busy_s, total_s
        return NodeConditions(
            name=self._name,
            cpu_ratio=min(1.0, max(0.0, cpu_ratio)),
            memory_free_bytes=(machine_memory() or (0, 0))[1],
            shared_memory_free_bytes=free_bytes(SHARED_MEMORY),
            disk_free_bytes=free_bytes(self._scratch),
            processes=processes,
            gpus=parse_gpus(ask_nvidia_smi() or ""),
        )


def ask_driver(*command: str) -> str | None:
    """The output of a driver's program; "" where it isn't installed, None where it doesn't answer within 5 s."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def ask_nvidia_smi(*columns: str) -> str | None:
    """Rows of nvidia-smi, one a GPU: these ``columns``, then those that `parse_gpus` reads. See `ask_driver`."""
    query = ",".join((*columns, *_GPU_COLUMNS))
    return ask_driver("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")


def parse_gpus(text: str) -> tuple[GpuConditions, ...]:
    """GPUs' conditions from the rows that nvidia-smi prints; a row that it can't fill, as for a lost GPU, is left out,
    a single value that the GPU doesn't have is 0."""
    gpus: list[GpuConditions] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not cells[0].isdecimal():
            continue
        busy, used, total, errors = (float(cell) if cell.replace(".", "", 1).isdecimal() else 0.0 for cell in cells[1:])
        gpus.append(
            GpuConditions(
                index=int(cells[0]),
                busy_ratio=busy / 100,
                memory_used_bytes=int(used * _MIB),
                memory_bytes=int(total * _MIB),
                ecc_errors=int(errors),
            )
        )
    return tuple(gpus)


def free_bytes(folder: Path) -> int:
    """Free space in the file system of ``folder``; 0 where that can't be known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def machine_memory() -> tuple[int, int] | None:
    """Total and available bytes of main memory; a container's limit where that is less. None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    meminfo = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    if "MemTotal" not in meminfo or "MemAvailable" not in meminfo:
        return None
    total_bytes, available_bytes = meminfo["MemTotal"] << 10, meminfo["MemAvailable"] << 10
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_bytes, used_bytes = (_number(Path("/sys/fs/cgroup") / name) for name in (limit_file, used_file))
        if limit_bytes is not None and limit_bytes < total_bytes:
            total_bytes, available_bytes = limit_bytes, min(available_bytes, max(0, limit_bytes - (used_bytes or 0)))
    return total_bytes, available_bytes


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def _cpu_s() -> tuple[float, float]:
    """Seconds that the cores of this machine have worked since it was started, and all their seconds; (0, 0) where that
    can't be read: no descriptor is left, say."""
    try:
        user, nice, system, idle, waiting, irq, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0, 0.0
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    busy_ticks = user + nice + system + irq + soft
    return busy_ticks / ticks_per_s, (busy_ticks + idle + waiting + stolen) / ticks_per_s
