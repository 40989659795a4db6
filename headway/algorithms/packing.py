"""Token-budget micro-batches without padding, over ranks.

``pack`` returns a *plan*: for each rank the list of its micro-batches, for each micro-batch the ascending indices
of its sequences. Every sequence is in exactly one micro-batch; a micro-batch holds at most ``budget`` tokens,
unless it is a single sequence longer than that; every rank has the same number of micro-batches (some may be
empty when there are too few sequences).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Literal

Method = Literal["balanced", "areal"]
MicroBatch = list[int]
Plan = list[list[MicroBatch]]

EVEN_ENOUGH = 1.01  # heaviest over mean load below which differencing can gain nothing worth its time


def pack(lengths: Sequence[int], budget: int, ranks: int = 1, method: Method = "balanced") -> Plan:
    """Plan micro-batches of at most ``budget`` tokens for ``ranks`` ranks.

    ``balanced``: the heaviest rank is never heavier than ``areal`` makes it; on one rank there are never more
    micro-batches than ``areal``'s and, at equal number, the heaviest is never heavier.
    ``areal``: Algorithm 1 of AReaL (2025), its micro-batches dealt to the ranks in turn.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"budget = {budget} and ranks = {ranks} must be at least 1")
    if method == "areal":
        return _deal(_areal_micro_batches(lengths, budget, ranks), ranks)
    everything = list(range(len(lengths)))
    if ranks == 1:
        return [_fewest_micro_batches(lengths, everything, budget)]
    dealt = _deal(_areal_micro_batches(lengths, budget, ranks), ranks)
    shares = min(
        (_partition(lengths, everything, ranks), [[i for batch in rank for i in batch] for rank in dealt]),
        key=lambda parts: _heaviest(lengths, parts),
    )
    plan = [_fewest_micro_batches(lengths, share, budget) for share in shares]
    most = max(len(batches) for batches in plan)
    return [_widen(lengths, share, batches, most, budget) for share, batches in zip(shares, plan, strict=True)]


def _areal_micro_batches(lengths: Sequence[int], budget: int, at_least: int) -> list[MicroBatch]:
    """Longest first, into the micro-batch with room that holds the fewest sequences, else into a new one."""
    batches: list[MicroBatch] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        room = [b for b, load in enumerate(loads) if load + length <= budget]
        if len(batches) < at_least or not room:
            batches.append([index])
            loads.append(length)
        else:
            chosen = min(room, key=lambda b: len(batches[b]))
            batches[chosen].append(index)
            loads[chosen] += length
    return [sorted(batch) for batch in batches]


def _deal(batches: list[MicroBatch], ranks: int) -> Plan:
    each = max(1, -(-len(batches) // ranks))
    padded = batches + [[] for _ in range(each * ranks - len(batches))]
    return [padded[rank::ranks] for rank in range(ranks)]


def _fewest_micro_batches(lengths: Sequence[int], sequences: list[int], budget: int) -> list[MicroBatch]:
    """As few micro-batches as the heuristics find, evenly loaded; sequences over the budget stand alone."""
    alone = [[i] for i in sequences if lengths[i] > budget]
    shared = [i for i in sequences if lengths[i] <= budget]
    areal = _areal_micro_batches([lengths[i] for i in shared], budget, 0)
    areal = [[shared[i] for i in batch] for batch in areal]
    fewest = -(-sum(lengths[i] for i in shared) // budget)
    for parts in range(fewest, len(areal) + 1):
        candidate = _partition_within(lengths, shared, parts, budget)
        if candidate is not None:
            return _lighter(lengths, alone, candidate, areal)
    return (alone + areal) or [[]]


def _lighter(
    lengths: Sequence[int], alone: list[MicroBatch], candidate: list[MicroBatch], areal: list[MicroBatch]
) -> list[MicroBatch]:
    worse = len(candidate) == len(areal) and _heaviest(lengths, areal) < _heaviest(lengths, candidate)
    return (alone + (areal if worse else candidate)) or [[]]


def _widen(
    lengths: Sequence[int], sequences: list[int], batches: list[MicroBatch], most: int, budget: int
) -> list[MicroBatch]:
    """Spread ``sequences`` over ``most`` micro-batches, so that every rank computes as many as the others."""
    if len(batches) == most:
        return batches
    alone = [[i] for i in sequences if lengths[i] > budget]
    shared = [i for i in sequences if lengths[i] <= budget]
    wider = _partition_within(lengths, shared, most - len(alone), budget) if shared else None
    if wider is None:
        return batches + [[] for _ in range(most - len(batches))]
    return alone + wider


def _partition_within(lengths: Sequence[int], sequences: list[int], parts: int, budget: int) -> list[MicroBatch] | None:
    if parts < 1:
        return None if sequences else []
    partition = _partition(lengths, sequences, parts)
    if _heaviest(lengths, partition) <= budget:
        return partition
    return _first_fit(lengths, sequences, parts, budget)


def _partition(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Split into ``parts`` of nearly equal load: longest first, or differencing where that is not even enough."""
    greedy = _longest_first(lengths, sequences, parts)
    mean = sum(lengths[i] for i in sequences) / parts
    if parts < 2 or _heaviest(lengths, greedy) <= EVEN_ENOUGH * mean:
        return greedy
    differenced = _largest_differencing(lengths, sequences, parts)
    return min((differenced, greedy), key=lambda partition: _heaviest(lengths, partition))


def _longest_first(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Longest processing time (Graham, 1969): each into the lightest part so far."""
    partition: list[MicroBatch] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(sequences, key=lambda i: (-lengths[i], i)):
        load, part = heap[0]
        partition[part].append(index)
        heapq.heapreplace(heap, (load + lengths[index], part))
    return [sorted(part) for part in partition]


def _largest_differencing(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Karmarkar & Karp (1982), k-way: join the two partial partitions with the largest spread, heavy with light."""
    order = count()
    heap: list[tuple[int, int, list[tuple[int, MicroBatch]]]] = []
    for index in sequences:
        bins: list[tuple[int, MicroBatch]] = [(0, list[int]()) for _ in range(parts - 1)]
        bins.append((lengths[index], [index]))
        heap.append((-lengths[index], next(order), bins))  # the smallest of a heap is the largest spread
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], next(order), joined))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]


def _first_fit(lengths: Sequence[int], sequences: list[int], parts: int, budget: int) -> list[MicroBatch] | None:
    """First-fit decreasing: fits where an even split does not; None when it needs more than ``parts``."""
    partition: list[MicroBatch] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(sequences, key=lambda i: (-lengths[i], i)):
        chosen = next((part for part in range(parts) if loads[part] + lengths[index] <= budget), None)
        if chosen is None:
            return None
        partition[chosen].append(index)
        loads[chosen] += lengths[index]
    return [sorted(part) for part in partition]


def _heaviest(lengths: Sequence[int], partition: Sequence[Sequence[int]]) -> int:
    return max((sum(lengths[i] for i in part) for part in partition), default=0)
