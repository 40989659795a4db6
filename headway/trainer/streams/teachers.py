"""Teachers as the trainer uses them: the distributions of a micro-batch's tokens, and the log-probabilities of sampled
tokens in the policy's advantages.

Legend: ``_n`` one value per token of this rank's samples, ``_m`` per scored token of a micro-batch, ``_j`` per token of
these that a teacher teaches, ``_s`` per sequence, ``d`` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.samples import (
    EMPTY_MICRO_BATCH,
    PROMPT_VERSION,
    FloatArray,
    IntArray,
    MicroBatchArrays,
    SampleArrays,
    prefix_tree,
    sequence_of_token,
    slice_micro_batch,
)
from headway.algorithms.teacher_scores import read_scores
from headway.config.external_models import SELF
from headway.config.services.policy_sections import PolicySections
from headway.models.packed_model import PackedModel
from headway.records.tokens import CONTEXT, KEPT, TokenRows
from headway.trainer.kept_sets import MicroBatchSets
from headway.trainer.streams.divergence import (
    EXCLUDED,
    Divergence,
    DivergenceKind,
    TeacherHidden,
    TopLogprobs,
    token_divergences,
)

UNKNOWN = math.log(np.finfo(np.float32).tiny)  # log-probability of an id that a teacher in the trainer lacks, nats
KeptOf = Callable[[IntArray], MicroBatchSets | None]  # of scored tokens, by their position among these


class TeacherHost(Protocol):
    """The part of `headway.trainer.learner.Learner` that `Teachers` use."""

    model: PackedModel
    device: torch.device

    @property
    def shares_prefixes(self) -> bool: ...

    def open_frozen(self, model_path: str) -> PackedModel: ...

    def hidden_states(self, model: PackedModel, batch: MicroBatchArrays, predictors: IntArray) -> Tensor: ...

    def flops(self, batch: MicroBatchArrays, model: PackedModel) -> float: ...


@dataclass(frozen=True, kw_only=True)
class TaughtTokens:
    """The tokens of a micro-batch that a teacher teaches, and its distribution in the place of each."""

    positions_j: IntArray  # among the scored tokens
    teacher: TeacherHidden | TopLogprobs
    kind: DivergenceKind


def divergence_of(
    taught: Sequence[TaughtTokens],
    model: PackedModel,
    hidden_md: Tensor,
    own_m: IntArray,
    temperature: float,
    kept_of: KeptOf,
) -> Divergence:
    """The divergence of each of this rank's scored tokens ``own_m`` from its teacher, 0 without one, by their hidden
    states [M, d] under ``model``. Called inside its `PackedModel.compute`."""
    zeros_m = hidden_md.new_zeros(len(hidden_md), dtype=torch.promote_types(hidden_md.dtype, torch.float32))
    values_m, slopes_m = zeros_m, zeros_m.clone()
    for tokens in taught:
        _, rows, taught_rows = np.intersect1d(own_m, tokens.positions_j, assume_unique=True, return_indices=True)
        rows_j, taught_j = (torch.from_numpy(indices).to(hidden_md.device) for indices in (rows, taught_rows))
        teacher = tokens.teacher
        if isinstance(teacher, TopLogprobs):
            teacher = teacher._replace(ids_mk=teacher.ids_mk[taught_j], logprobs_mk=teacher.logprobs_mk[taught_j])
        else:
            teacher = replace(teacher, hidden_md=teacher.hidden_md[taught_j])
        kept, own_hidden_jd = kept_of(own_m[rows]), hidden_md.index_select(0, rows_j)
        divergence = token_divergences(model, own_hidden_jd, teacher, tokens.kind, temperature, kept)
        values_m = values_m.index_add(0, rows_j, divergence.values_m.to(values_m.dtype))
        slopes_m = slopes_m.index_add(0, rows_j, divergence.slopes_m.to(slopes_m.dtype))
    return Divergence(values_m, slopes_m)


class Teachers:
    """The teachers of a run's rules. Those without devices and address compute here, frozen, divided among the ranks as
    the model in training is."""

    def __init__(self, experiment: PolicySections, learner: TeacherHost) -> None:
        """Raises ConfigurationError for a folder that isn't a model."""
        self._learner = learner
        rules = experiment.rules
        self._coefficients = [algorithm.teacher_coefficient for algorithm in rules.algorithms]
        self._policy_coefficients = [algorithm.policy_coefficient for algorithm in rules.algorithms]
        self._settings = experiment.used_teachers
        self._rules = {
            name: [number for number in rules.used if rules.algorithms[number].teacher == name]
            for name in self._settings
        }
        self._models: dict[str, PackedModel] = {
            name: learner.model if teacher.path == SELF else learner.open_frozen(teacher.path)
            for name, teacher in self._settings.items()
            if not teacher.scores
        }
        self._shares_prefixes = experiment.trainer.shared_prefix
        self._contexts: tuple[SampleArrays, SampleArrays] | None = None  # a batch, and it as teachers read it

    def taught(self, batch: MicroBatchArrays, arrays: SampleArrays) -> list[TaughtTokens]:
        """The taught tokens of a micro-batch by teacher, except by "sampled". Every rank gets as many. Raises
        ValueError for a token without stored scores."""
        taught = list[TaughtTokens]()
        for name, settings in self._settings.items():
            if settings.samples:
                continue
            positions_j = np.flatnonzero(self._is_taught(name, batch.targets_m, arrays))
            if (model := self._models.get(name)) is not None:
                hidden_jd = self._hidden(model, batch, arrays, positions_j)
                teacher: TeacherHidden | TopLogprobs = TeacherHidden(
                    model=model, hidden_md=hidden_jd, top_k=settings.top_k
                )
            else:
                teacher = self._likeliest(arrays, batch.targets_m[positions_j], settings.top_k)
            kind: Any = settings.divergence
            taught.append(TaughtTokens(positions_j=positions_j, teacher=teacher, kind=kind))
        return taught

    def shaped(
        self,
        arrays: SampleArrays,
        advantages_n: FloatArray,
        score: Callable[[SampleArrays, PackedModel], np.ndarray],
    ) -> FloatArray:
        """The advantages [N] with ``coefficient x (log pi_teacher - log pi_sampled)`` added for the teachers of
        "sampled", not to go; the advantage by reward counts only where its coefficient isn't 0. ``score(arrays,
        model)``: log-probabilities [N] of the tokens with loss."""
        for name, settings in self._settings.items():
            if not settings.samples:
                continue
            idx_j = np.flatnonzero(arrays.loss_mask_n)
            is_taught_j = self._is_taught(name, idx_j, arrays)
            if (model := self._models.get(name)) is None:
                idx_j = idx_j[is_taught_j]
                teacher_j = read_scores(arrays.token_rows, idx_j).logprobs
            else:
                read_arrays = self._as_read(arrays)
                teacher_j = score(read_arrays, model)[np.flatnonzero(read_arrays.loss_mask_n)][is_taught_j]
                idx_j = idx_j[is_taught_j]
                is_unknown_j = arrays.token_ids_n[idx_j] >= model.config.vocabulary_size
                teacher_j = np.where(is_unknown_j, UNKNOWN, teacher_j)
            rules_j = self._rules_of(idx_j, arrays)
            by_reward_j = np.where(np.take(self._policy_coefficients, rules_j) > 0, advantages_n[idx_j], 0.0)
            added_j = np.take(self._coefficients, rules_j) * (teacher_j - arrays.behaviour_logprobs_n[idx_j])
            advantages_n = advantages_n.copy()
            advantages_n[idx_j] = by_reward_j + added_j
        return advantages_n

    def flops(self, batch: MicroBatchArrays) -> float:
        """Model FLOP of the teachers' forward passes over a micro-batch; contexts aren't counted."""
        models = [m for name, m in self._models.items() if not self._settings[name].samples]
        return sum(self._learner.flops(batch, model) for model in models)

    def _rules_of(self, idx: IntArray, arrays: SampleArrays) -> IntArray:
        if arrays.rules_s is None:
            return np.zeros(len(idx), np.int64)
        return arrays.rules_s[sequence_of_token(arrays)[idx]]

    def _is_taught(self, name: str, idx: IntArray, arrays: SampleArrays) -> np.ndarray:
        return np.isin(self._rules_of(idx, arrays), self._rules[name]) & arrays.loss_mask_n[idx]

    def _as_read(self, arrays: SampleArrays) -> SampleArrays:
        if self._contexts is None or self._contexts[0] is not arrays:
            self._contexts = arrays, with_contexts(arrays)
        return self._contexts[1]

    def _likeliest(self, arrays: SampleArrays, idx_j: IntArray, top_k: int | None) -> TopLogprobs:
        """The stored likeliest tokens; what a teacher gives to rows of padding counts in the rest."""
        scores, vocabulary = read_scores(arrays.token_rows, idx_j), self._learner.model.config.vocabulary_size
        ids_jk, logprobs_jk = scores.top_ids[:, :top_k].astype(np.int64), scores.top_logprobs[:, :top_k]
        if padded := bool((is_padding_jk := ids_jk >= vocabulary).any()):
            ids_jk, logprobs_jk = (
                np.minimum(ids_jk, vocabulary),
                np.where(is_padding_jk, np.float32(EXCLUDED), logprobs_jk),
            )
        ids, logprobs = (torch.from_numpy(array).to(self._learner.device) for array in (ids_jk, logprobs_jk))
        return TopLogprobs(ids, logprobs, padded)

    def _hidden(
        self, model: PackedModel, batch: MicroBatchArrays, arrays: SampleArrays, positions_j: IntArray
    ) -> Tensor:
        """Hidden states [J, d] that predict the taught tokens under ``model``, which reads their contexts."""
        predictors_j = batch.predictors_m[positions_j]
        if CONTEXT in arrays.token_rows or len(positions_j) < len(batch.targets_m):
            read_arrays, sequences_j = self._as_read(arrays), sequence_of_token(arrays)[batch.targets_m[positions_j]]
            samples, batch = sequences_j[np.sort(np.unique(sequences_j, return_index=True)[1])], EMPTY_MICRO_BATCH
            if len(samples):
                sharing = self._shares_prefixes and self._learner.shares_prefixes
                with_rows = model is self._learner.model  # which replays experts
                tree = prefix_tree(read_arrays, samples, with_rows=with_rows) if sharing else None
                batch = slice_micro_batch(read_arrays, samples, tree)
            predictors_j = batch.predictors_m
        return self._learner.hidden_states(model, batch, predictors_j)


