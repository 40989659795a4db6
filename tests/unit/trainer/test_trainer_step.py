"""One training step: gradients, denominators, metrics, guards, precision."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import gradient as arrays_gradient
from tiny_trainer import Context, make_batch, make_experiment, make_model, optimiser_tensors

from headway.algorithms.samples import build_arrays, lay_out
from headway.config.schema import TrainerConfig
from headway.records.errors import HookFailed
from headway.records.training import TrainBatch
from headway.trainer import losses
from headway.trainer.learner import token_logprobs
from headway.trainer.optimizer import learning_rate
from headway.trainer.service import TrainerService
from headway.trainer.step_statistics import Progress

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, directory: Path | str = "/nowhere", **sections) -> TrainerService:
    return TrainerService(Context, experiment=make_experiment(model, Path(directory), **sections), run_id="test")


def gradient(trainer: TrainerService, batch: TrainBatch) -> torch.Tensor:
    return arrays_gradient(trainer, build_arrays(batch))


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 200),
    packing=st.sampled_from(["balanced", "areal", "fixed"]),
    order=st.randoms(use_true_random=False),
)
def test_any_packing_and_order_give_the_same_gradient(model: str, seed, budget, packing, order) -> None:
    batch = make_batch(seed)
    whole = gradient(service(model, trainer={"micro_batch_tokens": 10**6}), batch)
    samples = list(batch.samples)
    order.shuffle(samples)
    fixed = {"micro_batch_samples": 1 + budget % 8} if packing == "fixed" else {}
    packed = service(model, trainer={"micro_batch_tokens": budget, "packing": packing, **fixed})
    assert torch.allclose(gradient(packed, TrainBatch(step=0, samples=tuple(samples))), whole, atol=1e-5, rtol=0)


def test_fixed_micro_batches_have_so_many_samples(model: str) -> None:
    """12 samples, of which one has no loss token and isn't fed: three micro-batches of 4, 4 and 3, also of parts."""
    batch = make_batch(1)
    first = batch.samples[0]
    rollout = msgspec.structs.replace(first.rollout, response_mask=(False,) * len(first.rollout.response_ids))
    samples = (msgspec.structs.replace(first, rollout=rollout), *batch.samples[1:])
    keys = {"packing": "fixed", "micro_batch_samples": 4}
    trainer, parts = service(model, trainer=keys), service(model, trainer=keys)
    assert trainer.train_step(lay_out(TrainBatch(step=0, samples=samples))).micro_batches == 3
    for at in (0, 6):
        parts.forward_backward(lay_out(TrainBatch(step=0, samples=samples[at : at + 6])))
    assert parts.optim_step().micro_batches == 4
    two = service(model, trainer={**keys, "optimizer_steps_per_batch": 2, "packing": "fixed"})
    assert two.train_step(lay_out(TrainBatch(step=0, samples=samples))).micro_batches == 4


def test_step_moves_weights_and_reports(model: str) -> None:
    trainer = service(model)
    before = [p.detach().clone() for p in trainer.learner.parameters]
    report = trainer.train_step(lay_out(make_batch(1)))
    assert (report.step, report.version, report.skipped, report.samples) == (0, 1, False, 12)
    assert report.loss_tokens == build_arrays(make_batch(1)).loss_tokens
    assert report.micro_batches > 1
    assert report.flops > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.learner.parameters, strict=True))
    needed = {"loss", "entropy", "grad_norm", "clip_fraction", "mismatch_k3", "mismatch_max", "kl", "learning_rate"}
    needed |= {"ratio_p01", "ratio_p50", "ratio_p99", "ratio_max", "behaviour_weight_mean", "behaviour_weight_max"}
    assert needed <= report.metrics.keys()
    assert all(math.isfinite(value) for value in report.metrics.values())
    with pytest.raises(ValueError, match="step 0"):
        trainer.train_step(lay_out(make_batch(1)))


