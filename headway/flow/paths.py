"""Paths of payloads between two processes: which there are, which one a pair takes, and process groups of pairs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.flow.packing import aligned_bytes, as_bytes, slices
from headway.runtime.addresses import split_address

_JOINED = timedelta(seconds=60)
_PATIENCE = timedelta(hours=1)  # a dead peer is noticed by its connection, not here
PayloadPath = Literal["reference", "shared memory", "cuda ipc", "nccl", "gloo", "link"]
"""Paths: the object itself within a process; one copy within a machine; handles of a GPU's memory within a GPU; process
groups of torch.distributed, between GPUs and where they are asked for; frames over the connection."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a process of a workflow, and what its paths depend on."""

    name: str  # unique in the workflow; a restarted process has its predecessor's
    incarnation: str  # unique: of this start of the process
    machine: str  # processes of one machine share its /dev/shm
    unix: str  # path of its socket, for processes of its machine
    tcp: str = ""  # HOST:PORT for the others; empty: the workflow has one machine
    device: str = "cpu:0"


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of a workflow find and trust each other."""

    key: str
    epoch: int = 1  # a workflow keeps no books that an older process of it could write to
    folder: Path  # of sockets and shared memory, the same on all of its machines
    host: str = ""  # address of this process's machine for others; "": the workflow has one machine
    ports: tuple[int, ...] = (0,)  # it listens there on the first that is free
    certificate: str = ""  # of encrypted connections
    orphan_s: float = 60.0  # outages of the network that connections outlast
    machine: str = ""  # in the place of the machine's identity
    forced_path: PayloadPath | None = None  # of payloads, in the place of what placement says


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A payload that its owner holds until it is released; small, picklable, and good in every process."""

    owner: str  # name of the process that holds it
    incarnation: str  # of that process
    machine: str  # of that process
    id: int  # number of the payload in that process
    path: PayloadPath  # that it takes to a process of that machine
    reader: str = ""  # incarnation of the only process that may fetch it; empty: any may
    size_bytes: int  # of header and block
    segment: str = ""  # path of the shared memory that it is in; empty: with the owner alone, or inline
    inline: bytes = b""  # header and block of a small one


def machine_identity() -> str:
    """Identity of this machine as shared memory sees it: containers with a /dev/shm of their own are others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"


def choose_path(sender: PeerAddress, receiver: PeerAddress, forced: PayloadPath | None = None) -> PayloadPath:
    """The path of payloads between two processes by where they are."""
    if sender.incarnation == receiver.incarnation:
        return "reference"
    if forced is not None:
        return forced
    here = sender.machine == receiver.machine
    devices = [address.device.rpartition("/")[2] for address in (sender, receiver)]
    if all(device.startswith("cuda") for device in devices):
        return "cuda ipc" if here and devices[0] == devices[1] else "nccl"
    return "shared memory" if here else "link"


class PairGroup:
    """A process group of two that carries tensors one way: rank 0 sends, rank 1 receives.

    Between machines neither proves the run's key nor encrypts: for networks that one trusts, as all that NCCL has. The
    same code for gloo and NCCL, which needs two GPUs and is not yet run. ``send`` and ``receive`` block, and belong
    into a thread.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], rank: int, rendezvous: str, host: str) -> None:
        """``rendezvous``: path of a file that both can write, or HOST:PORT where rank 1 listens (port 0 takes any).
        ``host``: address of this machine for the other; empty: both are on it."""
        self._torch: Any = importlib.import_module("torch")
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._backend, self._rank, self._host = backend, rank, host or "127.0.0.1"
        self.rendezvous = rendezvous
        self._device = "cpu" if backend == "gloo" else f"cuda:{self._torch.cuda.current_device()}"
        self._group: Any = None  # until the other rank has joined
        if rendezvous.startswith("/"):
            self._store = self._distributed.FileStore(rendezvous, 2)
        else:
            name, port = split_address(rendezvous)
            self._store = self._distributed.TCPStore(name, port, 2, rank == 1, _JOINED, wait_for_workers=False)
            self.rendezvous = f"{name}:{self._store.port}"

    def send(self, tensors: Sequence[Any]) -> None:
        """Send tensors as one of bytes."""
        torch = self._torch
        sizes = [tensor.nbytes for tensor in tensors]
        flat = torch.empty(aligned_bytes(sizes), dtype=torch.uint8, device=self._device)
        for place, tensor in zip(slices(sizes, flat), tensors, strict=True):
            place.copy_(as_bytes(tensor))
        self._joined().send([flat], 1, 0).wait(_PATIENCE)

    def receive(self, sizes: Sequence[int]) -> list[Any]:
        """Receive tensors of bytes of these sizes."""
        flat = self._torch.empty(aligned_bytes(sizes), dtype=self._torch.uint8, device=self._device)
        self._joined().recv([flat], 0, 0).wait(_PATIENCE)
        return slices(sizes, flat)

    def _joined(self) -> Any:
        """The group, which is made when both ranks are there."""
        if self._group is None:
            if self._backend == "nccl":
                self._group = self._distributed.ProcessGroupNCCL(self._store, self._rank, 2, _PATIENCE)
            else:
                gloo = self._distributed.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = _JOINED
                options._devices = [gloo.create_device(hostname=self._host)]
                self._group = gloo(self._store, self._rank, 2, options)
        return self._group
