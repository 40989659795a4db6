"""Every objective through the trainer: the gradient is the definition's, however it is packed and spread, and masks
take tokens out of it without touching a denominator."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import (
    by_response,
    defined_gradient,
    gradient,
    gradient_over_ranks,
    response_logprobs,
    staled,
    versions_of,
)
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.records.training import TrainBatch
from headway.trainer.losses import LOSSES
from headway.trainer.service import TrainerService
from headway.trainer.step_statistics import Progress

torch.set_num_threads(1)

AGGREGATIONS = ["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
# Each loss in two aggregations, each aggregation of half of the losses.
mixed = pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        (loss, aggregation)
        for number, loss in enumerate(LOSSES)
        for place, aggregation in enumerate(AGGREGATIONS)
        if (number + place) % 2 == 0
    ],
)
MASKS = {
    "algorithm": {"token_mask": (0.6, 1.9), "sequence_mask": (0.8, 1.3), "second_moment_limit": 0.05},
    "queue": {"overdue": "mask", "budget": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(path: str, loss: str, aggregation: str, **sections) -> TrainerService:
    """``path``: the model's; a KL penalty holds on to another one."""
    algorithm = {"loss": loss, "aggregation": aggregation} | sections.pop("algorithm", {})
    reference = Path(path).with_name("reference")
    if not reference.exists():
        make_model(reference, seed=1)
    sections["model"] = {"reference": str(reference)}
    raw = make_experiment(path, Path("/nowhere"), algorithm=algorithm, **sections)
    return TrainerService(Context, experiment=raw, run_id="test")


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To float32's rounding, of sums as of means."""
    return torch.allclose(found, expected, atol=1e-5 * max(1.0, float(expected.abs().max())), rtol=0)


@every_loss
@every_aggregation
def test_gradient_equals_the_definition(model: str, loss: str, aggregation: str) -> None:
    trainer = service(model, loss, aggregation, rollout={"temperature": 0.7, "max_response_tokens": 9})
    # and three responses that carry no loss
    batch = TrainBatch(step=0, samples=make_batch(5).samples + make_batch(6, groups=1, masked=True).samples)
    expected = defined_gradient(trainer, batch)
    assert float(expected.abs().max()) > 1e-3
    assert close(gradient(trainer, build_arrays(batch)), expected)


@mixed
@settings(deadline=None, max_examples=3)  # of each of 18
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 200),
    packing=st.sampled_from(["balanced", "areal", "fixed"]),
    ranks=st.integers(1, 3),
    extras=st.sampled_from([{}, MASKS, {"algorithm": {"kl_coefficient": 0.1}}]),
    order=st.randoms(use_true_random=False),
)
def test_packing_order_and_ranks_leave_the_gradient_alone(
    model: str, loss: str, aggregation: str, seed, budget, packing, ranks, extras, order
) -> None:
    batch = staled(make_batch(seed), seed, 0, 4)
    whole = service(model, loss, aggregation, trainer={"micro_batch_tokens": 10**6}, **extras)
    expected = gradient(whole, build_arrays(batch), batch.step)
    samples = list(batch.samples)
    order.shuffle(samples)
    spread = {"micro_batch_tokens": budget, "packing": packing}
    spread |= {"micro_batch_samples": 1 + budget % 8} if packing == "fixed" else {}
    found = gradient_over_ranks(
        lambda: service(model, loss, aggregation, trainer=spread, **extras),
        TrainBatch(step=batch.step, samples=tuple(samples)),
        ranks,
    )
    assert close(found, expected)


# --- masks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@mixed
@settings(deadline=None, max_examples=2)  # of each of 18
@given(seed=st.integers(0, 10**6), budget=st.integers(0, 4))
def test_stale_tokens_lose_their_gradient_and_no_denominator_moves(
    model: str, loss: str, aggregation: str, seed: int, budget: int
) -> None:
    trainer = service(model, loss, aggregation, queue={"overdue": "mask", "budget": budget})
    batch = staled(make_batch(seed), seed, 0, 4)
    keep = [[4 - version <= budget for version in versions] for versions in versions_of(batch)]
    assert close(gradient(trainer, build_arrays(batch), 4), defined_gradient(trainer, batch, keep))


