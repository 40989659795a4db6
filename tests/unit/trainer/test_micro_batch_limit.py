"""A device whose memory holds fewer tokens than a micro-batch: they are halved once, and the gradients are whole."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_definition import on_ranks
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import lay_out
from headway.orchestrator.recovery import accumulate
from headway.records.errors import MicroBatchesHalved, OutOfDeviceMemory
from headway.records.training import StepReport
from headway.trainer.service import TrainerService

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainerService]:
    folder = tmp_path_factory.mktemp("model")
    model, reference = make_model(folder / "m"), make_model(folder / "reference", seed=1)

    def make(tokens: int, holds: int = 10**9, *, passes: bool = False, **sections: Any) -> TrainerService:
        """A trainer with micro-batches of ``tokens`` on a device that holds ``holds``. Its memory ends after a backward
        pass has stored its gradients, or with ``passes`` in any forward pass too."""
        sections["trainer"] = {"micro_batch_tokens": tokens, "shared_prefix": False, **sections.get("trainer", {})}
        raw = make_experiment(model, Path("/nowhere"), model={"reference": reference}, **sections)
        service = TrainerService(Context, experiment=raw, run_id="test")
        logprobs, backward, fed = service.learner.logprobs, service.learner.backward, [0]

        def checked_logprobs(batch: Any, *others: Any, **taught: Any) -> Any:
            fed[0] = len(batch.input_ids)
            if passes and fed[0] > holds:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {fed[0]}")
            return logprobs(batch, *others, **taught)

        def checked_backward(loss: torch.Tensor) -> None:
            backward(loss)
            if fed[0] > holds:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {fed[0]}")

        service.learner.logprobs = checked_logprobs  # type: ignore[method-assign]
        service.learner.backward = checked_backward  # type: ignore[method-assign]
        return service

    return make


def weights_of(trainer: TrainerService) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.learner.parameters]


def same(one: TrainerService, other: TrainerService) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other), strict=True))


def facts(report: StepReport) -> tuple[Any, ...]:
    return report.tokens, report.computed_tokens, report.micro_batches, report.flops, report.metrics


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"trainer": {"optimizer_steps_per_batch": 2}},
        {"algorithm": {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}},
        {"algorithm": {"proximal": "recompute"}},
    ],
)
def test_a_step_with_halved_micro_batches_is_that_of_the_half(build: Any, sections: Any) -> None:
    short, half = build(64, 40, passes=bool(sections), **sections), build(32, **sections)
    for step in range(2):
        one, other = (trainer.train_step(lay_out(make_batch(step, step=step))) for trainer in (short, half))
        assert facts(one) == facts(other)
        assert same(short, half)
        assert one.halved.startswith("micro-batches of trainer.micro_batch_tokens = 64 don't fit in a device's memory")
        assert one.halved.endswith("(CUDA out of memory): they have at most 32 from now on")
        assert other.halved == ""
    assert (short.policy.limit.size.tokens, short.version) == (32, 2)


def test_a_backward_pass_is_repeated_alone(build: Any) -> None:
    """Log-probabilities computed before it, with wider micro-batches, are kept."""
    kl = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    one, other = (
        trainer.train_step(lay_out(make_batch(1))) for trainer in (build(64, 40, algorithm=kl), build(64, algorithm=kl))
    )
    assert one.halved
    assert one.metrics == pytest.approx(other.metrics, rel=1e-4)
    assert one.flops == other.flops


def test_a_fixed_number_of_samples_is_halved(build: Any) -> None:
    fixed = {"packing": "fixed", "micro_batch_samples": 4}
    short, half = build(64, 30, trainer=fixed), build(64, trainer=fixed | {"micro_batch_samples": 2})
    one, other = (trainer.train_step(lay_out(make_batch(5))) for trainer in (short, half))
    assert "trainer.micro_batch_samples = 4" in one.halved
    assert facts(one) == facts(other)
    assert same(short, half)


def test_the_second_time_says_what_to_try(build: Any) -> None:
    trainer = build(64, 10)
    with pytest.raises(OutOfDeviceMemory, match=r"micro_batch_tokens = 32 .* valid: at most 16, or .*checkpointing"):
        trainer.train_step(lay_out(make_batch(1)))
    assert trainer.version == 0
    single = build(64, 1, trainer={"packing": "fixed", "micro_batch_samples": 1})
    with pytest.raises(OutOfDeviceMemory, match="valid: none smaller"):
        single.train_step(lay_out(make_batch(1)))


def test_deterministic_runs_keep_their_shapes(build: Any) -> None:
    trainer = build(64, 40, run={"deterministic": True}, queue={"budget": 0}, trainer={"packing": "balanced"})
    with pytest.raises(OutOfDeviceMemory, match=r"micro_batch_tokens = 64 .* at most 32"):
        trainer.train_step(lay_out(make_batch(1)))


def test_the_failed_pass_is_freed_before_it_is_repeated(build: Any) -> None:
    """What keeps the error keeps its frames, and with them the activations for which there was no room."""
    limit, references = build(64).policy.limit, list[weakref.ref[torch.Tensor]]()

    def compute() -> int:
        if references:
            return 1
        activations = torch.zeros(3)
        references.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    alive: list[bool] = []
    assert limit.attempt(compute, lambda: alive.append(references[0]() is not None)) == 1
    assert alive == [False]


class Parts:
    """A client of one trainer in this process."""

    def __init__(self, trainer: TrainerService) -> None:
        self.trainer, self.accumulated_parts = trainer, 0

    async def forward_backward(self, part: Any) -> None:
        before, self.accumulated_parts = self.accumulated_parts, 0
        self.trainer.forward_backward(lay_out(part))
        self.accumulated_parts = before + 1


def test_a_step_in_parts_is_computed_again_from_its_first(build: Any) -> None:
    parts: Any = [make_batch(1, groups=1, members=2, longest=4), make_batch(2), make_batch(3)]
    trainers = build(64, 40), build(32)
    for trainer in trainers:
        asyncio.run(accumulate(Parts(trainer), parts))  # type: ignore[arg-type]
        assert len(trainer.policy.parts) == 3
        trainer.optim_step()
    assert same(*trainers)
    alone = build(64, 40)
    alone.forward_backward(lay_out(parts[0]))
    with pytest.raises(MicroBatchesHalved, match="all parts of the step must be computed again"):
        alone.forward_backward(lay_out(parts[1]))
    assert alone.policy.parts == []


def test_all_ranks_halve_when_one_is_short(build: Any) -> None:
    """Micro-batches of other sizes on another rank would make the ranks' numbers of collectives differ."""

    def reports(*trainers: TrainerService) -> list[StepReport]:
        batch = make_batch(1, groups=6)
        return on_ranks(trainers, lambda trainer, share: trainer.train_step(share(batch)))

    mixed, halves = (build(64), build(64, 40)), (build(32), build(32))
    first, second = reports(*mixed)
    assert "(another rank is out of memory)" in first.halved
    assert "(CUDA out of memory)" in second.halved
    assert facts(first) == facts(reports(*halves)[0])
    assert same(mixed[0], halves[0])
    assert same(mixed[0], mixed[1])
