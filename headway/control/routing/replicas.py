"""Chooses the generator replica for a request by standing, cached prompt prefixes and load."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

# "serving" takes requests; "yielded" does when no serving replica has KV capacity; "idle" when there is neither. The
# others never do: "down" isn't live, "draining" is being removed, "behind" has older weights than another, "silent"
# doesn't answer its health check, "tripped" has an open breaker.
Standing = Literal["serving", "yielded", "idle", "down", "draining", "behind", "silent", "tripped"]


class ReplicaCondition(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions from which a replica's standing follows."""

    live: bool = True  # its process is up, and had the newest weights when it started to serve
    draining: bool = False
    idle: bool = False
    yielded: bool = False  # the trainer computes on its device
    silent: bool = False  # an answer to a health check is overdue
    allowed: bool = True  # its breaker lets requests through
    update: int = 0  # number of the last update of its weights, in the order they were announced
    outdated: bool = False  # its version is too old to be sampled from beside the newest
    updating_s: float | None = None  # seconds it has been applying newer weights; None: it isn't


def standing_of(replica: ReplicaCondition, newest_update: int, grace_s: float) -> Standing:
    """Return a replica's standing. ``newest_update``: the last update that any replica ever applied.

    A replica without it is behind, unless its update is in progress, has taken no longer than ``grace_s``, and its
    version isn't outdated."""
    if not replica.live:
        return "down"
    if replica.draining:
        return "draining"
    is_updating = replica.updating_s is not None and replica.updating_s <= grace_s
    if replica.update < newest_update and (replica.outdated or not is_updating):
        return "behind"
    if replica.silent:
        return "silent"
    if not replica.allowed:
        return "tripped"
    if replica.idle:
        return "idle"
    return "yielded" if replica.yielded else "serving"


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one replica, as one request sees it."""

    outstanding_tokens: int  # prompt and still allowed response tokens of its open requests
    standing: Standing = "serving"
    saved_tokens: int = 0  # tokens of this request's prompt already in its KV (weighted)
    capacity_tokens: int | None = None  # of its KV; None: unlimited


class Route(NamedTuple):
    """The replica chosen for a request."""

    replica: int  # its index
    spilled: bool  # another replica has more of the prompt in KV, but is too loaded or takes no requests


def choose_replica(loads: Sequence[ReplicaLoad], needed_tokens: int = 0) -> Route | None:
    """Choose the replica with the fewest outstanding tokens less saved ones; None when none takes requests.

    Ties go to the larger saving, then to the first. So a replica with the prompt in KV may exceed the least load by at
    most the tokens whose prefill that saves. ``needed_tokens``: KV tokens that the request may need; where no serving
    replica has that capacity, yielded ones are considered too."""
    candidate_indices = [index for index, load in enumerate(loads) if load.standing == "serving"]
    for index in candidate_indices:
        if _has_capacity(loads[index], needed_tokens):
            break
    else:
        candidate_indices += [index for index, load in enumerate(loads) if load.standing == "yielded"]
    if not candidate_indices:
        candidate_indices = [index for index, load in enumerate(loads) if load.standing == "idle"]
    if not candidate_indices:
        return None
    best_index, least_cost = candidate_indices[0], _cost(loads[candidate_indices[0]])
    for index in candidate_indices[1:]:
        if (cost := _cost(loads[index])) < least_cost:
            best_index, least_cost = index, cost
    return Route(best_index, max([load.saved_tokens for load in loads]) > loads[best_index].saved_tokens)


def _has_capacity(load: ReplicaLoad, needed_tokens: int) -> bool:
    return load.capacity_tokens is None or load.outstanding_tokens + needed_tokens <= load.capacity_tokens


def _cost(load: ReplicaLoad) -> tuple[int, int]:
    return load.outstanding_tokens - load.saved_tokens, -load.saved_tokens


class PrefixMemory:
    """Bounded LRU index of the prompt prefixes that were sent to each replica.

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
        """Return (tokens, key) of the prompt's prefixes, shortest first; the last is the whole prompt.

        Keys depend on ``adapter``, as another's KV can't be used."""
        if not self._capacity or not prompt:
            return []
        prefixes: list[tuple[int, int]] = []
        key, ids = zlib.crc32(adapter.encode()), tuple(prompt)
        for start in range(0, len(ids), self._block):
            block_ids = ids[start : start + self._block]
            key = hash((key, block_ids))  # of integers alone: the same in every process
            prefixes.append((start + len(block_ids), key))
        return prefixes

    def cached_tokens(self, keys: Sequence[tuple[int, int]], epochs: Mapping[int, int]) -> dict[int, int]:
        """Return the tokens of each replica's longest remembered prefix, by replica; those without any are left out.

        ``epochs``: current epochs of the replicas."""
        tokens_by_replica: dict[int, int] = {}
        for tokens, key in reversed(keys):
            epoch_by_replica = self._known.get(key)
            if epoch_by_replica is None:
                continue
            for replica, epoch in epoch_by_replica.items():
                if replica not in tokens_by_replica and epochs.get(replica) == epoch:
                    tokens_by_replica[replica] = tokens
            if len(tokens_by_replica) == len(epochs):
                break
        return tokens_by_replica

    def remember(self, keys: Sequence[tuple[int, int]], replica: int, epoch: int) -> None:
        """Record that a replica was sent this prompt, or has sampled tokens that extend to it."""
        for _, key in keys:
            self._known.setdefault(key, {})[replica] = epoch
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
