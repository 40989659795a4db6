"""The rules of early pruning, and the figures that the ledger has of it."""

from __future__ import annotations

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithms.groups.outcome import GroupOutcome, group_outcome
from headway.config.schema import QueueConfig
from headway.control.length_bias import LengthBias
from headway.control.lengths import length_distribution
from headway.control.pruning.repetition import NgramWindow, loop_period
from headway.control.pruning.rules import (
    agreement,
    chance_to_end,
    due_in_s,
    expected_saving_tokens,
    is_audited,
    pruner_figures,
    relative_cap_tokens,
    rewards_agree,
    solve_probability,
)
from headway.records.ledger import PrunerFigures
from headway.records.rollout import Failure, FinishedGroup, Group, Pruned, Rollout
from headway.records.task import Task

# --- the audit's draw ------------------------------------------------------------------------------------


def test_the_audit_takes_its_share_and_no_other_with_a_larger_one() -> None:
    keys = [(group, member) for group in range(500) for member in range(8)]
    small = {key for key in keys if is_audited(3, *key, 0.05)}
    assert 0.04 < len(small) / len(keys) < 0.06
    assert small < {key for key in keys if is_audited(3, *key, 0.3)}
    assert small != {key for key in keys if is_audited(4, *key, 0.05)}
    assert not any(is_audited(3, *key, 0.0) for key in keys)
    whole = {group for group in range(500) if is_audited(3, group, None, 0.3)}
    assert 0.22 < len(whole) / 500 < 0.38
    assert whole != {group for group in range(500) if is_audited(3, group, 0, 0.3)}


# --- caps ------------------------------------------------------------------------------------------------


def test_a_relative_cap_waits_for_siblings() -> None:
    rule = {"times_median": 3.0, "least_finished": 2, "least_tokens": 20}
    assert relative_cap_tokens([], **rule) is None
    assert relative_cap_tokens([50], **rule) is None
    assert relative_cap_tokens([10, 30], **rule) == 60
    assert relative_cap_tokens([1, 2, 3], **rule) == 20


@given(st.lists(st.integers(1, 1000), min_size=2), st.floats(1.01, 10))
def test_a_relative_cap_spares_at_least_half_of_those_it_is_made_of(lengths: list[int], times: float) -> None:
    cap = relative_cap_tokens(lengths, times_median=times, least_finished=2, least_tokens=1)
    assert cap is not None
    assert sum(length <= cap for length in lengths) * 2 >= len(lengths)


def test_when_a_group_is_due() -> None:
    rule = {"first_version": 3, "budget": 2, "step_s": 10.0}
    assert due_in_s(version=4, since_step_s=1.0, slack_steps=1.0, **rule) == 19.0
    assert due_in_s(version=5, since_step_s=4.0, slack_steps=0.0, **rule) == -4.0
    assert due_in_s(version=9, since_step_s=0.0, slack_steps=1.0, **rule) == 10.0  # the trainer waits for it already


def test_the_chance_to_end_in_time() -> None:
    lengths = length_distribution([(10, True), (20, True), (40, True), (80, True)], 100)
    assert chance_to_end(lengths, 5, 10) == pytest.approx(1 / 4)
    assert chance_to_end(lengths, 25, 20) == pytest.approx(1 / 2)
    assert chance_to_end(lengths, 45, 30) == 0.0
    assert chance_to_end(lengths, 45, 60) == 1.0  # the limit ends everything
    assert chance_to_end(lengths, 90, 1) == 1.0  # nothing as long was seen: no reason to stop it
    assert chance_to_end(lengths, 90, 0) == chance_to_end(lengths, 5, -3.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1), st.integers(0, 80), st.floats(0.1, 100))
def test_the_chance_to_end_grows_with_time(seen: list[tuple[int, bool]], tokens: int, more: float) -> None:
    lengths = length_distribution(seen, 70)
    chance = chance_to_end(lengths, tokens, more)
    assert -1e-12 <= chance <= chance_to_end(lengths, tokens, more + 5) + 1e-12 <= 1 + 2e-12


# --- lengths that are still to come ----------------------------------------------------------------------


