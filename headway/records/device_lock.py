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


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A party in the way of another."""

    name: str
    stage: str
    devices: tuple[str, ...]  # those that the other wants
    held_s: float
    recalled_s: float | None = None  # how long ago it was recalled; None: it wasn't
    dead: bool = False  # its memory isn't known to be free


class PartyWaits(msgspec.Struct, frozen=True, kw_only=True):
    """A party's waits for its devices, those that go on included."""

    count: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class LockStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a lock since its beginning."""

    grants: int
    switches: int  # grants for which another party had to leave
    onloads: int
    offloads: int
    idle_wanted_s: float  # device-seconds in which nobody held what somebody waited for; loading is holding
    waits: dict[str, PartyWaits]  # by party
