"""Represents sequences as tries of any depth, in which each common prefix is stored once.

*Tree order* is by group, and inside a group by tokens, a sequence after those that begin with it. A prefix that a
sequence shares with any sequence before it is shared with the previous one too, so one number for each sequence defines
the trie: the array of longest common prefixes, whose intervals are the branch points (Abouelhoda, Kurtz & Ohlebusch
2004).

Legend of shape suffixes: ``_n`` one value per token of the batch, ``_s`` per sequence, ``_t`` per sequence in tree
order, ``_p`` per piece, ``_m`` per requested token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LEAST_SAVED = 16  # tokens; a branch point that saves fewer costs more in attention calls than in products


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The nodes of tries in the order in which a forward pass computes them, concatenated.

    Roots come first; every other piece comes after the piece that it continues and next to its siblings. A sequence
    ends at the end of a leaf piece, unless another sequence begins with it.
    """

    lengths_p: IntArray
    continues_p: IntArray  # the piece that each continues, or -1
    sequences_p: IntArray  # a sequence that has the piece
    starts_p: IntArray  # tokens before the piece in each of its sequences
    last_s: IntArray  # the piece in which each sequence ends; a prefix of another sequence ends inside it

    def rows(self, sequences_m: IntArray, positions_m: IntArray) -> IntArray:
        """[M] index in the concatenation of all pieces of token ``positions_m`` of sequence ``sequences_m``."""
        shifts = np.cumsum(self.lengths_p) - self.lengths_p - self.starts_p
        stride = 1 + int((self.starts_p + self.lengths_p).max(initial=0))
        pieces, owners = self.last_s, np.arange(self.last_s.size)
        keys, shift_levels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while pieces.size:  # one level of all paths at a time, from the leaves up
            keys.append(owners * stride + self.starts_p[pieces])
            shift_levels.append(shifts[pieces])
            pieces = self.continues_p[pieces]
            pieces, owners = pieces[pieces >= 0], owners[pieces >= 0]
        key, shift = np.concatenate(keys), np.concatenate(shift_levels)
        order = np.argsort(key)
        return positions_m + shift[order][np.searchsorted(key[order], sequences_m * stride + positions_m, "right") - 1]


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Tries over sequences of at least one token.

    Example: 7 8 1 5, 7 8 2 and 7 8 1 6 have ``order_t`` 0 2 1 and ``common_t`` 0 3 2: 12 tokens, of which 7 are left.
    """

    lengths_s: IntArray  # tokens of each sequence, shared ones too
    order_t: IntArray  # the sequences in tree order
    common_t: IntArray  # tokens that each shares with the previous one

    @classmethod
    def separate(cls, lengths_s: IntArray) -> PrefixTree:
        """Make the tree of sequences that share no tokens."""
        return cls(lengths_s=lengths_s, order_t=np.arange(lengths_s.size), common_t=np.zeros_like(lengths_s))

    @classmethod
    def build(
        cls, ids_n: IntArray, starts_s: IntArray, lengths_s: IntArray, groups_s: IntArray, least: int = LEAST_SAVED
    ) -> PrefixTree:
        """Build the tries of the sequences ``ids_n[start : start + length]``, within each group.

        ``least``: tokens that a branch point must save; one that saves fewer is moved up to the one above it.
        """
        packed_ids = ids_n.astype(">u4").tobytes()  # big-endian: bytes compare as tokens do
        ends_s = (starts_s + lengths_s).tolist()
        sort_keys = [
            (group, packed_ids[4 * start : 4 * end] + b"\xff" * 4)  # sorts after all sequences that begin with it
            for group, start, end in zip(groups_s.tolist(), starts_s.tolist(), ends_s, strict=True)
        ]
        order = sorted(range(len(sort_keys)), key=sort_keys.__getitem__)
        common_t = np.zeros(len(order), np.int64)
        for position, (previous, current) in enumerate(itertools.pairwise(order), 1):
            if groups_s[previous] == groups_s[current]:
                limit = min(lengths_s[previous], lengths_s[current])
                previous_ids, current_ids = (ids_n[starts_s[i] : starts_s[i] + limit] for i in (previous, current))
                differs = previous_ids != current_ids
                common_t[position] = differs.argmax() if differs.any() else limit
        return cls(lengths_s=lengths_s, order_t=np.array(order, np.int64), common_t=_worth_sharing(common_t, least))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, shared ones once."""
        return int(self.lengths_s.sum() - self.common_t.sum())

    @cached_property
    def positions_s(self) -> IntArray:
        """[S] position of each sequence in tree order."""
        return np.argsort(self.order_t)

    def take(self, chosen: Sequence[int] | IntArray) -> PrefixTree:
        """Build the tries of the sequences ``chosen`` alone, renumbered in that order."""
        chosen_positions = self.positions_s[np.asarray(chosen, np.int64)]
        order = np.argsort(chosen_positions)
        positions = chosen_positions[order]
        common = np.zeros_like(positions)
        if positions.size:  # two sequences share the minimum that any between them shares with the previous one
            common[1:] = np.minimum.reduceat(self.common_t[: positions[-1] + 1], positions[:-1] + 1)
        return PrefixTree(lengths_s=self.lengths_s[np.asarray(chosen, np.int64)], order_t=order, common_t=common)

    @cached_property
    def pieces(self) -> Pieces:
        """The tries cut into pieces where sequences diverge."""
        parents: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        sequences: list[int] = []
        last_nodes = np.zeros(self.order_t.size, np.int64)
        path: list[int] = []  # nodes of the previous sequence, from its first token on
        for sequence, common in zip(self.order_t.tolist(), self.common_t.tolist(), strict=True):
            if path and common == self.lengths_s[sequence]:
                last_nodes[sequence] = path[-1]
                continue
            while path and starts[path[-1]] >= common:
                path.pop()
            if path and ends[path[-1]] > common:  # split it: the lower part keeps its index, the upper is new
                split_node = path[-1]
                parents.append(parents[split_node])
                starts.append(starts[split_node])
                ends.append(common)
                sequences.append(sequences[split_node])
                parents[split_node], starts[split_node], path[-1] = len(ends) - 1, common, len(ends) - 1
            parents.append(path[-1] if path else -1)
            starts.append(common)
            ends.append(int(self.lengths_s[sequence]))
            sequences.append(sequence)
            path.append(len(ends) - 1)
            last_nodes[sequence] = path[-1]
        order = _level_by_level(parents, sequences)
        position_by_node = np.argsort(order)
        parents_p, starts_p = np.array(parents, np.int64)[order], np.array(starts, np.int64)[order]
        return Pieces(
            lengths_p=np.array(ends, np.int64)[order] - starts_p,
            continues_p=np.where(parents_p >= 0, position_by_node[parents_p], -1),
            sequences_p=np.array(sequences, np.int64)[order],
            starts_p=starts_p,
            last_s=position_by_node[last_nodes],
        )


