"""Batches whose sequences branch off one another at random, as an agent's do."""

from __future__ import annotations

import numpy as np

from headway.algorithms.samples import SampleArrays


def branching(
    seed: int, nodes: int, *, groups: int = 2, deepest: int = 6, longest: int = 6, vocabulary: int = 31
) -> SampleArrays:
    """``nodes`` sequences in random order, each what an earlier one feeds and up to ``longest`` tokens more, chained up
    to ``deepest`` times, and a last token that isn't fed. Random loss masks and advantages."""
    random = np.random.default_rng(seed)
    found: list[tuple[int, list[int], int]] = []  # (group, tokens, depth)
    for _ in range(nodes):
        roots = [(int(random.integers(groups)), list[int](), 0)]
        group, tokens, depth = (choices := roots + [one for one in found if one[2] < deepest])[
            int(random.integers(len(choices)))
        ]
        own = random.integers(0, vocabulary, int(random.integers(1, longest + 1))).tolist()
        found.append((group, tokens + own, depth + 1))
    order = random.permutation(nodes)
    sequences = [[*found[i][1], int(random.integers(vocabulary))] for i in order]
    lengths_s = np.array([len(sequence) for sequence in sequences])
    loss_mask_n = random.random(int(lengths_s.sum())) < 0.7
    loss_mask_n[np.cumsum(lengths_s) - lengths_s] = False
    loss_mask_n[np.cumsum(lengths_s) - 1] = True
    return SampleArrays(
        token_ids_n=np.concatenate([np.array(sequence) for sequence in sequences]),
        loss_mask_n=loss_mask_n,
        behaviour_logprobs_n=np.where(loss_mask_n, -3.0, 0.0).astype(np.float32),
        advantages_n=np.repeat(random.standard_normal(nodes), lengths_s).astype(np.float32),
        versions_n=np.zeros(int(lengths_s.sum()), np.int64),
        lengths_s=lengths_s,
        groups_s=np.array([found[i][0] for i in order]),
    )


def fed(arrays: SampleArrays) -> list[tuple[int, tuple[int, ...]]]:
    """(group, fed tokens) of each sequence."""
    starts = arrays.starts_s.tolist()
    ids = arrays.token_ids_n.tolist()
    return [
        (group, tuple(ids[start : start + length - 1]))
        for group, start, length in zip(arrays.groups_s.tolist(), starts, arrays.lengths_s.tolist(), strict=True)
    ]


def distinct_prefixes(arrays: SampleArrays) -> set[tuple[int, tuple[int, ...]]]:
    """(group, prefix): every token that a trie has is one, by definition."""
    return {(group, tokens[: end + 1]) for group, tokens in fed(arrays) for end in range(len(tokens))}
