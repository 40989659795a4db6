"""A policy-gradient step over the samples of a batch: micro-batches, loss, gradients, updates, metrics.

Legend: ``_n`` one value per token of the batch, ``_m`` one value per token that carries loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from headway.algorithms.aggregation import Weighting, weighting
from headway.algorithms.groups.rewards import reward_to_go
from headway.algorithms.importance import second_moment_mask, sequence_mask, token_mask
from headway.algorithms.samples import (
    IntArray,
    MicroBatchArrays,
    SampleArrays,
    input_lengths,
    sequence_of_token,
    shared_prefixes,
    slice_micro_batch,
    split_by_group,
)
from headway.algorithms.shared_packing import pack_families
from headway.config.schema import AlgorithmConfig, Experiment, TrainerConfig
from headway.models.decoder import Decoder
from headway.records.training import OptimiserSettings
from headway.runtime.hooks import Hook
from headway.trainer.kl import adapted_coefficient, kl_estimate
from headway.trainer.learner import Learner, Update
from headway.trainer.losses import LOSSES, MAX_LOG_RATIO, LossSettings, TokenTerms, resolve, token_loss


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Per-token constants of a batch, computed before its first gradient."""

    advantages_n: np.ndarray  # with a KL penalty inside the reward: minus its sum to go
    keep_n: np.ndarray  # bool: not masked for staleness or importance
    start_n: np.ndarray | None = None  # log-probabilities under the weights at the start of the step, where needed
    reference_n: np.ndarray | None = None  # log-probabilities under the reference model, where there is a KL penalty
    old_n: np.ndarray | None = None  # bool: trained as if the proximal weights had sampled it

    @classmethod
    def joined(cls, parts: Sequence[Prepared]) -> Prepared:
        """The parts of a step as one."""
        found: dict[str, Any] = {key.name: [getattr(part, key.name) for part in parts] for key in fields(cls)}
        arrays: dict[str, Any] = {
            name: None if values[0] is None else np.concatenate(values) for name, values in found.items()
        }
        return cls(**arrays)


@dataclass(kw_only=True)
class Progress:
    """Per-token values and totals of the passes over one batch on this rank; `metrics` sums them over the ranks."""

    behaviour_n: np.ndarray  # at sampling
    logprobs_n: np.ndarray  # under the weights each token was trained with
    proximal_n: np.ndarray  # under the weights at the start of the step (or the same as logprobs_n)
    entropies_n: np.ndarray
    clipped_n: np.ndarray
    seen_n: np.ndarray  # 1 where a value was computed
    loss: float = 0.0  # sum over optimiser steps
    tokens: int = 0  # fed tokens of the samples
    computed_tokens: int = 0  # the same, shared prefixes counted once
    micro_batches: int = 0
    flops: float = 0.0
    updates: list[Update] = field(default_factory=list)
    skipped_minibatches: int = 0  # by algorithm.early_stop_ratio; equal on all ranks
    prepared: Prepared | None = None

    @classmethod
    def over(cls, arrays: SampleArrays) -> Progress:
        return cls(
            **dict(zip(_COMPUTED, np.zeros((5, arrays.tokens)), strict=True)), behaviour_n=arrays.behaviour_logprobs_n
        )

    @classmethod
    def joined(cls, parts: Sequence[Progress]) -> Progress:
        """The parts of a step as one."""
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("behaviour_n", *_COMPUTED)}
        counts: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _COUNTED}
        return cls(**arrays, **counts, prepared=Prepared.joined([part.prepared for part in parts if part.prepared]))


_COMPUTED = ("logprobs_n", "proximal_n", "entropies_n", "clipped_n", "seen_n")
_COUNTED = ("loss", "tokens", "computed_tokens", "micro_batches", "flops")


@dataclass(frozen=True, kw_only=True)
class AccumulatedPart:
    """A part whose gradients are accumulated."""

    step: int
    samples: int
    loss_tokens: int
    loss: str  # name of the loss function
    divisor: float | None  # applied to its gradients; None: they are sums
    total: float  # the divisor it would have as a batch
    progress: Progress