@every_loss
@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_what_a_masked_token_says_changes_nothing(model: str, loss: str, estimator: str) -> None:
    """Not its log-probability, not even through its sample's ratio or through the KL penalty."""
    trainer = service(
        model,
        loss,
        "seq_mean_token_mean",
        queue={"overdue": "mask", "budget": 1},
        algorithm={"kl_coefficient": 1.0, "kl_estimator": estimator},
    )
    batch = staled(make_batch(11), 11, 0, 4)
    arrays = build_arrays(batch)
    lied_n = np.where(4 - arrays.versions_n > 1, arrays.behaviour_logprobs_n - 3, arrays.behaviour_logprobs_n)
    assert not np.array_equal(lied_n, arrays.behaviour_logprobs_n)
    lied = gradient(trainer, _replace(arrays, behaviour_logprobs_n=lied_n.astype(np.float32)), 4)
    assert torch.equal(lied, gradient(trainer, arrays, 4))
    keep = [[4 - version <= 1 for version in versions] for versions in versions_of(batch)]
    assert close(lied, defined_gradient(trainer, batch, keep))


def _replace(arrays, **changes):
    return type(arrays)(**{name: getattr(arrays, name) for name in arrays.__dataclass_fields__} | changes)


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize(
    "chosen", [["token_mask"], ["sequence_mask"], ["second_moment_limit"], list(MASKS["algorithm"])]
)
def test_importance_masks_see_the_weights_at_the_start_of_the_step(model: str, loss: str, chosen: list[str]) -> None:
    algorithm = {name: MASKS["algorithm"][name] for name in chosen}
    trainer = service(model, loss, "token_mean", algorithm=algorithm)
    batch = make_batch(12)
    keep = expected_keep(trainer, batch, algorithm)
    arrays = build_arrays(batch)
    keep_n = trainer.policy.prepare(arrays, 0, Progress.over(arrays)).keep_n
    assert [
        [kept or not lossy for kept, lossy in zip(*pair, strict=True)]
        for pair in zip(by_response(batch, keep_n), by_response(batch, arrays.loss_mask_n), strict=True)
    ] == keep
    assert 0 < sum(not kept for sample in keep for kept in sample) < arrays.loss_tokens
    assert close(gradient(trainer, arrays), defined_gradient(trainer, batch, keep))


def expected_keep(trainer: TrainerService, batch: TrainBatch, algorithm: dict) -> list[list[bool]]:
    """The masks one after another, in plain loops: those that follow see what the ones before have kept."""
    tokens = {}  # (sample, place) -> log weight, advantage
    for index, sample in enumerate(batch.samples):
        with torch.no_grad():
            now = response_logprobs(trainer.learner.model, sample.rollout, trainer.policy.temperature).tolist()
        for place, behaviour in enumerate(sample.rollout.response_logprobs):
            if sample.rollout.response_mask[place]:
                tokens[index, place] = now[place] - behaviour, sample.advantage
    kept = set(tokens)
    if "token_mask" in algorithm:
        low, high = algorithm["token_mask"]
        kept = {key for key in kept if low <= math.exp(tokens[key][0]) <= high}
    if "sequence_mask" in algorithm:
        low, high = algorithm["sequence_mask"]
        for index in range(len(batch.samples)):
            mine = [key for key in kept if key[0] == index]
            if mine and not low <= math.exp(sum(tokens[key][0] for key in mine) / len(mine)) <= high:
                kept -= set(mine)
    if "second_moment_limit" in algorithm:
        driven = sorted((tokens[key][0] ** 2, key) for key in kept if tokens[key][0] * tokens[key][1] > 0)
        while driven and sum(square for square, _ in driven) / len(driven) > algorithm["second_moment_limit"]:
            kept.remove(driven.pop()[1])
    return [
        [not lossy or (index, place) in kept for place, lossy in enumerate(sample.rollout.response_mask)]
        for index, sample in enumerate(batch.samples)
    ]


def test_second_moment_mask_sees_the_advantages_that_the_loss_sees(model: str) -> None:
    """With a KL penalty in the reward they are less its reward to go, which turns the sign of many."""
    limit = {"second_moment_limit": 1e-9}  # every driven token goes
    penalised = {"kl_coefficient": 5.0, "kl_in": "reward", "kl_estimator": "k1"}
    arrays = build_arrays(make_batch(13))

    def prepared(algorithm: dict):
        trainer = service(model, "ppo_clip", "token_mean", algorithm=algorithm)
        return trainer.policy.prepare(arrays, 0, Progress.over(arrays))

    found = prepared(limit | penalised)
    log_weight_n = found.start_n - arrays.behaviour_logprobs_n
    driven_n = arrays.loss_mask_n & (log_weight_n * found.advantages_n > 0)
    assert np.array_equal(found.keep_n, ~driven_n)
    assert not np.array_equal(found.keep_n, prepared(limit).keep_n)