def with_contexts(arrays: SampleArrays) -> SampleArrays:
    """The sequences with what a teacher reads in the place of their prompts, and sampled tokens alone to score;
    ``arrays`` if nothing differs."""
    if arrays.imitated_n is not None:
        arrays = replace(arrays, imitated_n=None, rollout_imitated_s=None)
    if (rows := arrays.token_rows.get(CONTEXT)) is None:
        return arrays
    starts_s, is_prompt_n = arrays.starts_s, arrays.versions_n == PROMPT_VERSION
    contexts_s, values = rows.take(starts_s)
    prompts_s = np.add.reduceat(is_prompt_n.astype(np.int64), starts_s)
    ends_s, kept = np.cumsum(contexts_s), arrays.token_rows.get(KEPT)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("token_ids_n", "loss_mask_n", "versions_n")}
    kept_parts, lengths = list[TokenRows](), list[int]()
    for sequence, (start, prompt) in enumerate(zip(starts_s.tolist(), prompts_s.tolist(), strict=True)):
        stop = start + int(arrays.lengths_s[sequence])
        context = values[ends_s[sequence] - contexts_s[sequence] : ends_s[sequence]].astype(np.int64)
        if not len(context):
            context = arrays.token_ids_n[start : start + prompt]
        heads = {"token_ids_n": context, "loss_mask_n": False, "versions_n": PROMPT_VERSION}
        for name, part in parts.items():
            values_n = getattr(arrays, name)
            part += np.broadcast_to(heads[name], len(context)).astype(values_n.dtype), values_n[start + prompt : stop]
        lengths.append(len(context) + stop - start - prompt)
        if kept is not None:
            kept_parts += TokenRows.empty(len(context)), kept.cut([start + prompt], [stop - start - prompt])
    joined = {name: np.concatenate(part) for name, part in parts.items()}
    zeros_n = np.zeros(sum(lengths), np.float32)
    return replace(
        arrays,
        **joined,
        behaviour_logprobs_n=zeros_n,
        advantages_n=zeros_n,
        lengths_s=np.array(lengths, np.int64),
        token_rows={} if kept is None else {KEPT: TokenRows.joined(kept_parts)},
    )
