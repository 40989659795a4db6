"""Lays out the samples of one training step as flat arrays.

Legend of shape suffixes: ``_n`` one value per token of the batch (prompts and responses, samples one after
another, no padding), ``_s`` one value per sequence (a sample's rollout, or one of its branches), ``_r`` one value per
response token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.groups.rewards import reward_runs
from headway.algorithms.prefix_tree import LEAST_SAVED, PrefixTree
from headway.config.objective.rules import DEMONSTRATION
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, Rollout, Sample
from headway.records.tokens import TARGET_KINDS, TokenIds, TokenLogprobs, TokenMask, TokenRows
from headway.records.training import DrawnDemonstration, TrainBatch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

PROMPT_VERSION = -1  # version of tokens no policy sampled
ConstrainedRun = tuple[str, int, int]  # text of a grammar, and the tokens [first, behind) of the batch sampled by it


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """The samples of a batch, token by token: each sample's trunk, then its branches. On a rank: its own sequences.

    Invariant: ``lengths_s.sum() == N``; the first token of a sequence carries no loss (nothing comes before it
    that could predict it). Prompt tokens: no loss, log-probability 0, advantage 0, version -1.
    """

    token_ids_n: IntArray  # [N] ids, prompt then response
    loss_mask_n: BoolArray  # [N] the token was sampled by the policy and carries loss
    behaviour_logprobs_n: FloatArray  # [N] log-probability under the sampling policy, nats
    advantages_n: FloatArray  # [N] advantage of the token's sample or turn; with a critic the reward of each token
    versions_n: IntArray  # [N] version each token was sampled under
    lengths_s: IntArray  # [S] tokens of each sequence
    groups_s: IntArray  # [S] admission index of each sequence's group
    weights_s: NDArray[np.float64] | None = None  # [S] share of each sequence's loss that counts; None: all of it
    branches_s: IntArray | None = None  # [S] position of each sequence in its rollout, 0: the trunk; None: all are
    rollout_tokens_s: IntArray | None = None  # [S] loss tokens of each sequence's rollout, its branches' too; None: own
    batch_groups: IntArray | None = None  # ascending groups of the complete batch; None: these samples'
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict[str, TokenRows])  # by kind, [N] each
    grammars: Sequence[ConstrainedRun] = ()
    rules_s: IntArray | None = None  # [S] number of the rule of each sequence; None: all have rule 0
    imitated_n: BoolArray | None = None  # [N] the token carries cross-entropy, and wasn't sampled; None: none does
    rollout_imitated_s: IntArray | None = None  # [S] as rollout_tokens_s, of imitated tokens; None: own
    bootstraps_s: BoolArray | None = None  # [S] the critic's value stands behind its last token; None: of none

    @property
    def samples(self) -> int:
        """Number of sequences; branches count as sequences."""
        return int(self.lengths_s.size)

    @property
    def tokens(self) -> int:
        return int(self.token_ids_n.size)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that carry loss; the copies of a padded sample count together as one."""
        if self.weights_s is None:
            return int(np.count_nonzero(self.loss_mask_n))
        return round(float(self.weights_s[sequence_of_token(self)][self.loss_mask_n].sum()))

    @cached_property
    def numbers_n(self) -> IntArray:
        """[N] numbers that are equal for tokens with equal ids and rows.

        Kept sets and teachers' scores are left out: they belong to targets, not to input tokens."""
        other_rows = [rows for kind, rows in self.token_rows.items() if kind not in TARGET_KINDS]
        if not other_rows:
            return self.token_ids_n
        mixed_n = self.token_ids_n.astype(np.uint64)
        for rows in other_rows:
            mixed_n = mixed_n * np.uint64(1 << 32) + mixed_n + rows.cut([0], [self.tokens]).hashes()
        return np.unique(mixed_n, return_inverse=True)[1]

    @property
    def starts_s(self) -> IntArray:
        """[S] index of each sequence's first token."""
        return np.cumsum(self.lengths_s) - self.lengths_s

    @cached_property
    def loss_tokens_s(self) -> IntArray:
        """[S] number of each sequence's sampled tokens that carry loss."""
        return _loss_tokens(self.loss_mask_n, self.lengths_s)

    @cached_property
    def scored_n(self) -> BoolArray:
        """[N] tokens whose log-probabilities a step needs: sampled ones that carry loss, and imitated ones."""
        return self.loss_mask_n if self.imitated_n is None else self.loss_mask_n | self.imitated_n

    @cached_property
    def imitated_tokens_s(self) -> IntArray:
        """[S] number of imitated tokens of each sequence's rollout, its branches' too."""
        if self.imitated_n is None:
            return np.zeros(self.samples, np.int64)
        own_tokens_s = _loss_tokens(self.imitated_n, self.lengths_s)
        return own_tokens_s if self.rollout_imitated_s is None else self.rollout_imitated_s


