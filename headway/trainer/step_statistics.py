"""Per-token values that a policy-gradient step computes, and its metrics.

Legend: ``_n`` one value per token of the batch, ``_m`` one value per token that carries loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from headway.algorithms.samples import IntArray, SampleArrays
from headway.config.objective.rules import STREAMS
from headway.records.tokens import ExpertRouting
from headway.records.training import SKIPPED_VALUE_UPDATES
from headway.trainer.learner import TokenScores, Update
from headway.trainer.losses import MAX_LOG_RATIO
from headway.trainer.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Per-token constants of this rank's samples, computed before their first gradient."""

    advantages_n: np.ndarray  # with a KL penalty inside the reward: minus its sum to go
    keep_n: np.ndarray  # bool: not masked for staleness or importance
    start_n: np.ndarray | None = None  # log-probabilities under the weights at the start of the step, if needed
    reference_n: np.ndarray | None = None  # log-probabilities under the reference model, with a KL penalty
    values_n: np.ndarray | None = None  # [N, 3] value at the start of the step, its target and return, with a critic

    def take(self, idx_m: IntArray) -> Prepared:
        """Return the constants of the tokens ``idx_m`` alone."""
        arrays_by_field = {key.name: getattr(self, key.name) for key in fields(self)}
        taken: dict[str, Any] = {name: None if x_n is None else x_n[idx_m] for name, x_n in arrays_by_field.items()}
        return Prepared(**taken)

    @classmethod
    def joined(cls, parts: Sequence[Prepared]) -> Prepared:
        """Concatenate the parts of a step, or the ranks' constants."""
        parts_by_field: dict[str, Any] = {key.name: [getattr(part, key.name) for part in parts] for key in fields(cls)}
        joined_by_field: dict[str, Any] = {
            name: None if arrays[0] is None else np.concatenate(arrays) for name, arrays in parts_by_field.items()
        }
        return cls(**joined_by_field)


