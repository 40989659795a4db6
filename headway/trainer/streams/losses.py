"""The sum of a micro-batch's token losses over streams and rules.

Legend: ``_n`` one value per token of this rank's samples, ``_m`` one value per token of the micro-batch that is scored,
``_k`` one per token of a rule in a stream, ``_s`` one per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.samples import IntArray, SampleArrays
from headway.algorithms.streams import Streams, StreamWeights
from headway.config.objective.rules import STREAMS, StreamRule
from headway.config.schema import AlgorithmConfig
from headway.config.services.policy_sections import PolicySections
from headway.runtime.hooks import Hook
from headway.trainer.kl import kl_estimate
from headway.trainer.losses import LOSSES, LossSettings, TokenTerms, entropy_terms, loss_settings, resolve, token_loss
from headway.trainer.streams.divergence import Divergence


@dataclass(kw_only=True)
class RuleLoss:
    """The policy loss of a rule."""

    algorithm: AlgorithmConfig
    function: Hook
    settings: LossSettings
    kl_coefficient: float  # with a kl_target it changes step by step

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> RuleLoss:
        return cls(
            algorithm=algorithm,
            function=resolve(algorithm.loss),
            settings=loss_settings(algorithm),
            kl_coefficient=algorithm.kl_coefficient,
        )

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss reads the log-probabilities at the start of the step."""
        return self.algorithm.loss not in LOSSES or self.algorithm.loss == "decoupled_ppo"

    def policy_loss(self, terms: TokenTerms, entropies_m: Tensor, reference_m: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss of each token, with its entropy bonus and KL penalty, 0 where it is masked; and whether it was
        clipped."""
        trained_m, bonus_m = entropy_terms(self.algorithm, terms.logprobs_m, entropies_m)
        losses = token_loss(self.function, replace(terms, logprobs_m=trained_m), self.settings)
        loss_m = losses.loss_m if bonus_m is None else losses.loss_m - bonus_m
        if reference_m is not None and self.kl_coefficient > 0 and self.algorithm.kl_in == "loss":
            penalty_m = kl_estimate(self.algorithm.kl_estimator, terms.logprobs_m, reference_m, terms.behaviour_m)
            loss_m = loss_m + self.kl_coefficient * penalty_m
        assert terms.keep_m is not None
        return torch.where(terms.keep_m, loss_m, 0.0), losses.clipped_m


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """The scored tokens of a micro-batch."""

    terms: TokenTerms
    entropies_m: Tensor
    reference_m: Tensor | None
    divergence: Divergence | None
    indices_m: IntArray  # in the flat batch
    sequences_m: IntArray  # of the flat batch

    @property
    def loss_free(self) -> Tensor:
        """The loss without a token in any stream: 0, with gradients of 0."""
        return 0.0 * self.terms.logprobs_m.sum()


class StreamSum(NamedTuple):
    """The sum of a micro-batch."""

    loss: Tensor
    clipped_m: Tensor
    figures: Tensor | None  # [streams, 2] loss and sum of |d loss / d log pi|; None: there is one stream and rule


class StreamLosses:
    """The losses of a run's rules, and their sum."""

    def __init__(self, experiment: PolicySections, device: torch.device) -> None:
        """Raises ConfigurationError for a loss that can't be loaded."""
        self.streams = Streams.of(experiment)
        self.rules = [RuleLoss.of(algorithm) for algorithm in experiment.rules.algorithms]
        self._device = device

    def sum(
        self, arrays: SampleArrays, scored: ScoredTokens, weights: Sequence[StreamWeights], *, divides: bool
    ) -> StreamSum:
        """Add up the losses of the tokens ``scored``. ``divides``: by the denominators of ``weights``; False: the sum
        of a part of a step, which is divided later."""
        if self.streams.single:
            loss_m, clipped_m = self.rules[0].policy_loss(scored.terms, scored.entropies_m, scored.reference_m)
            return StreamSum(self._weighted(loss_m, scored.sequences_m, weights[0], divides=divides), clipped_m, None)
        logprobs_m = scored.terms.logprobs_m
        losses = [scored.loss_free for _ in STREAMS]
        slopes = [torch.zeros_like(losses[0]) for _ in STREAMS]
        clipped_m = torch.zeros_like(logprobs_m, dtype=torch.bool)
        for part_weights in weights:
            part = part_weights.part
            has_m = self.streams.has_tokens(arrays, part, scored.indices_m, scored.sequences_m)
            positions_k = np.flatnonzero(has_m)
            if not len(positions_k):
                continue
            idx_k = torch.from_numpy(positions_k).to(self._device)
            loss_k, slope_k, clipped_k = self._part_losses(part, scored, idx_k)
            stream, sequences_k = STREAMS.index(part.stream), scored.sequences_m[positions_k]
            losses[stream] = losses[stream] + self._weighted(loss_k, sequences_k, part_weights, divides=divides)
            if slope_k is not None:
                slopes[stream] = slopes[stream] + self._weighted(slope_k, sequences_k, part_weights, divides=divides)
            if clipped_k is not None:
                clipped_m[idx_k] = clipped_k
        (gradient_m,) = torch.autograd.grad(losses[0], logprobs_m, retain_graph=True)
        slopes[0] = gradient_m.abs().sum()
        figures = torch.stack((torch.stack(losses), torch.stack(slopes)), 1).detach()
        return StreamSum(torch.stack(losses).sum(), clipped_m, figures)

    def _part_losses(
        self, part: StreamRule, scored: ScoredTokens, idx_k: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss of each token of ``part``, its |d loss / d log pi| if that is known without a gradient, and whether
        it was clipped."""
        if part.stream == "imitate":
            logprobs_k = scored.terms.logprobs_m[idx_k]
            return -logprobs_k, torch.ones_like(logprobs_k).detach(), None
        if part.stream == "teacher":
            assert scored.divergence is not None, "computed where a rule has a teacher"
            return scored.divergence.values_m[idx_k], scored.divergence.slopes_m[idx_k], None
        reference_k = None if scored.reference_m is None else scored.reference_m[idx_k]
        terms_k = _taken(scored.terms, idx_k)
        loss_k, clipped_k = self.rules[part.rule].policy_loss(terms_k, scored.entropies_m[idx_k], reference_k)
        return loss_k, None, clipped_k

    def _weighted(self, loss_k: Tensor, sequences_k: IntArray, weights: StreamWeights, *, divides: bool) -> Tensor:
        weights_k = torch.from_numpy(weights.weights_s[sequences_k].astype(np.float32)).to(self._device)
        return (loss_k * weights_k).sum() / (weights.divisor if divides else 1.0)


def _taken(terms: TokenTerms, idx_k: Tensor) -> TokenTerms:
    tensors = {field.name: getattr(terms, field.name) for field in fields(terms)}
    return replace(terms, **{name: None if tensor is None else tensor[idx_k] for name, tensor in tensors.items()})