_PER_SEQUENCE = (
    *("lengths_s", "groups_s", "members_s", "weights_s", "branches_s", "rollout_tokens_s"),
    *("rules_s", "rollout_imitated_s", "bootstraps_s"),
)
_PER_TOKEN = ("token_ids_n", "loss_mask_n", "behaviour_logprobs_n", "imitated_n")


@dataclass(frozen=True, kw_only=True)
class FlatBatch:
    """The batch of one training step, or a rank's share of it, in its wire format: the content of `SampleArrays` in 9
    bytes a token, 10 where tokens are imitated.

    Values that repeat over consecutive tokens are run-length encoded: [R] values with the [R] tokens of each.
    """

    step: int  # trainer version before the step
    samples: int  # of the complete batch, as are ...
    tokens: int
    loss_tokens: int  # that carry loss; the copies of a padded sample count together as one
    batch_groups: IntArray  # ... and the ascending admission indices of its groups
    token_ids_n: NDArray[np.int32]
    loss_mask_n: BoolArray
    behaviour_logprobs_n: FloatArray
    advantage_runs: tuple[FloatArray, IntArray]
    version_runs: tuple[IntArray, IntArray]
    lengths_s: IntArray
    groups_s: IntArray
    members_s: IntArray  # [S] member index of each sequence's rollout
    weights_s: NDArray[np.float64] | None
    branches_s: IntArray | None
    rollout_tokens_s: IntArray | None
    token_rows: Mapping[str, TokenRows]
    grammars: Sequence[ConstrainedRun]
    rules_s: IntArray | None = None
    imitated_n: BoolArray | None = None
    rollout_imitated_s: IntArray | None = None
    bootstraps_s: BoolArray | None = None

    def arrays(self) -> SampleArrays:
        """Decode the batch to one value per token."""
        return SampleArrays(
            token_ids_n=self.token_ids_n.astype(np.int64),
            loss_mask_n=self.loss_mask_n,
            behaviour_logprobs_n=self.behaviour_logprobs_n,
            advantages_n=np.repeat(*self.advantage_runs),
            versions_n=np.repeat(*self.version_runs),
            lengths_s=self.lengths_s,
            groups_s=self.groups_s,
            weights_s=self.weights_s,
            branches_s=self.branches_s,
            rollout_tokens_s=self.rollout_tokens_s,
            batch_groups=self.batch_groups,
            token_rows=self.token_rows,
            grammars=self.grammars,
            rules_s=self.rules_s,
            imitated_n=self.imitated_n,
            rollout_imitated_s=self.rollout_imitated_s,
            bootstraps_s=self.bootstraps_s,
        )

    def take(self, sequences: IntArray) -> FlatBatch:
        """Return the batch with these sequences alone (ascending indices), as a rank gets it."""
        ends_s, lengths_s = np.cumsum(self.lengths_s), self.lengths_s[sequences]
        starts_s = ends_s[sequences] - lengths_s
        idx_n = _ranges(starts_s, lengths_s)
        taken: dict[str, Any] = {
            name: None
            if (values := getattr(self, name)) is None
            else values[idx_n if name in _PER_TOKEN else sequences]
            for name in (*_PER_SEQUENCE, *_PER_TOKEN)
        }
        for name in ("advantage_runs", "version_runs"):  # a run is within a sequence
            values_r, tokens_r = getattr(self, name)
            is_taken_r = np.isin(np.searchsorted(ends_s, np.cumsum(tokens_r)), sequences)
            taken[name] = values_r[is_taken_r], tokens_r[is_taken_r]
        taken["token_rows"] = {kind: rows.cut(starts_s, lengths_s) for kind, rows in self.token_rows.items()}
        shifts = (np.cumsum(lengths_s) - lengths_s - starts_s).tolist()
        shift_by_sequence = dict(zip(sequences.tolist(), shifts, strict=True))
        owners = np.searchsorted(ends_s, [first for _, first, _ in self.grammars], "right").tolist()
        taken["grammars"] = [
            (text, first + shift_by_sequence[owner], stop + shift_by_sequence[owner])
            for (text, first, stop), owner in zip(self.grammars, owners, strict=True)
            if owner in shift_by_sequence
        ]
        return replace(self, **taken)