@dataclass(kw_only=True)
class Progress:
    """Per-token values and totals of the passes over this rank's samples; `gather` has those of all ranks."""

    behaviour_n: np.ndarray  # at sampling
    logprobs_n: np.ndarray  # under the weights each token was trained with
    proximal_n: np.ndarray  # under the weights at the start of the step (or the same as logprobs_n)
    entropies_n: np.ndarray
    clipped_n: np.ndarray
    masses_n: np.ndarray  # log-probability of the set among which each token was sampled; 0: the complete vocabulary
    seen_n: np.ndarray  # 1 for tokens of the policy stream whose values were computed
    loss: float = 0.0  # sum over optimiser steps
    tokens: int = 0  # fed tokens of the samples
    computed_tokens: int = 0  # the same, shared prefixes counted once
    micro_batches: int = 0
    flops: float = 0.0
    routers: int = 0  # (computed token, layer with experts) pairs
    experts_recorded: int = 0  # routers with recorded experts to replay
    experts_disagree: int = 0  # of these, routers that would have chosen other experts
    experts_astray: int = 0  # of these, routers whose tokens went to other experts
    kept_tokens: int = 0  # sampled among a part of the vocabulary
    kept_ids: int = 0  # in the sets of all kept_tokens
    constrained_tokens: int = 0  # constrained by a grammar
    # [streams, 3] loss, tokens and sum of |d loss / d log pi|, if there are several streams or rules
    streams: np.ndarray = field(default_factory=lambda: np.zeros((len(STREAMS), 3)))
    updates: list[Update] = field(default_factory=list)
    value_updates: list[Update] = field(default_factory=list)  # of the critic, in all passes
    skipped_minibatches: int = 0  # by algorithm.early_stop_ratio or early_stop_kl; equal on all ranks
    prepared: Prepared | None = None
    later: list[Progress] = field(default_factory=list["Progress"])  # of passes after the first

    @classmethod
    def over(cls, arrays: SampleArrays) -> Progress:
        return cls(
            **dict(zip(_COMPUTED, np.zeros((len(_COMPUTED), arrays.tokens)), strict=True)),
            behaviour_n=arrays.behaviour_logprobs_n,
        )

    def count(self, scores: TokenScores, idx_m: IntArray, tokens: int, routing: ExpertRouting | None) -> None:
        """Count the kept sets and the replayed experts, if any, of a forward pass over ``tokens``. ``idx_m``: the
        indices of its targets."""
        if routing is not None:
            recorded_count, disagree_count, astray_count = scores.expert_counts
            self.routers += tokens * routing.layers
            self.experts_recorded += recorded_count
            self.experts_disagree += disagree_count
            self.experts_astray += astray_count
        if (kept := scores.kept) is not None:
            self.masses_n[idx_m] = kept.masses_m.cpu().numpy()
            self.kept_tokens += kept.tokens
            self.kept_ids += kept.ids
            self.constrained_tokens += kept.constrained

    def count_streams(self, tokens: np.ndarray) -> None:
        """Add the ``tokens`` [streams] of an optimiser step."""
        self.streams = self.streams + np.stack((np.zeros(len(STREAMS)), tokens, np.zeros(len(STREAMS))), 1)

    @property
    def all_updates(self) -> list[Update]:
        """The updates of all passes."""
        return [*self.updates, *(update for later in self.later for update in later.updates)]

    def totals(self) -> dict[str, Any]:
        """Return what `joined` sums, by name."""
        return {name: getattr(self, name) for name in _COUNTED}

    def gather(self, ranks: Ranks) -> Progress:
        """Move the values of all computed tokens, as float32, and the totals to rank 0, whose result has them rank
        after rank, once where several ranks compute the same samples; on all others totals are 0."""
        if ranks.size == 1:
            return self
        idx_m = np.flatnonzero(self.seen_n)
        arrays = {name: getattr(self, name)[idx_m].astype(np.float32) for name in ("behaviour_n", *_COMPUTED)}
        prepared = None if self.prepared is None else self.prepared.take(idx_m)
        later = [progress.gather(ranks) for progress in self.later]
        if parts := ranks.gather(replace(self, **arrays, prepared=prepared, later=[]) if ranks.is_first else None):
            gathered = Progress.joined([part for part in parts if part is not None])
            gathered = replace(gathered, updates=self.updates, value_updates=self.value_updates, later=later)
            return replace(gathered, skipped_minibatches=self.skipped_minibatches)
        no_totals = dict.fromkeys(_COUNTED, 0) | {"streams": np.zeros_like(self.streams)}
        return replace(self, **no_totals, later=later)

    @classmethod
    def joined(cls, parts: Sequence[Progress]) -> Progress:
        """Concatenate the values and sum the totals of a step's parts, or of its ranks."""
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts], dtype=np.float64)
            for name in ("behaviour_n", *_COMPUTED)
        }
        totals: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _COUNTED}
        prepared = [part.prepared for part in parts if part.prepared]
        return cls(**arrays, **totals, prepared=Prepared.joined(prepared) if prepared else None)


class DeviceColumns:
    """Losses and per-token values of a batch's micro-batches, which stay on the device until all are computed, so that
    it isn't waited for in between."""

    def __init__(self) -> None:
        self._indices: list[IntArray] = []
        self._tensors: list[torch.Tensor] = []  # of each micro-batch: its loss, then the columns one after another
        self._in_policy: list[np.ndarray] = []
        self._figures: list[torch.Tensor] = []

    def add(self, idx_m: IntArray, policy_m: np.ndarray, loss: torch.Tensor, *columns_m: torch.Tensor) -> None:
        """Add a micro-batch: its loss, and the `_COLUMNS` of the tokens ``idx_m``. ``policy_m``: whether they are of
        the policy stream, bool."""
        self._indices.append(idx_m)
        self._in_policy.append(policy_m)
        self._tensors += [x.detach().to(loss.dtype).view(-1) for x in (loss, *columns_m)]

    def add_figures(self, figures: torch.Tensor | None) -> None:
        """Add a micro-batch's loss and slope of each stream [streams, 2]; None: there is one."""
        if figures is not None:
            self._figures.append(figures)

    def read(self, progress: Progress) -> float:
        """Copy the values to ``progress`` in one transfer; returns the sum of the losses."""
        values = torch.cat(self._tensors).cpu().numpy() if self._tensors else np.zeros(0)
        first, loss = 0, 0.0
        for idx_m, policy_m in zip(self._indices, self._in_policy, strict=True):
            loss += float(values[first])
            stop = first + 1 + len(_COLUMNS) * len(idx_m)
            for name, column_m in zip(_COLUMNS, np.split(values[first + 1 : stop], len(_COLUMNS)), strict=True):
                getattr(progress, name)[idx_m] = column_m
            progress.seen_n[idx_m], first = policy_m, stop
        if self._figures:
            loss_of_stream, slope_of_stream = torch.stack(self._figures).sum(0).double().cpu().numpy().T
            zeros = np.zeros(len(STREAMS))
            progress.streams = progress.streams + np.stack((loss_of_stream, zeros, slope_of_stream), 1)
        return loss


