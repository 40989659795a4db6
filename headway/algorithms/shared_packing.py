"""Micro-batches for sequences that share prefixes: a micro-batch computes the prefix of a family once.

A *family* is the sequences of one group, which all begin with the same ``prefix`` tokens. A micro-batch's cost is
the tokens it computes: of each sequence those after its prefix, and the prefix of each family in it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.algorithms.packing import Method, MicroBatch, Plan, fewest_micro_batches, pack


def pack_families(
    lengths: Sequence[int],
    families: Sequence[int],
    prefixes: Sequence[int],
    budget: int,
    ranks: int = 1,
    method: Method = "balanced",
) -> Plan:
    """Plan micro-batches as `pack` does, for sequences of which those with equal ``families`` begin with the same
    ``prefixes`` tokens (>= 0, equal inside a family and at most each length). ``budget`` is in tokens computed.

    Families are kept whole, halved, quartered ... down to single sequences, each time packed as units by `pack`; the
    best plan by heaviest rank, then number of micro-batches, then heaviest micro-batch is returned. `pack`'s own plan
    of single sequences is a candidate, so the heaviest rank never computes more than under that.
    """
    members = _members(families, prefixes)
    plain = pack(lengths, budget, ranks, method)
    if not members:
        return plain
    together = {index for family in members for index in family}
    alone = [[index] for index in range(len(lengths)) if index not in together]
    best, best_cost = plain, _cost(plain, lengths, families, prefixes)
    parts = 1
    while parts < 2 * max(map(len, members)):
        units = [unit for family in members for unit in _units(lengths, family, prefixes[family[0]], budget, parts)]
        units = alone + units
        sizes = [sum(lengths[i] for i in unit) - (len(unit) - 1) * prefixes[unit[0]] for unit in units]
        plan = [
            [sorted(index for unit in batch for index in units[unit]) for batch in rank]
            for rank in pack(sizes, budget, ranks, method)
        ]
        cost = _cost(plan, lengths, families, prefixes)
        if cost < best_cost:
            best, best_cost = plan, cost
        parts *= 2
    return best


def computed_tokens(
    batch: Sequence[int], lengths: Sequence[int], families: Sequence[int], prefixes: Sequence[int]
) -> int:
    """Tokens that a micro-batch of the sequences ``batch`` computes."""
    shared = {families[i]: prefixes[i] for i in batch}
    return sum(lengths[i] - prefixes[i] for i in batch) + sum(shared.values())


def _members(families: Sequence[int], prefixes: Sequence[int]) -> list[MicroBatch]:
    """The families of at least two sequences with a common prefix."""
    found: dict[int, MicroBatch] = {}
    for index, family in enumerate(families):
        if prefixes[index] > 0:
            found.setdefault(family, []).append(index)
    return [family for family in found.values() if len(family) > 1]


def _units(lengths: Sequence[int], family: MicroBatch, prefix: int, budget: int, parts: int) -> list[MicroBatch]:
    """Split the family into about ``parts`` units (more where the budget needs it) of nearly equal cost."""
    own = [max(1, lengths[index] - prefix) for index in family]
    room = min(budget - prefix, -(-sum(own) // parts))
    if room < 1:
        return [[index] for index in family]
    return [[family[i] for i in unit] for unit in fewest_micro_batches(own, list(range(len(own))), room)]


def _cost(plan: Plan, lengths: Sequence[int], families: Sequence[int], prefixes: Sequence[int]) -> tuple[int, int, int]:
    """Cost of a plan: (tokens of the heaviest rank, micro-batches of a rank, tokens of the heaviest micro-batch)."""
    costs = [[computed_tokens(batch, lengths, families, prefixes) for batch in rank] for rank in plan]
    return max(map(sum, costs)), len(plan[0]), max(max(rank, default=0) for rank in costs)
