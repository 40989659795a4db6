"""Plans token-budget micro-batches without padding, balanced over ranks.

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

import numpy as np
from numpy.typing import NDArray

Method = Literal["balanced", "areal"]
MicroBatch = list[int]
Plan = list[list[MicroBatch]]
Lengths = NDArray[np.int64]

MAX_EXCHANGES = 1000  # exchanges of one search, each of which makes the heavier of two parts lighter


def pack(lengths: Sequence[int], budget: int, ranks: int = 1, method: Method = "balanced", least: int = 1) -> Plan:
    """Plan micro-batches of at most ``budget`` tokens for ``ranks`` ranks, at least ``least`` for each.

    ``balanced``: the heaviest rank is never heavier than ``areal`` makes it; on one rank there are never more
    micro-batches than ``areal``'s and, at equal number, the heaviest is never heavier.
    ``areal``: Algorithm 1 of AReaL (2025), its micro-batches dealt to the ranks in turn.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"budget = {budget} and ranks = {ranks} must be at least 1")
    if method == "areal":
        return _deal(_areal_micro_batches(lengths, budget, ranks * least), ranks, least)
    all_sequences = list(range(len(lengths)))
    shares = _partition(lengths, all_sequences, ranks)
    if _heaviest(lengths, shares) > _bound(lengths, all_sequences, ranks):
        dealt_plan = _deal(_areal_micro_batches(lengths, budget, ranks), ranks)
        joined_shares = [[i for batch in rank for i in batch] for rank in dealt_plan]
        shares = min((shares, joined_shares), key=lambda parts: _heaviest(lengths, parts))
    plan = [fewest_micro_batches(lengths, share, budget) for share in shares]
    batch_count = max(least, *(len(batches) for batches in plan))
    return [_widen(lengths, share, batches, batch_count, budget) for share, batches in zip(shares, plan, strict=True)]


