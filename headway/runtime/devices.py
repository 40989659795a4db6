"""Devices by name: ``cuda:N``, pinned cores of a CPU (``cpu:0``, ``cpu:0-1``), on another machine of the run
``NODE/cuda:N``; or a server's ``http://HOST:PORT``.

A CPU device is a set of cores with as many threads as cores, so that placement and contention are real
on a laptop: two threads beside another busy process on the same cores lose most of their speed. Core
indices count the cores this process may use, in ascending order, so that ``cpu:0`` exists under
``taskset`` and in a container too. Where the device is a server, its worker only sends requests, on any free core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.records.errors import ConfigurationError

VALID = "valid: cuda:N, cpu:N or cpu:N-M, each also as NODE/...; or a count on the cluster's nodes, N*cuda or N*cpu"
SERVER = "http://"  # what a server's address begins with

# Read at import: a process that pins itself later still assigns all cores it was started with.
_MACHINE_CORES: tuple[int, ...] = tuple(sorted(os.sched_getaffinity(0)))

# First touch of fresh memory is slow under virtualisation; these keep freed blocks inside the process.
ALLOCATOR_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# A thread that spins for long at a barrier while another process holds its partner's core costs a factor of 5 to 10;
# one that never spins costs a third on an idle machine. So: spin for a few microseconds, then sleep.
WAIT_ENVIRONMENT = {"GOMP_SPINCOUNT": "3000"}


def machine_cores() -> tuple[int, ...]:
    """Ids of the cores this process was started with, ascending."""
    return _MACHINE_CORES


def every_core() -> str:
    """The device of all cores of this machine: for workers that aren't pinned to some."""
    return f"cpu:0-{len(_MACHINE_CORES) - 1}"


