"""Rollouts that end early, in whole runs under the virtual clock: the real loops, rules and buffer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway.generator.fake_replica as fake
from headway.config import pruning as rules
from headway.control.pruning.rules import is_audited
from headway.records.errors import NoProgress
from headway.records.ledger import EventRecord, PrunerFigures
from headway.records.rollout import Rollout
from headway.records.task import Task
from headway.trainer.fake import FakeTrainer
from tests.support.simulated_run import Outcome, experiment_of, simulate

LONGEST = 200
STEPS, GROUPS, SIZE = 8, 2, 4


def tail(request: Any) -> int:
    """Median 30 tokens, a tenth of them beyond 100."""
    return max(1, int(random.Random(request.sampling.seed).lognormvariate(3.4, 0.95)))


CONSTANTS = {  # of headway/config/pruning.py, that a test sets to provoke what it looks at
    "least_tokens": "LEAST_TOKENS",
    "slack_steps": "SLACK_STEPS",
    "longest_period": "LONGEST_PERIOD",
    "loop_tokens": "LOOP_TOKENS",
    "ngram": "NGRAM",
    "window_tokens": "WINDOW_TOKENS",
    "every_tokens": "VERIFIED_EVERY_TOKENS",
    "least_finished": "LEAST_AGREEING",
}


def split(pruning: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the section, constants) of pruners by kind, each with keys and constants."""
    constants = {"EVERY_TOKENS": pruning.get("every_tokens", rules.EVERY_TOKENS)}
    pruners: list[dict[str, Any]] = []
    for kind, keys in pruning.items():
        if isinstance(keys, dict):
            constants |= {CONSTANTS[key]: value for key, value in keys.items() if key in CONSTANTS}
            pruners.append({"kind": kind} | {key: value for key, value in keys.items() if key not in CONSTANTS})
    shares = {"audit_share": pruning["audit_share"]} if "audit_share" in pruning else {}
    return {**shares, "pruners": pruners}, constants


def run_of(
    pruning: dict[str, Any],
    *,
    queue: dict[str, Any] | None = None,
    length_of: Any = tail,
    steps: int = STEPS,
    **options: Any,
) -> tuple[Outcome, list[Any]]:
    """The run, and every batch that a trainer of it was given, by step."""
    batches: list[Any] = []
    section, constants = split(pruning)
    with patch.multiple(rules, **constants):
        return _run_of(section, batches, queue, length_of, steps, **options), batches


def _run_of(
    section: dict[str, Any],
    batches: list[Any],
    queue: dict[str, Any] | None,
    length_of: Any,
    steps: int,
    **options: Any,
) -> Outcome:
    experiment = experiment_of(
        Path("unused"),
        run={"steps": steps},
        rollout={"group_size": SIZE, "max_response_tokens": LONGEST},
        queue={"groups_per_step": GROUPS, "budget": 3, "filter_zero_variance": False} | (queue or {}),
        generator={"slots": 16} | options.pop("generator", {}),
        pruning=section,
    )

    def spoil(trainer: FakeTrainer) -> None:
        trainer.batches = batches

    return simulate(experiment, spoil=spoil, generator_options={"length_of": length_of}, **options)


def rollouts_of(batches: list[Any]) -> list[Rollout]:
    return [sample.rollout for batch in batches for sample in batch.samples]


def figures_of(outcome: Outcome) -> dict[str, PrunerFigures]:
    names = {name for step in outcome.steps for name in step.pruning}
    return {
        name: PrunerFigures.total(step.pruning[name] for step in outcome.steps if name in step.pruning)
        for name in names
    }


def ended_tokens(outcome: Outcome) -> int:
    return sum(sum(step.tokens.ended.values()) for step in outcome.steps)


def whole(outcome: Outcome) -> None:
    """Books balance, and what was trained was trained once."""
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []
    assert len(outcome.trained_groups) == len(set(outcome.trained_groups)) == STEPS * GROUPS


