"""The queue's parameters out of ledgers of runs in virtual time whose parameters are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.tuning.ledger_model import LedgerModel, decode_line, estimate, fit_line, shape_of
from headway.control.tuning.queue_model import simulate as simulate_queue
from headway.records.generation import GenerationRequest
from headway.records.training import StepReport, TrainBatch
from headway.trainer.fake import FakeTrainer
from tests.support.simulated_run import Outcome, experiment_of, simulate, small_run

FIXED_S, REQUEST_S = 0.004, 0.0005  # of a decode step
TRAIN_S, TRAIN_TOKEN_S = 0.05, 0.0007


def train_s(batch: TrainBatch) -> float:
    tokens = sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in batch.samples)
    return TRAIN_S + TRAIN_TOKEN_S * tokens


def run(budget: int = 2, steps: int = 50, **options: Any) -> Outcome:
    known: dict[str, Any] = {"token_s": lambda running: FIXED_S + REQUEST_S * running, "sample_s": train_s}
    return small_run(budget=budget, steps=steps, **(known | options))


def model_of(outcome: Outcome, budget: int = 2) -> LedgerModel:
    found = estimate(outcome.steps[budget + 1 :], shape_of(outcome.experiment))
    assert found is not None
    return found


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    fixed_s=st.sampled_from([0.002, 0.008]),
    request_s=st.sampled_from([0.0002, 0.001]),
    train_token_s=st.sampled_from([3e-4, 2e-3]),
    verify_s=st.sampled_from([0.001, 0.01]),
    publish_s=st.sampled_from([0.005, 0.03]),
    seed=st.integers(0, 3),
)
def test_known_parameters_come_back(
    fixed_s: float, request_s: float, train_token_s: float, verify_s: float, publish_s: float, seed: int
) -> None:
    """Within: 5 % for the time of a decode and of a training step as they are, 10 % of it for their parts; exactly for
    single events; 15 % for the rate, 0.1 for the wait and 0.4 versions for the staleness of the model's own run."""
    outcome = run(
        seed=seed,
        steps=40,
        token_s=lambda running: fixed_s + request_s * running,
        sample_s=lambda batch: 0.03 + (train_s(batch) - TRAIN_S) / TRAIN_TOKEN_S * train_token_s,
        verify_s=verify_s,
        publish_s=publish_s,
    )
    found = model_of(outcome)
    model = found.model
    step_s = fixed_s + request_s * found.running
    assert model.decode_fixed_s + model.decode_request_s * found.running == pytest.approx(step_s, rel=0.05)
    if found.decode.identified:
        assert abs(model.decode_fixed_s - fixed_s) < 0.1 * step_s
    mean_tokens = found.train.x_mean
    trained_s = 0.03 + train_token_s * mean_tokens
    assert model.train_fixed_s + model.train_token_s * mean_tokens == pytest.approx(trained_s, rel=0.05)
    assert abs(model.train_fixed_s - 0.03) < 0.1 * trained_s
    assert model.verify_response_s == pytest.approx(verify_s)
    assert model.publish_s == pytest.approx(publish_s)
    assert model.delay_s == 0
    assert model.prompt_tokens == 2
    assert model.acceptance == pytest.approx(0.875, abs=0.08)  # 4 coins that are not all alike
    again = simulate_queue(model)
    assert again.samples_per_s == pytest.approx(found.samples_per_s, rel=0.15)
    assert again.trainer_wait == pytest.approx(found.trainer_wait, abs=0.1)
    assert again.staleness_mean == pytest.approx(found.staleness_mean, abs=0.4)


def test_time_that_slots_are_held_without_decoding_is_told_apart() -> None:
    outcome = run(budget=6, steps=60, slots=12, generator_options={"prefill_s": lambda _: 0.3})
    assert model_of(outcome, 6).model.delay_s == pytest.approx(0.3, rel=0.25)
    assert model_of(run(budget=6, steps=60, slots=12), 6).model.delay_s < 0.05  # of 0.2 s in a slot


def test_stragglers_and_updates_are_measured_where_they_happen() -> None:
    long = {"generator_options": {"length_of": lambda request: 150 if request.request_id.startswith("8-0") else 5}}
    outcome = run(steps=12, **_without_length(long))
    waited = [step for step in outcome.steps if step.flow.straggler_wait_s > 0]
    assert len(waited) == 1
    assert waited[0].flow.straggler_wait_s <= waited[0].trainer_wait_s
    assert all(step.flow.update_wait_s == 0 for step in outcome.steps)
    synchronous = run(budget=0, steps=6, generator_options={"update_s": 0.25})
    assert [step.flow.update_wait_s for step in synchronous.steps[1:]] == pytest.approx([0.25] * 5)


def _without_length(options: dict[str, Any]) -> dict[str, Any]:
    """``simulate`` has lengths of its own: one rollout that thinks long is made by its prefill instead."""

    def prefill_s(request: GenerationRequest) -> float:
        return 3.0 if options["generator_options"]["length_of"](request) > 5 else 0.0

    return {"generator_options": {"prefill_s": prefill_s}, "token_s": 0.001}


def test_useful_samples_are_those_with_an_advantage() -> None:
    filtered = run(steps=8)
    assert all(step.flow.useful_samples == step.samples for step in filtered.steps)
    experiment = filtered.experiment
    queue = experiment.queue.model_copy(update={"filter_zero_variance": False})
    kept = simulate(experiment.model_copy(update={"queue": queue}), sample_s=0.01)
    flat = sum(step.samples - step.flow.useful_samples for step in kept.steps)
    groups = [group for batch in kept.trainer.batches for group in {sample.rollout.group for sample in batch.samples}]
    assert flat == 4 * sum(_is_flat(kept, group) for group in groups)
    assert flat > 0


