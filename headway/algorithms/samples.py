"""The samples of one training step as flat arrays.

Legend of shape suffixes: ``_n`` one value per token of the batch (prompts and responses, samples one after
another, no padding), ``_s`` one value per sample, ``_r`` one value per response token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from headway.records.rollout import Sample
from headway.records.training import TrainBatch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

PROMPT_VERSION = -1  # version of tokens no policy sampled


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """All samples of a batch, token by token.

    Invariant: ``lengths_s.sum() == N``; the first token of a sample carries no loss (nothing comes before it
    that could predict it). Prompt tokens: no loss, log-probability 0, advantage 0, version -1.
    """

    token_ids_n: IntArray  # [N] ids, prompt then response
    loss_mask_n: BoolArray  # [N] the token was sampled by the policy and carries loss
    behaviour_logprobs_n: FloatArray  # [N] log-probability under the sampling policy, nats
    advantages_n: FloatArray  # [N] its sample's advantage
    versions_n: IntArray  # [N] version each token was sampled under
    lengths_s: IntArray  # [S] tokens of each sample
    groups_s: IntArray  # [S] admission index of each sample's group

    @property
    def samples(self) -> int:
        return int(self.lengths_s.size)

    @property
    def tokens(self) -> int:
        return int(self.token_ids_n.size)

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask_n))

    @property
    def starts_s(self) -> IntArray:
        """[S] index of each sample's first token."""
        return np.cumsum(self.lengths_s) - self.lengths_s


def build_arrays(batch: TrainBatch) -> SampleArrays:
    """Lay the samples of ``batch`` out flat, in batch order.

    Raises ValueError naming the rollout whose parts differ in length.
    """
    rollouts = [sample.rollout for sample in batch.samples]
    prompts_s = _count(len(r.prompt_ids) for r in rollouts)
    responses_s = _count(len(r.response_ids) for r in rollouts)
    _require_consistent(batch.samples, responses_s)
    lengths_s = prompts_s + responses_s
    tokens, response_tokens = int(lengths_s.sum()), int(responses_s.sum())

    token_ids_n = np.fromiter(
        chain.from_iterable(chain.from_iterable((r.prompt_ids, r.response_ids) for r in rollouts)), np.int64, tokens
    )
    starts_s = np.cumsum(lengths_s) - lengths_s
    response_starts_s = np.cumsum(responses_s) - responses_s
    # Where each response token lies in the flat batch: its place in its response, shifted to its sample.
    at_r = np.arange(response_tokens) + np.repeat(starts_s + prompts_s - response_starts_s, responses_s)

    loss_mask_n = np.zeros(tokens, np.bool_)
    loss_mask_n[at_r] = np.fromiter(chain.from_iterable(r.response_mask for r in rollouts), np.bool_, response_tokens)
    loss_mask_n[starts_s[lengths_s > 0]] = False  # only matters where a prompt is empty
    behaviour_logprobs_n = np.zeros(tokens, np.float32)
    behaviour_logprobs_n[at_r] = np.fromiter(
        chain.from_iterable(r.response_logprobs for r in rollouts), np.float32, response_tokens
    )
    versions_n = np.full(tokens, PROMPT_VERSION, np.int64)
    versions_n[at_r] = np.fromiter(
        chain.from_iterable(repeat(span.version, span.tokens) for r in rollouts for span in r.versions),
        np.int64,
        response_tokens,
    )
    advantages_s = np.fromiter((sample.advantage for sample in batch.samples), np.float32, len(rollouts))
    advantages_n = np.zeros(tokens, np.float32)
    advantages_n[at_r] = np.repeat(advantages_s, responses_s)
    return SampleArrays(
        token_ids_n=token_ids_n,
        loss_mask_n=loss_mask_n,
        behaviour_logprobs_n=behaviour_logprobs_n,
        advantages_n=advantages_n,
        versions_n=versions_n,
        lengths_s=lengths_s,
        groups_s=np.fromiter((r.group for r in rollouts), np.int64, len(rollouts)),
    )


