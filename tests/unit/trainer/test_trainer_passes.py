"""Several passes over a batch, against optimiser steps by hand in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_definition import on_ranks
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.algorithms.step_plan import pass_order
from headway.models.decoder import Decoder
from headway.records.errors import StepRefused
from headway.records.rollout import Sample
from headway.records.training import TrainBatch
from headway.trainer import losses
from headway.trainer.service import TrainerService

torch.set_num_threads(1)
RATE, CLIP, DECAY, SEED = 3e-3, 0.05, 0.02, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, algorithm: dict[str, Any], **trainer: Any) -> TrainerService:
    trainer = {"learning_rate": RATE, "max_grad_norm": CLIP, "weight_decay": DECAY, **trainer}
    raw = make_experiment(model, Path("/nowhere"), run={"seed": SEED}, algorithm=algorithm, trainer=trainer)
    return TrainerService(Context, experiment=raw, run_id="test")


class HandSteps:
    """AdamW in float64, and losses sample by sample on full logits."""

    def __init__(self, trainer: TrainerService) -> None:
        assert isinstance(trainer.learner.model, Decoder)
        self.model, self.policy = trainer.learner.model.double(), trainer.policy
        self.parameters = list(self.model.parameters())
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0
        self.start: dict[tuple[int, int], torch.Tensor] = {}

    def logprobs(self, sample: Sample) -> torch.Tensor:
        r, mask = sample.rollout, torch.tensor(sample.rollout.response_mask)
        ids = torch.tensor(r.prompt_ids + r.response_ids)
        logits = self.model.head(self.model.forward_packed(ids, [len(ids)]))[len(r.prompt_ids) - 1 : -1]
        return torch.log_softmax(logits, -1)[mask].gather(-1, torch.tensor(r.response_ids)[mask][:, None])[:, 0]

    def begin(self, batch: TrainBatch) -> None:
        with torch.no_grad():
            self.start = {(s.rollout.group, s.rollout.member): self.logprobs(s) for s in batch.samples}

    def step(self, samples: list[Sample]) -> None:
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            logprobs_m, rollout = self.logprobs(sample), sample.rollout
            behaviour = torch.tensor(rollout.response_logprobs, dtype=torch.float64)[
                torch.tensor(rollout.response_mask)
            ]
            terms = losses.TokenTerms(
                logprobs_m=logprobs_m,
                proximal_m=self.start[(rollout.group, rollout.member)],
                behaviour_m=behaviour,
                advantages_m=torch.full_like(logprobs_m, sample.advantage),
            )
            rule = self.policy.rules[0]
            total = total + rule.function(terms, rule.settings).loss_m.sum()
            tokens += len(logprobs_m)
        grads = torch.autograd.grad(total / tokens, self.parameters)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        scale = min(1.0, CLIP / (norm + 1e-6))
        self.steps += 1
        with torch.no_grad():
            for p, grad, mean, square in zip(self.parameters, grads, self.means, self.squares, strict=True):
                grad = grad * scale
                mean.mul_(0.9).add_(grad, alpha=0.1)
                square.mul_(0.95).addcmul_(grad, grad, value=0.05)
                p.mul_(1 - RATE * DECAY)
                denominator = (square / (1 - 0.95**self.steps)).sqrt() + 1e-8
                p.sub_(RATE * (mean / (1 - 0.9**self.steps)) / denominator)


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_second_pass_equals_steps_by_hand_with_their_moments(model: str, loss: str, parts: int) -> None:
    trainer, by_hand = (service(model, {"loss": loss}, passes=2, optimizer_steps_per_batch=parts) for _ in range(2))
    batch = make_batch(5, groups=6)
    report = trainer.train_step(lay_out(batch))
    hand, groups = HandSteps(by_hand), sorted({sample.rollout.group for sample in batch.samples})
    hand.begin(batch)
    shuffled = pass_order(len(groups), number=1, seed=SEED, step=0)
    assert shuffled.tolist() != list(range(6))
    for order in (np.arange(6), shuffled):
        for positions in np.array_split(order, parts):
            chosen = {groups[position] for position in positions}
            hand.step([sample for sample in batch.samples if sample.rollout.group in chosen])
    assert (report.version, hand.steps) == (1, 2 * parts)
    for index, parameter in enumerate(trainer.learner.parameters):
        state = trainer.learner.optimiser.state[parameter]
        assert int(state["step"]) == 2 * parts
        differences = (parameter.double() - hand.parameters[index]).detach().abs().flatten()
        assert float(differences.max()) < 0.02 * RATE  # where a gradient is rounding error AdamW's step is, too
        assert float(differences.quantile(0.98)) < 2e-4 * RATE
        for name, exact in (("exp_avg", hand.means[index]), ("exp_avg_sq", hand.squares[index])):
            assert torch.allclose(state[name].double(), exact, rtol=1e-4, atol=5e-5 * float(exact.abs().max()))


def test_the_record_and_the_accounting_are_of_the_first_pass(model: str) -> None:
    batch = lay_out(make_batch(6, groups=6))
    once, thrice = service(model, {}), service(model, {}, passes=3)
    arrays, settings = batch.arrays(), once.learner.optimiser_settings(RATE)
    first, repeated = once.policy.run(arrays, settings), thrice.policy.run(arrays, settings)
    for name in ("logprobs_n", "entropies_n", "clipped_n", "seen_n"):
        assert np.array_equal(getattr(repeated, name), getattr(first, name))
    reports = [service(model, {}).train_step(batch), service(model, {}, passes=3).train_step(batch)]
    one, three = reports
    for name in ("samples", "tokens", "computed_tokens", "loss_tokens", "version"):
        assert getattr(one, name) == getattr(three, name)
    assert three.flops > 2.9 * one.flops
    assert three.metrics["loss"] == pytest.approx(one.metrics["loss"])
    shifts = [
        abs(three.metrics[f"ratio_p99{suffix}"] - one.metrics["ratio_p99"]) for suffix in ("", "_pass_2", "_pass_3")
    ]
    assert shifts[0] == 0 < min(shifts[1:])
    assert {"clip_fraction_pass_2", "clip_fraction_pass_3", "ratio_max_pass_3"} <= three.metrics.keys()
    assert not any("_pass_" in name for name in one.metrics)


@pytest.mark.parametrize("key", ["early_stop_ratio", "early_stop_kl"])
def test_passes_end_at_the_limit_of_ratio_or_kl(model: str, key: str) -> None:
    batch = build_arrays(make_batch(7, groups=6))
    several = {"passes": 2, "optimizer_steps_per_batch": 2, "learning_rate": 0.05, "max_grad_norm": 100.0}

    def run(limit: float | None) -> tuple[int, float, int]:
        trainer = service(model, {key: limit}, **several)
        progress = trainer.policy.run(batch, trainer.learner.optimiser_settings(0.05))
        metrics = trainer.policy.metrics(progress)
        return len(progress.all_updates), metrics.get("skipped_minibatches", -1), len(progress.later)

    assert run(None) == (4, -1, 1)
    assert run(1e9) == (4, 0, 1)
    assert run(1e-2) == (2, 2, 0)  # the first minibatch is at the start of the step, where both are 0


def test_a_resumed_step_has_the_same_bits(model: str) -> None:
    trainers = [service(model, {}, passes=2, optimizer_steps_per_batch=2) for _ in range(2)]
    for trainer in trainers:
        for step in range(2):
            trainer.train_step(lay_out(make_batch(step, groups=6, step=step)))
    for one, other in zip(*(trainer.learner.parameters for trainer in trainers), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_train_what_one_does(model: str, optimizer: str) -> None:
    batch = make_batch(8, groups=6)
    sections = {"passes": 2, "optimizer_steps_per_batch": 2, "optimizer": optimizer}
    alone = service(model, {}, **sections)
    report = alone.train_step(lay_out(batch))
    trainers = [service(model, {}, **sections) for _ in range(2)]
    reports = on_ranks(trainers, lambda trainer, share: trainer.train_step(share(batch)))
    for one, other in zip(alone.learner.parameters, trainers[1].learner.parameters, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=RATE * 1e-2)
    for name in ("ratio_p99_pass_2", "clip_fraction_pass_2", "ratio_p50"):
        assert reports[0].metrics[name] == pytest.approx(report.metrics[name], abs=1e-4)
    assert reports[0].tokens == report.tokens
    assert reports[0].flops == pytest.approx(report.flops, rel=0.2)  # a shared prefix is computed on both


def test_parts_are_refused(model: str) -> None:
    with pytest.raises(StepRefused, match="passes"):
        service(model, {}, passes=2).forward_backward(lay_out(make_batch(1)))


@given(
    groups=st.integers(0, 40), number=st.integers(1, 5), seed=st.integers(-(10**9), 10**12), step=st.integers(0, 10**6)
)
def test_orders_are_permutations_that_depend_on_seed_step_and_pass(groups: int, number: int, seed: int, step: int):
    order = pass_order(groups, number=number, seed=seed, step=step)
    assert sorted(order.tolist()) == list(range(groups))
    assert np.array_equal(order, pass_order(groups, number=number, seed=seed, step=step))
    assert pass_order(groups, number=0, seed=seed, step=step).tolist() == list(range(groups))
    if groups >= 20:
        changed = ({"number": number + 1}, {"seed": seed + 1}, {"step": step + 1})
        for other in changed:
            keys = {"number": number, "seed": seed, "step": step} | other
            assert not np.array_equal(order, pass_order(groups, **keys))