def test_useful_samples_of_a_critic_are_those_that_it_gave_an_advantage() -> None:
    """The rewards of groups of one say nothing of it: only the trainer has the advantages."""
    rule = {"preset": "ppo"}
    experiment = experiment_of(Path("none"), run={"steps": 4}, algorithm=rule, rollout={"group_size": 1})

    def estimate(trainer: FakeTrainer) -> None:
        train_step = trainer.train_step

        async def valued(batch: TrainBatch) -> StepReport:
            advantages = tuple(0.0 if n % 3 else 1.5 for n in range(len(batch.samples)))
            return msgspec.structs.replace(await train_step(batch), sample_advantages=advantages)

        trainer.train_step = valued

    for step in simulate(experiment, spoil=estimate).steps:
        assert step.flow.useful_samples == -(-step.samples // 3)
    assert all(step.flow.useful_samples == step.samples for step in simulate(experiment).steps), "none is known"


def _is_flat(outcome: Outcome, group: int) -> bool:
    rewards = {s.rollout.reward for batch in outcome.trainer.batches for s in batch.samples if s.rollout.group == group}
    return len(rewards) == 1


def test_what_the_ledger_doesnt_tell_is_said() -> None:
    outcome = run(budget=8, steps=30)
    same = {"generated_tokens": 400, "decode_steps": 100, "generator_busy_s": 1.0}  # four requests, always
    steps = [msgspec.structs.replace(s, flow=msgspec.structs.replace(s.flow, **same)) for s in outcome.steps]
    steady = estimate(steps, shape_of(outcome.experiment))
    assert steady is not None
    assert "decode step" in steady.unidentified
    shares = {variant.decode_request_s for variant in steady.variants()}
    assert len(shares) == 3
    centre = steady.decode.fixed + steady.decode.slope * steady.decode.x_mean
    tilted = steady.decode.tilted(1.0)
    assert tilted.fixed + tilted.slope * tilted.x_mean == pytest.approx(centre)
    assert tilted.share > steady.decode.share


def test_how_a_decode_step_grows_is_taken_from_how_many_requests_it_has() -> None:
    """One request more at two costs next to nothing; at two hundred, its share."""
    outcome = run(budget=8, steps=12)
    shares = {}
    for requests, even in ((2, 16.0), (16, 16.0), (200, 16.0), (200, 128.0)):
        same = {"generated_tokens": 100 * requests, "decode_steps": 100, "generator_busy_s": 1.0}
        steps = [msgspec.structs.replace(s, flow=msgspec.structs.replace(s.flow, **same)) for s in outcome.steps]
        line, running = decode_line(steps, even)
        assert running == requests
        assert not line.identified
        shares[requests, even] = (line.share, line.share_error)
    assert shares[2, 16.0][0] == pytest.approx(1 / 9)
    assert shares[16, 16.0][0] == 0.5
    assert shares[200, 16.0][0] > shares[200, 128.0][0] > 0.5
    assert shares[2, 16.0][1] < 0.1 < shares[16, 16.0][1]
    cuda = experiment_of(Path("unused"), generator={"devices": ("cuda:0",)})
    assert shape_of(cuda).even_requests > shape_of(outcome.experiment).even_requests


def test_groups_of_adaptive_sizes_count_with_their_mean() -> None:
    outcome = run(steps=6)
    shape = shape_of(outcome.experiment)
    larger = [msgspec.structs.replace(s, production_per_s=1.5 * s.production_per_s) for s in outcome.steps]
    for steps, size in ((outcome.steps, 4), (larger, 6)):
        found = estimate(steps, shape)
        assert found is not None
        assert found.model.group_size == size


def test_too_little_gives_no_model() -> None:
    outcome = run(steps=6)
    shape = shape_of(outcome.experiment)
    assert estimate([], shape) is None
    assert estimate(outcome.steps[:1], shape) is None
    lost = [msgspec.structs.replace(step, step_s=0.0) for step in outcome.steps]
    assert estimate(lost, shape) is None


def test_a_line_leaves_outliers_out_and_falls_back_on_its_prior() -> None:
    points = [(float(x), 1.0 + 0.5 * x) for x in range(10, 30)]
    line = fit_line([*points, (20.0, 80.0)], prior_share=0.5, prior_error=0.3)
    assert line.identified
    assert (line.fixed, line.slope) == (pytest.approx(1.0, abs=0.05), pytest.approx(0.5, rel=0.01))
    flat = fit_line([(20.0, 11.0)] * 9, prior_share=0.5, prior_error=0.3)
    assert not flat.identified
    assert (flat.share, flat.share_error) == (0.5, 0.3)
    assert flat.fixed + 20 * flat.slope == pytest.approx(11.0)
    assert fit_line([], prior_share=0.5, prior_error=0.3).slope == 0


def test_the_limit_on_open_groups_and_discarded_surplus_in_the_queue() -> None:
    model = model_of(run(budget=4, steps=40), 4).model
    least = simulate_queue(msgspec.structs.replace(model, open_groups=4))
    most = simulate_queue(model)
    assert least.staleness_mean < 1.0 < most.staleness_mean
    assert least.samples_per_s < most.samples_per_s
    synchronous = msgspec.structs.replace(model, budget=0, decode_fixed_s=0.01, decode_request_s=0.0)
    discarding = msgspec.structs.replace(synchronous, open_groups=8, surplus_groups=4)
    assert simulate_queue(discarding).samples_per_s > simulate_queue(synchronous).samples_per_s
    assert simulate_queue(discarding).staleness_max == 0
