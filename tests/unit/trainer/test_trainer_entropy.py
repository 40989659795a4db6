"""The entropy bonus and the threshold of entropy, against a float64 definition of the step's gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from objective_definition import gradient
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.records.training import TrainBatch
from headway.trainer import losses
from headway.trainer.service import TrainerService

torch.set_num_threads(1)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, micro_batch_tokens: int = 64, **algorithm) -> TrainerService:
    sections = {"rollout": {"temperature": TEMPERATURE}, "trainer": {"micro_batch_tokens": micro_batch_tokens}}
    raw = make_experiment(model, Path("/nowhere"), algorithm={"loss": "ppo_clip"} | algorithm, **sections)
    return TrainerService(Context, experiment=raw, run_id="test")


def defined_gradient(trainer: TrainerService, batch: TrainBatch) -> tuple[torch.Tensor, float]:
    """Sample by sample in float64: the mean over loss tokens of the loss, of tokens above the threshold alone, less the
    bonus. And the share of tokens below the threshold."""
    algorithm, model = trainer.policy.algorithm, trainer.learner.model.double()
    threshold = -1.0 if algorithm.entropy_threshold is None else algorithm.entropy_threshold
    total, tokens, low = torch.zeros((), dtype=torch.float64), 0, 0
    for sample in batch.samples:
        r, mask = sample.rollout, torch.tensor(sample.rollout.response_mask)
        ids = torch.tensor(r.prompt_ids + r.response_ids)
        logits = model.head(model.forward_packed(ids, [len(ids)]))[len(r.prompt_ids) - 1 : -1] / TEMPERATURE
        logprobs_v = torch.log_softmax(logits, -1)[mask]
        entropies = -(logprobs_v.exp() * logprobs_v).sum(-1)
        chosen = logprobs_v.gather(-1, torch.tensor(r.response_ids)[mask][:, None])[:, 0]
        terms = losses.TokenTerms(
            logprobs_m=chosen,
            proximal_m=chosen.detach(),
            behaviour_m=torch.tensor(r.response_logprobs, dtype=torch.float64)[mask],
            advantages_m=torch.full_like(chosen, sample.advantage),
        )
        loss_m = losses.ppo_clip(terms, trainer.policy.rules[0].settings).loss_m
        total = total + loss_m[entropies >= threshold].sum() - algorithm.entropy_coefficient * entropies.sum()
        tokens, low = tokens + len(chosen), low + int((entropies < threshold).sum())
    grads = torch.autograd.grad(total / tokens, list(model.parameters()))
    model.float()
    return torch.cat([grad.flatten() for grad in grads]), low / tokens


@pytest.mark.parametrize(
    "algorithm",
    [
        {"entropy_coefficient": 0.3},
        {"entropy_threshold": 3.0},
        {"entropy_coefficient": 0.05, "entropy_threshold": 2.9},
    ],
)
def test_the_gradient_is_that_of_the_definition_in_any_packing(model: str, algorithm, monkeypatch) -> None:
    batch = make_batch(31)
    expected, low_share = defined_gradient(service(model, **algorithm), batch)
    plain, _ = defined_gradient(service(model), batch)
    assert float((expected - plain).abs().max()) > 1e-3
    for micro_batch_tokens in (20, 10**6):
        trainer = service(model, micro_batch_tokens, **algorithm)
        actual = gradient(trainer, build_arrays(batch))
        assert torch.allclose(actual.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    monkeypatch.setattr("headway.trainer.learner.token_logprobs.__defaults__", (5 * 31, None))  # logits in chunks
    actual = gradient(trainer, build_arrays(batch))
    assert torch.allclose(actual.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    metrics = service(model, **algorithm).train_step(lay_out(batch)).metrics
    if "entropy_threshold" in algorithm:
        assert 0.1 < low_share < 0.9
        assert metrics["low_entropy_share"] == pytest.approx(low_share)
    else:
        assert "low_entropy_share" not in metrics


def test_parts_of_a_batch_have_its_gradient(model: str) -> None:
    algorithm = {"entropy_coefficient": 0.05, "entropy_threshold": 3.1}
    batch = make_batch(32)
    trainer, parts = service(model, **algorithm), service(model, **algorithm)
    whole = gradient(trainer, build_arrays(batch))
    tokens = build_arrays(batch).loss_tokens
    for first in (0, 6):
        parts.forward_backward(lay_out(TrainBatch(step=0, samples=batch.samples[first : first + 6])))
    summed = torch.cat([g.flatten() for g in parts.learner.gradients()]) / tokens
    assert torch.allclose(summed, whole, atol=1e-6, rtol=0)


def test_a_sequence_loss_has_no_gradient_through_certain_tokens(model: str) -> None:
    """Its ratio is of all tokens of the sample, and would otherwise move them all."""
    batch = make_batch(33)
    trainer = service(model, loss="gspo", entropy_threshold=100.0)
    assert float(gradient(trainer, build_arrays(batch)).abs().max()) == 0.0
    progress = trainer.policy.accumulate_gradients(build_arrays(batch))
    free = service(model, loss="gspo").policy.accumulate_gradients(build_arrays(batch))
    assert np.isclose(progress.loss, free.loss)
    assert np.array_equal(progress.clipped_n, free.clipped_n)