def long_is_wrong(task: Task, response: str) -> float:
    return float(int(response) < 40 and int(response) % 2)


def test_a_cap_scores_what_stands_and_trains_it() -> None:
    outcome, batches = run_of({"length": {"tokens": 40}, "every_tokens": 8, "audit_share": 0.0}, reward=long_is_wrong)
    whole(outcome)
    rollouts = rollouts_of(batches)
    pruned = [r for r in rollouts if r.pruned is not None]
    assert outcome.endings == {"trained": len(rollouts)}
    assert max(len(r.response_ids) for r in rollouts) == 40  # looked at after 8, 16 ... 40 tokens
    assert {r.finish_reason for r in pruned} == {"abort"}
    assert all(len(r.response_ids) == 40 and r.response_ids[-1] != 1 and not r.truncated for r in pruned)
    assert all(len(r.response_mask) == 40 and all(r.response_mask) and r.reward == 0 and r.valid for r in pruned)
    assert all(r.pruned is not None and r.pruned.reason == "40 tokens, capped at 40" for r in pruned)
    found = figures_of(outcome)["length"]
    assert found.rollouts > 10
    assert (found.dropped, found.audits) == (0, 0)
    assert found.saved_tokens > 10 * found.rollouts  # the tail beyond 40 tokens is long
    # it is trained, but not in its length
    assert outcome.steps[-1].length_bias.ks == 0.0
    assert outcome.steps[-1].length_bias.pruning_ks > 0.1
    assert outcome.steps[-1].length_bias.scheduling_ks == 0.0


def test_what_is_saved_is_what_would_have_come() -> None:
    """Every length is known to the test, so the estimate can be compared with the truth."""
    synchronous: dict[str, Any] = {"reward": long_is_wrong, "queue": {"budget": 0}, "steps": 60}
    unpruned, _ = run_of({}, **synchronous)
    pruned, batches = run_of({"length": {"tokens": 40}, "audit_share": 0.2, "every_tokens": 1}, **synchronous)
    saved = ended_tokens(unpruned) - ended_tokens(pruned)
    found = figures_of(pruned)["length"]
    assert found.audits > 0
    assert saved > 0
    assert found.saved_tokens == pytest.approx(saved, rel=0.15)  # though most lengths beyond 40 were never seen
    audited = [r for r in rollouts_of(batches) if r.pruned is not None and r.pruned.audited]
    assert len(audited) == found.audits
    assert all(r.pruned is not None and r.pruned.saved_tokens == 0 and len(r.response_ids) > 40 for r in audited)


def test_the_audit_says_who_was_wrong() -> None:
    """Everything that comes to 40 tokens is solved in the end, and not when it is cut there."""
    outcome, batches = run_of(
        {"length": {"tokens": 40}, "every_tokens": 8, "audit_share": 0.5}, reward=lambda t, r: float(int(r) > 40)
    )
    whole(outcome)
    found = figures_of(outcome)["length"]
    assert found.audits > 5
    assert found.wrong_rate == pytest.approx(1.0, abs=0.2)  # a response may end at 40 tokens itself
    assert found.reward_bias == pytest.approx(found.wrong_rate)
    for r in rollouts_of(batches):
        if r.pruned is not None:
            assert r.pruned.audited == is_audited(0, r.group, r.member, 0.5)
            assert r.pruned.cut_reward == (0.0 if r.pruned.audited else None)


def test_a_dropped_member_leaves_and_its_group_goes_on() -> None:
    outcome, batches = run_of(
        {"length": {"tokens": 60, "mode": "drop"}, "every_tokens": 4, "audit_share": 0.0}, reward=long_is_wrong
    )
    whole(outcome)
    rollouts = rollouts_of(batches)
    assert not any(r.pruned for r in rollouts)
    assert len(rollouts) < SIZE * GROUPS * STEPS
    found = figures_of(outcome)["length"]
    assert found.dropped == found.rollouts > 0
    assert outcome.endings["pruned"] >= found.dropped
    assert outcome.endings["trained"] == len(rollouts)
    assert outcome.steps[-1].length_bias.pruning_ks > 0