def test_metrics_of_exact_behaviour_are_zero_mismatch(model: str) -> None:
    trainer = service(model)
    batch = with_exact_behaviour(trainer, make_batch(2))
    metrics = trainer.train_step(lay_out(batch)).metrics
    assert metrics["mismatch_max"] < 1e-5
    assert abs(metrics["mismatch_k3"]) < 1e-7
    assert metrics["ratio_p01"] == pytest.approx(1.0, abs=1e-5)
    # w = 1: the loss is minus the mean advantage over loss tokens.
    arrays = build_arrays(batch)
    assert metrics["loss"] == pytest.approx(-arrays.advantages_n[arrays.loss_mask_n].mean(), abs=1e-5)
    assert 0 < metrics["entropy"] <= math.log(31)


def with_exact_behaviour(trainer: TrainerService, batch: TrainBatch) -> TrainBatch:
    arrays = build_arrays(batch)
    progress = trainer.policy.accumulate_gradients(arrays)
    trainer.learner.clear_gradients()
    samples, start = [], 0
    for sample in batch.samples:
        r = sample.rollout
        end = start + len(r.prompt_ids) + len(r.response_ids)
        exact = tuple(progress.logprobs_n[start + len(r.prompt_ids) : end].tolist())
        rollout = msgspec.structs.replace(r, response_logprobs=exact)
        samples.append(msgspec.structs.replace(sample, rollout=rollout))
        start = end
    return TrainBatch(step=batch.step, samples=tuple(samples))