def build_arrays(batch: TrainBatch) -> SampleArrays:
    """Lay out the samples of ``batch`` with one value per token. Raises as `lay_out`."""
    return lay_out(batch).arrays()


def lay_out(batch: TrainBatch) -> FlatBatch:
    """Concatenate the samples of ``batch`` in batch order, a rollout's branches after its trunk.

    Raises ValueError naming the rollout whose parts differ in length.
    """
    owners: list[Sample] = []  # one per sequence
    sequences: list[Rollout | Branch] = []
    samples = (*batch.samples, *[_sample_of(*numbered) for numbered in enumerate(batch.demonstrations)])
    for sample in samples:
        for sequence in sample.rollout.sequences:
            owners.append(sample)
            sequences.append(sequence)
    prompts_s = _count([len(sequence.prompt_ids) for sequence in sequences])
    responses_s = _count([len(sequence.response_ids) for sequence in sequences])
    _require_consistent(owners, sequences, responses_s)
    lengths_s = prompts_s + responses_s
    prompt_masks = {length: TokenMask.filled(False, length) for length in set(prompts_s.tolist())}
    prompt_logprobs = {length: TokenLogprobs.filled(0.0, length) for length in prompt_masks}
    ids: list[Sequence[int]] = []
    masks: list[Sequence[bool]] = []
    logprobs: list[Sequence[float]] = []
    version_runs: list[tuple[int, int]] = []  # (version, number of tokens)
    advantage_runs: list[tuple[float, int]] = []
    for sample, sequence, prompt_tokens in zip(owners, sequences, prompts_s.tolist(), strict=True):
        ids += sequence.prompt_ids, sequence.response_ids
        masks += prompt_masks[prompt_tokens], sequence.response_mask
        logprobs += prompt_logprobs[prompt_tokens], sequence.response_logprobs
        version_runs.append((PROMPT_VERSION, prompt_tokens))
        version_runs += [(span.version, span.tokens) for span in sequence.versions]
        advantage_runs.append((0.0, prompt_tokens))
        advantage_runs += _advantages(sample, sequence)
    starts_s = np.cumsum(lengths_s) - lengths_s
    loss_mask_n = TokenMask.concatenated(masks)
    loss_mask_n[starts_s[lengths_s > 0]] = False  # only matters where a prompt is empty
    imitated_n = _imitated(owners, sequences, starts_s, lengths_s, batch.demonstrations)
    weights = [sample.weight for sample in owners]
    weights_s = None if weights.count(1.0) == len(weights) else np.array(weights)
    groups_s = _count([sample.rollout.group for sample in owners])
    loss_tokens_s, branches_s = _loss_tokens(loss_mask_n, lengths_s), None
    rollout_tokens_s = rollout_imitated_s = None
    if len(owners) > len(samples):
        branches_s = np.concatenate([np.arange(1 + len(sample.rollout.branches)) for sample in samples])
        rollouts_s = np.cumsum(branches_s == 0) - 1  # each copy of a padded member is a separate sample
        rollout_tokens_s = np.bincount(rollouts_s, weights=loss_tokens_s).astype(np.int64)[rollouts_s]
        if imitated_n is not None:
            imitated_tokens_s = _loss_tokens(imitated_n, lengths_s)
            rollout_imitated_s = np.bincount(rollouts_s, weights=imitated_tokens_s).astype(np.int64)[rollouts_s]
    rules_s = _count([sample.rule for sample in owners])
    bootstraps_s = np.array([sample.bootstraps for sample in owners], np.bool_)
    return FlatBatch(
        step=batch.step,
        samples=len(batch.samples),
        tokens=int(lengths_s.sum()),
        loss_tokens=round(float((loss_tokens_s if weights_s is None else loss_tokens_s * weights_s).sum())),
        batch_groups=np.unique(groups_s),
        token_ids_n=TokenIds.concatenated(ids),
        loss_mask_n=loss_mask_n,
        behaviour_logprobs_n=TokenLogprobs.concatenated(logprobs),
        advantage_runs=_runs(advantage_runs, np.float32),
        version_runs=_runs(version_runs, np.int64),
        lengths_s=lengths_s,
        groups_s=groups_s,
        members_s=_count([sample.rollout.member for sample in owners]),
        weights_s=weights_s,
        branches_s=branches_s,
        rollout_tokens_s=rollout_tokens_s,
        token_rows=_token_rows(sequences, lengths_s),
        grammars=_grammars(sequences, (np.cumsum(lengths_s) - responses_s).tolist()),
        rules_s=rules_s if rules_s.any() else None,
        imitated_n=imitated_n,
        rollout_imitated_s=rollout_imitated_s,
        bootstraps_s=bootstraps_s if bootstraps_s.any() else None,
    )


