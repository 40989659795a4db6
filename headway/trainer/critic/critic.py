"""A critic beside the policy: a linear head on hidden states of the policy, or of a network of its own.

Legend: ``_n`` one value per token of this rank's samples, ``_m`` one value per scored token of a micro-batch, ``_s``
per sequence, ``d`` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headway.algorithms.samples import MicroBatchArrays, SampleArrays, sequence_of_token
from headway.algorithms.values import Moments, least_probabilities, values_of_tokens, with_ends
from headway.config.objective.critic import ADAPTER, GAE, TRUNK
from headway.config.services.policy_sections import PolicySections
from headway.models.packed_model import PackedModel
from headway.models.shards.shard import Shard, shards_of
from headway.trainer.critic.value_loss import clipped_value_loss
from headway.trainer.learner import Learner, Update
from headway.trainer.optimizer import AdamW
from headway.trainer.state_files import ATTACHED

_LEAST_SCALE = 0.3  # a step of AdamW moves a value by p at most so much of what it moves it by all of h together


class Critic:
    """Values V = mean + deviation x (w·h + u p + b) of the states before loss tokens, with the mean and deviation of
    all returns so far, and hidden states h scaled to a root mean square of 1, so that the head learns numbers of a size
    of 1 from such numbers whatever rewards and model are. p is the lowest probability at which a token so far was
    sampled, in a scale that fits the learning rate: hidden states of a policy are for the next token, and say little of
    whether an earlier one was a slip.

    Lifecycle, step by step: `prepare` at its start, `backward` for each micro-batch, `update` for each optimiser step,
    `commit` once it has made a version: only then do its returns count, and the head changes so that no value does
    (PopArt, van Hasselt et al. 2016, arXiv:1602.07714). A step that is replayed after a crash so counts once.

    Head, moments of the returns and optimiser are complete on every rank; a network of its own is divided as the policy
    is. It is never published.
    """

    def __init__(self, experiment: PolicySections, policy: Learner) -> None:
        """Raises ConfigurationError for a folder that isn't a model."""
        self._settings, self._policy = experiment.critic, policy
        self._joins_groups = experiment.joins_groups
        self._network = None if self._settings.path == TRUNK else _open_network(experiment, policy)
        width, device = self.model.config.width, policy.device
        self.head = torch.zeros(width + 2, device=device, requires_grad=True)  # w, u, b
        self._least_n = np.zeros(0, np.float32)  # p of the batch's tokens, and of ends while `prepare` computes values
        self._optimiser = AdamW([self.head])
        self._optimiser.state[self.head] = self._optimiser.zero_state(self.head)
        self._moments = torch.zeros(3, dtype=torch.float64)  # of returns, as `Moments` has them
        self._pending = Moments()  # of this step's returns
        self._tokens, self._losses = 1, list[Tensor]()  # of this update: divisor, and this rank's micro-batches
        policy.attached = self

    @classmethod
    def of(cls, experiment: PolicySections, policy: Learner) -> Critic | None:
        """The critic of a run; None: it has none."""
        return cls(experiment, policy) if experiment.algorithm.advantage == GAE else None

    @property
    def model(self) -> PackedModel:
        """The model whose hidden states it reads."""
        return (self._network or self._policy).model

    @property
    def reads_policy(self) -> bool:
        """Whether it reads the hidden states of the policy's own forward passes."""
        return self._network is None

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different rows of its network."""
        return self._network is not None and self._network.trains_rows

    @property
    def scale(self) -> Moments:
        """The moments of the returns of all steps that have made a version."""
        count, mean, squares = self._moments.tolist()
        return Moments(count=count, mean=mean, squares=squares)

    def start_values(self, batch: MicroBatchArrays) -> Tensor:
        """Values [M] of a micro-batch's scored tokens, in the head's units. Called without gradients."""
        return self._read(self._hidden_states(batch), batch)

    def _hidden_states(self, batch: MicroBatchArrays, *, trains: bool = False) -> Tensor:
        """Hidden states [M, d] that predict the scored tokens. A network of its own reads an id that it lacks, of the
        vocabulary's padding, as its last one."""
        learner = self._network or self._policy
        ids_n = np.minimum(batch.input_ids, self.model.config.vocabulary_size - 1)
        return learner.hidden_states(self.model, replace(batch, input_ids=ids_n), batch.predictors_m, trains=trains)

    def _read(self, hidden_md: Tensor, batch: MicroBatchArrays) -> Tensor:
        width = hidden_md.shape[-1]
        least_m = torch.from_numpy(_LEAST_SCALE * width * self._least_n[batch.targets_m]).to(self.head.device)
        scaled_md = functional.rms_norm(hidden_md.float(), (width,))
        return scaled_md @ self.head[:-2] + least_m * self.head[-2] + self.head[-1]

    def prepare(
        self,
        arrays: SampleArrays,
        rewards_n: np.ndarray,
        policy_n: np.ndarray,
        score: Callable[[SampleArrays], np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """The advantages [N] of the tokens ``policy_n`` (bool [N]), normalised over the batch, and their value, target
        and return [N, 3], in units of reward; 0 for others. A call of all ranks. ``score``: `start_values` of all
        scored tokens [N]."""
        (extended, own_n), scale = with_ends(arrays), self.scale
        self._least_n = least_probabilities(extended)
        scored_n = scale.mean + scale.deviation * score(extended).astype(np.float64)
        self._least_n = self._least_n[own_n]
        cut_values_s = np.zeros(arrays.samples)
        if arrays.bootstraps_s is not None:
            cut_values_s[arrays.bootstraps_s] = scored_n[~own_n]
        idx_m = np.flatnonzero(policy_n)
        values_m = scored_n[own_n][idx_m]
        sequence_m = sequence_of_token(arrays)[idx_m]
        if self._joins_groups:
            sequence_m = np.unique(arrays.groups_s[sequence_m], return_inverse=True)[1]
        rewards_m = rewards_n[idx_m].astype(np.float64)
        valued = values_of_tokens(rewards_m, values_m, sequence_m, cut_values_s, self._settings)
        rank_moments = Moments.of(valued.advantages_m), Moments.of(valued.returns_m)
        moments_by_rank = self._policy.ranks.all_gather_data(rank_moments)
        advantage_scale, self._pending = (Moments.joined(parts) for parts in zip(*moments_by_rank, strict=True))
        advantages_m = (valued.advantages_m - advantage_scale.mean) / advantage_scale.deviation
        advantages_n, values_n = np.zeros(arrays.tokens, np.float32), np.zeros((arrays.tokens, 3))
        advantages_n[idx_m] = advantages_m
        values_n[idx_m] = np.stack((values_m, valued.targets_m, valued.returns_m), 1)
        return advantages_n, values_n

    def begin_update(self, tokens: int) -> None:
        """Begin an optimiser step over ``tokens`` of this rank, which divides by those of all. A call of all ranks."""
        self._tokens = max(1, sum(self._policy.ranks.all_gather_data(tokens)))
        self.clear_gradients()

    def backward(
        self, batch: MicroBatchArrays, hidden_md: Tensor | None, values_n: np.ndarray, policy_n: np.ndarray
    ) -> None:
        """Accumulate the gradients of a micro-batch's value loss over the tokens ``policy_n``. ``hidden_md``: of the
        policy, if it reads these. ``values_n``: as `prepare` returns them."""
        learner, idx_m, scale = self._network or self._policy, batch.targets_m, self.scale
        if hidden_md is None:
            hidden_md = self._hidden_states(batch, trains=True)
        scaled_m2 = ((values_n[idx_m, :2] - scale.mean) / scale.deviation).astype(np.float32)
        start_m, targets_m = torch.from_numpy(scaled_m2).to(self.head.device).unbind(1)
        losses_m = clipped_value_loss(self._read(hidden_md, batch), start_m, targets_m)
        is_valued_m = torch.from_numpy(policy_n[idx_m]).to(self.head.device)
        loss = torch.where(is_valued_m, losses_m, 0.0).sum() / self._tokens
        learner.backward(loss)
        self._losses.append(loss.detach())

    def update(self) -> Update:
        """Sum the gradients over the ranks, clip them and take a step with them. If loss or gradient norm aren't finite
        on some rank, nothing changes on any."""
        ranks, settings = self._policy.ranks, self._policy.optimiser_settings(self._settings.network_rate)
        gradient = torch.zeros_like(self.head) if self.head.grad is None else self.head.grad
        ranks.sum_(gradient).div_(ranks.context)  # whose ranks have the same one
        loss = float(sum(self._losses))
        loss_tensor = torch.tensor(loss / ranks.context, dtype=torch.float64, device=self.head.device)
        total_loss, norm = float(ranks.sum_(loss_tensor)), float(gradient.norm())
        is_finite = math.isfinite(total_loss) and math.isfinite(norm)
        if self._network is not None:
            update = self._network.update(settings, loss if is_finite else math.nan)
            is_finite = update.applied
        if is_finite:
            self.head.grad = gradient * min(1.0, settings.max_grad_norm / (norm + 1e-6))
            self._optimiser.step(self._policy.optimiser_settings(self._settings.head_rate(self.model.config.width)))
        self.clear_gradients()
        reason = "" if is_finite else f"critic: loss {total_loss}, gradient norm {norm}: not finite"
        return Update(applied=is_finite, reason=reason, grad_norm=norm)

    def clear_gradients(self) -> None:
        """Discard all gradients, and the losses they are of."""
        self._losses.clear()
        self.head.grad = None
        if self._network is not None:
            self._network.clear_gradients()

    @torch.no_grad()
    def commit(self) -> None:
        """Count the returns of the step that `prepare` began, and keep all values as they are, but in the first step:
        then the mean of its returns is a better value than 0."""
        former, self._pending, pending = self.scale, Moments(), self._pending
        scale = Moments.joined([former, pending])
        self._moments.copy_(torch.tensor([scale.count, scale.mean, scale.squares], dtype=torch.float64))
        if former.count:
            self.head.mul_(former.deviation / scale.deviation)
            self.head[-1] += (former.mean - scale.mean) / scale.deviation

    def shards(self) -> list[Shard]:
        """This rank's rows of head, moments, optimiser and network, in their memory."""
        tensors = {"head": self.head.detach(), "returns": self._moments}
        tensors |= {f"head/{kind}": tensor for kind, tensor in self._optimiser.state[self.head].items()}
        shards = shards_of(tensors)
        if (network := self._network) is not None:
            with network.masters.exposed():
                shards += shards_of(network.weights())
            shards += network.optimiser_shards()
        return [replace(shard, name=ATTACHED + shard.name) for shard in shards]

    def restored(self) -> None:
        """Use the state that was read into the memory of `shards`."""
        if self._network is not None:
            self._network.masters.round()

    def resident(self) -> list[Tensor]:
        """All tensors that stay on the device between two steps."""
        tensors = [self.head, *self._optimiser.state[self.head].values()]
        return tensors if self._network is None else tensors + self._network.resident()

    def flops(self, batch: MicroBatchArrays) -> float:
        """Model FLOP of a forward pass, the head's not counted."""
        return self.model.config.flops(batch.input_lengths, 0, batch.continues)

    def training_flops(self, batch: MicroBatchArrays) -> float:
        """Model FLOP of `backward`; those of the policy's own passes aren't counted again."""
        return 0.0 if self._network is None else 3 * self.flops(batch)


def _open_network(experiment: PolicySections, policy: Learner) -> Learner:
    """A network of the critic's own: the model of its folder, or an adapter as the policy's on another copy of its
    model."""
    path, chosen = experiment.critic.path, experiment.model
    if path != ADAPTER:
        chosen = chosen.model_copy(update={"path": path, "adapter": None, "quantization": None})
    settings = policy.settings.model_copy(update={"optimizer": "adamw"})
    options: dict[str, Any] = {"chat": experiment.uses_chat, "pixels": policy.pixels}
    network = Learner(chosen, settings, policy.device, policy.ranks, experiment.run.seed, **options)
    network.optimiser.state = {parameter: network.optimiser.zero_state(parameter) for parameter in network.parameters}
    return network