def sample_of_token(arrays: SampleArrays) -> IntArray:
    """[N] index of each token's sample."""
    return np.repeat(np.arange(arrays.samples), arrays.lengths_s)


def gather_tokens(arrays: SampleArrays, samples: Sequence[int] | IntArray) -> IntArray:
    """[M] indices into the flat batch of all tokens of ``samples``, sample after sample."""
    chosen = np.asarray(samples, dtype=np.int64)
    lengths = arrays.lengths_s[chosen]
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(arrays.starts_s[chosen] - offsets, lengths)


def split_by_group(arrays: SampleArrays, parts: int) -> list[IntArray]:
    """Split the samples into at most ``parts`` minibatches along group borders, in admission order.

    Returns sample indices per minibatch; every group is whole in one of them, their counts of groups differ by
    at most one, and none is empty. Fewer groups than ``parts`` give fewer minibatches.
    """
    if not arrays.samples:
        return [np.zeros(0, np.int64)]
    groups = np.unique(arrays.groups_s)
    shares = np.array_split(groups, min(parts, groups.size))
    return [np.flatnonzero(np.isin(arrays.groups_s, share)) for share in shares]


def _count(lengths: Iterable[int]) -> IntArray:
    return np.fromiter(lengths, np.int64)


def _require_consistent(samples: Sequence[Sample], responses_s: IntArray) -> None:
    for sample, tokens in zip(samples, responses_s.tolist(), strict=True):
        rollout = sample.rollout
        spans = sum(span.tokens for span in rollout.versions)
        if not len(rollout.response_logprobs) == len(rollout.response_mask) == spans == tokens:
            raise ValueError(
                f"rollout {rollout.rollout_id}: {tokens} response ids, {len(rollout.response_logprobs)} "
                f"log-probabilities, {len(rollout.response_mask)} mask values, {spans} tokens in version spans"
            )


@dataclass(frozen=True, kw_only=True)
class MicroBatchArrays:
    """What one forward and backward pass needs of some samples, packed end to end.

    The last token of a sample predicts nothing that is known, so it isn't fed: a sample of L tokens takes L - 1.
    Suffix ``_m``: one value per token that carries loss.
    """

    input_ids: IntArray  # [sum of input_lengths]
    input_lengths: list[int]  # tokens fed of each sample, >= 1
    predictors_m: IntArray  # [M] index into input_ids of the token before each loss token
    targets_m: IntArray  # [M] index into the flat batch of each loss token


def input_lengths(arrays: SampleArrays) -> IntArray:
    """[S] tokens each sample feeds to the model: its length less one, and 0 for one without any loss token."""
    loss_tokens_s = np.bincount(
        np.repeat(np.arange(arrays.samples), arrays.lengths_s), weights=arrays.loss_mask_n, minlength=arrays.samples
    )
    return np.where(loss_tokens_s > 0, arrays.lengths_s - 1, 0)


def slice_micro_batch(arrays: SampleArrays, samples: Sequence[int] | IntArray) -> MicroBatchArrays:
    """Cut ``samples`` (each with at least one loss token) out of the batch."""
    chosen = np.asarray(samples, dtype=np.int64)
    at = gather_tokens(arrays, chosen)
    lengths = arrays.lengths_s[chosen]
    fed = np.ones(at.size, np.bool_)
    fed[np.cumsum(lengths) - 1] = False
    lossy = np.flatnonzero(arrays.loss_mask_n[at])
    # In the fed tokens each earlier sample is one token shorter, and the predictor stands one before its target.
    predictors_m = lossy - np.repeat(np.arange(chosen.size), lengths)[lossy] - 1
    return MicroBatchArrays(
        input_ids=arrays.token_ids_n[at[fed]],
        input_lengths=(lengths - 1).tolist(),
        predictors_m=predictors_m,
        targets_m=at[lossy],
    )