# --- degenerate batches -----------------------------------------------------------------------------------


@every_loss
@every_aggregation
def test_masked_rows_and_batches_are_finite(model: str, loss: str, aggregation: str) -> None:
    trainer = service(model, loss, aggregation, queue={"overdue": "mask", "budget": 1})
    fresh = staled(make_batch(14), 14, 4, 4)
    stale = staled(make_batch(15, groups=1), 15, 0, 1)
    masked = staled(make_batch(16, groups=1, masked=True), 16, 4, 4)
    alone = gradient(trainer, build_arrays(fresh), 4)

    def grown(extra: TrainBatch) -> torch.Tensor:
        return gradient(trainer, build_arrays(TrainBatch(step=4, samples=fresh.samples + extra.samples)), 4)

    # Rows without a loss token count only where the divisor counts samples whatever they hold: 12 and then 15.
    assert close(grown(masked), alone * (12 / 15 if aggregation == "fixed" else 1.0))
    # Stale rows keep their place in the divisor.
    before, after = build_arrays(fresh).loss_tokens, build_arrays(fresh).loss_tokens + build_arrays(stale).loss_tokens
    assert close(grown(stale), alone * (before / after if aggregation == "token_mean" else 12 / 15))
    # Nothing but such rows: exactly nothing.
    for batch in (masked, stale, TrainBatch(step=4, samples=()), TrainBatch(step=4, samples=masked.samples * 2)):
        assert float(gradient(trainer, build_arrays(batch), 4).abs().sum()) == 0.0


@every_loss
@pytest.mark.parametrize("batch", [make_batch(1, masked=True), TrainBatch(step=0, samples=())])
def test_steps_without_loss_tokens_report_zeros(model: str, loss: str, batch: TrainBatch) -> None:
    masks = MASKS["algorithm"] | {"kl_coefficient": 0.1}
    report = service(model, loss, "seq_mean_token_mean", algorithm=masks).train_step(lay_out(batch))
    assert (report.skipped, report.loss_tokens, report.metrics["loss"], report.metrics["grad_norm"]) == (False, 0, 0, 0)
    assert all(math.isfinite(value) for value in report.metrics.values())


@every_loss
@pytest.mark.parametrize("shift", [500.0, -500.0])
@pytest.mark.parametrize("masks", [{}, MASKS["algorithm"]])
def test_steps_over_huge_ratios_are_finite(model: str, loss: str, shift: float, masks: dict) -> None:
    """Every second token is 500 nats from where it was sampled, in either direction."""
    algorithm = masks | {"kl_coefficient": 0.1, "kl_estimator": "k3_unbiased"}
    trainer = service(model, loss, "token_mean", algorithm=algorithm, trainer={"optimizer_steps_per_batch": 2})
    samples = []
    for sample in make_batch(17).samples:
        moved = tuple(p + (shift if i % 2 else 0.0) for i, p in enumerate(sample.rollout.response_logprobs))
        rollout = msgspec.structs.replace(sample.rollout, response_logprobs=moved)
        samples.append(msgspec.structs.replace(sample, rollout=rollout))
    report = trainer.train_step(lay_out(TrainBatch(step=0, samples=tuple(samples))))
    assert not report.skipped, report.reason
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert all(torch.isfinite(p).all() for p in trainer.learner.parameters)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "dro"])  # its square has no advantage
def test_advantages_of_zero_teach_nothing(model: str, loss: str) -> None:
    trainer = service(model, loss, "token_mean")
    samples = tuple(msgspec.structs.replace(sample, advantage=0.0) for sample in make_batch(18).samples)
    assert float(gradient(trainer, build_arrays(TrainBatch(step=0, samples=samples))).abs().max()) == 0.0


def test_the_recomputed_proximal_is_only_for_losses_that_use_it(model: str) -> None:
    several = {"optimizer_steps_per_batch": 2}
    using = [loss for loss in LOSSES if service(model, loss, "fixed", trainer=several).policy.recomputes_proximal]
    assert using == ["decoupled_ppo"]
    own = service(model, "headway.trainer.losses:ppo_clip", "fixed", trainer=several)
    assert own.policy.recomputes_proximal
