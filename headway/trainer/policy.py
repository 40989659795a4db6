"""One policy-gradient step over the samples of a batch.

Legend: ``_n`` one value per token of the batch, ``_m`` one value per token that carries loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from headway.algorithms.packing import pack
from headway.algorithms.samples import (
    IntArray,
    MicroBatchArrays,
    SampleArrays,
    input_lengths,
    slice_micro_batch,
    split_by_group,
)
from headway.config.schema import Algorithm, Experiment, Trainer
from headway.trainer.learner import Learner, Update
from headway.trainer.losses import LossSettings, TokenTerms, denominator, require_elementwise, resolve


@dataclass(kw_only=True)
class Progress:
    """What the passes over one batch add up to, on this rank; summed over ranks by `metrics_of`."""

    logprobs_n: np.ndarray  # of the weights each token was trained with
    proximal_n: np.ndarray  # of the weights at the start of the step (or the same as logprobs_n)
    entropies_n: np.ndarray
    clipped_n: np.ndarray
    seen_n: np.ndarray  # 1 where a value was computed
    loss: float = 0.0  # sum over optimiser steps
    tokens: int = 0
    micro_batches: int = 0
    flops: float = 0.0
    updates: list[Update] = field(default_factory=list)

    @classmethod
    def over(cls, tokens: int) -> Progress:
        zeros = np.zeros((5, tokens))
        return cls(logprobs_n=zeros[0], proximal_n=zeros[1], entropies_n=zeros[2], clipped_n=zeros[3], seen_n=zeros[4])


class PolicyGradient:
    """Micro-batches, loss, gradients and updates for one batch after another."""

    def __init__(self, learner: Learner, experiment: Experiment) -> None:
        self.learner = learner
        self.algorithm: Algorithm = experiment.algorithm
        self.trainer: Trainer = experiment.trainer
        self.temperature = experiment.rollout.temperature
        self.max_response_tokens = experiment.rollout.max_response_tokens
        self.loss = resolve(experiment.algorithm.loss)
        self.settings = LossSettings(
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
            dual_clip=self.algorithm.dual_clip,
            behaviour_weight_cap=self.algorithm.behaviour_weight_cap,
        )

    @property
    def recomputes_proximal(self) -> bool:
        """Whether proximal log-probabilities take a forward pass of their own (naive PPO never uses them)."""
        if self.algorithm.proximal == "auto":
            return self.trainer.optimizer_steps_per_batch > 1 and self.algorithm.loss != "ppo_clip"
        return self.algorithm.proximal == "recompute"

    def run(self, arrays: SampleArrays, learning_rate: float) -> Progress:
        """Train on the batch: one update per minibatch, minibatches in admission order."""
        progress = Progress.over(arrays.tokens)
        proximal_n = self._recompute_proximal(arrays, progress) if self.recomputes_proximal else None
        for minibatch in split_by_group(arrays, self.trainer.optimizer_steps_per_batch):
            loss = self._accumulate(arrays, minibatch, proximal_n, progress)
            progress.updates.append(self.learner.update(learning_rate, loss))
            progress.loss += loss
        return progress

    def accumulate_gradients(self, arrays: SampleArrays) -> Progress:
        """Add the gradients of the whole batch as one minibatch to the parameters, without an update."""
        progress = Progress.over(arrays.tokens)
        progress.loss = self._accumulate(arrays, np.arange(arrays.samples), None, progress)
        return progress

    def _accumulate(
        self, arrays: SampleArrays, minibatch: IntArray, proximal_n: np.ndarray | None, progress: Progress
    ) -> float:
        """Backward over one minibatch; returns its loss (this rank's part of the sum)."""
        divisor = self._denominator(arrays, minibatch)
        total = 0.0
        for batch in self._micro_batches(arrays, minibatch):
            logprobs_m, entropies_m = self.learner.logprobs(batch, arrays, self.temperature)
            at = batch.targets_m
            current_m = logprobs_m.detach()
            terms = TokenTerms(
                logprobs_m=logprobs_m,
                proximal_m=current_m if proximal_n is None else self._tensor(proximal_n[at]),
                behaviour_m=self._tensor(arrays.behaviour_logprobs_n[at]),
                advantages_m=self._tensor(arrays.advantages_n[at]),
            )
            result = self.loss(terms, self.settings)
            require_elementwise(self.algorithm.loss, result, logprobs_m.shape)
            loss = result.loss_m.sum() / divisor
            loss.backward()
            total += float(loss.detach())
            progress.logprobs_n[at] = current_m.cpu().numpy()
            progress.proximal_n[at] = terms.proximal_m.cpu().numpy()
            progress.entropies_n[at] = entropies_m.cpu().numpy()
            progress.clipped_n[at] = result.clipped_m.cpu().numpy()
            progress.seen_n[at] = 1.0
            progress.tokens += len(batch.input_ids)
            progress.micro_batches += 1
            progress.flops += 3.0 * self.learner.flops(batch)
        return total

    def _recompute_proximal(self, arrays: SampleArrays, progress: Progress) -> np.ndarray:
        """[N] log-probabilities under the weights at the start of the step."""
        proximal_n = np.zeros(arrays.tokens, np.float32)
        with torch.no_grad():
            for batch in self._micro_batches(arrays, np.arange(arrays.samples)):
                logprobs_m, _ = self.learner.logprobs(batch, arrays, self.temperature)
                proximal_n[batch.targets_m] = logprobs_m.cpu().numpy()
                progress.flops += self.learner.flops(batch)
        # Packed otherwise, another rank may compute a sample later: everyone needs all of them.
        return self.learner.ranks.sum_(torch.from_numpy(proximal_n).to(self.learner.device)).cpu().numpy()

    def _micro_batches(self, arrays: SampleArrays, minibatch: IntArray) -> Iterator[MicroBatchArrays]:
        """This rank's micro-batches of the minibatch; samples without a loss token are left out."""
        lengths = input_lengths(arrays)[minibatch]
        minibatch, lengths = minibatch[lengths > 0], lengths[lengths > 0]
        ranks = self.learner.ranks
        plan = pack(lengths.tolist(), self.trainer.micro_batch_tokens, ranks.size, self.trainer.packing)
        for chosen in plan[ranks.rank]:
            if chosen:
                yield slice_micro_batch(arrays, minibatch[chosen])

    def _denominator(self, arrays: SampleArrays, minibatch: IntArray) -> float:
        loss_tokens = int(np.bincount(_sample_of(arrays), weights=arrays.loss_mask_n, minlength=1)[minibatch].sum())
        return denominator(
            self.algorithm.aggregation,
            loss_tokens=loss_tokens,
            samples=len(minibatch),
            max_response_tokens=self.max_response_tokens,
            fixed_tokens=self.algorithm.fixed_denominator_tokens,
            share=len(minibatch) / max(1, arrays.samples),
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.learner.device)

    def metrics(self, arrays: SampleArrays, progress: Progress) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; also sums ``progress``'s counts over the ranks."""
        ranks = self.learner.ranks
        if ranks.size > 1:
            _sum_progress(progress, ranks.sum_, self.learner.device)
        at = np.flatnonzero(progress.seen_n)
        norms = [update.grad_norm for update in progress.updates]
        return {
            "loss": progress.loss / max(1, len(progress.updates)),
            "grad_norm": max(norms, default=0.0),
            **token_metrics(
                logprobs_m=progress.logprobs_n[at],
                proximal_m=progress.proximal_n[at],
                behaviour_m=arrays.behaviour_logprobs_n[at].astype(np.float64),
                entropies_m=progress.entropies_n[at],
                clipped_m=progress.clipped_n[at],
                cap=self.settings.behaviour_weight_cap,
            ),
        }


def token_metrics(
    *,
    logprobs_m: np.ndarray,
    proximal_m: np.ndarray,
    behaviour_m: np.ndarray,
    entropies_m: np.ndarray,
    clipped_m: np.ndarray,
    cap: float | None,
) -> dict[str, float]:
    """Means, quantiles and extremes over the loss tokens; all 0 when there is none.

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


def _sample_of(arrays: SampleArrays) -> IntArray:
    return np.repeat(np.arange(arrays.samples), arrays.lengths_s)


def _sum_progress(progress: Progress, sum_: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Every token was computed on one rank and is 0 elsewhere, so sums over ranks assemble the whole batch."""
    names = ("logprobs_n", "proximal_n", "entropies_n", "clipped_n", "seen_n")
    stacked = sum_(torch.from_numpy(np.stack([getattr(progress, name) for name in names])).to(device)).cpu().numpy()
    for name, row in zip(names, stacked, strict=True):
        setattr(progress, name, row)
    counts = torch.tensor(
        [progress.loss, progress.tokens, progress.micro_batches, progress.flops], dtype=torch.float64, device=device
    )
    loss, tokens, micro_batches, flops = sum_(counts).tolist()
    progress.loss, progress.tokens = loss, int(tokens)
    progress.micro_batches, progress.flops = int(micro_batches), flops