_COLUMNS = ("logprobs_n", "proximal_n", "entropies_n", "clipped_n")
_COMPUTED = ("logprobs_n", "proximal_n", "entropies_n", "clipped_n", "masses_n", "seen_n")
_EXPERTS = ("routers", "experts_recorded", "experts_disagree", "experts_astray")
_KEPT = ("kept_tokens", "kept_ids", "constrained_tokens")
_COUNTED = ("loss", "tokens", "computed_tokens", "micro_batches", "flops", *_EXPERTS, *_KEPT, "streams")


def stream_metrics(progress: Progress) -> dict[str, float]:
    """Metrics of each stream of the loss: stream_NAME_loss, its part of the loss; stream_NAME_tokens, before masks;
    stream_NAME_slope, the sum of |d loss / d log pi| over its tokens, which compares what streams pull at."""
    updates = max(1, len(progress.updates))
    return {
        f"stream_{stream}_{figure}": float(number) / (1 if figure == "tokens" else updates)
        for stream, figures in zip(STREAMS, progress.streams, strict=True)
        for figure, number in zip(("loss", "tokens", "slope"), figures, strict=True)
    }


def entropy_metrics(progress: Progress, idx_m: IntArray, threshold: float | None) -> dict[str, float]:
    """low_entropy_share: share of the loss tokens below ``algorithm.entropy_threshold``, if there is one."""
    if threshold is None or not len(idx_m):
        return {}
    return {"low_entropy_share": float((progress.entropies_n[idx_m] < threshold).mean())}


def expert_metrics(progress: Progress) -> dict[str, float]:
    """Metrics of replayed experts. experts_replayed: share of the routers (one per token and layer with experts) with
    recorded experts. experts_disagree: share of these that would have chosen others by the trainer's scores, which is
    the disagreement with the engine without replay. experts_disagree_replayed: share of these whose tokens still went
    to others."""
    if not progress.routers:
        return {}
    recorded_count = max(1, progress.experts_recorded)
    return {
        "experts_replayed": progress.experts_recorded / progress.routers,
        "experts_disagree": progress.experts_disagree / recorded_count,
        "experts_disagree_replayed": progress.experts_astray / recorded_count,
    }


def kept_metrics(progress: Progress, idx_m: IntArray) -> dict[str, float]:
    """Metrics of replayed kept sets. kept_ids: mean size of the sets of tokens that were sampled among a part of the
    vocabulary. kept_constrained_share: share of the loss tokens that a grammar constrained. mismatch_k3_unreplayed:
    mismatch_k3 as it would be with log-probabilities over the complete vocabulary."""
    if not progress.kept_tokens:
        return {}
    log_weight = progress.proximal_n[idx_m] + progress.masses_n[idx_m] - progress.behaviour_n[idx_m].astype(np.float64)
    return {
        "kept_ids": progress.kept_ids / progress.kept_tokens,
        "kept_constrained_share": progress.constrained_tokens / len(idx_m),
        "mismatch_k3_unreplayed": float((np.exp(log_weight.clip(max=700.0)) - 1.0 - log_weight).mean()),
    }