def _level_by_level(parents: list[int], sequences: list[int]) -> IntArray:
    """Return nodes in the order of `Pieces`, siblings ordered by the sequence from which they are cut."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in sorted(range(len(parents)), key=sequences.__getitem__):
        children[parents[node]].append(node)  # roots have parent -1: they come last
    order = children[-1]
    for node in order:
        order.extend(children[node])
    return np.array(order, np.int64)


def _worth_sharing(common_t: IntArray, least: int) -> IntArray:
    """Return ``common_t`` without the branch points that save fewer than ``least`` tokens.

    A branch point saves the tokens between it and the one above, once for all but one of its branches. Deep ones are
    removed first, so that their branches count in the one above."""
    worthy_t = common_t.copy()
    points: list[tuple[int, list[int]]] = [(0, [])]  # (depth, sequences that diverge there from the previous one)
    for position, common in enumerate([*common_t.tolist(), 0]):
        while points[-1][0] > common:
            depth, members = points.pop()
            parent_depth = max(common, points[-1][0])
            if (depth - parent_depth) * len(members) < least:
                worthy_t[members] = parent_depth
                if points[-1][0] < parent_depth:
                    points.append((parent_depth, []))
                points[-1][1].extend(members)
        if points[-1][0] < common:
            points.append((common, []))
        points[-1][1].append(position)
    return worthy_t
