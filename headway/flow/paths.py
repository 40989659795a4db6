"""Addresses of a workflow's processes, and references to payloads that one of them holds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.runtime.transport.packing import Packed
from headway.runtime.transport.paths import Location, PayloadPath


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a process of a workflow, and what its paths depend on."""

    name: str  # unique in the workflow; a restarted process keeps its predecessor's name
    incarnation: str  # unique identifier of this start of the process
    machine: str  # processes of one machine share its /dev/shm
    unix: str  # path of its socket, for processes of its machine
    tcp: str = ""  # HOST:PORT for processes of other machines; empty: the workflow has one machine
    device: str = "cpu:0"

    @property
    def location(self) -> Location:
        return Location.of(self.device, self.machine)


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the processes of a workflow find and trust each other."""

    key: str
    epoch: int = 1  # constant: a workflow keeps no accounting that one of its older processes could write to
    folder: Path  # of sockets and shared memory, the same on all of its machines
    host: str = ""  # address of this process's machine for others; "": the workflow has one machine
    ports: tuple[int, ...] = (0,)  # the process listens on the first of these that is free
    certificate: str = ""  # for encrypted connections
    orphan_s: float = 60.0  # outages of the network that connections outlast
    machine: str = ""  # replaces the machine's identity, unless it is empty


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a payload that its owner holds until it is released; picklable, valid in every process."""

    owner: str  # name of the process that holds it
    incarnation: str  # of that process
    machine: str  # of that process
    id: int  # number of the payload in that process
    path: PayloadPath  # path that the payload takes to a process of that machine
    reader: str = ""  # incarnation of the only process that may fetch it; empty: any may
    size_bytes: int
    segment: str = ""  # path of the shared-memory segment that holds the payload
    content: bytes | Packed | None = None  # the payload itself, if small (bytes) or for another machine; then not held

    def outlives_owner(self, machine: str) -> bool:
        """Whether processes of ``machine`` can read the payload though its owner is dead."""
        return self.content is not None or (bool(self.segment) and self.machine == machine)
