"""The gradient of one training step by its definition: sample by sample, full logits, no packing, no gathering, and
the aggregations and the KL penalty written out a second time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from headway.algorithms.samples import FlatBatch, SampleArrays, lay_out
from headway.algorithms.step_plan import divide
from headway.models.decoder import Decoder
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout
from headway.records.training import TrainBatch
from headway.trainer import losses
from headway.trainer.ranks import Ranks
from headway.trainer.service import TrainerService


def gradient(trainer: TrainerService, arrays: SampleArrays, step: int = 0) -> torch.Tensor:
    """What the trainer accumulates over the batch as one optimiser step."""
    trainer.learner.clear_gradients()
    trainer.policy.accumulate_gradients(arrays, step)
    return torch.cat([gradient.flatten().clone() for gradient in trainer.learner.gradients()])


def response_logprobs(model: Decoder, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Of every response token, masked ones too."""
    ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
    logits = model.head(model.forward_packed(ids, [len(ids)])) / temperature
    at = torch.arange(len(rollout.prompt_ids), len(ids))
    return torch.log_softmax(logits[at - 1], -1)[torch.arange(len(at)), ids[at]]


def defined_gradient(
    trainer: TrainerService,
    batch: TrainBatch,
    keep: list[list[bool]] | None = None,
    advantages: list[list[float]] | None = None,
) -> torch.Tensor:
    """The gradient of the whole batch. ``keep`` and ``advantages``: of every response token, sample by sample."""
    algorithm, temperature = trainer.policy.algorithm, trainer.policy.temperature
    total = torch.zeros(())
    for index, sample in enumerate(batch.samples):
        r = sample.rollout
        mask = torch.tensor(r.response_mask)
        if not mask.any():
            continue
        logprobs = response_logprobs(trainer.learner.model, r, temperature)[mask]
        behaviour = torch.tensor(r.response_logprobs)[mask]
        values = [sample.advantage] * len(mask) if advantages is None else advantages[index]
        kept = torch.ones(len(logprobs), dtype=torch.bool) if keep is None else torch.tensor(keep[index])[mask]
        terms = losses.TokenTerms(
            logprobs_m=logprobs,
            proximal_m=logprobs.detach(),
            behaviour_m=behaviour,
            advantages_m=torch.tensor(values)[mask],
            keep_m=kept,
        )
        per_token = trainer.policy.rules[0].function(terms, trainer.policy.rules[0].settings).loss_m
        if algorithm.kl_coefficient > 0 and algorithm.kl_in == "loss":
            assert trainer.learner.reference is not None
            with torch.no_grad():
                reference = response_logprobs(trainer.learner.reference, r, temperature)[mask]
            per_token = per_token + algorithm.kl_coefficient * penalty(
                algorithm.kl_estimator, logprobs, reference, behaviour
            )
        weight = 1 / len(logprobs) if algorithm.aggregation == "seq_mean_token_mean" else 1.0
        total = total + (per_token * kept).sum() * weight / divisor(trainer, batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, trainer.learner.parameters)])


def divisor(trainer: TrainerService, batch: TrainBatch) -> float:
    """Of the loss masks alone."""
    tokens = [sum(sample.rollout.response_mask) for sample in batch.samples]
    return {
        "token_mean": sum(tokens),
        "fixed": len(tokens) * trainer.policy.losses.streams.max_response_tokens,
        "seq_mean_token_sum": sum(count > 0 for count in tokens),
        "seq_mean_token_mean": sum(count > 0 for count in tokens),
    }[trainer.policy.algorithm.aggregation]


def penalty(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    difference = logprobs - reference
    values = {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}
    return values[estimator[:2]] * (torch.exp(logprobs - behaviour) if "unbiased" in estimator else 1.0)


# --- batches ----------------------------------------------------------------------------------------------


def staled(batch: TrainBatch, seed: int, oldest: int, newest: int) -> TrainBatch:
    """The same batch with responses sampled under versions ``oldest`` .. ``newest``, ascending in each."""
    random = np.random.default_rng(seed)
    samples = []
    for sample in batch.samples:
        length = len(sample.rollout.response_ids)
        first, second = sorted(random.integers(oldest, newest + 1, 2).tolist())
        cut = int(random.integers(0, length + 1))
        spans = ((first, cut), (second, length - cut))
        versions = tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in spans if tokens)
        samples.append(
            msgspec.structs.replace(sample, rollout=msgspec.structs.replace(sample.rollout, versions=versions))
        )
    return TrainBatch(step=newest, samples=tuple(samples))


def versions_of(batch: TrainBatch) -> list[list[int]]:
    """Version of every response token."""
    return [[span.version for span in sample.rollout.versions for _ in range(span.tokens)] for sample in batch.samples]


def by_response(batch: TrainBatch, values_n: np.ndarray) -> list[list]:
    """What is flat over the batch, for every response token."""
    found, end = [], 0
    for sample in batch.samples:
        start = end + len(sample.rollout.prompt_ids)
        end = start + len(sample.rollout.response_ids)
        found.append(values_n[start:end].tolist())
    return found


# --- ranks ------------------------------------------------------------------------------------------------


class ThreadRanks(Ranks):
    """A rank that meets the others in one process: each runs in a thread of its own."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def sum_(self, tensor: torch.Tensor, dimension: str = "all") -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor.clone())).sum(0))

    def all_gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values

    def gather(self, value: Any) -> list[Any]:
        values = self.all_gather(value)
        return values if self.rank == 0 else []


R = TypeVar("R")
Share = Callable[[TrainBatch], FlatBatch]  # a rank's share of a batch


def on_ranks(trainers: Sequence[TrainerService], call: Callable[[TrainerService, Share], R]) -> list[R]:
    """What ``call`` returns of each trainer, which are ranks in threads."""
    slots, barrier = [None] * len(trainers), threading.Barrier(len(trainers))

    def on_rank(rank: int) -> R:
        trainer, ranks = trainers[rank], ThreadRanks(rank, slots, barrier)
        trainer.ranks = trainer.learner.ranks = trainer._recorder._ranks = ranks

        def share(batch: TrainBatch) -> FlatBatch:
            laid_out = lay_out(batch)
            return laid_out.take(divide(laid_out, trainer.experiment.trainer, len(trainers))[rank])

        try:
            return call(trainer, share)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(trainers)) as pool:
        return list(pool.map(on_rank, range(len(trainers))))


def gradient_over_ranks(build: Callable[[], TrainerService], batch: TrainBatch, ranks: int) -> torch.Tensor:
    """The sum of what each of ``ranks`` trainers accumulates of its share of the batch."""
    trainers = [build() for _ in range(ranks)]
    gradients = on_ranks(trainers, lambda trainer, share: gradient(trainer, share(batch).arrays(), batch.step))
    return torch.stack(gradients).sum(0)
