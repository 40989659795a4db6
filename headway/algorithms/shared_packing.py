"""Plans micro-batches for sequences with common prefixes: a micro-batch computes a shared prefix once.

A micro-batch's cost is the tokens of the tries of its sequences (`prefix_tree.py`).
"""

from __future__ import annotations

from headway.algorithms.packing import Method, MicroBatch, Plan, fewest_micro_batches, pack
from headway.algorithms.prefix_tree import PrefixTree

Unit = tuple[int, MicroBatch]  # tokens of sequences that stay in one micro-batch, and those sequences


def pack_trees(tree: PrefixTree, budget: int, ranks: int = 1, method: Method = "balanced", least: int = 1) -> Plan:
    """Plan micro-batches as `pack` does, for the sequences of ``tree``. ``budget`` is in tokens computed.

    Tries are kept whole, halved, quartered ... down to single sequences, each time packed as units by `pack`; the
    best plan by heaviest rank, then number of micro-batches, then heaviest micro-batch is returned. `pack`'s own plan
    of single sequences is a candidate, so the heaviest rank never computes more than under that.
    """
    best_plan = pack(tree.lengths_s.tolist(), budget, ranks, method, least)
    if not tree.common_t.any():
        return best_plan
    best_cost = _cost(best_plan, tree)
    part_count = 1
    while part_count < 2 * _largest_trie(tree):
        units = _split_tries(tree, budget, part_count)
        plan = [
            [sorted(index for unit in batch for index in units[unit][1]) for batch in rank]
            for rank in pack([tokens for tokens, _ in units], budget, ranks, method, least)
        ]
        cost = _cost(plan, tree)
        if cost < best_cost:
            best_plan, best_cost = plan, cost
        part_count *= 2
    return best_plan


def _largest_trie(tree: PrefixTree) -> int:
    """Return the number of sequences of the largest trie."""
    borders = [position for position, common in enumerate(tree.common_t.tolist()) if not common]
    return max(end - start for start, end in zip(borders, [*borders[1:], tree.common_t.size], strict=True))


def _split_tries(tree: PrefixTree, budget: int, parts: int) -> list[Unit]:
    """Split each trie into about ``parts`` units of nearly equal cost, more where the budget requires it.

    From the leaves up, units that meet at a branch point are merged as far as the limit allows."""
    pieces = tree.pieces
    lengths: list[int] = pieces.lengths_p.tolist()
    continues: list[int] = pieces.continues_p.tolist()
    starts: list[int] = pieces.starts_p.tolist()
    roots: list[int] = []
    trie_tokens = [0] * len(lengths)  # tokens of the trie, by its root
    for piece, parent in enumerate(continues):
        roots.append(piece if parent < 0 else roots[parent])
        trie_tokens[roots[piece]] += lengths[piece]
    ending_sequences: list[MicroBatch] = [[] for _ in lengths]
    lasts: list[int] = pieces.last_s.tolist()
    for sequence, piece in enumerate(lasts):
        ending_sequences[piece].append(sequence)
    below: list[list[Unit]] = [[] for _ in lengths]
    root_units: list[Unit] = []
    for piece in reversed(range(len(lengths))):
        root, parent, length = roots[piece], continues[piece], lengths[piece]
        branch_tokens = trie_tokens[root] - lengths[root]
        capacity = min(budget, lengths[root] - (-branch_tokens // parts)) - starts[piece] - length
        units = _joined(below[piece], capacity) if below[piece] else [(0, ending_sequences[piece])]
        (root_units if parent < 0 else below[parent]).extend((length + tokens, members) for tokens, members in units)
    return root_units


def _joined(units: list[Unit], capacity: int) -> list[Unit]:
    """Merge ``units`` into units of at most ``capacity`` tokens; a larger one stays alone."""
    if capacity < 1:
        return units
    unit_tokens = [tokens for tokens, _ in units]
    return [
        (sum(unit_tokens[i] for i in batch), [sequence for i in batch for sequence in units[i][1]])
        for batch in fewest_micro_batches(unit_tokens, list(range(len(unit_tokens))), capacity)
    ]


def _cost(plan: Plan, tree: PrefixTree) -> tuple[int, int, int]:
    """Return (tokens of the heaviest rank, micro-batches of a rank, tokens of the heaviest micro-batch) of a plan."""
    rank_tokens = [[tree.take(batch).tokens for batch in rank] for rank in plan]
    return max(map(sum, rank_tokens)), len(plan[0]), max(max(rank, default=0) for rank in rank_tokens)
