"""Parties of a device lock, its decisions, and its counts."""

from __future__ import annotations

import msgspec


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who computes on devices: a worker, or workers that compute together."""

    name: str
    stage: str  # of the workflow
    devices: frozenset[str]  # names that overlap nowhere: cores and GPUs, not ranges of them
    order: int  # of its stage in the workflow, upstream first


class LockGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A party holds its devices from now on."""

    party: str
    offload: tuple[str, ...] = ()  # these must leave the devices before it computes there
    onload: bool = False  # it isn't on its devices: it must load after that


class MemoryMove(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that an offload or onload has moved, and its time."""

    moved_bytes: int
    seconds: float
    freed_bytes: int = 0  # by which the process's resident memory fell, on a GPU its allocated memory
    onload: bool = False


class LockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Grants and recalls that a call on the lock has led to."""

    grants: tuple[LockGrant, ...] = ()
    recalls: tuple[str, ...] = ()  # holders that are wanted since now: they release at their next wait


class LockStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a lock since its beginning."""

    grants: int
    switches: int  # grants for which another party had to leave
    idle_wanted_s: float  # device-seconds in which nobody held what somebody waited for; loading is holding
