"""A step in parts: `forward_backward` any number of times, then `optim_step`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import gradient, on_ranks, staled
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.config.load import validate_experiment
from headway.records.errors import RemoteError, StepRefused
from headway.records.training import OptimiserSettings, StepReport, TrainBatch
from headway.trainer.client import TrainerClient
from headway.trainer.service import TrainerService

torch.set_num_threads(1)

AGGREGATIONS = ["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainerService]:
    folder = tmp_path_factory.mktemp("model")
    model, reference = make_model(folder / "m"), make_model(folder / "reference", seed=1)

    def build(**sections: Any) -> TrainerService:
        sections["algorithm"] = {"loss": "ppo_clip"} | sections.get("algorithm", {})
        raw = make_experiment(model, Path("/nowhere"), model={"reference": reference}, **sections)
        return TrainerService(Context, experiment=raw, run_id="test")

    return build


def part_of(batch: TrainBatch, chosen: list[int]) -> TrainBatch:
    return TrainBatch(step=batch.step, samples=tuple(batch.samples[i] for i in chosen))


def weights_of(trainer: TrainerService) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.learner.parameters]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gradient_in_parts(trainer: TrainerService, batch: TrainBatch, cuts: list[list[int]]) -> torch.Tensor:
    """The gradient that `optim_step` clips and applies."""
    applied: list[torch.Tensor] = []
    trainer.version = batch.step
    step = trainer.learner.optimiser.step

    def spy(chosen: OptimiserSettings) -> None:
        applied.extend(gradient.flatten().clone() for gradient in trainer.learner.gradients())
        step(chosen)

    trainer.learner.optimiser.step = spy  # type: ignore[method-assign]
    for chosen in cuts:
        trainer.forward_backward(lay_out(part_of(batch, chosen)))
    report = trainer.optim_step(OptimiserSettings(learning_rate=1e-3, max_grad_norm=1e9))
    assert report.version == batch.step + 1
    return torch.cat(applied)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    parts=st.integers(1, 8),
    budget=st.integers(1, 200),
    extras=st.sampled_from(
        [
            {},
            {"loss": "gspo"},
            {"kl_coefficient": 0.1},
            {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            {"token_mask": (0.5, 5.0), "sequence_mask": (0.9, 1.2)},
        ]
    ),
    order=st.randoms(use_true_random=False),
)
def test_parts_in_any_number_order_and_packing_give_the_gradient_of_the_batch(
    service: Any, aggregation: str, seed: int, parts: int, budget: int, extras: dict[str, Any], order: Any
) -> None:
    batch = staled(make_batch(seed), seed, 0, 4)
    algorithm = {"aggregation": aggregation} | extras
    whole = service(algorithm=algorithm, trainer={"micro_batch_tokens": 10**6})
    expected = gradient(whole, build_arrays(batch), batch.step)
    places = list(range(len(batch.samples)))
    order.shuffle(places)
    cuts = [piece.tolist() for piece in np.array_split(places, parts)]
    apart = service(algorithm=algorithm, trainer={"micro_batch_tokens": budget})
    found = gradient_in_parts(apart, batch, cuts)
    # Mostly 5e-7 of the largest; sums of both signs in float32 come to 1.4e-6 in the worst of 120 draws.
    assert float((found - expected).abs().max()) <= 3e-6 * float(expected.abs().max()) + 1e-9


def test_a_part_reports_the_log_probability_of_every_token_with_loss(service: Any) -> None:
    trainer, batch = service(), make_batch(1)
    arrays = build_arrays(batch)
    logprobs = trainer.forward_backward(lay_out(batch)).logprobs
    assert len(logprobs) == arrays.tokens
    expected = service().policy.accumulate_gradients(arrays).logprobs_n
    assert np.allclose(np.asarray(logprobs), expected, atol=1e-6)
    assert (np.asarray(logprobs) < 0)[arrays.loss_mask_n].all()
    assert (np.asarray(logprobs) == 0)[~arrays.loss_mask_n].all()


def test_settings_of_a_step_are_its_own_and_the_next_has_the_runs(service: Any) -> None:
    still, trainer = service(), service()
    before = weights_of(trainer)
    trainer.forward_backward(lay_out(make_batch(1)))
    report = trainer.optim_step(OptimiserSettings(learning_rate=0.0))
    assert same(before, weights_of(trainer))
    assert (report.version, report.metrics["learning_rate"]) == (1, 0.0)
    still.version = 1
    states = (trainer.learner.optimiser.state[parameter] for parameter in trainer.learner.parameters)
    still.learner.optimiser.state = {
        parameter: {kind: values.clone() for kind, values in state.items()}
        for parameter, state in zip(still.learner.parameters, states, strict=True)
    }
    for one in (still, trainer):
        one.train_step(lay_out(make_batch(2, step=1)))
    assert same(weights_of(still), weights_of(trainer))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_part_that_is_not_finite_skips_the_step_and_is_named(service: Any, poison: float) -> None:
    trainer, fresh = service(), service()
    batch = make_batch(1)
    bad = msgspec.structs.replace(batch.samples[0], advantage=poison)
    trainer.forward_backward(lay_out(part_of(batch, [1, 2])))
    trainer.forward_backward(lay_out(TrainBatch(step=0, samples=(bad,))))
    trainer.forward_backward(lay_out(part_of(batch, [3])))
    report: StepReport = trainer.optim_step()
    assert (report.skipped, report.version, report.samples) == (True, 0, 4)
    assert report.reason.startswith("part 1 of 3: loss")
    for one in (trainer, fresh):  # nothing of it is left
        one.train_step(lay_out(batch))
    assert same(weights_of(trainer), weights_of(fresh))


def test_what_does_not_go_together_is_refused_and_changes_nothing(service: Any) -> None:
    trainer, fresh = service(), service()
    batch = make_batch(1)
    with pytest.raises(ValueError, match="optim_step without gradients"):
        trainer.optim_step()
    trainer.forward_backward(lay_out(part_of(batch, [0, 1, 2])))
    rest = lay_out(part_of(batch, list(range(3, len(batch.samples)))))
    with pytest.raises(ValueError, match="part of step 3"):
        trainer.forward_backward(lay_out(msgspec.structs.replace(batch, step=3)))
    trainer.forward_backward(rest)
    trainer.optim_step()
    fresh.forward_backward(lay_out(part_of(batch, [0, 1, 2])))
    fresh.forward_backward(rest)
    fresh.optim_step()
    assert same(weights_of(trainer), weights_of(fresh))
    with pytest.raises(ValueError, match="optim_step without gradients"):
        trainer.optim_step()


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("algorithm", {"second_moment_limit": 0.04}),
        ("trainer", {"optimizer_steps_per_batch": 2}),
        ("algorithm", {"environment_coefficient": 0.1}),
    ],
)
def test_what_needs_the_whole_batch_is_refused_by_name(service: Any, section: str, values: dict[str, Any]) -> None:
    has_tools = "environment_coefficient" in values
    reason = "policy.*, imitate" if has_tools else f"{section}.{next(iter(values))}"
    environment = {"environment": {"name": "myproject:Shop"}} if has_tools else {}
    with pytest.raises(ValueError, match=reason):
        service(**{section: values}, **environment).forward_backward(lay_out(make_batch(1)))


def test_a_part_that_fails_amid_its_micro_batches_leaves_no_gradient(service: Any) -> None:
    trainer, fresh = service(trainer={"micro_batch_tokens": 20}), service(trainer={"micro_batch_tokens": 20})
    trainer.forward_backward(lay_out(make_batch(5)))
    backward, calls = trainer.learner.backward, iter(range(3))

    def fail(loss: torch.Tensor) -> None:
        next(calls)  # StopIteration at the third
        backward(loss)

    trainer.learner.backward = fail
    for _ in range(2):
        next(calls)
    with pytest.raises(StopIteration):
        trainer.forward_backward(lay_out(make_batch(6)))
    trainer.learner.backward = backward
    with pytest.raises(ValueError, match="optim_step without gradients"):
        trainer.optim_step()
    for one in (trainer, fresh):
        one.forward_backward(lay_out(make_batch(1)))
        report = one.optim_step()
        assert (report.samples, report.version) == (12, 1)
    assert same(weights_of(trainer), weights_of(fresh))


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_fails_leaves_no_gradient_to_the_next(service: Any, whole: bool) -> None:
    trainer, fresh = service(), service()
    step, trainer.learner.optimiser.step = trainer.learner.optimiser.step, lambda chosen: 1 / 0
    if not whole:
        trainer.forward_backward(lay_out(make_batch(5)))
    with pytest.raises(ZeroDivisionError):
        trainer.train_step(lay_out(make_batch(5))) if whole else trainer.optim_step()
    trainer.learner.optimiser.step = step
    for one in (trainer, fresh):
        one.forward_backward(lay_out(make_batch(1)))
        one.optim_step()
    assert same(weights_of(trainer), weights_of(fresh))


class InThisProcess:
    """A rank whose errors come as from a worker."""

    def __init__(self, trainer: TrainerService) -> None:
        self.trainer = trainer

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        try:
            return getattr(self.trainer, method)(*arguments)
        except Exception as error:
            raise RemoteError("trainer-0", method, str(error), "") from error


def test_the_client_counts_the_parts_that_the_trainer_holds(service: Any, tmp_path: Path) -> None:
    trainer, batch = service(), make_batch(1)
    client = TrainerClient(cast(Any, None), validate_experiment(trainer.experiment.model_dump(mode="json"), "t"), "t")
    client.workers = (cast(Any, InThisProcess(trainer)),)

    def held() -> int:
        assert client.accumulated_parts == len(trainer.policy.parts)
        return client.accumulated_parts

    async def main() -> None:
        await client.forward_backward(part_of(batch, [0, 1, 2]))
        with pytest.raises(StepRefused, match="part of step 7"):  # by name, though it comes from another process
            await client.forward_backward(msgspec.structs.replace(part_of(batch, [3]), step=7))
        assert held() == 1
        accumulate, trainer.policy._accumulate_batch = trainer.policy._accumulate_batch, lambda *_: int("x")
        with pytest.raises(RemoteError):
            await client.forward_backward(part_of(batch, [3]))
        assert held() == 0
        trainer.policy._accumulate_batch = accumulate
        path = str(tmp_path / "checkpoints" / "step_00000000")
        trainer.save_checkpoint(path, {})
        await client.forward_backward(part_of(batch, [0, 1, 2]))
        assert held() == 1
        await client.load_checkpoint(path)
        assert held() == 0
        with pytest.raises(StepRefused, match="forward_backward comes first"):
            await client.optim_step()

    asyncio.run(main())


@pytest.mark.parametrize("loads", [False, True])
def test_a_train_step_and_a_loaded_checkpoint_forget_parts_before_them(
    service: Any, tmp_path: Path, loads: bool
) -> None:
    trainer, fresh = service(), service()
    path = str(tmp_path / "checkpoints" / "step_000000")
    fresh.save_checkpoint(path, {})
    trainer.forward_backward(lay_out(make_batch(5)))
    if loads:
        trainer.load_checkpoint(path)
        with pytest.raises(ValueError, match="optim_step without gradients"):
            trainer.optim_step()
    for one in (trainer, fresh):
        one.train_step(lay_out(make_batch(1)))
    assert same(weights_of(fresh), weights_of(trainer))


def test_ranks_agree_on_a_step_in_parts(service: Any) -> None:
    alone, trainers = service(), [service(), service()]
    batch = make_batch(3)
    cuts = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]

    def both(trainer: TrainerService, share: Any) -> tuple[StepReport, list[float]]:
        losses = [trainer.forward_backward(share(part_of(batch, chosen))).loss for chosen in cuts]
        return trainer.optim_step(), losses

    (first, losses), (second, others) = on_ranks(trainers, both)
    expected = [alone.forward_backward(lay_out(part_of(batch, chosen))).loss for chosen in cuts]
    report = alone.optim_step()
    assert losses == pytest.approx(expected, abs=1e-5)
    assert others == [0.0, 0.0], "rank 0 has the sums"
    assert first.metrics == pytest.approx(report.metrics, abs=1e-5)
    assert second.version == 1
    assert first.metrics["loss"] == pytest.approx(report.metrics["loss"], abs=1e-6)
    assert (first.tokens, first.samples, first.loss_tokens) == (report.tokens, report.samples, report.loss_tokens)
    for a, b, c in zip(weights_of(trainers[0]), weights_of(trainers[1]), weights_of(alone), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, atol=1e-6)


def test_an_empty_first_part_leaves_the_fixed_divisor_alone(service: Any) -> None:
    algorithm = {"aggregation": "fixed"}
    batch = make_batch(3)
    expected = gradient(service(algorithm=algorithm), build_arrays(batch), batch.step)
    found = gradient_in_parts(service(algorithm=algorithm), batch, [[], list(range(len(batch.samples)))])
    assert torch.allclose(found, expected, atol=1e-6)