class PolicyGradient:
    """Trains on one batch after another: splits it into micro-batches, accumulates gradients, updates, measures."""

    def __init__(self, learner: Learner, experiment: Experiment) -> None:
        self.learner = learner
        self.algorithm: AlgorithmConfig = experiment.algorithm
        self.trainer: TrainerConfig = experiment.trainer
        self.temperature = experiment.rollout.temperature
        self.max_response_tokens = experiment.rollout.max_response_tokens
        self.token_budget = experiment.token_budget
        queue = experiment.queue
        self.uncorrected_after = queue.max_token_staleness if queue.old_tokens == "train" else None
        self.loss = resolve(experiment.algorithm.loss)
        self.kl_coefficient = self.algorithm.kl_coefficient  # with a kl_target it changes step by step
        self.parts: list[AccumulatedPart] = []  # whose gradients the next `optim_step` applies
        self.settings = LossSettings(**{key.name: getattr(self.algorithm, key.name) for key in fields(LossSettings)})

    @property
    def recomputes_proximal(self) -> bool:
        """Whether the log-probabilities at the start of the step are computed in a forward pass of their own (only
        the decoupled objective, or a user's, uses them; with one optimiser step they equal the current ones)."""
        if self.algorithm.proximal == "auto":
            uses_them = self.algorithm.loss not in LOSSES or self.algorithm.loss == "decoupled_ppo"
            return self.trainer.optimizer_steps_per_batch > 1 and uses_them
        return self.algorithm.proximal == "recompute"

    @property
    def _masks_by_importance(self) -> bool:
        algorithm = self.algorithm
        limits = (algorithm.token_mask, algorithm.sequence_mask, algorithm.second_moment_limit)
        return any(limit is not None for limit in limits)

    def run(self, arrays: SampleArrays, settings: OptimiserSettings, step: int = 0) -> Progress:
        """Train on the batch of ``step``: one update per minibatch, minibatches in admission order."""
        self.clear()
        progress = Progress.over(arrays)
        progress.prepared = prepared = self.prepare(arrays, step, progress)
        minibatches = split_by_group(arrays, self.trainer.optimizer_steps_per_batch)
        for number, minibatch in enumerate(minibatches):
            if number and self._moved_too_far(progress, prepared):
                progress.skipped_minibatches = len(minibatches) - number
                break
            weights = self._weighting(arrays, minibatch)
            loss = self._accumulate(arrays, minibatch, weights, weights.divisor, prepared, progress, self.loss)
            progress.updates.append(self.learner.update(settings, loss))
            progress.loss += loss
        self._sum_over_ranks(progress)
        return progress

    def _moved_too_far(self, progress: Progress, prepared: Prepared) -> bool:
        """Whether mean |ratio - 1| of the step's loss tokens so far, masked ones left out, exceeds
        ``early_stop_ratio``; equal on all ranks. The ratio is the loss's: to the policy that sampled, or to that of the
        start of the step where it is recomputed."""
        limit = self.algorithm.early_stop_ratio
        if limit is None:
            return False
        at = np.flatnonzero((progress.seen_n > 0) & prepared.keep_n)
        away_m = (progress.logprobs_n - (progress.proximal_n if self.recomputes_proximal else progress.behaviour_n))[at]
        away = float(np.abs(np.expm1(away_m.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))).sum())
        sums = torch.tensor([away, len(at)], dtype=torch.float64, device=self.learner.device)
        total, tokens = self.learner.ranks.sum_(sums).tolist()
        return total > limit * tokens

    def forward_backward(
        self, arrays: SampleArrays, step: int, loss: str | None = None, divisor: float | None = None
    ) -> AccumulatedPart:
        """Accumulate the gradients of a part of ``step``, for `optim_step`. ``loss``: name of the loss function
        (default: the run's). ``divisor``: of its weighted token losses; by default `optim_step` divides by that of all
        parts together. Raises ValueError, with nothing changed, for a part that doesn't go with those before it, and
        where the algorithm needs the whole batch."""
        name = loss or self.algorithm.loss
        self._require_part(step, name, divisor)
        function = self.loss if name == self.algorithm.loss else resolve(name)
        weights = self._weighting(arrays, np.arange(arrays.samples))
        progress = self._accumulate_whole(arrays, step, weights, divisor or 1.0, function)
        self._sum_over_ranks(progress)
        part = AccumulatedPart(
            step=step,
            samples=arrays.samples,
            loss_tokens=arrays.loss_tokens,
            loss=name,
            divisor=divisor,
            total=weights.total,
            progress=progress,
        )
        self.parts.append(part)
        return part

    def accumulate_gradients(self, arrays: SampleArrays, step: int = 0) -> Progress:
        """Accumulate the gradients of the whole batch as one minibatch, without an update."""
        weights = self._weighting(arrays, np.arange(arrays.samples))
        return self._accumulate_whole(arrays, step, weights, weights.divisor, self.loss)

    def optim_step(self, settings: OptimiserSettings) -> Progress:
        """Apply the gradients of the parts since the last step. A part whose loss isn't finite skips the step and is
        named. Raises ValueError without parts."""
        if not self.parts:
            raise ValueError("optim_step without gradients: forward_backward comes first")
        parts, self.parts = self.parts, []
        progress = Progress.joined([part.progress for part in parts])
        divisor = 1.0
        if parts[0].divisor is None:
            fixed = self.algorithm.aggregation == "fixed" and self.algorithm.fixed_denominator_tokens is not None
            divisor = max(1.0, parts[0].total if fixed else sum(part.total for part in parts))
            progress.loss /= divisor
        update = self.learner.update(settings, progress.loss / self.learner.ranks.size, divisor)
        bad = [str(number) for number, part in enumerate(parts) if not math.isfinite(part.progress.loss)]
        if bad:
            update = replace(update, reason=f"part {', '.join(bad)} of {len(parts)}: {update.reason}")
        progress.updates.append(update)
        return progress

    def adapt_kl(self, kl: float | None, samples: int) -> None:
        """Move the KL coefficient towards ``kl_target`` after an applied step of ``samples`` with the measured ``kl``,
        in nats per token; None: nothing was measured. Does nothing without a target."""
        target, horizon = self.algorithm.kl_target, self.algorithm.kl_horizon
        if target is not None and kl is not None:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, kl, target=target, samples=samples, horizon=horizon
            )

    def clear(self) -> None:
        """Forget the parts since the last step, and their gradients."""
        if self.parts:
            self.parts.clear()
            self.learner.clear_gradients()

    def _accumulate_whole(
        self, arrays: SampleArrays, step: int, weights: Weighting, divisor: float, function: Hook
    ) -> Progress:
        progress = Progress.over(arrays)
        progress.prepared = prepared = self.prepare(arrays, step, progress)
        everything = np.arange(arrays.samples)
        progress.loss = self._accumulate(arrays, everything, weights, divisor, prepared, progress, function)
        return progress

    def _require_part(self, step: int, loss: str, divisor: float | None) -> None:
        if self.algorithm.second_moment_limit is not None:
            raise ValueError("algorithm.second_moment_limit bounds a mean over the whole batch: no parts")
        if self.trainer.optimizer_steps_per_batch > 1:
            raise ValueError("trainer.optimizer_steps_per_batch divides the whole batch: no parts")
        if not self.parts:
            return
        first = self.parts[0]
        if first.step != step:
            raise ValueError(f"a part of step {step} after one of step {first.step}: optim_step comes between them")
        if (first.divisor is None) != (divisor is None):
            raise ValueError("either all parts of a step are given a divisor, or none is")
        if divisor is None and first.loss != loss:
            raise ValueError(
                f"a part with the loss {loss!r} after one with {first.loss!r}: with different losses each part needs "
                "its divisor"
            )

    def _weighting(self, arrays: SampleArrays, minibatch: IntArray) -> Weighting:
        return weighting(
            self.algorithm.aggregation,
            arrays,
            minibatch,
            max_response_tokens=self.max_response_tokens,
            fixed_tokens=self.algorithm.fixed_denominator_tokens,
        )

    def prepare(self, arrays: SampleArrays, step: int, progress: Progress) -> Prepared:
        """Compute the constants of the batch: forward passes without gradient where they are needed, then the KL
        inside the reward, the staleness mask and the importance masks."""
        algorithm = self.algorithm
        kl_in_reward = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward"
        start_n = reference_n = None
        if self.recomputes_proximal or self._masks_by_importance or kl_in_reward:
            start_n = self._logprobs_of_batch(arrays, self.learner.model, progress)
        if algorithm.kl_coefficient > 0:
            reference = self.learner.reference
            assert reference is not None, "the service loads it with the model"
            reference_n = self._logprobs_of_batch(arrays, reference, progress)
        advantages_n = arrays.advantages_n
        if kl_in_reward:
            assert start_n is not None
            assert reference_n is not None
            at = np.flatnonzero(arrays.loss_mask_n)
            to_go_m = reward_to_go((start_n - reference_n)[at].astype(np.float64), sequence_of_token(arrays)[at])
            advantages_n = advantages_n.copy()
            advantages_n[at] -= (self.kl_coefficient * to_go_m).astype(np.float32)
        keep_n = np.ones(arrays.tokens, np.bool_)
        if self.token_budget is not None:
            keep_n &= step - arrays.versions_n <= self.token_budget
        if start_n is not None and self._masks_by_importance:
            self._mask_by_importance(arrays, start_n, advantages_n, keep_n)
        old_n = None if self.uncorrected_after is None else step - arrays.versions_n > self.uncorrected_after
        return Prepared(advantages_n=advantages_n, keep_n=keep_n, start_n=start_n, reference_n=reference_n, old_n=old_n)

    def _mask_by_importance(
        self, arrays: SampleArrays, start_n: np.ndarray, advantages_n: np.ndarray, keep_n: np.ndarray
    ) -> None:
        """Clear ``keep_n`` for tokens that an importance mask drops; each mask sees the tokens kept by those before."""
        algorithm = self.algorithm
        log_weight_n = (start_n - arrays.behaviour_logprobs_n).astype(np.float64)
        if algorithm.token_mask is not None:
            at = np.flatnonzero(arrays.loss_mask_n & keep_n)
            keep_n[at] = token_mask(log_weight_n[at], algorithm.token_mask)
        if algorithm.sequence_mask is not None:
            at = np.flatnonzero(arrays.loss_mask_n & keep_n)
            samples_m = sequence_of_token(arrays)[at]
            keep_n[at] = sequence_mask(log_weight_n[at], samples_m, algorithm.sequence_mask, algorithm.sequence_mask_by)
        if algorithm.second_moment_limit is not None:
            at = np.flatnonzero(arrays.loss_mask_n & keep_n)
            advantages_m = advantages_n[at].astype(np.float64)
            keep_n[at] = second_moment_mask(log_weight_n[at], advantages_m, algorithm.second_moment_limit)

    def _accumulate(
        self,
        arrays: SampleArrays,
        minibatch: IntArray,
        weights: Weighting,
        divisor: float,
        prepared: Prepared,
        progress: Progress,
        function: Hook,
    ) -> float:
        """Run forward and backward over one minibatch; returns its loss (this rank's part of the sum)."""
        samples_n = sequence_of_token(arrays)
        total = 0.0
        for batch in self._micro_batches(arrays, minibatch):
            logprobs_m, entropies_m = self.learner.logprobs(batch, arrays, self.temperature)
            at = batch.targets_m
            terms = self._terms(arrays, prepared, at, samples_n[at], logprobs_m)
            result = token_loss(function, terms, self.settings)
            loss_m = result.loss_m
            if prepared.reference_n is not None and self.algorithm.kl_in == "loss":
                reference_m = self._tensor(prepared.reference_n[at])
                penalty_m = kl_estimate(self.algorithm.kl_estimator, logprobs_m, reference_m, terms.behaviour_m)
                loss_m = loss_m + self.kl_coefficient * penalty_m
            loss_m = torch.where(self._tensor(prepared.keep_n[at]), loss_m, 0.0)
            weights_m = self._tensor(weights.weights_s[samples_n[at]].astype(np.float32))
            loss = (loss_m * weights_m).sum() / divisor
            self.learner.backward(loss)
            total += float(loss.detach())
            progress.logprobs_n[at] = logprobs_m.detach().cpu().numpy()
            progress.proximal_n[at] = terms.proximal_m.cpu().numpy()
            progress.entropies_n[at] = entropies_m.cpu().numpy()
            progress.clipped_n[at] = result.clipped_m.cpu().numpy()
            progress.seen_n[at] = 1.0
            progress.tokens += batch.sample_tokens
            progress.computed_tokens += len(batch.input_ids)
            progress.micro_batches += 1
            progress.flops += 3.0 * self.learner.flops(batch)
        return total

    def _terms(
        self, arrays: SampleArrays, prepared: Prepared, at: IntArray, samples_m: IntArray, logprobs_m: torch.Tensor
    ) -> TokenTerms:
        start_n = prepared.start_n if self.algorithm.proximal != "current" else None
        proximal_m = logprobs_m.detach() if start_n is None else self._tensor(start_n[at])
        behaviour_m = self._tensor(arrays.behaviour_logprobs_n[at])
        if prepared.old_n is not None:
            behaviour_m = torch.where(self._tensor(prepared.old_n[at]), proximal_m, behaviour_m)
        return TokenTerms(
            logprobs_m=logprobs_m,
            proximal_m=proximal_m,
            behaviour_m=behaviour_m,
            advantages_m=self._tensor(prepared.advantages_n[at]),
            sequence_m=self._tensor(np.cumsum(np.diff(samples_m, prepend=samples_m[:1]) != 0)),
            keep_m=self._tensor(prepared.keep_n[at]),
        )

    def _logprobs_of_batch(self, arrays: SampleArrays, model: Decoder, progress: Progress) -> np.ndarray:
        """[N] log-probabilities of the loss tokens under ``model``, without gradient."""
        logprobs_n = np.zeros(arrays.tokens, np.float32)
        with torch.no_grad():
            for batch in self._micro_batches(arrays, np.arange(arrays.samples)):
                logprobs_m, _ = self.learner.logprobs(batch, arrays, self.temperature, model)
                logprobs_n[batch.targets_m] = logprobs_m.cpu().numpy()
                progress.flops += self.learner.flops(batch, model)
        # The minibatches are packed differently, so another rank may need a sample later: every rank gets all values.
        return self.learner.ranks.sum_(torch.from_numpy(logprobs_n).to(self.learner.device)).cpu().numpy()

    def _micro_batches(self, arrays: SampleArrays, minibatch: IntArray) -> Iterator[MicroBatchArrays]:
        """Yield this rank's micro-batches of the minibatch; samples without a loss token are left out."""
        lengths = input_lengths(arrays)[minibatch]
        minibatch, lengths = minibatch[lengths > 0], lengths[lengths > 0]
        ranks, groups = self.learner.ranks, arrays.groups_s[minibatch]
        prefixes = shared_prefixes(arrays, minibatch) if self.trainer.shared_prefix else np.zeros_like(lengths)
        plan = pack_families(
            lengths.tolist(),
            groups.tolist(),
            prefixes.tolist(),
            self.trainer.micro_batch_tokens,
            ranks.size,
            self.trainer.packing,
        )
        for chosen in plan[ranks.rank]:
            if chosen:
                yield slice_micro_batch(arrays, minibatch[chosen], prefixes[chosen])

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.learner.device)

    def _sum_over_ranks(self, progress: Progress) -> None:
        if self.learner.ranks.size > 1:
            _sum_progress(progress, self.learner.ranks.sum_, self.learner.device)

    def metrics(self, progress: Progress) -> dict[str, float]:
        """Metrics of the whole batch, or part, equal on every rank."""
        at = np.flatnonzero(progress.seen_n)
        norms = [update.grad_norm for update in progress.updates]
        return {
            "loss": progress.loss / max(1, len(progress.updates)),
            "grad_norm": max(norms, default=0.0),
            **(
                {} if self.algorithm.early_stop_ratio is None else {"skipped_minibatches": progress.skipped_minibatches}
            ),
            **token_metrics(
                logprobs_m=progress.logprobs_n[at],
                proximal_m=progress.proximal_n[at],
                behaviour_m=progress.behaviour_n[at].astype(np.float64),
                entropies_m=progress.entropies_n[at],
                clipped_m=progress.clipped_n[at],
                cap=self.settings.behaviour_weight_cap,
            ),
            **_prepared_metrics(progress, at),
            **({} if self.algorithm.kl_target is None else {"kl_coefficient": self.kl_coefficient}),
        }


