"""Runs that end early, die, or get nowhere, in virtual time: the real loops, rules and buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import resolved

from headway.buffer.store import GroupBuffer
from headway.control.staleness import OpenGroups
from headway.orchestrator import collect_loop
from headway.orchestrator.control_loop import ControlLoop
from headway.orchestrator.state import RunningGroup, RunState
from headway.records.control import Knobs
from headway.records.errors import EpochLost, NoProgress, WorkerDied
from headway.records.ledger import EventRecord, StepRecord
from headway.records.rollout import Group
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.telemetry.summary import endings, failures, summarise
from headway.trainer.checkpoints import CheckpointState
from headway.trainer.fake import FakeTrainer
from tests.support.simulated_run import Outcome, experiment_of, simulate


def run_of(queue: dict[str, Any] | None = None, weights: dict[str, Any] | None = None, **options: Any) -> Outcome:
    queue = dict(queue or {})
    batches = queue.pop("give_up_after_batches", 100)
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 8},
        rollout={"group_size": 4, "max_response_tokens": 200},
        queue={"groups_per_step": 2, "budget": 3, "filter_zero_variance": False} | queue,
        weights=weights or {},
        generator={"slots": 16},
        evaluation={"test": "after" if options.pop("after", False) else "never"},
        checkpoint={"every_steps": options.pop("checkpoint_steps", 5)},
    )
    with patch.object(collect_loop, "GIVE_UP_AFTER_BATCHES", batches):
        return simulate(experiment, **options)


def some_fail(task: object, response: str) -> float:
    return float("nan") if int(response) % 5 == 0 else int(response) % 2


def test_interrupted_run_parks_long_generations_when_half_its_grace_is_over(monkeypatch: pytest.MonkeyPatch):
    """Also those that were parked so often that updates leave them running."""
    monkeypatch.setattr("headway.orchestrator.assembly._MOST_RESUMES", 0)
    outcome = run_of({}, interrupt_s=1.0, token_s=10.0)
    parked = outcome.event("parked")
    assert 60.0 <= parked.time_s - 1.0 <= 60.0 + 15.0
    assert parked.data["rollouts"] > 0
    assert outcome.duration_s - 1.0 < 120.0
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []
    assert outcome.endings.get("failed", 0) == 0


def test_interrupted_run_keeps_the_responses_that_a_hanging_verifier_has():
    outcome = run_of(interrupt_s=5.0, verify_s=1e6)
    parked = outcome.event("parked")
    assert parked.data["complete"] == 8 * 4  # groups of 4 that the budget admits
    assert outcome.duration_s - 5.0 < 120.0
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


def test_interrupted_run_that_drains_in_time_parks_nothing():
    outcome = run_of(interrupt_s=1.0)
    assert "parked" not in names(outcome)
    assert outcome.duration_s < 60.0


def names(outcome: Outcome) -> list[str]:
    return [line.event for line in outcome.lines if isinstance(line, EventRecord)]


@given(st.integers(0, 1000), st.floats(0.2, 4.0), st.sampled_from([0.001, 0.05]))
@settings(deadline=None, max_examples=20)
def test_books_balance_when_a_run_with_failed_members_is_interrupted(seed, interrupt_s, sample_s):
    outcome = run_of(seed=seed, reward=some_fail, interrupt_s=interrupt_s, sample_s=sample_s)
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


@pytest.mark.slow
@given(
    st.integers(0, 1000),
    st.lists(st.floats(0.1, 3.0), min_size=1, max_size=3),
    st.sampled_from(["wait", "drop"]),
    st.sampled_from([0.001, 0.05]),
)
@settings(deadline=None, max_examples=30)
def test_a_killed_run_with_failed_members_resumes(seed, kills_s, overdue, sample_s):
    outcome = run_of({"overdue": overdue}, seed=seed, reward=some_fail, kills_s=tuple(kills_s), sample_s=sample_s)
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []
    assert len(outcome.trained_groups) == len(set(outcome.trained_groups)) == 16
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= 3


def test_a_kill_between_a_step_and_its_line_loses_no_step(monkeypatch: pytest.MonkeyPatch):
    write = ControlLoop._write

    async def late(self: ControlLoop, record: StepRecord) -> None:
        await self._run.clock.sleep(0.5)
        await write(self, record)

    monkeypatch.setattr(ControlLoop, "_write", late)
    outcome = run_of(kills_s=(2.0,), checkpoint_steps=100)
    restored = outcome.event("records_restored")
    assert restored.data["steps"] >= 2
    steps = [line for line in resolved(outcome.lines) if isinstance(line, StepRecord)]
    assert [(step.step, step.version) for step in steps] == [(v, v + 1) for v in range(8)]
    assert {(step.samples, step.groups) for step in steps} == {(8, 2)}
    rebuilt = [step for step in steps if step.step_s == 0]
    assert len(rebuilt) == restored.data["steps"]
    assert all(step.lengths.mean > 0 and step.endings == {"trained": 8} for step in rebuilt)


def test_a_resume_with_a_whole_ledger_misses_no_step():
    outcome = run_of(kills_s=(2.0,), checkpoint_steps=1)  # the payloads of its first steps are released by then
    assert outcome.event("resume").step > 2
    assert "ledger_incomplete" not in names(outcome)


@pytest.mark.parametrize("left", [0, 2])
def test_a_resume_with_a_cut_ledger_counts_the_steps_lost_and_rebuilds_the_others(
    monkeypatch: pytest.MonkeyPatch, left: int
):
    monkeypatch.setattr("tests.support.simulated_run.recorded_steps", lambda lines: left)
    outcome = run_of(kills_s=(2.0,), checkpoint_steps=1)
    lost, rebuilt = outcome.event("ledger_incomplete"), outcome.event("records_restored")
    assert f"lacks the steps from {left} on" in lost.detail
    steps = left + int(lost.data["steps"]) + int(rebuilt.data["steps"])
    assert outcome.event("resume").step == steps


def test_a_resume_says_the_version_that_it_goes_on_from():
    outcome = run_of(kills_s=(2.0,), checkpoint_steps=100)
    restored = outcome.event("restored")
    assert outcome.event("resume").step == restored.step == restored.data["replayed"] > 0
    assert restored.detail == f"steps trained again: {restored.step}"


def test_nothing_is_said_of_what_is_restored_where_nothing_is_trained_again():
    outcome = run_of(kills_s=(0.1,))
    assert outcome.event("resume").step == 0
    assert "restored" not in names(outcome)


def test_groups_generated_anew_are_as_old_as_the_version_they_were_reopened_under():
    """Else ``drop`` would end them as overdue although no token of theirs is, and ``wait`` would wait for them."""
    knobs = Knobs(open_groups=None, concurrent_rollouts=8, steps_per_publish=1)
    state = RunState(clock=RealClock(), knobs=knobs, selectable=OpenGroups(2, 2, "drop"))
    group = Group(
        index=7, task=Task(task_id="t", prompt="p"), prompt_ids=(1,), size=4, admitted_version=9, admitted_s=0.0
    )
    state.open_group(RunningGroup(group=group, unfinished=4, oldest_version=11))
    assert state.selectable.unfinished([11]) == (7,)
    assert not state.selectable.select(13).overdue
    assert state.selectable.select(14).overdue == (7,)


def test_a_run_that_can_fill_no_batch_says_so_and_ends():
    with pytest.raises(NoProgress, match=r"ended untrained, the last one as filtered \(zero_variance\)"):
        run_of({"filter_zero_variance": True, "give_up_after_batches": 9}, reward=lambda task, response: 0.0)


def test_attempts_that_all_get_one_reward_are_said_with_it():
    queue = {"filter_zero_variance": True, "give_up_after_batches": 9}
    with pytest.raises(
        NoProgress, match=r"ended untrained.*the same reward, 0 \(no task was solved: .*#most-groups-are-filt"
    ):
        run_of(queue, reward=lambda task, response: 0.0)
    with pytest.raises(NoProgress, match=r"had no learning signal.*the same reward, 1 \(most tasks are solved already"):
        run_of(queue, reward=lambda task, response: 1.0)


@pytest.mark.parametrize("works", [0, 25])
def test_rollouts_that_nearly_all_fail_alike_end_the_run_early(works: int):
    calls = itertools.count(1)

    def reward(task: object, response: str) -> float:
        return float("nan") if not works or next(calls) % works else 1.0

    with pytest.raises(NoProgress, match=r"\d of the 64 rollouts of the last 16 groups failed with: the reward is nan"):
        run_of({"give_up_after_batches": 1000}, reward=reward)


def test_failures_of_a_process_that_made_no_step_are_counted():
    """Ten groups fail, then all is well; the process is killed before its first step."""
    calls = itertools.count()
    outcome = run_of(kills_s=(0.6,), reward=lambda task, response: float("nan") if next(calls) < 40 else 1.0)
    failed = outcome.endings["failed"]
    assert sum(sum(step.failures.values()) for step in outcome.steps) < failed
    for lines in (outcome.lines, [line for line in outcome.lines if line is not outcome.event("accounting")]):
        assert failures(lines) == {"reward": failed}
        assert endings(lines)["failed"] == failed


def test_a_verifier_that_always_fails_is_named():
    with pytest.raises(NoProgress, match=r"too_few_valid.*reward"):
        run_of({"give_up_after_batches": 3}, reward=lambda task, response: float("nan"))


def test_steps_skipped_for_ever_end_the_run():
    with pytest.raises(NoProgress, match="20 steps in a row were skipped, the last one because: told to skip"):
        run_of(skip_steps=frozenset(range(3, 1000)))


def dying(*methods: str):
    """The trainer dies at the first call of each of ``methods``."""

    def spoil(trainer: FakeTrainer) -> None:
        for name in methods:
            whole = getattr(trainer, name)

            async def call(*arguments: Any, name: str = name, whole: Any = whole) -> Any:
                setattr(trainer, name, whole)
                trainer.version = -1  # whatever it held is gone
                raise WorkerDied("trainer-0", f"killed in {name}")

            setattr(trainer, name, call)

    return spoil


@pytest.mark.parametrize("method", ["publish", "train_step", "begin_checkpoint", "save_weights", "load_weights"])
def test_a_trainer_that_dies_is_replaced_wherever_it_was(method):
    outcome = run_of(after=True, spoil=dying(method))
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(outcome.trained_groups) == 16
    if method != "load_weights":  # nothing was loaded: there was no better version than the last
        assert names(outcome).count("worker_died") == 1
        assert "trainer_restored" in names(outcome)


def test_steps_go_on_while_a_version_is_published():
    """Only its snapshot holds them up, where the budget lets them be formed."""
    events: list[str] = []

    def spoil(trainer: FakeTrainer) -> None:
        step, publish = trainer.train_step, trainer.publish

        async def stepping(batch: Any) -> Any:
            events.append(f"step {trainer.version}")
            return await step(batch)

        async def publishing(version: int) -> Any:
            events.append(f"publishing {version}")
            await trainer._clock.sleep(3.0)
            weights = await publish(version)
            events.append(f"published {version}")
            return weights

        trainer.train_step, trainer.publish = stepping, publishing  # type: ignore[method-assign]

    def beside(**queue: Any) -> int:
        events.clear()
        outcome = run_of(queue, spoil=spoil)
        assert len(outcome.trained_groups) == 16
        return sum(
            events[index].startswith("publishing") and following.startswith("step")
            for index, following in enumerate(events[1:])
        )

    assert beside(budget=2) > 0
    assert beside(budget=0) == 0


@pytest.mark.parametrize("budget", [0, 2])
def test_a_trainer_that_dies_while_it_publishes_loses_no_version(budget: int):
    """It dies at every publication that it began, beside the steps too; each version that was due is applied."""
    died: list[int] = []

    def spoil(trainer: FakeTrainer) -> None:
        publish, step = trainer.publish, trainer.train_step

        async def stepping(batch: Any) -> Any:
            lives = len(died)
            report = await step(batch)
            if len(died) > lives:  # meanwhile
                trainer.version = -1
                raise WorkerDied("trainer-0", "killed while it publishes")
            return report

        async def publishing(version: int) -> Any:
            if version and version not in died and trainer._begun == version:
                await trainer._clock.sleep(0.01)
                died.append(version)
                trainer.version, trainer._begun = -1, None
                raise WorkerDied("trainer-0", "killed while it publishes")
            return await publish(version)

        trainer.train_step, trainer.publish = stepping, publishing  # type: ignore[method-assign]

    outcome = run_of({"budget": budget}, spoil=spoil)
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(outcome.trained_groups) == 16
    assert len(died) >= 7
    assert names(outcome).count("worker_died") == names(outcome).count("trainer_restored") == len(died)
    assert set(died) <= set(outcome.trainer.published)


def test_the_last_version_is_published_before_it_is_judged():
    outcome = run_of(weights={"steps_per_publish": 3}, after=True)
    assert outcome.trainer.published[-1] == 8


def saving_slowly(events: list[str], saves_s: float = 3.0, dies_at: int = -1) -> Callable[[FakeTrainer], None]:
    """Records steps and checkpoints of a trainer whose checkpoints take ``saves_s``, and which dies in one of them."""

    died: list[int] = []

    def spoil(trainer: FakeTrainer) -> None:
        step, save = trainer.train_step, trainer.save_checkpoint

        async def stepping(batch: Any) -> Any:
            lives = len(died)
            events.append(f"step {trainer.version}")
            report = await step(batch)
            if len(died) > lives:  # meanwhile
                trainer.version = -1
                raise WorkerDied("trainer-0", "killed while it saves")
            return report

        async def saving(path: str, consumed: dict[int, list[int]], before_commit: Callable[[], None]) -> Any:
            version = trainer.version
            events.append(f"saving {version}")
            await trainer._clock.sleep(saves_s)
            if version == dies_at and not died:
                died.append(version)
                trainer.version, trainer._begun_checkpoint = -1, ("", CheckpointState(version=-1))
                raise WorkerDied("trainer-0", "killed while it saves")
            saved = await save(path, consumed, before_commit)
            events.append(f"saved {saved.version}")
            return saved

        trainer.train_step, trainer.save_checkpoint = stepping, saving  # type: ignore[method-assign]

    return spoil


def test_a_step_is_recorded_before_its_checkpoint_is_written():
    events: list[str] = []
    outcome = run_of(spoil=saving_slowly(events, 0.5))
    assert [event for event in events if event.startswith("sav")] == ["saving 5", "saved 5", "saving 8", "saved 8"]
    checkpoint = next(line for line in outcome.lines if isinstance(line, EventRecord) and line.event == "checkpoint")
    before = outcome.lines[: outcome.lines.index(checkpoint)]
    assert 5 in [step.version for step in outcome.steps if step in before]


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it():
    events: list[str] = []
    outcome = run_of(checkpoint_steps=1, spoil=saving_slowly(events, 1000.0))
    assert len(outcome.trained_groups) == 16
    for version in range(1, 7):
        saved = events.index(f"saved {version}")
        assert events.index(f"step {version}") < saved < events.index(f"step {version + 1}")
    assert outcome.event("accounting").data["balanced"] == 1


def test_payloads_stay_until_a_checkpoint_is_durable(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    release = GroupBuffer.release_covered

    def released(self: GroupBuffer, version: int) -> int:
        events.append(f"released {version}")
        return release(self, version)

    monkeypatch.setattr(GroupBuffer, "release_covered", released)
    run_of(checkpoint_steps=2, spoil=saving_slowly(events, 30.0))
    assert "released 2" in events
    for index, event in enumerate(events):
        if event.startswith("released"):
            assert events[index - 1].startswith("saved"), event
            assert f"saved {event.split()[1]}" in events[:index]


@pytest.mark.parametrize("dies_at", [2, 4, 8])
def test_a_trainer_that_dies_while_it_saves_leaves_the_checkpoint_before(dies_at: int):
    events: list[str] = []
    outcome = run_of(checkpoint_steps=2, spoil=saving_slowly(events, dies_at=dies_at))
    assert outcome.event("accounting").data["balanced"] == 1
    assert len(outcome.trained_groups) == 16
    assert names(outcome).count("worker_died") == names(outcome).count("trainer_restored") == 1
    assert f"saved {dies_at}" not in events or dies_at == 8, "it was due, and the next one is at another version"
    loaded = outcome.event("trainer_restored").data["replayed"]
    assert loaded >= {2: 2, 4: 2, 8: 2}[dies_at], "from the checkpoint before"


def test_a_checkpoint_whose_epoch_is_lost_while_it_is_written_is_none(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []

    def lost(self: GroupBuffer) -> None:
        if "saving 2" in events and len(events) > events.index("saving 2") + 1:
            raise EpochLost("another orchestrator has the run")

    monkeypatch.setattr(GroupBuffer, "make_durable", lost)
    with pytest.raises(EpochLost):
        run_of(checkpoint_steps=2, spoil=saving_slowly(events, 30.0))
    assert "saved 2" not in events


def test_a_trainers_death_and_replay_say_who_why_and_what_it_cost():
    outcome = run_of(after=True, spoil=dying("train_step"), checkpoint_steps=100)
    died, restored = outcome.event("worker_died"), outcome.event("trainer_restored")
    assert died.detail == "trainer-0: killed in train_step"
    assert (died.worker, died.cause, died.found_by) == ("trainer-0", "killed in train_step", "exit")
    assert restored.worker == "trainer"
    assert restored.lost_samples == 8 * int(restored.data["replayed"])


def test_fruitless_groups_are_said_once_at_each_size():
    """Groups of task 3 alone are accepted: every stretch between two of them is fruitless."""
    outcome = run_of(
        {"filter_zero_variance": True, "give_up_after_batches": 1000},
        reward=lambda task, response: float(int(task.task_id) % 10 == 3 and int(response) % 2),
    )
    said = [event.data["groups"] for event in outcome.lines if getattr(event, "event", "") == "no_progress"]
    assert said
    assert len(said) == len(set(said))


@pytest.mark.parametrize("after", [True, False])
def test_without_validation_tasks_there_is_no_best_version(after: bool):
    outcome = run_of(after=after)
    assert "best" not in names(outcome)
    kept = outcome.event("last_kept")
    assert kept.detail == "best/ has version 8: none was evaluated on validation tasks"
    assert summarise(outcome.lines).best_version is None
