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


class LockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Grants and recalls that a call on the lock has led to."""

    grants: tuple[LockGrant, ...] = ()
    recalls: tuple[str, ...] = ()  # holders that are wanted since now: they release at their next wait


class LockStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a lock since its beginning."""

    grants: int
    switches: int  # grants for which another party had to leave
    idle_wanted_s: float  # device-seconds in which nobody held what somebody waited for; loading is holding
