"""Chooses the path of memory from its owner to a reader: for the payloads of workflows, and for weights."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from headway.runtime.devices import split_node

PayloadPath = Literal["shared memory", "cuda ipc", "link"]
"""One copy within a machine, handles of memory between GPUs, frames over the connection between machines."""


class Location(NamedTuple):
    """The location of a process's memory."""

    machine: str  # processes of one machine share its /dev/shm
    gpu: str = ""  # its name on the machine; "": the process has none

    @classmethod
    def of(cls, device: str, machine: str | None = None) -> Location:
        """The location of a device's process, on ``machine``, or on that of the device's node."""
        node, device_name = split_node(device)
        return cls(node if machine is None else machine, device_name if device_name.startswith("cuda") else "")


def choose_path(
    owner: Location, reader: Location | None, reaches: Callable[[str, str], bool] = operator.eq
) -> PayloadPath:
    """Choose the path to a reader, None: to any process of the owner's machine. ``reaches(gpu, other)``: whether a GPU
    reads the other's memory; by default it reads its own alone."""
    if reader is not None and reader.machine != owner.machine:
        return "link"
    if reader is not None and owner.gpu and reader.gpu and reaches(reader.gpu, owner.gpu):
        return "cuda ipc"
    return "shared memory"


def machine_identity() -> str:
    """The identity of this machine for shared memory: a container with its own /dev/shm is another machine."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/dev/shm').st_dev}"