def test_what_remains_is_the_sample_beyond() -> None:
    sample = [3, 7, 7, 12, 40]
    lengths = length_distribution([(length, True) for length in sample], 64)
    for tokens in (0, 2, 3, 7, 11, 12, 39):
        longer = [length - tokens for length in sample if length > tokens]
        assert lengths.mean_remaining_tokens(tokens) == pytest.approx(sum(longer) / len(longer))
        assert lengths.beyond(tokens) == pytest.approx(len(longer) / len(sample))
    assert lengths.mean_remaining_tokens(40) == 0.0  # nothing is known of longer ones
    assert lengths.mean_remaining_tokens(0) == pytest.approx(lengths.mean_tokens)


def test_what_remains_without_anything_seen_is_the_limit() -> None:
    nothing = length_distribution([], 100)
    assert (nothing.beyond(99), nothing.beyond(100)) == (1.0, 0.0)
    assert nothing.mean_remaining_tokens(30) == 70


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1), st.integers(0, 69))
def test_what_remains_fits_the_limit(seen: list[tuple[int, bool]], tokens: int) -> None:
    lengths = length_distribution(seen, 70)
    assert 0 <= lengths.mean_remaining_tokens(tokens) <= 70 - tokens + 1e-9
    assert 0 <= lengths.beyond(tokens + 1) <= lengths.beyond(tokens) <= 1
    assert lengths.mean_remaining_tokens(0) == pytest.approx(lengths.mean_tokens)


def test_what_is_saved_is_what_audits_of_the_same_pruner_went_on_for() -> None:
    short = length_distribution([(10, True), (20, True), (30, True)], 500)
    assert expected_saving_tokens(short, 15, []) == short.mean_remaining_tokens(15) == 10
    assert expected_saving_tokens(short, 15, [400]) == 205
    assert expected_saving_tokens(short, 15, [400] * 64) == pytest.approx(394)


# --- repetition ------------------------------------------------------------------------------------------

LOOP = {"longest_period": 8, "repeats": 3, "loop_tokens": 12}


def brute_force_period(ids: list[int], longest_period: int, repeats: int, loop_tokens: int) -> int | None:
    for period in range(1, longest_period + 1):
        span = max(period * repeats, loop_tokens)
        if span <= len(ids) and span > period:
            tail = ids[-span:]
            if all(tail[i] == tail[i - period] for i in range(period, span)):
                return period
    return None


@given(st.lists(st.integers(0, 2), max_size=40))
def test_loops_are_found_as_defined(ids: list[int]) -> None:
    assert loop_period(ids, **LOOP) == brute_force_period(ids, **LOOP)
    assert loop_period(tuple(ids), **LOOP) == loop_period(ids, **LOOP)


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_loop_is_found_whatever_stands_before(before: list[int], period: list[int]) -> None:
    loop = period * max(3, -(-12 // len(period)))
    found = loop_period([*before, *loop], **LOOP)
    assert found is not None
    assert found <= len(period)


@given(st.lists(st.integers(0, 5), max_size=11))
def test_short_text_is_no_loop(ids: list[int]) -> None:
    assert loop_period(ids, **LOOP) is None


def test_a_loop_needs_its_repeats_and_its_tokens() -> None:
    seven = list(range(7))
    assert loop_period(seven * 2, **LOOP) is None  # 14 tokens, twice
    assert loop_period(seven * 3, **LOOP) == 7
    assert loop_period([5, *[1, 2] * 5], **LOOP) is None  # five times, 10 tokens
    assert loop_period([5, *[1, 2] * 6], **LOOP) == 2
    assert loop_period([*[1, 2] * 6, 3], **LOOP) is None  # it got out again
    assert loop_period(list(range(9)) * 5, **LOOP) is None  # longer than longest_period


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 15), max_size=20))
def test_the_window_counts_as_defined_however_the_tokens_come(ids: list[int], sizes: list[int]) -> None:
    window, size, ngram = NgramWindow(12, 3), 12, 3
    end = 0
    for step in [*sizes, len(ids)]:
        end = min(len(ids), end + step)
        window.extend(ids[:end])
        tail = ids[max(0, end - size) : end]
        runs = [tuple(tail[i : i + ngram]) for i in range(len(tail) - ngram + 1)]
        expected = 1 - len(set(runs)) / len(runs) if len(tail) == size else 0.0
        assert window.repeated_share == pytest.approx(expected)


