"""The loops on random schedules in virtual time: budget, books, credit, no deadlock, equal drained multisets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.ledger import StepRecord
from tests.support.simulated_run import experiment_of, simulate


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, object]:
    budget = draw(st.integers(0, 6))
    return {
        "budget": budget,
        "groups_per_step": draw(st.integers(1, 6)),
        "group_size": draw(st.integers(1, 4)),
        "steps_per_publish": draw(st.integers(1, budget + 1)),
        "slots": draw(st.integers(1, 40)),
        "token_s": draw(st.sampled_from([0.001, 0.01, 0.1])),
        "sample_s": draw(st.sampled_from([0.001, 0.05, 0.5])),
        "verify_s": draw(st.sampled_from([0.0, 0.01, 1.0])),
        "publish_s": draw(st.sampled_from([0.0, 0.3])),
        "mode": draw(st.sampled_from(["keep", "recompute", "abort", "drain"])),
        "shared": draw(st.booleans()),
        "seed": draw(st.integers(0, 10_000)),
    }


def run_of(schedule: dict[str, object], *, overdue: str = "wait", filtered: bool = False, **options: object):
    s = schedule
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 8},
        rollout={"group_size": s["group_size"], "max_response_tokens": 200},
        queue={
            "groups_per_step": max(s["groups_per_step"], 2 if s["group_size"] == 1 else 1),
            "budget": s["budget"],
            "overdue": overdue,
            "filter_zero_variance": filtered,
        },
        weights={"steps_per_publish": s["steps_per_publish"]},
        generator={"slots": s["slots"], "update_mode": s["mode"]},
    )
    return simulate(
        experiment,
        seed=s["seed"],
        token_s=s["token_s"],
        sample_s=s["sample_s"],
        verify_s=s["verify_s"],
        publish_s=s["publish_s"],
        shared=s.get("shared", False),
        **options,
    )


@given(schedules())
@settings(deadline=None, max_examples=40)
def test_wait_trains_exactly_what_was_admitted_within_the_budget(schedule):
    outcome = run_of(schedule)
    queue = outcome.experiment.queue
    assert len(outcome.steps) == 8
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= queue.budget
    assert all(step.groups == queue.groups_per_step for step in outcome.steps)
    assert all(step.open_groups <= queue.groups_per_step * (queue.budget + 1) for step in outcome.steps)
    assert sorted(outcome.trained_groups) == list(range(outcome.admitted_groups))
    trained, completed = outcome.bias_lengths
    assert trained == completed
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=25)
def test_filters_give_credit_back_and_the_books_balance(schedule):
    outcome = run_of(schedule, filtered=True)
    if schedule["group_size"] > 1:
        assert outcome.endings.get("filtered", 0) % schedule["group_size"] == 0
    assert len(outcome.steps) == 8
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= outcome.experiment.queue.budget
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(set(outcome.trained_groups)) == len(outcome.trained_groups)


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=25)
def test_drop_never_trains_over_the_budget(schedule):
    outcome = run_of(schedule, overdue="drop")
    assert len(outcome.steps) == 8
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= outcome.experiment.queue.budget
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=25)
def test_mask_trains_no_token_over_the_budget_and_ends_only_groups_without_any(schedule):
    outcome = run_of(schedule, overdue="mask")
    budget = outcome.experiment.queue.budget
    assert len(outcome.steps) == 8
    assert max(step.tokens.staleness.max for step in outcome.steps) <= budget
    newest = [
        (batch.step, max(span.version for sample in batch.samples for span in sample.rollout.versions))
        for batch in outcome.trainer.batches
    ]
    assert all(step - version <= budget for step, version in newest)
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


@given(schedules(), st.sets(st.integers(0, 9), max_size=3))
@settings(deadline=None, max_examples=15)
def test_skipped_steps_make_no_version(schedule, skipped):
    outcome = run_of(schedule, skip_steps=frozenset(skipped))
    trained = [step for step in outcome.steps if not step.skipped]
    assert [step.version for step in trained] == list(range(1, 9))
    discarded_groups = sum(step.skipped for step in outcome.steps) * outcome.experiment.queue.groups_per_step
    assert outcome.endings.get("discarded", 0) == discarded_groups * schedule["group_size"]
    assert not any(step.samples for step in outcome.steps if step.skipped)
    assert outcome.event("accounting").data["balanced"] == 1


def test_budget_zero_is_synchronous_and_trains_in_admission_order():
    outcome = run_of(
        {
            "budget": 0, "groups_per_step": 4, "group_size": 2, "steps_per_publish": 1, "slots": 8, "token_s": 0.01,
            "sample_s": 0.05, "verify_s": 0.01, "publish_s": 0.0, "mode": "keep", "seed": 3,
        }
    )  # fmt: skip
    assert outcome.trained_groups == list(range(32))
    assert all(step.tokens.staleness.max == 0 for step in outcome.steps)


def test_a_step_is_recorded_whole_and_without_the_subjects_that_its_run_lacks():
    experiment = experiment_of(Path("unused"), run={"steps": 3}, generator={"slots": 8})
    fields = set(StepRecord.__struct_fields__) - {"metrics", "group_meta", "failures", "filtered", "nodes", "pruning"}
    for step in simulate(experiment).steps:
        line = msgspec.json.decode(msgspec.json.encode(step))
        assert fields - line.keys() <= {"rewards", "lengths", "router", "judges", "agents", "sandboxes", "kernels",
                                        "curriculum", "weights", "demonstrations", "teaching",
                                        "episodes"}  # fmt: skip
        absent = {"weights", "judges", "agents", "sandboxes", "kernels", "curriculum", "pruning", "nodes", "episodes"}
        assert not line.keys() & absent
        assert ("rewards" in line, "lengths" in line) == (step.flow.finished_groups > 0,) * 2


def test_a_failing_reward_fails_rollouts_not_the_run():
    def reward(task, response):
        return float("nan") if int(response) % 5 == 0 else 1.0

    schedule = {
        "budget": 2, "groups_per_step": 2, "group_size": 4, "steps_per_publish": 1, "slots": 16, "token_s": 0.01,
        "sample_s": 0.05, "verify_s": 0.01, "publish_s": 0.0, "mode": "keep", "seed": 5,
    }  # fmt: skip
    outcome = run_of(schedule, reward=reward)
    assert outcome.endings["failed"] > 0
    assert sum(step.failures.get("reward", 0) for step in outcome.steps) > 0
    assert len(outcome.steps) == 8


def test_asynchrony_keeps_both_sides_busy():
    base = {
        "groups_per_step": 4, "group_size": 4, "steps_per_publish": 1, "slots": 16, "token_s": 0.01,
        "sample_s": 0.02, "verify_s": 0.0, "publish_s": 0.0, "mode": "keep", "seed": 1,
    }  # fmt: skip
    synchronous = run_of(base | {"budget": 0})
    asynchronous = run_of(base | {"budget": 6})
    assert asynchronous.duration_s < 0.75 * synchronous.duration_s


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_rollouts_cross_updates_without_loss(mode):
    schedule = {
        "budget": 4, "groups_per_step": 2, "group_size": 2, "steps_per_publish": 1, "slots": 16, "token_s": 0.05,
        "sample_s": 0.01, "verify_s": 0.0, "publish_s": 0.0, "mode": mode, "seed": 1,
    }  # fmt: skip
    outcome = run_of(schedule)
    versions = [
        {span.version for span in sample.rollout.versions}
        for batch in outcome.trainer.batches
        for sample in batch.samples
    ]
    assert any(len(of_one) > 1 for of_one in versions)


def shared_devices(shared: bool, pause_s: float = 0.0, **queue: object):
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 10},
        rollout={"group_size": 4, "max_response_tokens": 200},
        queue={"groups_per_step": 2, "filter_zero_variance": False, **queue},
        generator={"slots": 8, "prefetch_groups": 0},
    )
    return simulate(experiment, token_s=0.01, sample_s=0.1, shared=shared, generator_options={"pause_s": pause_s})


def test_devices_are_lent_for_exactly_as_long_as_the_trainer_computes():
    outcome = shared_devices(True, budget=2)
    steps = outcome.steps[1:]  # engines are asked a little after a step is closed; over several it evens out
    yielded_s = sum(step.generator_yielded_ratio * step.step_s for step in steps)
    assert yielded_s == pytest.approx(sum(step.trainer_compute_s for step in steps), rel=0.05)
    assert sum(step.generator_wait_ratio for step in steps) < 0.05 * len(steps)
    assert all(step.generator_yielded_ratio == 0 for step in shared_devices(False, budget=2).steps)


def test_what_lending_takes_is_waiting():
    """Every second of the trainer is in one account."""
    for step in shared_devices(True, pause_s=0.25, budget=2).steps:
        known = step.trainer_compute_s + step.trainer_wait_s + step.publish_s + step.checkpoint_s
        assert known == pytest.approx(step.step_s, abs=0.01)


def test_on_shared_devices_a_budget_saves_the_tail():
    synchronous, flexible = (shared_devices(True, budget=budget).duration_s for budget in (0, 2))
    assert flexible < 0.9 * synchronous
