"""Records between the orchestrator and the agents of its nodes."""

from __future__ import annotations

import msgspec


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a node's agent announces when it joins."""

    name: str
    host: str  # its host name
    pid: int  # of the agent
    cores: int  # that workers may use
    gpus: int
    memory_bytes: int  # of a container: its limit
    scratch: str  # the agent's temporary folder on the node
    time_s: float = 0.0  # Unix time by its clock, when it was asked
    offers: tuple[str, ...] = ()  # devices on which it offers to run a generator's replica, beside the file's


class ProcessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start a worker's process on a node."""

    worker: str  # its name
    token: str  # by which its connection is recognised
    device: str  # on the node, without the node's name
    environment: dict[str, str] = {}
    log: str = ""  # appended to where its folder is seen on the node; else a log in the agent's scratch folder is


class ProcessEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a worker's process on a node has ended; the children that it left are killed."""

    pid: int
    code: int  # as of `subprocess`: negative for a signal
    output: str  # the last lines that it wrote


class GpuConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a GPU."""

    index: int
    busy_ratio: float  # share of the last second in which it computed
    memory_used_bytes: int
    memory_bytes: int
    ecc_errors: int = 0  # that could not be corrected, since its driver was loaded


class NodeConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions on a machine of the run: an event of its agent every few seconds."""

    name: str = ""  # of the node; "": the orchestrator's machine
    cpu_ratio: float  # share of its cores' time in use since the last one
    memory_free_bytes: int
    shared_memory_free_bytes: int
    disk_free_bytes: int  # of the scratch folder's file system
    processes: int = 0  # of workers, running
    gpus: tuple[GpuConditions, ...] = ()