def test_text_that_varies_raises_no_alarm_and_text_that_does_not_does() -> None:
    draw = random.Random(5)
    # a sum written out: the same few signs and phrases again and again, with other numbers
    sums = [token for _ in range(80) for token in (50, 51, draw.randrange(40), 52, draw.randrange(40), 53)]
    window = NgramWindow(256, 4)
    window.extend(sums)
    assert window.repeated_share < 0.5
    phrase = [draw.randrange(100) for _ in range(12)]
    circles = [token for _ in range(40) for token in (*phrase, draw.randrange(3))]  # no exact loop
    stuck = NgramWindow(256, 4)
    stuck.extend(circles)
    assert stuck.repeated_share > 0.8
    assert loop_period(circles, longest_period=64, repeats=4, loop_tokens=64) is None


# --- values and groups -----------------------------------------------------------------------------------


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 8))
def test_agreement_is_the_posterior_of_the_rest(agreeing: int, rest: int, twice_prior: int) -> None:
    """E[p^rest] under Beta(prior + agreeing, prior), by the moments of the Beta distribution."""
    prior = Fraction(twice_prior, 2)
    moment = Fraction(1)
    for i in range(rest):
        moment *= (prior + agreeing + i) / (2 * prior + agreeing + i)
    found = agreement(agreeing, rest, float(prior))
    assert found == pytest.approx(float(moment))
    assert agreement(agreeing + 1, rest, float(prior)) >= found >= agreement(agreeing, rest + 1, float(prior))


def test_agreement_is_calibrated() -> None:
    """Groups whose solve rate is drawn from the prior: of those whose first six agree, the last two do as often as it
    says."""
    draw = random.Random(11)
    agreed = same = 0
    for _ in range(40_000):
        rate = draw.betavariate(0.5, 0.5)
        members = [draw.random() < rate for _ in range(8)]
        if len(set(members[:6])) == 1:
            agreed += 1
            same += len(set(members)) == 1
    assert agreement(6, 2, 0.5) == pytest.approx(6.5 / 7 * 7.5 / 8)
    assert same / agreed == pytest.approx(agreement(6, 2, 0.5), abs=0.012)


def test_the_rest_of_nothing_agrees() -> None:
    assert agreement(3, 0, 0.5) == 1.0
    assert rewards_agree([])
    assert rewards_agree([0.3, 0.1 + 0.2])
    assert not rewards_agree([0.0, 0.1])


def test_a_solve_rate_with_a_prior() -> None:
    assert solve_probability(0, 0, 0.5) == 0.5
    assert solve_probability(0, 9, 0.5) == pytest.approx(0.05)
    assert solve_probability(4, 4, 1.0) == pytest.approx(5 / 6)


# --- figures ---------------------------------------------------------------------------------------------


def rollout(member: int, reward: float, pruned: Pruned | None = None, *, left: bool = False) -> Rollout:
    return Rollout(
        group=0, member=member, prompt_ids=(1,), reward=reward, solved=reward >= 1, pruned=pruned,
        removal="pruned" if left else None, removal_reason="x" if left else "", response_ids=(5, 5, 5),
    )  # fmt: skip


def hit(pruner: str, **fields: float | bool | None) -> Pruned:
    return msgspec.convert({"pruner": pruner, "reason": "w", "at_tokens": 1, **fields}, Pruned)


def group_of(*rollouts: Rollout) -> FinishedGroup:
    task = Task(task_id="0", prompt="p")
    group = Group(index=0, task=task, prompt_ids=(1,), size=len(rollouts), admitted_version=0, admitted_s=0.0)
    return FinishedGroup(group=group, rollouts=rollouts)


