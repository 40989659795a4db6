"""The KL penalty through the trainer: in the loss, in the reward, and the reference model it holds on to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from objective_definition import by_response, defined_gradient, gradient, response_logprobs, staled, versions_of
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.records.errors import ConfigurationError
from headway.records.training import TrainBatch
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.service import TrainerService
from headway.trainer.step_statistics import Progress

torch.set_num_threads(1)

IN_LOSS = ["k2", "k3", "k1_unbiased", "k3_unbiased"]
IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_model(path / "model")
    make_model(path / "reference", seed=1)
    make_model(path / "wide", width=32, seed=2)
    make_model(path / "words", vocabulary=37)
    return path


def service(folder: Path, reference: str, **algorithm) -> TrainerService:
    """A trainer with a penalty towards the model ``reference`` of ``folder`` ("": none named)."""
    sections = {name: algorithm.pop(name) for name in ("queue", "trainer", "rollout") if name in algorithm}
    algorithm = {"loss": "ppo_clip", "kl_coefficient": 0.5} | algorithm
    named = {"reference": str(folder / reference) if reference else ""}
    path = str(folder / "model")
    raw = make_experiment(path, Path("/nowhere"), algorithm=algorithm, model=named, **sections)
    return TrainerService(Context, experiment=raw, run_id="test")


def losses_of(trainer: TrainerService, batch: TrainBatch) -> float:
    loss = trainer.policy.accumulate_gradients(build_arrays(batch)).loss
    trainer.learner.clear_gradients()
    return loss


# --- in the loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", IN_LOSS)
@pytest.mark.parametrize("reference", ["", "model"])
def test_a_model_is_at_no_distance_from_itself(folder: Path, estimator: str, reference: str) -> None:
    batch = make_batch(21)
    free = service(folder, "", kl_coefficient=0.0)
    assert free.learner.reference is None
    held = service(folder, reference, kl_coefficient=10.0, kl_estimator=estimator)
    assert losses_of(held, batch) == pytest.approx(losses_of(free, batch), abs=1e-6)
    if estimator != "k1_unbiased":  # whose gradient is 0 in expectation only: w times that of log pi_theta
        arrays = build_arrays(batch)
        assert torch.allclose(gradient(held, arrays), gradient(free, arrays), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", IN_LOSS)
@pytest.mark.parametrize("aggregation", ["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"])
@pytest.mark.parametrize("reference", ["reference", "wide"])
def test_the_penalty_is_aggregated_as_the_loss_is(folder: Path, estimator, aggregation, reference) -> None:
    trainer = service(
        folder, reference, kl_estimator=estimator, aggregation=aggregation, loss="gspo", rollout={"temperature": 0.7}
    )
    batch = make_batch(22)
    found, expected = gradient(trainer, build_arrays(batch)), defined_gradient(trainer, batch)
    assert torch.allclose(found, expected, atol=1e-5 * max(1.0, float(expected.abs().max())), rtol=0)
    free = service(folder, "", kl_coefficient=0.0, aggregation=aggregation, loss="gspo", rollout={"temperature": 0.7})
    assert float((found - gradient(free, build_arrays(batch))).abs().max()) > 1e-3


@pytest.mark.parametrize("estimator", IN_LOSS)
def test_the_penalty_pulls_the_model_towards_its_reference(folder: Path, estimator: str) -> None:
    """With advantages of 0 it is all that is learnt."""
    trainer = service(folder, "reference", kl_estimator=estimator, trainer={"learning_rate": 3e-3})
    samples = tuple(type(s)(rollout=s.rollout, advantage=0.0) for s in make_batch(23).samples)
    distances = []
    for step in range(6):
        distances.append(distance(trainer, TrainBatch(step=step, samples=samples)))
        assert not trainer.train_step(lay_out(TrainBatch(step=step, samples=samples))).skipped
    assert distances[-1] < 0.8 * distances[0]


def distance(trainer: TrainerService, batch: TrainBatch) -> float:
    """Mean squared log-ratio of the tokens trained on."""
    with torch.no_grad():
        pairs = [
            [response_logprobs(model, s.rollout, 1.0) for s in batch.samples]
            for model in (trainer.learner.model, trainer.learner.reference)
            if model is not None
        ]
    return float((torch.cat(pairs[0]) - torch.cat(pairs[1])).square().mean())


def test_stale_tokens_are_not_held_either(folder: Path) -> None:
    """Rule 2: no token older than the budget has any loss weight."""
    trainer = service(folder, "reference", kl_coefficient=5.0, queue={"overdue": "mask", "budget": 1})
    batch = staled(make_batch(24), 24, 0, 3)
    keep = [[3 - version <= 1 for version in versions] for versions in versions_of(batch)]
    found = gradient(trainer, build_arrays(batch), 3)
    assert torch.allclose(found, defined_gradient(trainer, batch, keep), atol=1e-5)
    everything_stale = gradient(trainer, build_arrays(staled(make_batch(24), 24, 0, 1)), 3)
    assert float(everything_stale.abs().max()) == 0.0


# --- in the reward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 3.0])
def test_in_the_reward_each_token_pays_for_itself_and_those_after_it(folder: Path, beta: float) -> None:
    trainer = service(folder, "reference", kl_coefficient=beta, rollout={"temperature": 0.7}, **IN_REWARD)
    batch = make_batch(25)
    expected = []
    for sample in batch.samples:
        r = sample.rollout
        with torch.no_grad():
            assert trainer.learner.reference is not None
            now = response_logprobs(trainer.learner.model, r, 0.7).tolist()
            before = response_logprobs(trainer.learner.reference, r, 0.7).tolist()
        paid = [(a - b) * lossy for a, b, lossy in zip(now, before, r.response_mask, strict=True)]
        # Masked tokens (an environment's) pay nothing and keep the advantage of their sample.
        expected.append([sample.advantage - beta * sum(paid[i:]) * lossy for i, lossy in enumerate(r.response_mask)])
    arrays = build_arrays(batch)
    untouched_n = arrays.advantages_n.copy()
    prepared = trainer.policy.prepare(arrays, 0, Progress.over(arrays))
    for found, wanted in zip(by_response(batch, prepared.advantages_n), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert np.array_equal(prepared.advantages_n[~arrays.loss_mask_n], untouched_n[~arrays.loss_mask_n])
    assert np.array_equal(arrays.advantages_n, untouched_n)  # the batch itself stays as it is
    # ... and it is the policy loss of those advantages, with no term of its own.
    found, wanted = gradient(trainer, arrays), defined_gradient(trainer, batch, advantages=expected)
    assert torch.allclose(found, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)


def test_in_the_reward_a_model_pays_nothing_for_being_itself(folder: Path) -> None:
    trainer = service(folder, "", kl_coefficient=3.0, **IN_REWARD)
    arrays = build_arrays(make_batch(26))
    prepared = trainer.policy.prepare(arrays, 0, Progress.over(arrays))
    assert np.array_equal(prepared.advantages_n, arrays.advantages_n)


# --- the reference model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [{"kl_estimator": "k3"}, IN_REWARD])
def test_the_reference_is_frozen_and_carries_no_gradient(
    folder: Path, algorithm: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = service(folder, "", kl_coefficient=1.0, trainer={"optimizer_steps_per_batch": 2}, **algorithm)
    reference = trainer.learner.reference
    assert reference is not None
    assert reference is not trainer.learner.model
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    seen: list[bool] = []
    forward = reference.forward_packed

    def watched(*given: Any) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return forward(*given)

    monkeypatch.setattr(reference, "forward_packed", watched)
    for step in range(2):
        trainer.train_step(lay_out(make_batch(27 + step, step=step)))
    assert seen
    assert not any(seen)
    assert len({id(p) for p in trainer.learner.parameters} & {id(p) for p in reference.parameters()}) == 0
    for name, parameter in reference.named_parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert any(not torch.equal(p, before[name]) for name, p in trainer.learner.model.named_parameters())


def test_loading_weights_leaves_the_reference_alone(folder: Path) -> None:
    trainer = service(folder, "")
    assert trainer.learner.reference is not None
    trainer.load_weights(str(folder / "reference"))
    batch = TrainBatch(step=0, samples=make_batch(28).samples)
    assert distance(trainer, batch) > 0.1


def test_another_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"model.reference = '.*words' has a vocabulary of 37, the model .* 31"
    ):
        service(folder, "words")
    assert service(folder, "words", kl_coefficient=0.0).learner.reference is None  # nobody asks for it
    with pytest.raises(ConfigurationError, match="nothing"):
        service(folder, "nothing")


def test_only_its_own_forward_passes_cost_anything(folder: Path) -> None:
    arrays = build_arrays(make_batch(29))

    def flops(reference: str, **algorithm) -> float:
        progress = Progress.over(arrays)
        service(folder, reference, **algorithm).policy.prepare(arrays, 0, progress)
        return progress.flops

    assert flops("", kl_coefficient=0.0) == 0.0
    own, wide = flops("model"), flops("wide")
    assert wide > 2 * own > 0.0
    assert flops("wide", **IN_REWARD) == pytest.approx(own + wide)


def test_bfloat16_keeps_a_model_near_itself(folder: Path) -> None:
    # The reference's weights are rounded too, so the distance isn't 0, but of the order of that rounding, squared.
    trainer = service(folder, "", trainer={"dtype": "bfloat16"}, kl_coefficient=1.0)
    assert trainer.learner.reference is not None
    assert {p.dtype for p in trainer.learner.reference.parameters()} == {torch.bfloat16}
    free = service(folder, "", trainer={"dtype": "bfloat16"}, kl_coefficient=0.0)
    batch = make_batch(30)
    assert 0.0 <= losses_of(trainer, batch) - losses_of(free, batch) < 1e-4
    assert not trainer.train_step(lay_out(batch)).skipped


# --- to a target ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.trainer.policy.KL_HORIZON", 64.0)


TARGET = {"kl_target": 0.1, "trainer": {"learning_rate": 1e-2}}


@pytest.mark.parametrize("kind", [{"kl_estimator": "k2"}, IN_REWARD])
def test_the_coefficient_follows_the_measured_kl_and_is_what_the_next_step_uses(folder: Path, kind) -> None:
    trainer = service(folder, "reference", **TARGET, **kind)
    expected, batch = 0.5, make_batch(3)
    for step in range(2):
        metrics = trainer.train_step(lay_out(make_batch(step, step=step))).metrics
        assert metrics["kl_coefficient"] == expected
        error = min(max((metrics["kl_reference"] - 0.1) / 0.1, -0.2), 0.2)
        expected *= 1 + error * len(make_batch(step).samples) / 64
        assert error != 0
        assert trainer.policy.rules[0].kl_coefficient == pytest.approx(expected, abs=1e-12)
    fixed = service(folder, "reference", kl_coefficient=expected, **kind)
    fixed.learner.model.load_state_dict(trainer.learner.model.state_dict())
    assert torch.allclose(gradient(trainer, build_arrays(batch)), gradient(fixed, build_arrays(batch)), atol=1e-7)


def test_a_resumed_run_goes_on_with_its_coefficient(folder: Path, tmp_path: Path) -> None:
    through, ended = (service(folder, "reference", **TARGET) for _ in range(2))
    for step in range(2):
        for trainer in (through, ended):
            trainer.train_step(lay_out(make_batch(step, step=step)))
    place = str(checkpoint_path(tmp_path, 2))
    ended.save_checkpoint(place, {})
    resumed = service(folder, "reference", **TARGET)
    resumed.load_checkpoint(place)
    assert resumed.policy.rules[0].kl_coefficient == through.policy.rules[0].kl_coefficient != 0.5
    third = lay_out(make_batch(2, step=2))
    assert resumed.train_step(third).metrics == through.train_step(third).metrics
    assert resumed.policy.rules[0].kl_coefficient == through.policy.rules[0].kl_coefficient
    # Back at an earlier point the same steps give the same numbers again: a replay.
    again = resumed.policy.rules[0].kl_coefficient
    resumed.load_checkpoint(place)
    resumed.train_step(third)
    assert resumed.policy.rules[0].kl_coefficient == again


def test_steps_that_measure_nothing_or_are_skipped_leave_the_coefficient(folder: Path) -> None:
    trainer = service(folder, "reference", **TARGET)
    trainer.train_step(lay_out(make_batch(0, masked=True)))
    assert trainer.policy.rules[0].kl_coefficient == 0.5
    trainer.learner.parameters[0].data.fill_(float("nan"))
    assert trainer.train_step(lay_out(make_batch(1, step=trainer.version))).skipped
    assert trainer.policy.rules[0].kl_coefficient == 0.5


def test_without_a_target_the_coefficient_stays(folder: Path) -> None:
    trainer = service(folder, "reference")
    assert "kl_coefficient" not in trainer.train_step(lay_out(make_batch(0))).metrics
    assert trainer.policy.rules[0].kl_coefficient == 0.5