def test_proximal_is_recomputed_only_where_it_differs(model: str) -> None:
    assert not service(model).policy.recomputes_proximal
    assert service(model, trainer={"optimizer_steps_per_batch": 2}).policy.recomputes_proximal
    assert service(model, algorithm={"proximal": "recompute"}).policy.recomputes_proximal
    # With one step both ways are the same gradient to rounding.
    first, second = service(model), service(model, algorithm={"proximal": "recompute"})
    first.train_step(lay_out(make_batch(3)))
    second.train_step(lay_out(make_batch(3)))
    for a, b in zip(first.learner.parameters, second.learner.parameters, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_minibatches_clip_against_the_weights_before_the_first(model: str) -> None:
    trainer = service(model, trainer={"optimizer_steps_per_batch": 3, "learning_rate": 0.05, "max_grad_norm": 100.0})
    arrays = build_arrays(make_batch(4, groups=6))
    progress = trainer.policy.run(arrays, trainer.learner.optimiser_settings(0.05))
    assert len(progress.updates) == 3
    moved_n = np.abs(progress.logprobs_n - progress.proximal_n)
    assert moved_n[arrays.groups_s.repeat(arrays.lengths_s) < 2].max() < 1e-5
    assert moved_n[arrays.groups_s.repeat(arrays.lengths_s) >= 4].max() > 1e-2
    assert progress.clipped_n.sum() > 0


def test_a_token_without_a_number_ends_no_updates_and_hides_no_others(model: str) -> None:
    """The first of three minibatches has a sample whose behaviour log-probabilities are lost: its update is left out,
    and the healthy ones still end at the limit."""
    batch = make_batch(4, groups=6)
    spoilt = batch.samples[0].rollout
    lost = msgspec.structs.replace(spoilt, response_logprobs=(math.nan,) * len(spoilt.response_ids))
    samples = (msgspec.structs.replace(batch.samples[0], rollout=lost), *batch.samples[1:])
    several = {"trainer": {"optimizer_steps_per_batch": 3, "learning_rate": 0.05, "max_grad_norm": 100.0}}
    skipped: list[float] = []
    for limit in (1e-9, 1e9):
        trainer = service(model, algorithm={"loss": "ppo_clip", "early_stop_ratio": limit}, **several)
        report = trainer.train_step(lay_out(TrainBatch(step=0, samples=samples)))
        skipped.append(report.metrics["skipped_minibatches"])
    assert skipped == [2, 0]


def test_a_kl_without_a_number_leaves_the_coefficient_alone(model: str) -> None:
    trainer = service(model, algorithm={"kl_coefficient": 0.1, "kl_target": 0.01})
    for kl in (math.nan, math.inf, None):
        trainer.policy.adapt_kl(kl, 100)
        assert trainer.policy.rules[0].kl_coefficient == 0.1
    trainer.policy.adapt_kl(1.0, 100)
    assert trainer.policy.rules[0].kl_coefficient > 0.1


@pytest.mark.parametrize(("loss", "against"), [("decoupled_ppo", "proximal_n"), ("ppo_clip", "behaviour_n")])
def test_updates_of_a_batch_end_once_the_ratio_has_moved(model: str, loss: str, against: str) -> None:
    several = {"trainer": {"optimizer_steps_per_batch": 3, "learning_rate": 0.05, "max_grad_norm": 100.0}}
    arrays = build_arrays(make_batch(4, groups=6))

    def run(limit: float | None) -> tuple[Progress, dict[str, float]]:
        trainer = service(model, algorithm={"loss": loss, "early_stop_ratio": limit}, **several)
        progress = trainer.policy.run(arrays, trainer.learner.optimiser_settings(0.05))
        return progress, trainer.policy.metrics(progress)

    free, metrics = run(None)
    assert "skipped_minibatches" not in metrics
    away_n = np.abs(np.exp(free.logprobs_n - getattr(free, against)) - 1)
    group_n = arrays.groups_s.repeat(arrays.lengths_s)
    means = [float(away_n[(free.seen_n > 0) & (group_n < last)].mean()) for last in (2, 4)]  # after each update but one
    assert means[0] < means[1]
    for limit, skipped in ((means[1] * 1.001, 0), (means[1] * 0.999, 1), (means[0] * 1.001 + 1e-5, 1)):
        progress, metrics = run(limit)
        assert (metrics["skipped_minibatches"], len(progress.updates)) == (skipped, 3 - skipped)
        assert set(group_n[progress.seen_n > 0]) == set(range(6 - 2 * skipped))
        trained_n = progress.seen_n > 0
        assert np.array_equal(
            progress.logprobs_n[trained_n], free.logprobs_n[trained_n]
        )  # what came before is as it was
    if loss == "ppo_clip":  # far from the policy that sampled from the start
        assert run(means[0] * 0.999)[1]["skipped_minibatches"] == 2


def test_masked_batches_dont_end_early(model: str) -> None:
    several = {"trainer": {"optimizer_steps_per_batch": 2}}
    trainer = service(model, algorithm={"early_stop_ratio": 1e-9, "token_mask": (1e8, 1e9)}, **several)
    progress = trainer.policy.run(build_arrays(make_batch(4)), trainer.learner.optimiser_settings(0.05))
    assert trainer.policy.metrics(progress)["skipped_minibatches"] == 0
    assert len(progress.updates) == 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_steps_are_skipped_and_leave_everything_untouched(model: str, poison: float) -> None:
    trainer = service(model)
    trainer.train_step(lay_out(make_batch(1)))
    weights = [p.detach().clone() for p in trainer.learner.parameters]
    state = optimiser_tensors(trainer.learner)
    state = {name: tensor.clone() for name, tensor in state.items()}
    batch = make_batch(6, step=1)
    bad = msgspec.structs.replace(batch.samples[0], advantage=poison)
    report = trainer.train_step(lay_out(TrainBatch(step=1, samples=(bad, *batch.samples[1:]))))
    assert (report.skipped, report.version, trainer.version) == (True, 1, 1)
    assert "not finite" in report.reason
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.learner.parameters, strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in optimiser_tensors(trainer.learner).items())
    assert not trainer.train_step(lay_out(batch)).skipped


@pytest.mark.parametrize("batch", [make_batch(1, masked=True), TrainBatch(step=0, samples=())])
def test_batch_without_loss_tokens_is_a_finite_zero(model: str, batch: TrainBatch) -> None:
    report = service(model).train_step(lay_out(batch))
    assert (report.loss_tokens, report.metrics["loss"], report.metrics["grad_norm"]) == (0, 0.0, 0.0)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_fully_masked_samples_change_nothing_under_token_mean(model: str) -> None:
    batch = make_batch(7)
    masked = make_batch(8, masked=True).samples
    trainer = service(model)
    with_masked = gradient(trainer, TrainBatch(step=0, samples=batch.samples + masked))
    assert torch.allclose(with_masked, gradient(trainer, batch), atol=1e-6)