def _prepared_metrics(progress: Progress, at: IntArray) -> dict[str, float]:
    """Metrics of masks and KL. masked_share: share of the loss tokens that staleness and importance masks drop.
    kl_reference: k3 estimate of the KL from the reference model, if there is one, in nats per token."""
    prepared = progress.prepared
    if prepared is None or not len(at):
        return {"masked_share": 0.0}
    found = {"masked_share": float(1.0 - prepared.keep_n[at].mean())}
    if prepared.reference_n is not None:
        away_m = prepared.reference_n[at] - progress.logprobs_n[at]
        found["kl_reference"] = float((np.expm1(away_m.clip(max=MAX_LOG_RATIO)) - away_m).mean())
    return found


def token_metrics(
    *,
    logprobs_m: np.ndarray,
    proximal_m: np.ndarray,
    behaviour_m: np.ndarray,
    entropies_m: np.ndarray,
    clipped_m: np.ndarray,
    cap: float | None,
) -> dict[str, float]:
    """Means, quantiles and extremes over the loss tokens, as if of one token with all values 0 when there is none.

    ratio_*: pi_theta / pi_behav. behaviour_weight_*: pi_prox / pi_behav before truncation. mismatch_k3: the
    estimator ``w - 1 - log w`` of KL(behaviour || proximal), w = pi_prox / pi_behav; mismatch_max: the largest
    |log w|. kl: mean of log pi_behav - log pi_theta.
    """
    if not len(logprobs_m):
        logprobs_m = proximal_m = behaviour_m = entropies_m = clipped_m = np.zeros(1)
    log_ratio = logprobs_m - behaviour_m
    p01, p50, p99, largest = np.exp(np.quantile(log_ratio, (0.01, 0.5, 0.99, 1.0)).clip(max=700.0)).tolist()
    log_weight = proximal_m - behaviour_m
    weight = np.exp(log_weight.clip(max=700.0))
    return {
        "entropy": float(entropies_m.mean()),
        "clip_fraction": float(clipped_m.mean()),
        "ratio_p01": p01,
        "ratio_p50": p50,
        "ratio_p99": p99,
        "ratio_max": largest,
        "behaviour_weight_mean": float(weight.mean()),
        "behaviour_weight_max": float(weight.max()),
        "behaviour_weight_truncated": float((weight > (math.inf if cap is None else cap)).mean()),
        "mismatch_k3": float((weight - 1.0 - log_weight).mean()),
        "mismatch_max": float(np.abs(log_weight).max()),
        "kl": float(-log_ratio.mean()),
    }


def _sum_progress(progress: Progress, sum_: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Sum ``progress`` over the ranks. Every token was computed on one rank and is 0 on all others, so the sums
    assemble the whole batch."""
    arrays = [getattr(progress, name) for name in _COMPUTED]
    stacked = sum_(torch.from_numpy(np.stack(arrays)).to(device)).cpu().numpy()
    for name, row in zip(_COMPUTED, stacked, strict=True):
        setattr(progress, name, row)
    counts = torch.tensor([getattr(progress, name) for name in _COUNTED], dtype=torch.float64, device=device)
    for name, total in zip(_COUNTED, sum_(counts).tolist(), strict=True):
        setattr(progress, name, type(getattr(progress, name))(total))