def _sample_of(position: int, demonstration: DrawnDemonstration) -> Sample:
    """A demonstration in the form of a sample that no policy has sampled, in a group below all admitted ones."""
    tokens = len(demonstration.ids)
    rollout = Rollout(
        group=-1 - position,
        member=0,
        prompt_ids=TokenIds(),
        response_ids=demonstration.ids,
        response_logprobs=TokenLogprobs.filled(0.0, tokens),
        response_mask=TokenMask.filled(False, tokens),
        versions=(VersionSpan(version=PROMPT_VERSION, tokens=tokens),),
    )
    return Sample(rollout=rollout, advantage=0.0, rule=DEMONSTRATION)


def _imitated(
    owners: Sequence[Sample],
    sequences: Sequence[Rollout | Branch],
    starts_s: IntArray,
    lengths_s: IntArray,
    demonstrations: Sequence[DrawnDemonstration],
) -> BoolArray | None:
    """[N] the tokens with cross-entropy: what tools answered in samples that imitate it, and what demonstrations, the
    last sequences, show; None where there are none."""
    imitated_n = np.zeros(int(lengths_s.sum()), np.bool_)
    for owner, sequence, start in zip(owners, sequences, starts_s.tolist(), strict=True):
        response_start = start + len(sequence.prompt_ids)
        for first, stop in sequence.observations if owner.imitates else ():
            imitated_n[response_start + first : response_start + stop] = True
    for demonstration, start in zip(demonstrations, starts_s[len(owners) - len(demonstrations) :], strict=True):
        imitated_n[start : start + len(demonstration.ids)] = demonstration.learned
    imitated_n[starts_s[lengths_s > 0]] = False
    return imitated_n if imitated_n.any() else None


def _token_rows(sequences: Sequence[Rollout | Branch], lengths_s: IntArray) -> dict[str, TokenRows]:
    """Concatenate the rows of all sequences' tokens, by kind; a token without one has an empty row."""
    kinds = dict.fromkeys(kind for sequence in sequences for kind in sequence.token_rows)
    empty_rows = TokenRows()
    rows_s = {kind: [sequence.token_rows.get(kind, empty_rows) for sequence in sequences] for kind in kinds}
    return {
        kind: TokenRows.joined(rows.cut([0], [length]) for rows, length in zip(parts, lengths_s, strict=True))
        for kind, parts in rows_s.items()
    }