def test_gradient_clipping_bounds_the_update(model: str) -> None:
    trainer = service(model, trainer={"max_grad_norm": 1e-3})
    trainer.policy.accumulate_gradients(build_arrays(make_batch(1)))
    seen: list[float] = []
    step = trainer.learner.optimiser.step
    norm = lambda: float(torch.nn.utils.get_total_norm(trainer.learner.gradients()))  # noqa: E731
    trainer.learner.optimiser.step = lambda chosen: (seen.append(norm()), step(chosen))[1]  # type: ignore[method-assign]
    update = trainer.learner.update(trainer.learner.optimiser_settings(1e-3), 0.0)
    assert update.grad_norm > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-2)]


def test_chunked_head_gives_the_same_values_and_gradients(model: str) -> None:
    decoder = service(model).learner.model
    hidden, targets = torch.randn(23, 16), torch.randint(0, 31, (23,))
    results = []
    for chunk in (1 << 20, 5 * 31):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies = token_logprobs(decoder, leaf, targets, 0.8, chunk_logits=chunk)
        logprobs.square().sum().backward()
        results.append((logprobs.detach(), entropies, leaf.grad))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_bfloat16_is_close_and_keeps_float32_weights(model: str) -> None:
    exact, rounded = service(model), service(model, trainer={"dtype": "bfloat16"})
    a, b = gradient(exact, make_batch(1)), gradient(rounded, make_batch(1))
    assert not torch.equal(a, b)
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.995
    assert all(p.dtype == torch.float32 for p in rounded.learner.parameters)


def test_own_loss_by_module_and_function(model: str) -> None:
    named = service(model, algorithm={"loss": "headway.trainer.losses:ppo_clip"})
    assert torch.equal(
        gradient(named, make_batch(1)), gradient(service(model, algorithm={"loss": "ppo_clip"}), make_batch(1))
    )


def mean_of_tokens(terms: losses.TokenTerms, settings: losses.LossSettings) -> losses.TokenLoss:
    per_token = losses.ppo_clip(terms, settings)
    return losses.TokenLoss(loss_m=per_token.loss_m.mean(), clipped_m=per_token.clipped_m)


def one_number(terms: losses.TokenTerms, settings: losses.LossSettings) -> torch.Tensor:
    return losses.ppo_clip(terms, settings).loss_m.mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [(mean_of_tokens, r"loss_m of shape \[\] and clipped_m of shape \[\d+\]"), (one_number, "returned a Tensor")],
)
def test_own_loss_is_held_to_its_contract(model: str, loss, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    name = f"test_trainer_step:{loss.__name__}"
    trainer = service(model, algorithm={"loss": name})
    with pytest.raises(HookFailed, match=f"algorithm.loss = '{name}' .*{message}"):
        trainer.train_step(lay_out(make_batch(1)))


def test_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        settings = TrainerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)  # type: ignore[arg-type]
        return [learning_rate(step, settings, total_steps=6) for step in range(8)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_a_schedule_stays_at_its_peak_and_ends_at_the_lowest_rate() -> None:
    def rates(schedule: str, **keys: object) -> list[float]:
        settings = TrainerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule, **keys)  # type: ignore[arg-type]
        first, last = settings.decay_steps(8)
        lowest = settings.min_learning_rate
        return [learning_rate(step, settings, last, first, lowest=lowest) for step in range(10)]

    stable = [0.5, 1, 1, 1, 1]
    assert rates("linear", schedule_steps=(4, 8)) == pytest.approx([*stable, 0.75, 0.5, 0.25, 0, 0])
    floored = rates("linear", schedule_steps=(4, 8), min_learning_rate=0.2)
    assert floored == pytest.approx([*stable, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates("cosine", schedule_steps=6, min_learning_rate=0.2) == pytest.approx(
        [0.5, 1, 1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447, 0.2, 0.2, 0.2, 0.2], abs=1e-6
    )