def test_figures_by_hand() -> None:
    scored = group_of(
        rollout(0, 0.0, hit("length", saved_tokens=30.0)),
        rollout(1, 1.0, hit("length", audited=True, cut_reward=0.0)),  # wrong: it would have lost its reward
        rollout(2, 0.0, hit("length", audited=True, cut_reward=0.0)),
        rollout(3, 1.0),
    )
    dropped = group_of(
        rollout(0, 0.0, hit("value", saved_tokens=12.5), left=True),
        rollout(1, 1.0, hit("value", audited=True)),  # wrong: solved; the others have 0.0 and 0.5
        rollout(2, 0.0),
        rollout(3, 0.5),
    )
    found = pruner_figures([scored, dropped])
    assert found == {
        "length": PrunerFigures(rollouts=1, saved_tokens=30.0, audits=2, audited_tokens=4, wrong=1, reward_bias=0.5),
        "value": PrunerFigures(
            rollouts=1, dropped=1, saved_tokens=12.5, audits=1, audited_tokens=2, wrong=1, reward_bias=0.75
        ),
    }
    assert found["length"].wrong_rate == 0.5
    assert found["length"].saving_tokens == pytest.approx((30 + 2 + 2) / 3)
    total = PrunerFigures.total(found.values())
    assert (total.rollouts, total.dropped, total.saved_tokens, total.audits) == (2, 1, 42.5, 3)
    assert total.reward_bias == pytest.approx((0.0 + 1.0 + 0.75) / 3)
    assert PrunerFigures.total([]) == PrunerFigures()


def test_a_group_of_which_nobody_agrees_with_the_decision() -> None:
    """An audited decision on a whole group: those who were to go on to the common reward 0, and one didn't."""
    audited = hit("group", audited=True, cut_reward=0.0)
    members = [rollout(i, reward, audited) for i, reward in enumerate((0.0, 1.0, 0.0))]
    found = pruner_figures([group_of(rollout(3, 0.0), *members)])
    assert found == {"group": PrunerFigures(audits=3, audited_tokens=6, wrong=1, reward_bias=1 / 3)}


def test_an_audit_that_failed_says_nothing() -> None:
    failure = Failure(boundary="reward", cause="c", infrastructure=False)
    failed = msgspec.structs.replace(rollout(0, 0.0, hit("value", audited=True)), failure=failure)
    alone = rollout(0, 1.0, hit("value", audited=True))
    assert pruner_figures([group_of(failed, rollout(1, 1.0)), group_of(alone)]) == {}


# --- what it means for a group and for the length bias ---------------------------------------------------


def outcome_of(*rollouts: Rollout) -> GroupOutcome:
    return group_outcome(rollouts, size=len(rollouts), limits=QueueConfig())


def test_a_group_ends_as_pruned_where_pruning_took_too_many() -> None:
    failure = Failure(boundary="reward", cause="c", infrastructure=False)
    gone = [rollout(i, 0.0, hit("value"), left=True) for i in range(4)]
    failed = [msgspec.structs.replace(rollout(i, 0.0), failure=failure) for i in range(4)]
    assert outcome_of(rollout(0, 0.0), rollout(1, 1.0), *gone[2:]).ending is None
    assert outcome_of(rollout(0, 1.0), *gone[1:]) == GroupOutcome(ending="pruned", reason="too_few_valid", valid=1)
    assert outcome_of(rollout(0, 1.0), gone[1], *failed[2:]).ending == "pruned"  # two would be enough
    assert outcome_of(gone[0], *failed[1:]).ending == "failed"
    assert outcome_of(rollout(0, 1.0), rollout(1, 1.0), *gone[2:]).reason == "zero_variance"
    assert outcome_of(rollout(0, 1.0), rollout(1, 1.0), rollout(2, 1.0), gone[3]).ending == "filtered"  # its 0.0 left


def test_a_rollout_trained_as_it_was_cut_is_not_as_long_as_it_would_have_been() -> None:
    bias = LengthBias(groups_per_step=1)
    bias.admit(0, 4)
    for length in (3, 5):
        bias.end(0, "trained", length, complete=True)
    for length in (8, 8):
        bias.end(0, "trained", length, complete=False)
    found = bias.statistics()
    assert found.pruning_ks == 0.5  # without them, all are at most 5 tokens long; with them, half
    assert (found.ks, found.scheduling_ks, found.filter_ks, found.cut_share) == (0.0, 0.0, 0.0, 0.5)
