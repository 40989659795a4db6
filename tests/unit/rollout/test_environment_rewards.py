"""Rewards that environments give turn by turn, in advance and in the end."""

from __future__ import annotations

from typing import Any, cast

import pytest
from played import TASK, Parts, play
from test_environments import waiting

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.environment import PartialRollout
from headway.records.rollout import Verdict
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.hosting.service import Episodes
from headway.runtime.clock import Clock, run_virtual


class Paying(Environment):
    def __init__(self, scores: Any = None, learned: bool = True) -> None:
        self.scores, self.learned = scores, learned

    async def reply(self, episode: Episode, answer: Answer) -> None:
        episode.reward(float(answer.text))
        episode.reward(0.5)
        if episode.turns == 2:
            episode.end()
        else:
            episode.add_message("more")

    async def score(self, episode: Episode) -> Any:
        return self.scores


def test_rewards_of_turns_are_kept_by_turn() -> None:
    rollout = play(Paying(), ["1", "2"]).rollout
    assert (rollout.reward, rollout.turn_rewards) == (4.0, (1.5, 2.5))
    rollout = play(Paying(scores=10.0), ["1", "2"]).rollout
    assert (rollout.reward, rollout.turn_rewards) == (10.0, (1.5, 12.5)), "the outcome comes on top of the last"
    rollout = play(Paying(scores=Verdict(reward=3.0, solved=True, turn_rewards=(1.0, 2.0))), ["1", "2"]).rollout
    assert (rollout.reward, rollout.turn_rewards) == (3.0, (1.0, 2.0)), "what it says by turn is what counts"


class PayingElsewhere(Environment):
    """In advance, and for the whole."""

    def __init__(self, score: Any = None) -> None:
        self._score = score

    async def begin(self, episode: Episode) -> None:
        await super().begin(episode)
        episode.reward(1.0)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if episode.turns == 2:
            episode.end()
        else:
            episode.add_message("more")

    async def score(self, episode: Episode) -> Any:
        episode.reward(4.0)
        return self._score


def test_what_is_rewarded_before_the_first_turn_or_after_the_last_counts_in_it() -> None:
    rollout = play(PayingElsewhere(), ["a", "b"]).rollout
    assert (rollout.reward, rollout.turn_rewards) == (5.0, (1.0, 4.0))
    rollout = play(PayingElsewhere(score=10.0), ["a", "b"]).rollout
    assert (rollout.reward, rollout.turn_rewards) == (10.0, (1.0, 14.0))
    rollout = play(PayingElsewhere(), ["a", "b"], max_turns=1).rollout
    assert (rollout.reward, rollout.turn_rewards) == (5.0, (5.0,)), "of one turn, that is both"


def test_a_reward_in_advance_is_kept_while_its_rollout_is_parked() -> None:
    parked: list[PartialRollout] = []
    said = [Parts("a1", "a2"), "b"]
    first = play(PayingElsewhere(), said, gate=waiting(parked)).rollout
    second = play(PayingElsewhere(), ["a2", "b"], parked=parked[0]).rollout
    assert (first.turn_rewards, second.turn_rewards) == ((1.0, 4.0), (1.0, 4.0))


def test_what_an_earlier_headway_parked_without_a_reward_in_advance_goes_on() -> None:
    parked: list[PartialRollout] = []
    play(Paying(), [Parts("1", "2"), "3"], gate=waiting(parked))
    assert parked[0].episode is not None
    del parked[0].episode.environment.state["reward"]
    rollout = play(Paying(), ["2", "3"], parked=parked[0]).rollout
    assert (rollout.failure, rollout.attempts, rollout.turn_rewards) == (None, 1, (12.5, 3.5))


def test_a_reward_that_is_no_number_fails_the_rollout() -> None:
    failure = play(Paying(), ["nan"]).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("environment", False)
    assert "finite" in failure.cause


def test_a_score_that_can_not_be_used_fails_the_rollout() -> None:
    failure = play(Paying(scores="good"), ["1", "2"]).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("reward", False)


def test_a_score_that_is_none_is_named_as_the_environments() -> None:
    failure = play(Paying(scores={"solved": True}), ["1", "2"]).rollout.failure
    assert failure is not None
    assert failure.cause.startswith("the environment's score returned {'solved': True}: expected a number")


class Broken(Paying):
    def __init__(self) -> None:
        self.seen = 0

    async def reply(self, episode: Episode, answer: Answer) -> None:
        self.seen += 1
        if self.seen < 3:
            raise KeyError(f"boom {self.seen}")
        int("x")


def test_a_traceback_is_logged_once_for_each_place_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(clock: Clock) -> None:
        settings = EnvironmentConfig(name="mine:Mine")
        episodes = Episodes(Broken(), settings, cast("Any", None), SandboxConfig(), SandboxConfig().spec, clock)
        for name in ("1", "2", "3"):
            await episodes.begin(name, TASK, 0)
            await episodes.reply(name, {"content": "a"}, "", False)

    run_virtual(main)
    logged = capsys.readouterr().err
    assert ("boom 1" in logged, "boom 2" in logged, logged.count("Traceback")) == (True, False, 2)
    assert (
        "rollouts fail: ValueError: invalid literal for int() with base 10: 'x' (test_environment_rewards.py" in logged
    )