def prepared_metrics(progress: Progress, idx_m: IntArray) -> dict[str, float]:
    """Metrics of masks and KL. masked_share: share of the loss tokens that staleness and importance masks drop.
    kl_reference: k3 estimate of the KL from the reference model, if there is one, in nats per token."""
    prepared = progress.prepared
    if prepared is None or not len(idx_m):
        return {"masked_share": 0.0}
    metrics = {"masked_share": float(1.0 - prepared.keep_n[idx_m].mean())}
    if prepared.reference_n is not None:
        log_ratio_m = prepared.reference_n[idx_m] - progress.logprobs_n[idx_m]
        metrics["kl_reference"] = float((np.expm1(log_ratio_m.clip(max=MAX_LOG_RATIO)) - log_ratio_m).mean())
    return metrics


def value_metrics(progress: Progress, idx_m: IntArray) -> dict[str, float]:
    """Metrics of the critic's values at the start of the step against the returns, over the loss tokens.
    explained_variance: 1 - variance of their difference / variance of the returns, not if that is 0. value_error: root
    mean square of the difference, in units of reward. skipped_value_updates: as of skipped_updates."""
    skipped_updates = sum(not update.applied for update in progress.value_updates)
    metrics = {SKIPPED_VALUE_UPDATES: float(skipped_updates)}
    if progress.prepared is None or progress.prepared.values_n is None or not len(idx_m):
        return metrics
    values_m, _, returns_m = progress.prepared.values_n[idx_m].T
    metrics["value_error"] = float(np.sqrt(np.square(returns_m - values_m).mean()))
    if (variance := returns_m.var()) > 0:
        metrics["explained_variance"] = float(1.0 - (returns_m - values_m).var() / variance)
    return metrics


def pass_metrics(progress: Progress) -> dict[str, float]:
    """ratio_* and clip_fraction of each pass after the first: NAME_pass_2, NAME_pass_3, ..."""
    return {
        f"{name}_pass_{number}": metric
        for number, later in enumerate(progress.later, 2)
        for name, metric in token_metrics(later, None).items()
        if name.startswith(("ratio_", "clip_fraction"))
    }


def token_metrics(progress: Progress, cap: float | None) -> dict[str, float]:
    """Means, quantiles and extremes over the loss tokens; without any, those of one token with all values 0.

    ratio_*: pi_theta / pi_behav. behaviour_weight_*: pi_prox / pi_behav before truncation. mismatch_k3: the
    estimator ``w - 1 - log w`` of KL(behaviour || proximal), w = pi_prox / pi_behav; mismatch_max: the largest
    |log w|. kl: mean of log pi_behav - log pi_theta.
    """
    idx_m = np.flatnonzero(progress.seen_n)
    logprobs_m, proximal_m = progress.logprobs_n[idx_m], progress.proximal_n[idx_m]
    behaviour_m = progress.behaviour_n[idx_m].astype(np.float64)
    entropies_m, clipped_m = progress.entropies_n[idx_m], progress.clipped_n[idx_m]
    if not len(logprobs_m):
        logprobs_m = proximal_m = behaviour_m = entropies_m = clipped_m = np.zeros(1)
    log_ratio = logprobs_m - behaviour_m
    p01, p50, p99, p100 = np.exp(np.quantile(log_ratio, (0.01, 0.5, 0.99, 1.0)).clip(max=700.0)).tolist()
    log_weight = proximal_m - behaviour_m
    weight = np.exp(log_weight.clip(max=700.0))
    return {
        "entropy": float(entropies_m.mean()),
        "clip_fraction": float(clipped_m.mean()),
        "ratio_p01": p01,
        "ratio_p50": p50,
        "ratio_p99": p99,
        "ratio_max": p100,
        "behaviour_weight_mean": float(weight.mean()),
        "behaviour_weight_max": float(weight.max()),
        "behaviour_weight_truncated": float((weight > (math.inf if cap is None else cap)).mean()),
        "mismatch_k3": float((weight - 1.0 - log_weight).mean()),
        "mismatch_max": float(np.abs(log_weight).max()),
        "kl": float(-log_ratio.mean()),
    }
