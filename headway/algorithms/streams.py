"""Streams of a step's loss: which tokens each has, what they weigh, and by what their sum is divided.

The loss of a step is, over streams and rules, ``coefficient x sum of weights x token losses / denominator``:

- ``policy``: the loss by advantages, on sampled tokens;
- ``teacher``: the divergence from a teacher's distribution, on sampled tokens;
- ``imitate``: cross-entropy on tokens that the policy didn't sample: what tools answered, and demonstrations.

A rule's denominator is what its aggregation counts (tokens or responses) over all samples of the stream, whatever
their rule, before any mask but the loss mask (design.md, rule 10). So a rule's mean is weighted by its share of the
stream, and two equal rules give what one gives. A stream without tokens is 0.

Legend: ``_n`` one value per token of the flat batch, ``_s`` one per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.aggregation import weighting
from headway.algorithms.samples import BoolArray, IntArray, SampleArrays, gather_tokens
from headway.config.objective.rules import STREAMS, StreamRule, stream_rules
from headway.config.services.policy_sections import PolicySections


@dataclass(frozen=True, kw_only=True)
class StreamWeights:
    """The weights of a rule's tokens in a stream, for an optimiser step."""

    part: StreamRule
    weights_s: NDArray[np.float64]  # [S] of every token of a sequence, with the coefficient
    total: float  # what the aggregation counts in the whole stream; those of parts of a step, or of ranks, add up

    @property
    def divisor(self) -> float:
        """The divisor: at least 1."""
        return max(1.0, self.total)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The streams of a run."""

    parts: tuple[StreamRule, ...]
    max_response_tokens: int  # of aggregation "fixed"

    @classmethod
    def of(cls, experiment: PolicySections) -> Streams:
        limit = experiment.rollout.max_response_tokens
        return cls(parts=stream_rules(experiment.rules, experiment.demonstrations), max_response_tokens=limit)

    @property
    def single(self) -> bool:
        """Whether all tokens are of the policy stream and have rule 0: nothing has to be distinguished."""
        return [(part.stream, part.rule) for part in self.parts] == [("policy", 0)]

    def has_rule(self, arrays: SampleArrays, rule: int, sequences_k: IntArray) -> BoolArray:
        """[K] whether the sequences ``sequences_k`` of some tokens have the rule with this number."""
        if arrays.rules_s is None:
            return np.full(len(sequences_k), rule == 0)
        return arrays.rules_s[sequences_k] == rule

    def has_tokens(
        self, arrays: SampleArrays, part: StreamRule, indices_k: IntArray, sequences_k: IntArray
    ) -> BoolArray:
        """[K] whether ``part`` has the tokens ``indices_k`` of the flat batch, of sequences ``sequences_k``, before
        masks."""
        in_stream_n = arrays.imitated_n if part.stream == "imitate" else arrays.loss_mask_n
        if in_stream_n is None:
            return np.zeros(len(indices_k), np.bool_)
        return in_stream_n[indices_k] & self.has_rule(arrays, part.rule, sequences_k)

    def count(self, arrays: SampleArrays, sequences: IntArray) -> NDArray[np.float64]:
        """[streams] the tokens of each stream in ``sequences``, before masks."""
        indices_k, counts = gather_tokens(arrays, sequences), np.zeros(len(STREAMS))
        sequences_k = np.repeat(sequences, arrays.lengths_s[sequences])
        for part in self.parts:
            has_k = self.has_tokens(arrays, part, indices_k, sequences_k)
            counts[STREAMS.index(part.stream)] += np.count_nonzero(has_k)
        return counts

    def policy_tokens(self, arrays: SampleArrays) -> BoolArray:
        """[N] the sampled tokens that the policy stream has, which masks and ratios are of."""
        rules = [part.rule for part in self.parts if part.stream == "policy"]
        if arrays.rules_s is None:
            return arrays.loss_mask_n if 0 in rules else np.zeros(arrays.tokens, np.bool_)
        return arrays.loss_mask_n & np.repeat(np.isin(arrays.rules_s, rules), arrays.lengths_s)

    def weights(self, arrays: SampleArrays, minibatch: IntArray) -> list[StreamWeights]:
        """The weights of every part for an optimiser step over the sequences ``minibatch`` (see `weighting`), of this
        rank; the same parts in the same order on every rank."""
        rules_s = np.zeros(arrays.samples, np.int64) if arrays.rules_s is None else arrays.rules_s
        weights = list[StreamWeights]()
        for part in self.parts:
            rules = [other.rule for other in self.parts if other.stream == part.stream]
            in_stream = minibatch[np.isin(rules_s[minibatch], rules)]
            tokens_s = arrays.imitated_tokens_s if part.stream == "imitate" else None
            weighted = weighting(
                part.aggregation,
                arrays,
                in_stream,
                max_response_tokens=self.max_response_tokens,
                tokens_s=tokens_s,
            )
            weights_s = weighted.weights_s if part.coefficient == 1 else part.coefficient * weighted.weights_s
            weights.append(StreamWeights(part=part, weights_s=weights_s, total=weighted.total))
        return weights