def test_a_group_of_which_too_few_are_left_ends_as_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.orchestrator.collect_loop.GIVE_UP_AFTER_BATCHES", 2)
    with pytest.raises(NoProgress, match=r"ended untrained, the last one as pruned \(too_few_valid\)"):
        run_of(
            {"length": {"tokens": 1, "mode": "drop"}, "every_tokens": 1, "audit_share": 0.0},
        )


def test_the_rest_of_a_decided_group_is_dropped() -> None:
    verified: list[str] = []

    def none_solved(task: Task, response: str) -> float:
        verified.append(response)
        return 0.0

    outcome, batches = run_of(
        {"group": {"confidence": 0.6, "least_finished": 2}, "audit_share": 0.0},
        reward=none_solved,
        queue={"budget": 0},  # no group is generated in vain
    )
    whole(outcome)
    assert len(verified) == len(rollouts_of(batches))  # once each, and nobody who left
    found = figures_of(outcome)["group"]
    # 2.5/3 x 3.5/4 = 0.73: two that agree decide over the other two
    assert found.rollouts == found.dropped == outcome.endings["pruned"]
    assert found.saved_tokens > 0
    assert {len(batch.samples) for batch in batches} == {SIZE}  # two of each group
    assert all(r.reward == 0 and r.pruned is None for r in rollouts_of(batches))


def test_a_group_that_differs_is_left_alone() -> None:
    outcome, batches = run_of({"group": {"confidence": 0.6, "least_finished": 2}, "audit_share": 0.0})
    whole(outcome)
    for batch in batches:
        for group in {s.rollout.group for s in batch.samples}:
            members = [s.rollout for s in batch.samples if s.rollout.group == group]
            if len(members) < SIZE:
                assert len({r.reward for r in members}) == 1


def test_the_audit_of_a_decided_group_is_of_all_the_rest() -> None:
    outcome, batches = run_of(
        {"group": {"confidence": 0.6, "least_finished": 2}, "audit_share": 0.5}, reward=lambda t, r: float(int(r) > 60)
    )
    whole(outcome)
    found = figures_of(outcome)["group"]
    assert found.audits > 0
    assert found.wrong > 0  # the short ones finish first, unsolved
    assert found.reward_bias == pytest.approx(found.wrong_rate)
    groups: dict[int, list[Rollout]] = {}
    for r in rollouts_of(batches):
        groups.setdefault(r.group, []).append(r)
    for index, members in groups.items():
        hit = [r for r in members if r.pruned is not None]
        assert len(members) in (SIZE, 2)
        assert all(r.pruned is not None and r.pruned.audited and r.pruned.cut_reward == 0.0 for r in hit)
        assert not hit or is_audited(0, index, None, 0.5)
        assert not (len(members) == 2 and is_audited(0, index, None, 0.5))


def test_a_cap_that_follows_the_group() -> None:
    lengths = {0: 10, 1: 12, 2: 14, 3: 150}  # tokens by member

    def length_of(request: Any) -> int:
        return lengths[int(request.request_id.split("-")[1].split(".")[0])]

    outcome, batches = run_of(
        {"relative_length": {"times_median": 3.0, "least_tokens": 20}, "every_tokens": 2, "audit_share": 0.0},
        length_of=length_of,
    )
    whole(outcome)
    pruned = [r for r in rollouts_of(batches) if r.pruned is not None]
    assert [r.member for r in pruned] == [3] * (STEPS * GROUPS)
    assert {len(r.response_ids) for r in pruned} == {36}
    assert pruned[0].pruned is not None
    assert pruned[0].pruned.reason == "36 tokens, capped at 36: 3 x the median of 3 siblings"