def every_core_round_robin(nodes: Sequence[str], index: int) -> str:
    """The device of all cores of the machine on which worker ``index`` runs: this one, or ``nodes`` in turn."""
    node = nodes[index % len(nodes)] if nodes else ""
    return f"{node}/cpu:all" if node else every_core()


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a worker: CPU cores, a GPU, or a server."""

    kind: Literal["cpu", "cuda", "server"]
    first: int  # first core index, or the GPU's index; -1: a server
    last: int  # last core index (== first for one core and for a GPU)
    address: str = ""  # of a server: http://HOST:PORT
    node: str = ""  # of the run; empty: this machine

    def __str__(self) -> str:
        if self.kind == "server":
            return self.address
        prefix = f"{self.node}/" if self.node else ""
        return prefix + self.on_node

    @property
    def on_node(self) -> str:
        """Its name on its own machine."""
        return f"{self.kind}:{self.first}" if self.first == self.last else f"{self.kind}:{self.first}-{self.last}"

    @property
    def threads(self) -> int | None:
        """Compute threads: one per pinned core; None for a GPU (the library's default); a server's worker has one."""
        return None if self.kind == "cuda" else self.last - self.first + 1

    def check(self) -> None:
        """Raise ConfigurationError, with what is available, unless this machine has the device. Those of nodes are
        checked there."""
        if self.node:
            return
        if self.kind != "cuda":
            self.core_ids()
            return
        gpu_count = cuda_device_count()
        if gpu_count is not None and self.first >= gpu_count:
            raise ConfigurationError(f"device {self}: {_available_gpus(gpu_count)}")

    def core_ids(self, available: Sequence[int] | None = None) -> tuple[int, ...]:
        """Operating-system ids of its cores out of ``available`` (default: this machine's).

        Raises ConfigurationError for an index beyond them; empty for a GPU and a server, which pin nothing.
        """
        if self.kind != "cpu":
            return ()
        cores = machine_cores() if available is None else tuple(available)
        if self.last >= len(cores):
            valid_names = "cpu:0" if len(cores) == 1 else f"cpu:0 to cpu:{len(cores) - 1}"
            raise ConfigurationError(f"device {self}: this machine has {len(cores)} usable core(s), {valid_names}")
        return cores[self.first : self.last + 1]

    def shares_with(self, other: Device) -> bool:
        """Whether the two devices share a core or a GPU, or are the same server."""
        if (self.kind, self.address, self.node) != (other.kind, other.address, other.node):
            return False
        return self.first <= other.last and other.first <= self.last

    def units(self) -> frozenset[str]:
        """Names of its cores, or its own name where it isn't a CPU. Devices share hardware if they share a unit."""
        if self.kind != "cpu":
            return frozenset({str(self)})
        return frozenset(
            f"{self.node}/cpu:{core}" if self.node else f"cpu:{core}" for core in range(self.first, self.last + 1)
        )

    def environment(self) -> dict[str, str]:
        """Variables for the start of a process on this device (allocator, thread counts, how threads wait)."""
        variables = dict(ALLOCATOR_ENVIRONMENT)
        if self.threads is not None:
            variables |= WAIT_ENVIRONMENT | {name: str(self.threads) for name in THREAD_VARIABLES}
        return variables

    def apply(self, available: Sequence[int] | None = None) -> None:
        """Pin this process, before it imports a numerical library.

        ``available``: core ids the index counts in (a worker gets its parent's list). Raises
        ConfigurationError when the cores do not exist or may not be used.
        """
        os.environ.update(self.environment())
        cores = self.core_ids(available)
        if not cores:
            return
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ConfigurationError(f"device {self}: cannot pin to core(s) {list(cores)}: {error}") from error

    def torch_device(self) -> str:
        """Torch's name of the device: ``cpu`` or ``cuda:N``. The caller sets torch's threads to ``threads``."""
        return f"cuda:{self.first}" if self.kind == "cuda" else "cpu"


def split_node(device: str) -> tuple[str, str]:
    """Split a device's name into its node's ("" for this machine, and for a server) and its own there."""
    if device.startswith(SERVER):
        return "", device
    node, _, name = device.rpartition("/")
    return node, name


def parse_device(text: str) -> Device:
    """Parse a device's name: ``cuda:N``, ``cpu:N``, ``cpu:N-M``, each also as ``NODE/...``; ``cpu:all``, every core of
    this machine; or a server's ``http://HOST:PORT``. Raises ConfigurationError for anything else."""
    if text.startswith(SERVER):
        if re.fullmatch(r"http://[^/\s:]+:\d{1,5}", text) is None:
            raise ConfigurationError(f"device {text!r}: not a server's address; valid: http://HOST:PORT")
        return Device(kind="server", first=-1, last=-1, address=text)
    node, _, name = text.rpartition("/")
    if name == "cpu:all" and not node:
        name = every_core()
    match = re.fullmatch(r"(cpu|cuda):(\d+)(?:-(\d+))?", name)
    if match is None:
        raise ConfigurationError(f"device {text!r}: not a device; {VALID}")
    kind, first, last = match.group(1), int(match.group(2)), int(match.group(3) or match.group(2))
    if kind == "cuda":
        if match.group(3) is not None:
            raise ConfigurationError(f"device {text!r}: a GPU is one index; {VALID}")
        return Device(kind="cuda", first=first, last=first, node=node)
    if last < first:
        raise ConfigurationError(f"device {text!r}: the last core is before the first; {VALID}")
    return Device(kind="cpu", first=first, last=last, node=node)


def sharing(devices: Sequence[str], others: Iterable[str]) -> list[int]:
    """Indices of the ``devices`` that share cores or a GPU with one of the ``others``: a replica on such a device takes
    turns on it with the trainer."""
    peers = [parse_device(name) for name in others]
    return [index for index, name in enumerate(devices) if any(parse_device(name).shares_with(peer) for peer in peers)]


def interchangeable(devices: Iterable[str]) -> bool:
    """Whether the devices are of one kind and size, so that any two are interchangeable."""
    parsed = [parse_device(name) for name in devices]
    return len({(device.kind, device.threads) for device in parsed}) == 1 and parsed[0].kind != "server"


def cpu_multiplies_bfloat16(cpuinfo: str | None = None) -> bool:
    """Whether this machine's cores have instructions for fast bfloat16 products (AVX-512, AMX, Arm's bf16); also True
    where that can't be determined. ``cpuinfo``: the text of /proc/cpuinfo, read by default."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return True
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return match is None or bool({"avx512bw", "avx512_bf16", "amx_bf16", "bf16"} & set(match.group(1).split()))


def cuda_device_count() -> int | None:
    """Number of GPUs this process may use, counted without a GPU library; None when it can't be determined."""
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_gpus is not None:
        return len([gpu_id for gpu_id in visible_gpus.split(",") if gpu_id.strip() not in ("", "-1")])
    if Path("/dev/dxg").exists() or Path("/dev/kfd").exists():  # WSL, ROCm: no device file per GPU
        return None
    return sum(re.fullmatch(r"nvidia\d+", file_name) is not None for file_name in os.listdir("/dev"))


def _available_gpus(count: int) -> str:
    if count == 0:
        return "this machine shows no GPU (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides it)"
    return f"this machine shows {count} GPU(s), cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "")


def resident_bytes() -> int:
    """Resident memory of this process, including shared memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def native_kernels_enabled() -> bool:
    """Whether C++ kernels are used on one CPU core, where they can be built, and Triton kernels on GPUs;
    ``HEADWAY_NATIVE_KERNELS=0`` in the environment turns them off, to find out whether a fault is theirs."""
    return os.environ.get("HEADWAY_NATIVE_KERNELS") != "0"