def _grammars(sequences: Sequence[Rollout | Branch], responses: Sequence[int]) -> list[ConstrainedRun]:
    """Return the runs of grammar-constrained tokens, equal texts interned. ``responses``: start of each response."""
    interned: dict[str, str] = {}
    return [
        (interned.setdefault(text, text), start + first, start + stop)
        for sequence, start in zip(sequences, responses, strict=True)
        for text, runs in sequence.grammars.items()
        for first, stop in runs
    ]


def _loss_tokens(loss_mask_n: BoolArray, lengths_s: IntArray) -> IntArray:
    """[S] number of each sequence's tokens that carry loss."""
    counts_n = np.concatenate([[0], np.cumsum(loss_mask_n)])
    ends_s = np.cumsum(lengths_s)
    return counts_n[ends_s] - counts_n[ends_s - lengths_s]


def sequence_of_token(arrays: SampleArrays) -> IntArray:
    """[N] index of each token's sequence."""
    return np.repeat(np.arange(arrays.samples), arrays.lengths_s)


def gather_tokens(arrays: SampleArrays, samples: Sequence[int] | IntArray) -> IntArray:
    """Return indices into the flat batch of all tokens of ``samples``, sample after sample: one per token."""
    chosen = np.asarray(samples, dtype=np.int64)
    return _ranges(arrays.starts_s[chosen], arrays.lengths_s[chosen])


def split_by_group(arrays: SampleArrays, parts: int, order: Callable[[int], IntArray] = np.arange) -> list[IntArray]:
    """Split the samples into at most ``parts`` minibatches along group borders, in admission order, or that of the
    positions that ``order`` returns for a number of groups.

    Returns sample indices per minibatch. Every group is whole in one minibatch, their numbers of groups differ by at
    most one, and none is empty unless the batch is. Fewer groups than ``parts`` give fewer minibatches. Demonstrations
    are ordered and split likewise. On a rank the groups of the complete batch are split, of which it may have none.
    """
    all_groups = np.unique(arrays.groups_s) if arrays.batch_groups is None else arrays.batch_groups
    groups, demonstrations = all_groups[all_groups >= 0], all_groups[all_groups < 0]
    count = max(1, min(parts, groups.size))
    shares = (np.array_split(numbers[order(numbers.size)], count) for numbers in (groups, demonstrations))
    return [np.flatnonzero(np.isin(arrays.groups_s, np.concatenate(share))) for share in zip(*shares, strict=True)]


def _count(numbers: Sequence[int]) -> IntArray:
    return np.array(numbers, np.int64)


def _runs(runs: Sequence[tuple[float, int]], kind: type[np.generic]) -> tuple[NDArray[Any], IntArray]:
    """Runs of (value, tokens) as two arrays."""
    return np.array([value for value, _ in runs], kind), _count([tokens for _, tokens in runs])


def _advantages(sample: Sample, sequence: Rollout | Branch) -> list[tuple[float, int]]:
    """Runs of (advantage, response tokens) of a sequence: one run for the whole response, or one per turn. With a
    critic they are runs of rewards."""
    tokens = len(sequence.response_ids)
    if sample.rewards:
        return reward_runs(sample)
    if not sample.turn_advantages or sequence is not sample.rollout:
        return [(sample.advantage, tokens)]
    turns_t = np.diff(sample.rollout.turn_ends, prepend=0)
    if len(turns_t) != len(sample.turn_advantages) or turns_t.sum() != tokens:
        raise ValueError(
            f"rollout {sample.rollout.rollout_id}: {len(sample.turn_advantages)} turn advantages, turns end at "
            f"{list(sample.rollout.turn_ends)} of {tokens} response tokens"
        )
    return list(zip(sample.turn_advantages, turns_t.tolist(), strict=True))


def _require_consistent(
    samples: Sequence[Sample], sequences: Sequence[Rollout | Branch], responses_s: IntArray
) -> None:
    for sample, sequence, tokens in zip(samples, sequences, responses_s.tolist(), strict=True):
        span_tokens = sum([span.tokens for span in sequence.versions])
        if not len(sequence.response_logprobs) == len(sequence.response_mask) == span_tokens == tokens:
            raise ValueError(
                f"rollout {sample.rollout.rollout_id}: {tokens} response ids, {len(sequence.response_logprobs)} "
                f"log-probabilities, {len(sequence.response_mask)} mask values, {span_tokens} tokens in version spans"
            )