def test_who_cannot_end_before_the_group_is_due_is_stopped() -> None:
    """One member in four takes 180 tokens, 1.8 s; a step takes 0.3 s and its group is due after two."""

    def length_of(request: Any) -> int:
        return 180 if request.request_id.split("-")[1].startswith("3") and request.priority > 12 else 20

    queue = {"budget": 1}
    outcome, batches = run_of(
        {"budget": {"least_tokens": 30, "slack_steps": 0.5}, "every_tokens": 5, "audit_share": 0.0},
        queue=queue,
        sample_s=0.04,
        length_of=length_of,
    )
    whole(outcome)
    pruned = [r for r in rollouts_of(batches) if r.pruned is not None]
    assert pruned
    assert all(r.member == 3 and 30 <= len(r.response_ids) < 150 for r in pruned)
    waited, _ = run_of({}, queue=queue, sample_s=0.04, length_of=length_of)
    assert outcome.duration_s < waited.duration_s


def circles(monkeypatch: pytest.MonkeyPatch, members: tuple[int, ...], period: int) -> None:
    """Responses go round in circles from token 30 on where the seed says so."""
    tokens = fake.tokens_from

    def looping(seed: int, first: int, count: int) -> tuple[int, ...]:
        plain = tokens(seed, first, count)
        if seed % 4 not in members:
            return plain
        return tuple(900 + at % period if at >= 30 else plain[at - first] for at in range(first, first + count))

    monkeypatch.setattr(fake, "tokens_from", looping)


def test_a_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    circles(monkeypatch, (1, 3), 7)
    rule = {"longest_period": 16, "repeats": 3, "loop_tokens": 24, "window_tokens": 64, "ngram": 3}
    outcome, batches = run_of({"repetition": rule, "every_tokens": 4, "audit_share": 0.0})
    whole(outcome)
    rollouts = rollouts_of(batches)
    pruned = [r for r in rollouts if r.pruned is not None]
    assert len(pruned) > 5
    assert {r.pruned.reason for r in pruned if r.pruned is not None} == {"a loop of 7 tokens"}
    assert all(54 <= len(r.response_ids) <= 57 and r.response_ids[-1] >= 900 for r in pruned)
    assert all(len(r.response_ids) < 58 for r in rollouts if max(r.response_ids) >= 900)


Judge = Callable[[Task, str], object]


def judged_by(judge: Judge) -> Judge:
    def reward(task: Task, response: str) -> object:
        return judge(task, response) if task.verifier == "numeric" else int(response) % 2

    return reward


def test_a_verifier_of_half_a_response() -> None:
    outcome, batches = run_of(
        {"verifier": {"verifier": "numeric", "every_tokens": 10}, "every_tokens": 5, "audit_share": 0.0},
        reward=judged_by(lambda task, response: {"reward": 0.0 if int(response) >= 50 else 1.0}),
        verify_s=0.001,
    )
    whole(outcome)
    found = figures_of(outcome)["verifier"]
    assert found.dropped == found.rollouts > 5
    assert max(len(r.response_ids) for r in rollouts_of(batches)) < 60


def test_a_slow_judge_holds_up_nothing_and_comes_too_late() -> None:
    options = {"verify_s": 0.0}
    plain, _ = run_of({}, **options)
    slow: dict[str, Any] = {"verify_s": lambda task, response: 60.0 if task.verifier else 0.0}
    outcome, batches = run_of(
        {"value": {"verifier": "numeric", "every_tokens": 16}, "audit_share": 0.0},
        reward=judged_by(lambda t, r: 0.0),
        **slow,
    )
    whole(outcome)
    assert all(r.pruned is None for r in rollouts_of(batches))
    assert plain.duration_s <= outcome.duration_s < 60 * 40  # rewards queue behind it: one worker


