"""Chooses the generator replica for a request: by each one's standing, its cached prompt prefixes and its load."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

# "serving" takes requests; "lent" does when no serving one has room in its KV; "resting" when there is neither. The
# others never do: "down" isn't live, "draining" leaves, "behind" has older weights than another, "silent" doesn't
# answer its health check, "tripped" has an open breaker.
Standing = Literal["serving", "lent", "resting", "down", "draining", "behind", "silent", "tripped"]


class ReplicaCondition(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that decide a replica's standing."""

    live: bool = True  # its process is up, and had the newest weights when it started to serve
    leaving: bool = False
    resting: bool = False
    lent: bool = False  # the trainer computes on its device
    silent: bool = False  # an answer to a health check is overdue
    allowed: bool = True  # by its breaker
    update: int = 0  # number of the last update of its weights, in the order they were announced
    updating_s: float | None = None  # how long it has been applying newer ones; None: it isn't


def standing_of(one: ReplicaCondition, newest_update: int, grace_s: float) -> Standing:
    """Return a replica's standing. ``newest_update``: the last that any replica ever applied. A replica without it is
    behind, unless its own update is under way and has taken no longer than ``grace_s``."""
    if not one.live:
        return "down"
    if one.leaving:
        return "draining"
    if one.update < newest_update and (one.updating_s is None or one.updating_s > grace_s):
        return "behind"
    if one.silent:
        return "silent"
    if not one.allowed:
        return "tripped"
    if one.resting:
        return "resting"
    return "lent" if one.lent else "serving"


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one replica, as one request sees it."""

    outstanding_tokens: int  # prompt and still allowed response tokens of its open requests
    standing: Standing = "serving"
    saved_tokens: int = 0  # of this request's prompt, those already in its KV (weighted)
    capacity_tokens: int | None = None  # of its KV; None: unlimited


class Route(NamedTuple):
    """The replica chosen for a request."""

    replica: int  # its index
    spilled: bool  # another has more of its prompt in KV, but is too loaded or takes no requests


def choose_replica(loads: Sequence[ReplicaLoad], needed_tokens: int = 0) -> Route | None:
    """Choose the replica with the fewest outstanding tokens, less those it saves (ties: the larger saving, then the
    first). None when none takes requests.

    So a replica with the prompt in KV may exceed the least load by at most the tokens whose prefill that saves.
    ``needed_tokens``: KV tokens that the request may need; where no serving replica has that room, lent ones are
    considered too."""
    taking = [index for index, load in enumerate(loads) if load.standing == "serving"]
    for index in taking:
        if _has_room(loads[index], needed_tokens):
            break
    else:
        taking += [index for index, load in enumerate(loads) if load.standing == "lent"]
    if not taking:
        taking = [index for index, load in enumerate(loads) if load.standing == "resting"]
    if not taking:
        return None
    best, least = taking[0], _cost(loads[taking[0]])
    for index in taking[1:]:
        if (cost := _cost(loads[index])) < least:
            best, least = index, cost
    return Route(best, max([load.saved_tokens for load in loads]) > loads[best].saved_tokens)


def _has_room(load: ReplicaLoad, needed_tokens: int) -> bool:
    return load.capacity_tokens is None or load.outstanding_tokens + needed_tokens <= load.capacity_tokens


def _cost(load: ReplicaLoad) -> tuple[int, int]:
    return load.outstanding_tokens - load.saved_tokens, -load.saved_tokens


class PrefixMemory:
    """Remembers which replicas were sent which prompt prefixes. Bounded: the least recently used are dropped first.

    A prompt is identified by a chain of hashes, one for each whole block and one for all of it. A replica's entries
    are void when its *epoch* changes: new weights, or another process. Whether a replica still has a prefix in KV is
    not verified: only the choice of replica depends on it.
    """

    def __init__(self, block_tokens: int, capacity: int) -> None:
        self._block = block_tokens
        self._capacity = capacity
        self._known: OrderedDict[int, dict[int, int]] = OrderedDict()  # key -> replica -> epoch

    def __len__(self) -> int:
        return len(self._known)

    def keys(self, prompt: Sequence[int], adapter: str = "") -> list[tuple[int, int]]:
        """(tokens, key) of the prompt's prefixes, shortest first; the last is the whole prompt. KV of one ``adapter``
        is of no use to another."""
        if not self._capacity or not prompt:
            return []
        found: list[tuple[int, int]] = []
        key, ids = zlib.crc32(adapter.encode()), tuple(prompt)
        for start in range(0, len(ids), self._block):
            part = ids[start : start + self._block]
            key = hash((key, part))  # of integers alone: the same in every process
            found.append((start + len(part), key))
        return found

    def cached_tokens(self, keys: Sequence[tuple[int, int]], epochs: Mapping[int, int]) -> dict[int, int]:
        """Replica -> tokens of its longest remembered prefix; replicas without any are left out. ``epochs``: present
        epochs of the replicas."""
        found: dict[int, int] = {}
        for tokens, key in reversed(keys):
            holders = self._known.get(key)
            if holders is None:
                continue
            for replica, epoch in holders.items():
                if replica not in found and epochs.get(replica) == epoch:
                    found[replica] = tokens
            if len(found) == len(epochs):
                break
        return found

    def remember(self, keys: Sequence[tuple[int, int]], replica: int, epoch: int) -> None:
        """Record that a replica was sent this prompt, or has sampled tokens that extend to it."""
        for _, key in keys:
            self._known.setdefault(key, {})[replica] = epoch
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
