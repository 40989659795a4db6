"""The plan of a training step: which rank has which sequences, and how a rank packs its own into micro-batches.

Legend of shape suffixes: ``_s`` one value per sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.algorithms.packing import MicroBatch, Plan, pack_in_order
from headway.algorithms.prefix_tree import PrefixTree
from headway.algorithms.samples import FlatBatch, IntArray, SampleArrays, input_lengths, prefix_tree, split_by_group
from headway.algorithms.shared_packing import pack_trees
from headway.config.schema import TrainerConfig

_SHUFFLE_KEY = 0x5061_7373_6573  # of `pass_order`'s generator, which no other one has


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """The most that a micro-batch may have."""

    packing: Literal["balanced", "areal", "fixed"]
    tokens: int
    samples: int | None  # instead of ``tokens`` with fixed packing

    @classmethod
    def of(cls, settings: TrainerConfig) -> MicroBatchSize:
        return cls(packing=settings.packing, tokens=settings.micro_batch_tokens, samples=settings.micro_batch_samples)

    def pack(self, tree: PrefixTree, ranks: int = 1, least: int = 1) -> Plan:
        """Plan micro-batches of the sequences of ``tree``, at least ``least`` for each rank."""
        if self.packing != "fixed":
            return pack_trees(tree, self.tokens, ranks, self.packing, least)
        assert self.samples is not None, "the configuration is refused without it"
        return pack_in_order(len(tree.lengths_s), self.samples, ranks, least)

    def pack_equally(self, tree: PrefixTree, most: Callable[[int], int]) -> list[MicroBatch]:
        """Plan a rank's micro-batches, as many as every other rank has; some are empty if it has too few sequences.
        ``most`` returns the largest over the ranks of the number that each needs."""
        micro_batches = [micro_batch for micro_batch in self.pack(tree)[0] if micro_batch]
        count = most(len(micro_batches))
        if len(micro_batches) < count and len(wider_plan := self.pack(tree, least=count)[0]) == count:
            return wider_plan
        return micro_batches + [[] for _ in range(count - len(micro_batches))]


def tree_of(
    arrays: SampleArrays, sequences: IntArray, *, shares_prefixes: bool, with_rows: bool = True
) -> tuple[IntArray, PrefixTree]:
    """Return those of ``sequences`` that have a loss token, and their tries. ``with_rows``: as of `prefix_tree`."""
    lengths = input_lengths(arrays)[sequences]
    sequences, lengths = sequences[lengths > 0], lengths[lengths > 0]
    if not shares_prefixes:
        return sequences, PrefixTree.separate(lengths)
    return sequences, prefix_tree(arrays, sequences, with_rows=with_rows)


def pass_order(groups: int, *, number: int, seed: int, step: int) -> IntArray:
    """The positions of a batch's ``groups`` in the order in which pass ``number`` (from 0) of ``step`` splits them into
    minibatches: the first in admission order, later ones shuffled by a counter-based generator keyed (seed, step,
    pass), equal on every rank and after a resume."""
    if not number:
        return np.arange(groups)
    key = np.array([_SHUFFLE_KEY, seed % (1 << 64)], np.uint64)
    shuffle = np.random.Philox(key=key, counter=[0, 0, number, step])
    return np.argsort(shuffle.random_raw(groups), kind="stable")


def divide(batch: FlatBatch, settings: TrainerConfig, ranks: int) -> list[IntArray]:
    """Divide a batch among ``ranks``, or groups of ranks: returns the ascending sequences of each, of which it has
    every one alone.

    Every minibatch of the first pass is balanced by the tokens to be computed. A sequence stays on its rank in all
    passes of a step. Those without a loss token are dealt in turn."""
    arrays, size = batch.arrays(), MicroBatchSize.of(settings)
    rank_s = np.arange(arrays.samples) % ranks
    for minibatch in split_by_group(arrays, settings.optimizer_steps_per_batch):
        sequences, tree = tree_of(arrays, minibatch, shares_prefixes=settings.shared_prefix)
        for rank, micro_batches in enumerate(size.pack(tree, ranks)):
            for positions in micro_batches:
                rank_s[sequences[positions]] = rank
    return [np.flatnonzero(rank_s == rank) for rank in range(ranks)]
