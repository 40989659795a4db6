"""A policy-gradient step over the samples of a batch: micro-batches, loss, gradients, updates, metrics.

Legend: ``_n`` one value per token of this rank's samples, ``_m`` one value per token that carries loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headway.algorithms.groups.rewards import reward_to_go
from headway.algorithms.importance import second_moment_mask, sequence_mask, token_mask
from headway.algorithms.samples import (
    EMPTY_MICRO_BATCH,
    FlatBatch,
    IntArray,
    MicroBatchArrays,
    SampleArrays,
    gather_tokens,
    sequence_of_token,
    slice_micro_batch,
    split_by_group,
)
from headway.algorithms.step_plan import pass_order, tree_of
from headway.algorithms.streams import StreamWeights
from headway.config.consistency import KL_HORIZON
from headway.config.objective.rules import denominators_of
from headway.config.schema import AlgorithmConfig, TrainerConfig
from headway.config.services.policy_sections import PolicySections
from headway.models.packed_model import PackedModel
from headway.records.errors import MicroBatchesHalved, StepRefused
from headway.records.training import SKIPPED_MINIBATCHES, OptimiserSettings
from headway.trainer.critic.critic import Critic
from headway.trainer.kl import adapted_coefficient
from headway.trainer.learner import Learner, TokenScores
from headway.trainer.losses import MAX_LOG_RATIO, TokenTerms
from headway.trainer.micro_batch_limit import MicroBatchLimit
from headway.trainer.step_statistics import (
    DeviceColumns,
    Prepared,
    Progress,
    entropy_metrics,
    expert_metrics,
    kept_metrics,
    pass_metrics,
    prepared_metrics,
    stream_metrics,
    token_metrics,
    value_metrics,
)
from headway.trainer.streams.losses import ScoredTokens, StreamLosses
from headway.trainer.streams.teachers import Teachers


@dataclass(frozen=True, kw_only=True)
class AccumulatedPart:
    """A part of a step whose gradients are accumulated."""

    step: int
    samples: int  # attempts, branches not counted
    loss_tokens: int
    compute_s: float
    total: float  # the divisor it would have as a batch; its gradients are sums
    progress: Progress  # as `Progress.gather` returns it


class PolicyGradient:
    """Trains on batches: splits each into micro-batches, accumulates gradients, updates the weights, measures."""

    def __init__(self, learner: Learner, experiment: PolicySections) -> None:
        self.learner = learner
        self.algorithm: AlgorithmConfig = experiment.algorithm
        self.trainer: TrainerConfig = experiment.trainer
        self.seed, self.temperature = experiment.run.seed, experiment.rollout.temperature
        self.token_budget = experiment.token_budget
        self.losses = StreamLosses(experiment, learner.device)
        self.rules = self.losses.rules
        self.teachers = Teachers(experiment, learner)
        self.critic = Critic.of(experiment, learner)
        self.parts: list[AccumulatedPart] = []  # whose gradients the next `optim_step` applies
        self.limit = MicroBatchLimit(self.trainer, learner, may_halve=not experiment.run.deterministic)

    @property
    def recomputes_proximal(self) -> bool:
        """Whether the log-probabilities at the start of the step are computed in a separate forward pass. Only the
        decoupled objective, or a loss of the user, uses them; with one optimiser step they equal the current ones."""
        if self.algorithm.proximal == "auto":
            return self.trainer.updates_per_batch > 1 and any(rule.uses_proximal for rule in self.rules)
        return self.algorithm.proximal == "recompute"

    @property
    def _masks_by_importance(self) -> bool:
        algorithm = self.algorithm
        limits = (algorithm.token_mask, algorithm.sequence_mask, algorithm.second_moment_limit)
        return any(limit is not None for limit in limits)

    def run(self, arrays: SampleArrays, settings: OptimiserSettings, step: int = 0) -> Progress:
        """Train on this rank's samples of the batch of ``step`` with one update per minibatch, in the order of
        `pass_order`; returns their values in the first pass, with those of later ones."""
        self.clear()
        progress = Progress.over(arrays)
        progress.prepared = prepared = self.prepare(arrays, step, progress)
        passes, parts = [progress], self.trainer.optimizer_steps_per_batch
        order = partial(pass_order, seed=self.seed, step=step)
        plan = [
            (number, minibatch)
            for number in range(self.trainer.passes)
            for minibatch in split_by_group(arrays, parts, partial(order, number=number))
        ]
        for update_index, (number, minibatch) in enumerate(plan):
            if update_index and self._exceeds_early_stop(passes[-1], prepared):
                progress.skipped_minibatches = len(plan) - update_index
                break
            if number == len(passes):
                passes.append(Progress.over(arrays))
            weights, current = self._weights(arrays, minibatch), passes[-1]
            loss = self._accumulate(arrays, minibatch, weights, prepared, current)
            current.updates.append(update := self.learner.update(settings, loss))
            current.loss += loss
            if self.critic is not None and update.applied:
                progress.value_updates.append(self.critic.update())
        progress.later = passes[1:]
        if self.critic is not None and any(update.applied for update in progress.all_updates):
            self.critic.commit()
        progress.flops += sum(later.flops for later in progress.later)
        self.learner.clear_kept_sets()
        return progress

    def _exceeds_early_stop(self, progress: Progress, prepared: Prepared) -> bool:
        """Whether mean |ratio - 1| of the unmasked loss tokens of a pass so far exceeds ``early_stop_ratio``, or k3 its
        limit; equal on all ranks. The ratio is the loss's: to the policy that sampled, or to that of the start of the
        step if it is recomputed."""
        ratio_limit, kl_limit = self.algorithm.early_stop_ratio, self.algorithm.early_stop_kl
        if ratio_limit is None and kl_limit is None:
            return False
        log_ratio_n = progress.logprobs_n - (progress.proximal_n if self.recomputes_proximal else progress.behaviour_n)
        idx_m = np.flatnonzero((progress.seen_n > 0) & prepared.keep_n & np.isfinite(log_ratio_n))
        log_ratio_m = log_ratio_n[idx_m].clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        deviation_m = np.expm1(log_ratio_m)
        sums = [float(np.abs(deviation_m).sum()), float((deviation_m - log_ratio_m).sum()), len(idx_m)]
        sums_tensor = torch.tensor(sums, dtype=torch.float64, device=self.learner.device)
        deviation, kl, tokens = self.learner.ranks.sum_(sums_tensor).tolist()
        limits = ((deviation, ratio_limit), (kl, kl_limit))
        return any(limit is not None and total > limit * tokens for total, limit in limits)

    def forward_backward(self, batch: FlatBatch, arrays: SampleArrays) -> tuple[AccumulatedPart, Progress]:
        """Accumulate the gradients of a part of a step, for `optim_step`, which divides them by the denominator of all
        parts together; returns it with the values of this rank's samples, ``arrays``. Raises StepRefused for a part of
        another step than earlier ones, and if the run needs the complete batch. Any other error discards the earlier
        parts too, since the gradients may be incomplete."""
        started = time.perf_counter()
        self._require_part(batch.step)
        if not self.parts:
            self.learner.clear_gradients()  # of a failed step
        weights = self._weights(arrays, np.arange(arrays.samples))
        try:
            progress = self._accumulate_batch(arrays, batch.step, weights, divides=False)
            gathered = progress.gather(self.learner.ranks)
        except BaseException:
            self.clear()
            raise
        part = AccumulatedPart(
            step=batch.step,
            samples=batch.samples,
            loss_tokens=batch.loss_tokens,
            compute_s=time.perf_counter() - started,
            total=weights[0].total,
            progress=gathered,
        )
        self.parts.append(part)
        return part, progress

    def accumulate_gradients(self, arrays: SampleArrays, step: int = 0) -> Progress:
        """Accumulate the gradients of the complete batch as one minibatch, without an update."""
        return self._accumulate_batch(arrays, step, self._weights(arrays, np.arange(arrays.samples)))

    def optim_step(self, settings: OptimiserSettings) -> Progress:
        """Apply the gradients of the parts since the last step. A part with a non-finite loss skips the step, and the
        update's reason names it. Raises StepRefused without parts."""
        if not self.parts:
            raise StepRefused("optim_step without gradients: forward_backward comes first")
        parts, self.parts = self.parts, []
        progress = Progress.joined([part.progress for part in parts])
        divisor = max(1.0, sum(part.total for part in parts))
        progress.loss /= divisor
        progress.streams = progress.streams / [divisor, 1.0, divisor]
        update = self.learner.update(settings, progress.loss, divisor)
        bad_indices = [str(i) for i, part in enumerate(parts) if not math.isfinite(part.progress.loss)]
        if bad_indices:
            update = replace(update, reason=f"part {', '.join(bad_indices)} of {len(parts)}: {update.reason}")
        progress.updates.append(update)
        return progress

    def adapt_kl(self, kl: float | None, samples: int) -> None:
        """Adapt the KL coefficient to ``kl_target`` after an applied step of ``samples`` with the ``kl`` that rank 0
        has measured, in nats per token; None or not finite: it wasn't measured. No-op without a target."""
        target, horizon = self.algorithm.kl_target, KL_HORIZON
        if target is None:
            return
        kl = self.learner.ranks.all_gather(kl)[0]
        if kl is not None and math.isfinite(kl):
            rule = self.rules[0]
            rule.kl_coefficient = adapted_coefficient(
                rule.kl_coefficient, kl, target=target, samples=samples, horizon=horizon
            )

    def clear(self) -> None:
        """Discard the parts since the last step, and all gradients."""
        self.parts.clear()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self.learner.clear_gradients()
        if self.critic is not None:
            self.critic.clear_gradients()

    def _accumulate_batch(
        self, arrays: SampleArrays, step: int, weights: list[StreamWeights], *, divides: bool = True
    ) -> Progress:
        progress = Progress.over(arrays)
        progress.prepared = prepared = self.prepare(arrays, step, progress)
        all_samples = np.arange(arrays.samples)
        progress.loss = self._accumulate(arrays, all_samples, weights, prepared, progress, divides=divides)
        self.learner.clear_kept_sets()
        return progress

    def _require_part(self, step: int) -> None:
        if self.algorithm.second_moment_limit is not None:
            raise StepRefused("algorithm.second_moment_limit bounds a mean over the whole batch: no parts")
        if self.critic is not None:
            raise StepRefused("algorithm.advantage = 'gae' normalises over the whole batch: no parts")
        if self.trainer.updates_per_batch > 1:
            raise StepRefused("trainer.optimizer_steps_per_batch and passes need the whole batch: no parts")
        if len(denominators := denominators_of(self.losses.streams.parts)) > 1:
            raise StepRefused(f"a step is divided once, and has several denominators: {', '.join(denominators)}")
        if self.parts and self.parts[0].step != step:
            raise StepRefused(
                f"a part of step {step} after one of step {self.parts[0].step}: optim_step comes between them"
            )

    def _weights(self, arrays: SampleArrays, minibatch: IntArray) -> list[StreamWeights]:
        weights = self.losses.streams.weights(arrays, minibatch)
        totals_by_rank = self.learner.ranks.all_gather_data([part.total for part in weights])
        return [replace(part, total=sum(totals)) for part, *totals in zip(weights, *totals_by_rank, strict=True)]

    def prepare(self, arrays: SampleArrays, step: int, progress: Progress) -> Prepared:
        """Compute the constants of the batch: forward passes without gradient if they are needed, then the KL inside
        the reward, what teachers add to advantages, the staleness mask and the importance masks."""
        penalised_rules = [rule for rule, loss in enumerate(self.rules) if loss.algorithm.kl_coefficient > 0]
        rules_of_reward = [rule for rule in penalised_rules if self.rules[rule].algorithm.kl_in == "reward"]
        start_n = reference_n = None
        if self.recomputes_proximal or self._masks_by_importance or rules_of_reward:
            start_n = self._logprobs_of_batch(arrays, self.learner.model, progress)
        if penalised_rules:
            reference_model = self.learner.reference
            assert reference_model is not None, "the service loads it with the model"
            reference_n = self._logprobs_of_batch(arrays, reference_model, progress)
        advantages_n, streams = arrays.advantages_n, self.losses.streams
        policy_n, sequences_n = streams.policy_tokens(arrays), sequence_of_token(arrays)
        for rule in rules_of_reward:
            assert start_n is not None
            assert reference_n is not None
            idx_m = np.flatnonzero(policy_n & streams.has_rule(arrays, rule, sequences_n))
            penalties_m = (start_n - reference_n)[idx_m].astype(np.float64)
            if self.critic is None:  # else it is a reward of its token
                penalties_m = reward_to_go(penalties_m, sequences_n[idx_m])
            advantages_n = advantages_n.copy()
            advantages_n[idx_m] -= (self.rules[rule].kl_coefficient * penalties_m).astype(np.float32)
        values = None
        if (critic := self.critic) is not None:
            score = lambda ended: self._of_batch(ended, critic.start_values, critic.flops, progress)  # noqa: E731
            advantages_n, values = critic.prepare(arrays, advantages_n, policy_n, score)
        advantages_n = self.teachers.shaped(
            arrays, advantages_n, lambda read_arrays, model: self._logprobs_of_batch(read_arrays, model, progress)
        )
        keep_n = np.ones(arrays.tokens, np.bool_)
        if self.token_budget is not None:
            keep_n &= step - arrays.versions_n <= self.token_budget
        if start_n is not None and self._masks_by_importance:
            self._mask_by_importance(arrays, start_n, advantages_n, policy_n, keep_n)
        return Prepared(
            advantages_n=advantages_n, keep_n=keep_n, start_n=start_n, reference_n=reference_n, values_n=values
        )

    def _mask_by_importance(
        self,
        arrays: SampleArrays,
        start_n: np.ndarray,
        advantages_n: np.ndarray,
        policy_n: np.ndarray,
        keep_n: np.ndarray,
    ) -> None:
        """Clear ``keep_n`` for tokens of the policy stream that an importance mask drops; each mask applies to the
        tokens kept so far."""
        config = self.algorithm
        log_weight_n = (start_n - arrays.behaviour_logprobs_n).astype(np.float64)
        if config.token_mask is not None:
            idx_m = np.flatnonzero(policy_n & keep_n)
            keep_n[idx_m] = token_mask(log_weight_n[idx_m], config.token_mask)
        if config.sequence_mask is not None:
            idx_m = np.flatnonzero(policy_n & keep_n)
            samples_m = sequence_of_token(arrays)[idx_m]
            keep_n[idx_m] = sequence_mask(log_weight_n[idx_m], samples_m, config.sequence_mask, config.sequence_mask_by)
        if config.second_moment_limit is not None:
            idx_m = np.flatnonzero(policy_n & keep_n)
            ranks, rank_terms = self.learner.ranks, (log_weight_n[idx_m], advantages_n[idx_m].astype(np.float64))
            terms_by_rank = ranks.all_gather_data(rank_terms)  # the mask bounds a mean over the whole batch
            log_weight_m, advantages_m = (np.concatenate(columns) for columns in zip(*terms_by_rank, strict=True))
            kept_m = second_moment_mask(log_weight_m, advantages_m, config.second_moment_limit)
            first = sum(len(terms[0]) for terms in terms_by_rank[: ranks.data_rank])
            keep_n[idx_m] = kept_m[first : first + len(idx_m)]

    def _accumulate(
        self,
        arrays: SampleArrays,
        minibatch: IntArray,
        weights: list[StreamWeights],
        prepared: Prepared,
        progress: Progress,
        *,
        divides: bool = True,
    ) -> float:
        """Run forward and backward over one minibatch; returns its loss (this rank's part of the sum). ``divides``: by
        the denominators of ``weights``."""
        totals = progress.totals()
        samples_n, policy_n = sequence_of_token(arrays), self.losses.streams.policy_tokens(arrays)
        keeps_hidden = self.critic is not None and self.critic.reads_policy
        if self.critic is not None:
            self.critic.begin_update(int(np.count_nonzero(policy_n[gather_tokens(arrays, minibatch)])))

        def undo() -> None:
            self._clear_gradients()
            vars(progress).update(totals)
            if self.parts:
                raise MicroBatchesHalved(f"{self.limit.halved}; all parts of the step must be computed again")

        def compute() -> float:
            columns = DeviceColumns()
            for batch in self._micro_batches(arrays, minibatch):
                taught = self.teachers.taught(batch, arrays)
                scores = self.learner.logprobs(
                    batch, arrays, self.temperature, taught=taught, keeps_hidden=keeps_hidden
                )
                logprobs_m, idx_m = scores.logprobs_m, batch.targets_m
                if batch is EMPTY_MICRO_BATCH:
                    self.learner.backward(0.0 * logprobs_m.sum())
                    self._backward_values(batch, scores, prepared, policy_n, progress)
                    continue
                sequences_m = samples_n[idx_m]
                scored = ScoredTokens(
                    terms=(terms := self._terms(arrays, prepared, idx_m, sequences_m, logprobs_m)),
                    entropies_m=scores.entropies_m,
                    reference_m=self._optional_tensor(prepared.reference_n, idx_m),
                    divergence=scores.divergence,
                    indices_m=idx_m,
                    sequences_m=sequences_m,
                )
                stream_sum = self.losses.sum(arrays, scored, weights, divides=divides)
                self.learner.backward(stream_sum.loss)
                self._backward_values(batch, scores, prepared, policy_n, progress)
                columns_m = logprobs_m, terms.proximal_m, scores.entropies_m, stream_sum.clipped_m
                columns.add(idx_m, policy_n[idx_m], stream_sum.loss, *columns_m)
                columns.add_figures(stream_sum.figures)
                progress.tokens += batch.sample_tokens
                progress.computed_tokens += len(batch.input_ids)
                progress.micro_batches += 1
                progress.flops += self.learner.training_flops(batch) + self.teachers.flops(batch)
                progress.count(scores, idx_m, len(batch.input_ids), self.learner.routing)
            self.learner.release_frozen()
            return columns.read(progress)

        loss = self.limit.attempt(compute, undo)
        if not self.losses.streams.single:
            progress.count_streams(self.losses.streams.count(arrays, minibatch))
        return loss

    def _backward_values(
        self,
        batch: MicroBatchArrays,
        scores: TokenScores,
        prepared: Prepared,
        policy_n: np.ndarray,
        progress: Progress,
    ) -> None:
        """Accumulate the gradients of the critic, if there is one, after those of the policy."""
        if self.critic is not None and prepared.values_n is not None:
            self.critic.backward(batch, scores.hidden_md, prepared.values_n, policy_n)
            progress.flops += 0.0 if batch is EMPTY_MICRO_BATCH else self.critic.training_flops(batch)

    def _terms(
        self, arrays: SampleArrays, prepared: Prepared, idx_m: IntArray, samples_m: IntArray, logprobs_m: torch.Tensor
    ) -> TokenTerms:
        start_n = prepared.start_n if self.algorithm.proximal != "current" else None
        proximal_m = logprobs_m.detach() if start_n is None else self._tensor(start_n[idx_m])
        behaviour_m = self._tensor(arrays.behaviour_logprobs_n[idx_m])
        return TokenTerms(
            logprobs_m=logprobs_m,
            proximal_m=proximal_m,
            behaviour_m=behaviour_m,
            advantages_m=self._tensor(prepared.advantages_n[idx_m]),
            sequence_m=self._tensor(np.cumsum(np.diff(samples_m, prepend=samples_m[:1]) != 0)),
            keep_m=self._tensor(prepared.keep_n[idx_m]),
        )

    def _logprobs_of_batch(self, arrays: SampleArrays, model: PackedModel, progress: Progress) -> np.ndarray:
        """[N] log-probabilities of the loss tokens under ``model``, without gradient."""
        score = lambda batch: self.learner.logprobs(batch, arrays, self.temperature, model).logprobs_m  # noqa: E731
        return self._of_batch(arrays, score, lambda batch: self.learner.flops(batch, model), progress)

    def _of_batch(
        self,
        arrays: SampleArrays,
        score: Callable[[MicroBatchArrays], torch.Tensor],
        flops: Callable[[MicroBatchArrays], float],
        progress: Progress,
    ) -> np.ndarray:
        """[N] what ``score`` returns of each micro-batch's scored tokens, without gradient; 0 for others."""
        scores_n = np.zeros(arrays.tokens, np.float32)

        @torch.no_grad()
        def compute() -> None:
            parts, targets = list[torch.Tensor](), list[IntArray]()
            for batch in self._micro_batches(arrays, np.arange(arrays.samples)):
                parts.append(score(batch))
                targets.append(batch.targets_m)
                progress.flops += 0.0 if batch is EMPTY_MICRO_BATCH else flops(batch)
            if parts:
                scores_n[np.concatenate(targets)] = torch.cat(parts).cpu().numpy()

        totals = progress.totals()
        self.limit.attempt(compute, lambda: vars(progress).update(totals))
        return scores_n

    def _micro_batches(self, arrays: SampleArrays, minibatch: IntArray) -> Iterator[MicroBatchArrays]:
        """Yield this rank's micro-batches of the minibatch, as many as every other rank has; samples without a loss
        token are left out."""
        sharing = self.trainer.shared_prefix and self.learner.shares_prefixes
        sharing = sharing and (self.critic is None or self.critic.model.shares_prefixes)
        replays_experts = self.learner.routing is not None
        sequences, tree = tree_of(arrays, minibatch, shares_prefixes=sharing, with_rows=replays_experts)
        for positions in self.limit.size.pack_equally(tree, lambda count: max(self.learner.ranks.all_gather(count))):
            if positions:
                yield slice_micro_batch(arrays, sequences[positions], tree.take(positions))
            else:
                yield EMPTY_MICRO_BATCH

    def _optional_tensor(self, values_n: np.ndarray | None, idx_m: IntArray) -> torch.Tensor | None:
        return None if values_n is None else self._tensor(values_n[idx_m])

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.learner.device)

    def sample_advantages(self, arrays: SampleArrays, progress: Progress) -> tuple[float, ...]:
        """The mean advantage over the loss tokens of each of this rank's samples, 0 without any; (): there is no
        critic, and who made the batch knows them."""
        if self.critic is None or progress.prepared is None:
            return ()
        idx_m = np.flatnonzero(self.losses.streams.policy_tokens(arrays))
        sequence_m, samples = sequence_of_token(arrays)[idx_m], arrays.samples
        sums_s = np.bincount(sequence_m, progress.prepared.advantages_n[idx_m], samples)
        return tuple((sums_s / np.bincount(sequence_m, minlength=samples).clip(1)).tolist())

    def metrics(self, progress: Progress) -> dict[str, float]:
        """Metrics of the complete batch, or part, on rank 0, from the ranks' gathered values."""
        idx_m = np.flatnonzero(progress.seen_n)
        grad_norms = [update.grad_norm for update in progress.all_updates]
        stops_early = self.algorithm.early_stop_ratio is not None or self.algorithm.early_stop_kl is not None
        return {
            "loss": progress.loss / max(1, len(progress.updates)),
            "grad_norm": max(grad_norms, default=0.0),
            **({SKIPPED_MINIBATCHES: progress.skipped_minibatches} if stops_early else {}),
            **token_metrics(progress, self.rules[0].settings.behaviour_weight_cap),
            **pass_metrics(progress),
            **prepared_metrics(progress, idx_m),
            **entropy_metrics(progress, idx_m, self.algorithm.entropy_threshold),
            **expert_metrics(progress),
            **kept_metrics(progress, idx_m),
            **({} if self.losses.streams.single else stream_metrics(progress)),
            **({} if self.critic is None else value_metrics(progress, idx_m)),
            **({} if self.algorithm.kl_target is None else {"kl_coefficient": self.rules[0].kl_coefficient}),
        }