@dataclass(frozen=True, kw_only=True)
class MicroBatchArrays:
    """Input of one forward and backward pass over some samples, packed end to end in *pieces*.

    A piece is a whole sample, or a node of the trie of several: tokens that they share are fed once
    (`prefix_tree.Pieces` defines the order). The last token of a sample has no target, so it isn't fed: a sample of
    L tokens feeds L - 1. Suffix ``_m``: one value per token that carries loss, sample after sample.
    """

    input_ids: IntArray  # [sum of input_lengths]
    input_lengths: list[int]  # tokens of each piece, >= 1
    continues: list[int]  # for each piece the index of the piece it continues, or -1
    predictors_m: IntArray  # [M] index into input_ids of the token before each loss token; samples may share it
    targets_m: IntArray  # [M] index into the flat batch of each loss token
    token_rows: Mapping[str, TokenRows]  # by kind, of the tokens fed (a shared prefix: its first sample's); no targets'
    sample_tokens: int  # tokens fed without prefix sharing


# One token without a target, for a rank that has no samples left while others compute: its gradient is 0.
EMPTY_MICRO_BATCH = MicroBatchArrays(
    input_ids=np.zeros(1, np.int64),
    input_lengths=[1],
    continues=[-1],
    predictors_m=np.zeros(0, np.int64),
    targets_m=np.zeros(0, np.int64),
    token_rows={},
    sample_tokens=0,
)


def input_lengths(arrays: SampleArrays) -> IntArray:
    """[S] tokens each sequence feeds to the model: its length less one, or 0 if it has no loss token."""
    return np.where(_loss_tokens(arrays.scored_n, arrays.lengths_s) > 0, arrays.lengths_s - 1, 0)


def slice_micro_batch(
    arrays: SampleArrays, samples: Sequence[int] | IntArray, tree: PrefixTree | None = None
) -> MicroBatchArrays:
    """Cut ``samples`` (each with at least one loss token) out of the batch.

    ``tree``: the tries of the samples' input tokens (`prefix_tree`); by default no tokens are shared.
    """
    samples_s = np.asarray(samples, dtype=np.int64)
    fed = arrays.lengths_s[samples_s] - 1
    pieces = (tree or PrefixTree.separate(fed)).pieces
    starts = arrays.starts_s[samples_s][pieces.sequences_p] + pieces.starts_p
    indices = gather_tokens(arrays, samples_s)
    lossy = np.flatnonzero(arrays.scored_n[indices])
    sequence_m = np.repeat(np.arange(samples_s.size), fed + 1)[lossy]
    position_m = lossy - (np.cumsum(fed + 1) - fed - 1)[sequence_m] - 1  # position of the predictor inside its sample
    return MicroBatchArrays(
        input_ids=arrays.token_ids_n[_ranges(starts, pieces.lengths_p)],
        input_lengths=pieces.lengths_p.tolist(),
        continues=pieces.continues_p.tolist(),
        predictors_m=pieces.rows(sequence_m, position_m),
        targets_m=indices[lossy],
        token_rows={
            kind: rows.cut(starts, pieces.lengths_p)
            for kind, rows in arrays.token_rows.items()
            if kind not in TARGET_KINDS
        },
        sample_tokens=int(fed.sum()),
    )


def prefix_tree(
    arrays: SampleArrays, samples: IntArray, least: int = LEAST_SAVED, *, with_rows: bool = True
) -> PrefixTree:
    """Build the tries of the input tokens of ``samples``, within each group.

    Shared are prompts, the turns common to branches of a rollout, and equal beginnings of responses. ``with_rows``:
    tokens with different rows differ, as a replayed token is routed to recorded experts. ``least``: as of
    `PrefixTree.build`."""
    fed_s, ids_n = arrays.lengths_s[samples] - 1, arrays.numbers_n if with_rows else arrays.token_ids_n
    return PrefixTree.build(ids_n, arrays.starts_s[samples], fed_s, arrays.groups_s[samples], least)


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate the index ranges ``start .. start + length - 1``."""
    return np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
