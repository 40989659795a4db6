"""Batches with rewards for a critic, its values by their definition in float64, and what ranks do with both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from rank_processes import complete, service, share, summed_gradients
from tiny_trainer import make_batch

from headway.records.rollout import Sample
from headway.records.training import TrainBatch
from headway.trainer.service import TrainerService

CLIP = 0.2


def rewarded(seed: int, step: int = 0, groups: int = 6, members: int = 1, *, turns: bool = True) -> TrainBatch:
    """Random samples with rewards, of which every third is cut and bootstraps, and every other one has turns with
    rewards of their own."""
    batch, random = make_batch(seed, groups=groups, members=members, step=step), np.random.default_rng(seed + 1000)
    samples = []
    for index, sample in enumerate(batch.samples):
        rollout, length = sample.rollout, len(sample.rollout.response_ids)
        rewards = (float(random.standard_normal()) + 0.5,)
        if turns and index % 2 and length > 2:
            rewards = tuple(random.standard_normal(2).tolist())
            rollout = msgspec.structs.replace(rollout, turn_ends=(length // 2, length))
        samples.append(Sample(rollout=rollout, advantage=0.0, rewards=rewards, bootstraps=index % 3 == 0))
    return TrainBatch(step=step, samples=tuple(samples))


@dataclass
class Definition:
    """Advantages, values and gradients of a batch, sample by sample and token by token in float64."""

    advantages: list[list[float]]  # of each sample's loss tokens, normalised
    values: list[list[float]]
    targets: list[list[float]]
    head: torch.Tensor  # the gradient of the value loss, of w and then b
    network: list[torch.Tensor]  # of the network's parameters; of a trunk all are zero


def defined(
    trainer: TrainerService, batch: TrainBatch, mean: float = 0.0, deviation: float = 1.0, start: Any = None
) -> Definition:
    """``start``: the values at the step's start, from an earlier definition; None: those of now. The trainer's models
    become float64."""
    critic = trainer.policy.critic
    assert critic is not None
    model: Any = critic.model.double()
    discount, decay = critic._settings.gae
    head = critic.head.detach().double().requires_grad_()
    parameters = [p.requires_grad_() for p in model.parameters()]
    scores, advantages, values, targets = [], [], [], []
    for sample in batch.samples:
        rollout = sample.rollout
        ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        hidden = model.forward_packed(ids, [len(ids)])  # of the state behind each token
        sampled = [(i, math.exp(x)) for i, x in enumerate(rollout.response_logprobs) if rollout.response_mask[i]]
        places = [len(rollout.prompt_ids) + i for i, _ in sampled]
        least = [min([1.0] + [p for i, p in sampled if len(rollout.prompt_ids) + i <= n]) for n in range(len(ids))]
        raw = hidden / hidden.square().mean(-1, keepdim=True).sqrt() @ head[:-2] + head[-1]
        raw = raw + 0.3 * hidden.shape[1] * torch.tensor(least) * head[-2]
        score = raw[[place - 1 for place in places]]
        v = [mean + deviation * x for x in score.tolist()]
        ends = list(rollout.turn_ends) if len(sample.rewards) > 1 else [len(rollout.response_ids)]
        rewards = [0.0] * len(places)
        for reward, end in zip(sample.rewards, ends, strict=True):
            inside = [i for i, place in enumerate(places) if place - len(rollout.prompt_ids) < end]
            if inside:
                rewards[inside[-1]] += reward
        behind = mean + deviation * float(raw[-1].detach()) if sample.bootstraps else 0.0
        lam = max(0.0, 1 - 1 / (0.05 * max(1, len(places)))) if decay == "length" else decay
        advantages.append(_advantages(rewards, v, behind, discount, lam))
        of_targets = _advantages(rewards, v, behind, discount, 1.0 if decay == "length" else lam)
        values.append(v)
        targets.append([a + b for a, b in zip(of_targets, v, strict=True)])
        scores.append(score)
    flat = [a for row in advantages for a in row]
    middle = sum(flat) / len(flat)
    spread = math.sqrt(sum((a - middle) ** 2 for a in flat) / len(flat))
    loss = torch.zeros((), dtype=torch.float64)
    for score, row_values, row_targets in zip(scores, start or values, targets, strict=True):
        for x, before, target in zip(score, row_values, row_targets, strict=True):
            before, target = (before - mean) / deviation, (target - mean) / deviation
            distance = float(x.detach()) - before
            near = before + math.copysign(CLIP, distance)
            stands = abs(distance) > CLIP and abs(near - target) > abs(float(x.detach()) - target)
            loss = loss + (0.5 * (near - target) ** 2 if stands else 0.5 * (x - target) ** 2)
    grads = torch.autograd.grad(loss / len(flat), [head, *parameters], allow_unused=True)
    network = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads[1:], strict=True)]
    return Definition([[(a - middle) / spread for a in row] for row in advantages], values, targets, grads[0], network)


def _advantages(rewards: list[float], values: list[float], behind: float, discount: float, lam: float) -> list[float]:
    """Each as its sum of later errors."""
    following = [*values[1:], behind]
    errors = [r + discount * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((discount * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def set_head(trainer: TrainerService, scale: float = 0.3) -> None:
    """Give the head random weights."""
    critic = trainer.policy.critic
    assert critic is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        critic.head.normal_(0, scale, generator=generator)


def train_values(
    mesh: tuple[int, int, str], experiment: dict[str, Any], groups: int = 6, steps: int = 2
) -> dict[str, Any]:
    """Gradients of the value and the policy loss of a batch over all ranks, then heads and moments after steps."""
    trainer = service(mesh, experiment)
    set_head(trainer)
    critic, learner = trainer.policy.critic, trainer.learner
    assert critic is not None
    trainer.policy.accumulate_gradients(share(trainer, rewarded(3, groups=groups)).arrays())
    gradient = torch.zeros_like(critic.head) if critic.head.grad is None else critic.head.grad.clone()
    gradients = {"head": (learner.ranks.sum_(gradient) / learner.ranks.context).numpy().copy()}
    network = critic._network
    gradients |= {} if network is None else {f"network/{k}": v for k, v in summed_gradients(network).items()}
    policy = summed_gradients(learner)
    trainer.policy.clear()
    metrics = [
        trainer.train_step(share(trainer, rewarded(3 + step, step, groups=groups))).metrics for step in range(steps)
    ]
    outcome = {
        "gradients": gradients,
        "policy": policy,
        "metrics": metrics[-1],
        "head": critic.head.detach().numpy().copy(),
        "network": {} if network is None else complete(network, network.parameters),
        "scale": critic.scale,
    }
    trainer.close()
    return outcome


def resumed_values(mesh: tuple[int, int, str], experiment: dict[str, Any], path: str, load: str = "") -> dict[str, Any]:
    """The critic's state after a step on top of what ``load`` has, or of two; saved between them into ``path``."""
    trainer = service(mesh, experiment)
    critic = trainer.policy.critic
    assert critic is not None
    if load:
        assert trainer.load_checkpoint(load) == 1
    else:
        trainer.train_step(share(trainer, rewarded(0)))
    trainer.save_checkpoint(path, {})
    trainer.train_step(share(trainer, rewarded(1, 1)))
    network = critic._network
    state = {
        "head": critic.head.detach().numpy().copy(),
        "scale": critic.scale,
        "network": {} if network is None else complete(network, network.parameters),
        "policy": complete(trainer.learner, trainer.learner.parameters),
    }
    trainer.close()
    return state