@pytest.mark.parametrize(
    ("judge", "cause"),
    [
        (lambda task, response: float("nan"), "the reward is nan"),
        (lambda task, response: 3.0, "it returned 3, not a probability"),
        (lambda task, response: "yes", "the verifier returned 'yes'"),
    ],
)
def test_a_judge_that_fails_is_recorded_once_and_prunes_nothing(judge: Judge, cause: str) -> None:
    outcome, batches = run_of(
        {"value": {"verifier": "numeric", "every_tokens": 16}}, reward=judged_by(judge), verify_s=0.0
    )
    whole(outcome)
    events = [line for line in outcome.lines if isinstance(line, EventRecord) and line.event == "pruner_failed"]
    assert len(events) == 1
    assert events[0].detail.startswith(f"pruning.pruners: value: {cause}")
    assert all(r.pruned is None for r in rollouts_of(batches))


def test_a_value_from_the_siblings() -> None:
    outcome, batches = run_of(
        {"value": {"below": 0.2, "mode": "score"}, "every_tokens": 4, "audit_share": 0.0}, reward=lambda t, r: 0.0
    )
    whole(outcome)
    pruned = [r for r in rollouts_of(batches) if r.pruned is not None]
    assert pruned  # 0.5 / 3 after two unsolved siblings
    assert all(r.pruned and re.search("of 2 siblings|of 3", r.pruned.reason) for r in pruned)
    assert {r.member for r in pruned} <= set(range(SIZE))


EVERYTHING = {
    "every_tokens": 4,
    "audit_share": 0.2,
    "length": {"tokens": 90},
    "relative_length": {"times_median": 2.5, "least_tokens": 16},
    "budget": {"least_tokens": 16},
    "repetition": {"loop_tokens": 24, "window_tokens": 48},
    "value": {"below": 0.3, "every_tokens": 8},
    "verifier": {"verifier": "numeric", "every_tokens": 12, "mode": "score"},
    "group": {"confidence": 0.6, "least_finished": 2},
}


@pytest.mark.slow
@given(
    st.integers(0, 1000),
    st.lists(st.floats(0.1, 3.0), max_size=2),
    st.sampled_from(["wait", "drop", "mask"]),
    st.sampled_from([0.001, 0.05]),
    st.sampled_from(["keep", "recompute", "abort"]),
)
@settings(deadline=None, max_examples=12)
def test_books_balance_and_replays_are_equal_whatever_prunes(seed, kills_s, overdue, sample_s, update_mode) -> None:
    def some_fail(task: Task, response: str) -> float:
        return float("nan") if int(response) % 7 == 0 else float(int(response) % 3 == 0)

    outcome, _ = run_of(
        EVERYTHING,
        queue={"overdue": overdue, "filter_zero_variance": True, "min_valid_group_ratio": 0.25},
        generator={"update_mode": update_mode},
        seed=seed,
        reward=some_fail,
        kills_s=tuple(kills_s),
        sample_s=sample_s,
    )
    whole(outcome)
    if overdue != "mask":
        assert max(step.trajectory_staleness.max for step in outcome.steps) <= 3


def test_a_killed_run_trains_the_same_batches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches after a kill, replayed from the log, have the very rollouts that were trained before it."""
    trained: dict[int, Any] = {}
    again = 0
    train_step = FakeTrainer.train_step

    async def remember(self: FakeTrainer, batch: Any) -> Any:
        nonlocal again
        if batch.step in trained:
            again += 1
            assert trained[batch.step] == batch
        report = await train_step(self, batch)
        trained[batch.step] = batch
        return report

    monkeypatch.setattr(FakeTrainer, "train_step", remember)
    outcome, _ = run_of(EVERYTHING, kills_s=(1.0,), queue={"min_valid_group_ratio": 0.25})
    whole(outcome)
    assert again > 0
    assert any(s.rollout.pruned for batch in trained.values() for s in batch.samples)
