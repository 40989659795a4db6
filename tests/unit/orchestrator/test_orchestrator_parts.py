"""Steps in parts, in virtual time: the trainer computes on the groups that are there while the rest are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.errors import ConfigurationError, WorkerDied
from headway.records.training import OptimiserSettings, PartReport, StepReport, TrainBatch
from headway.trainer.fake import FakeTrainer
from tests.support.simulated_run import Outcome, experiment_of, simulate


def run_of(per_part: int | None, *, budget: int = 2, overdue: str = "wait", steps: int = 8, **options: Any) -> Outcome:
    experiment = experiment_of(
        Path("unused"),
        run={"steps": steps},
        rollout={"group_size": 2, "max_response_tokens": 200},
        queue={
            "groups_per_step": 5,
            "groups_per_part": per_part,
            "budget": budget,
            "overdue": overdue,
            "filter_zero_variance": False,
        },
        generator={"slots": 12},
        checkpoint={"every_steps": 3},
    )
    return simulate(experiment, **options)


def whole(outcome: Outcome, steps: int = 8) -> None:
    """All steps came about, and nothing was lost or trained twice."""
    assert len(outcome.steps) == steps
    assert outcome.audit == []
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(outcome.trained_groups) == len(set(outcome.trained_groups)) == 5 * steps


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 500),
    per_part=st.integers(1, 6),
    budget=st.integers(0, 3),
    overdue=st.sampled_from(["wait", "drop", "mask"]),
    sample_s=st.sampled_from([0.001, 0.05, 0.3]),
    kills=st.lists(st.floats(0.5, 12.0), max_size=2),
)
def test_parts_keep_the_budget_and_lose_nothing(seed, per_part, budget, overdue, sample_s, kills):
    outcome = run_of(per_part, budget=budget, overdue=overdue, seed=seed, sample_s=sample_s, kills_s=tuple(kills))
    assert outcome.audit == []
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(outcome.trained_groups) == len(set(outcome.trained_groups)) == 40
    if overdue != "mask":
        assert max(step.trajectory_staleness.max for step in outcome.steps) <= budget
    for trainer in outcome.trainers:
        for batch in trainer.batches:
            assert len({sample.rollout.group for sample in batch.samples}) == 5


def test_on_policy_the_trainer_computes_while_the_rest_are_generated():
    """At budget 0 a whole batch waits for its slowest group; in parts only the last part's time is left after it."""
    at_once, parts = run_of(None, budget=0, sample_s=0.1), run_of(1, budget=0, sample_s=0.1)
    for outcome in (at_once, parts):
        whole(outcome)
    assert parts.duration_s < 0.85 * at_once.duration_s
    waited = [sum(step.trainer_wait_s for step in outcome.steps) for outcome in (at_once, parts)]
    assert waited[1] < waited[0]


class MortalTrainer(FakeTrainer):
    """Dies at chosen calls: of `forward_backward`, and of `optim_step` after it was applied."""

    dies_at: dict[str, set[int]]

    async def forward_backward(self, part: TrainBatch) -> PartReport:
        report = await super().forward_backward(part)
        self._count("forward_backward")
        return report

    async def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        report = await super().optim_step(settings)
        self._count("optim_step")
        return report

    def _count(self, method: str) -> None:
        calls = self.__dict__.setdefault("calls", {})
        calls[method] = calls.get(method, 0) + 1
        if calls[method] in self.dies_at[method]:
            raise WorkerDied("trainer-0", "killed")


@pytest.mark.parametrize("per_part", [1, 2, 3])
def test_a_trainer_that_dies_amid_parts_gets_all_of_them_again(per_part: int):
    def spoil(trainer: FakeTrainer) -> None:
        trainer.__class__ = MortalTrainer
        trainer.dies_at = {"forward_backward": {2, 9, 24}, "optim_step": {4}}  # type: ignore[attr-defined]

    outcome = run_of(per_part, spoil=spoil)
    whole(outcome)
    trainer = outcome.trainers[0]
    # The step that made each version in the end had the whole batch, in the log's order.
    last = {batch.step: batch for batch in trainer.batches}
    trained = [dict.fromkeys(s.rollout.group for s in last[step].samples) for step in sorted(last)]
    assert [group for groups in trained for group in groups] == outcome.trained_groups


def test_an_interrupted_run_keeps_a_batch_of_which_a_part_is_computed():
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 6, "stop_grace_s": 1.0},
        rollout={"group_size": 2, "max_response_tokens": 200},
        queue={"groups_per_step": 5, "groups_per_part": 1, "budget": 0, "filter_zero_variance": False},
        generator={"slots": 12},
    )
    for interrupt_s in (0.5, 1.5, 2.5, 4.0):
        outcome = simulate(experiment, interrupt_s=interrupt_s, sample_s=0.1)
        assert outcome.audit == []
        assert outcome.event("accounting").data["balanced"] == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"advantage": "batch_mean_std"}}, "algorithm.advantage = 'batch_mean_std' needs all of it"),
        ({"algorithm": {"second_moment_limit": 0.04}}, "algorithm.second_moment_limit"),
        ({"trainer": {"optimizer_steps_per_batch": 2}}, "trainer.optimizer_steps_per_batch = 2"),
        ({"run": {"deterministic": True}}, "run.deterministic = true.*unless queue.budget = 0"),
    ],
)
def test_what_needs_the_whole_batch_is_refused_by_name(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        experiment_of(Path("unused"), **{"queue": {"groups_per_part": 2}} | sections)