def pack_in_order(sequences: int, micro_batch: int, ranks: int = 1, least: int = 1) -> Plan:
    """Plan micro-batches of at most ``micro_batch`` of ``sequences``, in order and regardless of their lengths, at
    least ``least`` for each rank.

    Their sizes differ by at most one. This is the baseline for a token budget (AReaL, 2025, section 5)."""
    if micro_batch < 1 or ranks < 1:
        raise ValueError(f"micro_batch = {micro_batch} and ranks = {ranks} must be at least 1")
    per_rank = max(least, -(-sequences // (micro_batch * ranks)))
    micro_batches: list[MicroBatch] = [part.tolist() for part in np.array_split(np.arange(sequences), per_rank * ranks)]
    return [micro_batches[per_rank * rank : per_rank * (rank + 1)] for rank in range(ranks)]


def _areal_micro_batches(lengths: Sequence[int], budget: int, minimum: int) -> list[MicroBatch]:
    """Place sequences longest first, each into the fitting micro-batch of fewest sequences, else into a new one."""
    batches: list[MicroBatch] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting_indices = [b for b, load in enumerate(loads) if load + length <= budget]
        if len(batches) < minimum or not fitting_indices:
            batches.append([index])
            loads.append(length)
        else:
            chosen_index = min(fitting_indices, key=lambda b: len(batches[b]))
            batches[chosen_index].append(index)
            loads[chosen_index] += length
    return [sorted(batch) for batch in batches]


def _deal(batches: list[MicroBatch], ranks: int, least: int = 1) -> Plan:
    per_rank = max(least, -(-len(batches) // ranks))
    padded_batches = batches + [[] for _ in range(per_rank * ranks - len(batches))]
    return [padded_batches[rank::ranks] for rank in range(ranks)]


def fewest_micro_batches(lengths: Sequence[int], sequences: list[int], budget: int) -> list[MicroBatch]:
    """Pack into as few micro-batches as the heuristics find, evenly loaded; sequences over the budget stand alone."""
    single_batches = [[i] for i in sequences if lengths[i] > budget]
    fitting = [i for i in sequences if lengths[i] <= budget]
    fewest_count = -(-sum(lengths[i] for i in fitting) // budget)
    candidate = _partition_within(lengths, fitting, fewest_count, budget)
    if candidate is not None and _heaviest(lengths, candidate) <= _bound(lengths, fitting, fewest_count):
        return (single_batches + candidate) or [[]]  # optimal
    areal_batches = _areal_micro_batches([lengths[i] for i in fitting], budget, 0)
    areal_batches = [[fitting[i] for i in batch] for batch in areal_batches]
    for part_count in range(fewest_count, len(areal_batches) + 1):
        candidate = _partition_within(lengths, fitting, part_count, budget)
        if candidate is not None:
            return _lighter(lengths, single_batches, candidate, areal_batches)
    return (single_batches + areal_batches) or [[]]


def _lighter(
    lengths: Sequence[int], alone: list[MicroBatch], candidate: list[MicroBatch], areal: list[MicroBatch]
) -> list[MicroBatch]:
    areal_is_lighter = len(candidate) == len(areal) and _heaviest(lengths, areal) < _heaviest(lengths, candidate)
    return (alone + (areal if areal_is_lighter else candidate)) or [[]]


def _widen(
    lengths: Sequence[int], sequences: list[int], batches: list[MicroBatch], micro_batches: int, budget: int
) -> list[MicroBatch]:
    """Spread ``sequences`` over ``micro_batches`` micro-batches, so that all ranks have the same number."""
    if len(batches) == micro_batches:
        return batches
    single_batches = [[i] for i in sequences if lengths[i] > budget]
    fitting = [i for i in sequences if lengths[i] <= budget]
    wider = _partition_within(lengths, fitting, micro_batches - len(single_batches), budget) if fitting else None
    if wider is None:
        return batches + [[] for _ in range(micro_batches - len(batches))]
    return single_batches + wider


def _partition_within(lengths: Sequence[int], sequences: list[int], parts: int, budget: int) -> list[MicroBatch] | None:
    if parts < 1:
        return None if sequences else []
    partition = _partition(lengths, sequences, parts)
    if _heaviest(lengths, partition) <= budget:
        return partition
    return _first_fit(lengths, sequences, parts, budget)


def _partition(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Split ``sequences`` into ``parts`` of nearly equal load.

    It is longest first with exchanges and, where that stays above the lower bound, the better of it and differencing
    with exchanges."""
    if parts < 2 or not sequences:
        return _longest_first(lengths, sequences, parts)
    lower_bound = _bound(lengths, sequences, parts)
    greedy = _exchanged(lengths, _longest_first(lengths, sequences, parts), lower_bound)
    if _heaviest(lengths, greedy) <= lower_bound:
        return greedy
    differenced = _exchanged(lengths, _largest_differencing(lengths, sequences, parts), lower_bound)
    return min((differenced, greedy), key=lambda partition: _heaviest(lengths, partition))


def _bound(lengths: Sequence[int], sequences: Sequence[int], parts: int) -> int:
    """Lower bound of the heaviest part of any split: the mean, rounded up, or the longest sequence."""
    total = sum(lengths[i] for i in sequences)
    return max(-(-total // max(1, parts)), max((lengths[i] for i in sequences), default=0))


def _exchanged(lengths: Sequence[int], partition: list[MicroBatch], bound: int) -> list[MicroBatch]:
    """Improve a partition by local search, down to the lower bound ``bound``.

    Each exchange moves a sequence from the heaviest part to another or swaps two, so that the heavier of the two parts
    becomes as light as possible."""
    members = [np.array(part, dtype=np.int64) for part in partition]
    sizes = [np.array([lengths[i] for i in part], dtype=np.int64) for part in partition]
    loads = np.array([size.sum() for size in sizes], dtype=np.int64)
    for _ in range(MAX_EXCHANGES):
        heavy_part = int(loads.argmax())
        exchange = _first_exchange(sizes, loads, heavy_part) if loads[heavy_part] > bound else None
        if exchange is None:
            break
        light_part, give_index, take_index = exchange
        tokens = int(sizes[heavy_part][give_index]) - (int(sizes[light_part][take_index]) if take_index >= 0 else 0)
        _exchange(members, heavy_part, light_part, give_index, take_index)
        _exchange(sizes, heavy_part, light_part, give_index, take_index)
        loads[heavy_part] -= tokens
        loads[light_part] += tokens
    return [sorted(part.tolist()) for part in members]


def _first_exchange(sizes: list[Lengths], loads: Lengths, heavy: int) -> tuple[int, int, int] | None:
    """Return the best exchange with the lightest part that allows one: (part, position given, position taken or -1)."""
    ascending: list[int] = np.argsort(loads, kind="stable").tolist()
    for part in ascending:
        excess = int(loads[heavy] - loads[part])
        positions = _best_exchange(sizes[heavy], sizes[part], excess) if part != heavy and excess > 1 else None
        if positions is not None:
            return part, *positions
    return None


def _best_exchange(heavy: Lengths, light: Lengths, gap: int) -> tuple[int, int] | None:
    """Return the exchange that minimises the heavier of two loads, ``gap`` tokens apart.

    The result is (position in ``heavy``, position in ``light`` or -1 for a plain move) whose difference in tokens lies
    strictly between 0 and ``gap``, as near to half of it as possible."""
    order = np.argsort(light, kind="stable")
    partners = np.concatenate([[0], light[order]])  # 0: a plain move, no sequence in return
    ideal = heavy - gap / 2
    right = np.searchsorted(partners, ideal).clip(1, len(partners) - 1) if len(partners) > 1 else np.zeros_like(heavy)
    best_excess, choice = float(gap), None
    for column in (right, np.maximum(right - 1, 0)):
        difference = heavy - partners[column]
        heavier = np.where((difference > 0) & (difference < gap), np.maximum(gap - difference, difference), gap)
        giver = int(heavier.argmin()) if len(heavier) else 0
        if len(heavier) and heavier[giver] < best_excess:
            best_excess = float(heavier[giver])
            choice = (giver, int(order[column[giver] - 1]) if column[giver] else -1)
    return choice


def _exchange(parts: list[Lengths], heavy: int, light: int, give: int, take: int) -> None:
    given_length = parts[heavy][give]
    if take >= 0:
        parts[heavy][give], parts[light][take] = parts[light][take], given_length
    else:
        parts[heavy] = np.delete(parts[heavy], give)
        parts[light] = np.append(parts[light], given_length)


def _longest_first(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Partition by longest processing time (Graham, 1969): longest first, each into the lightest part so far."""
    partition: list[MicroBatch] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(sequences, key=lambda i: (-lengths[i], i)):
        load, part = heap[0]
        partition[part].append(index)
        heapq.heapreplace(heap, (load + lengths[index], part))
    return [sorted(part) for part in partition]


def _largest_differencing(lengths: Sequence[int], sequences: list[int], parts: int) -> list[MicroBatch]:
    """Partition by k-way differencing (Karmarkar & Karp, 1982): merge the two partial partitions of largest spread."""
    tiebreaks = count()
    heap: list[tuple[int, int, list[tuple[int, MicroBatch]]]] = []
    for index in sequences:
        bins: list[tuple[int, MicroBatch]] = [(0, list[int]()) for _ in range(parts - 1)]
        bins.append((lengths[index], [index]))
        heap.append((-lengths[index], next(tiebreaks), bins))  # negated: the heap's smallest is the largest spread
    heapq.heapify(heap)
    while len(heap) > 1:
        first_bins, second_bins = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined_bins = [(a + b, x + y) for (a, x), (b, y) in zip(first_bins, reversed(second_bins), strict=True)]
        joined_bins.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined_bins[0][0] - joined_bins[-1][0], next(tiebreaks), joined_bins))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]


def _first_fit(lengths: Sequence[int], sequences: list[int], parts: int, budget: int) -> list[MicroBatch] | None:
    """Partition by first-fit decreasing, which can fit where an even split doesn't; None beyond ``parts`` parts."""
    partition: list[MicroBatch] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(sequences, key=lambda i: (-lengths[i], i)):
        chosen_part = next((part for part in range(parts) if loads[part] + lengths[index] <= budget), None)
        if chosen_part is None:
            return None
        partition[chosen_part].append(index)
        loads[chosen_part] += lengths[index]
    return [sorted(part) for part in partition]


def _heaviest(lengths: Sequence[int], partition: Sequence[Sequence[int]]) -> int:
    return max((sum(lengths[i] for i in part) for part in partition), default=0)
