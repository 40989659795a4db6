"""Rollouts in environments: what one is left with, however it ends or is played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_sandboxes import FakeSandbox
from played import GROUP, InProcess, play
from test_environments import CALL, SAID, Counting, SlowShop, waiting

from headway.config.sandbox import SandboxConfig
from headway.generator.recording.sessions import Sessions
from headway.records.environment import PartialRollout
from headway.records.rollout import Failure, Rollout
from headway.records.sandbox import SandboxError, Snapshot, model_failure
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.hosting.client import EnvironmentDied
from headway.rollout.makers.turn_sampler import TurnSampler

SPEC = SandboxConfig().spec
WHY = Failure(boundary="engine", cause="the group is overdue", infrastructure=True)
MESSAGE = {"role": "assistant", "content": "a"}


def test_stopped_twice_its_conversation_is_sealed_all_the_same() -> None:
    async def meanwhile(rollouts: Any, boxes: Any, clock: Any) -> None:
        await clock.sleep(1.5)
        boxes._backend.end_s = 5.0
        rollouts.stop(GROUP.index, 1, WHY)
        await clock.sleep(1)
        rollouts.stop(GROUP.index, 1, WHY)
        await clock.sleep(10)
        boxes._backend.end_s = 0.0

    played = play(Counting(), ["a", "b", "c"], meanwhile=meanwhile)
    assert played.rollout.failure == WHY
    assert played.rollout.turns == 1, "what it had is kept"


def test_a_sandbox_that_is_used_up_when_it_is_parked_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async def snapshot(self: FakeSandbox, name: str) -> Snapshot:
        raise SandboxError(model_failure("out of memory as a whole"))

    monkeypatch.setattr(FakeSandbox, "snapshot", snapshot)
    parked: list[PartialRollout] = []
    played = play(Counting(), SAID, gate=waiting(parked))
    assert played.rollout.failure is None, "its environment sees what has become of it"
    assert [one.episode for one in parked] == [None], "in another process it begins anew"


def test_a_role_that_is_not_learned_has_random_numbers_of_its_own() -> None:
    class Mirror(Environment):
        async def begin(self, episode: Episode) -> None:
            episode.add_message("choose", to="one")
            episode.add_message("choose", to="other")
            episode.set_active_agent("one")

        async def reply(self, episode: Episode, answer: Answer) -> None:
            if episode.turns == 2:
                return episode.end()
            episode.set_active_agent("other", learned=False)
            return None

        async def score(self, episode: Episode) -> float:
            return 0.5

    played = play(Mirror(), ["a", "b"])
    assert played.rollout.failure is None
    one, other = played.policy.requests
    assert one.prompt_ids == other.prompt_ids
    assert one.sampling.seed != other.sampling.seed


def test_parked_it_goes_on_in_another_worker_when_its_own_dies() -> None:
    undisturbed = play(Counting(), SAID, gate=waiting([], version=4)).rollout
    environment = Counting()
    played = play(environment, SAID, gate=waiting([], version=4), dies_at=[4])
    assert played.pool.calls == ["begin", "reply", "park", "unpark", "restore", "reply", "reply", "score"]
    rollout = played.rollout
    assert environment.resumed == ["7-1"]
    assert (rollout.failure, rollout.attempts, rollout.verdict) == (None, 2, undisturbed.verdict)
    assert (rollout.response_ids, rollout.response_logprobs) == (
        undisturbed.response_ids,
        undisturbed.response_logprobs,
    )
    assert (rollout.versions, rollout.resumes) == (undisturbed.versions, undisturbed.resumes)
    assert rollout.environment_version == undisturbed.environment_version == 0
    assert len(played.policy.requests) == 4, "nothing is sampled again"


class Far(InProcess):
    """The way to the environment takes half a second, and so does the way back."""

    async def call(self, method: str, name: str, *arguments: Any) -> Any:
        await asyncio.sleep(0.5)
        result = await super().call(method, name, *arguments)
        await asyncio.sleep(0.5)
        return result


def test_the_way_to_an_environment_is_told_apart_from_its_own_time() -> None:
    assert play(Counting(), SAID).rollout.environment_hop_s == pytest.approx(0.0)
    rollout = play(SlowShop(), [CALL, "It is 3."], pool_of=Far).rollout
    assert (rollout.environment_s, rollout.environment_hop_s) == (5.5, 3.0)  # two replies, and what it is worth
    parked: list[PartialRollout] = []
    first = play(Counting(), SAID, gate=waiting(parked), pool_of=Far)
    later = play(Counting(), ["b2", "c"], parked=parked[0], snapshots=first.backend.snapshots, pool_of=Far)
    assert later.rollout.environment_s > later.rollout.environment_hop_s == pytest.approx(3.0)


def test_it_goes_on_in_a_third_worker_when_the_second_dies_too_and_anew_after_that() -> None:
    played = play(Counting(), SAID, gate=waiting([]), dies_at=[4, 5])
    assert played.pool.calls == ["begin", "reply", "park", "unpark", "restore", "restore", "reply", "reply", "score"]
    assert (played.rollout.attempts, len(played.policy.requests)) == (3, 4)
    assert played.rollout.verdict["heard"] == ["a", "b1b2", "c"]
    answers = iter([*SAID[:2], "x", "y", "z"])
    played = play(Counting(), lambda prompt, number: next(answers), gate=waiting([]), dies_at=[4, 5, 6], retries=3)
    assert (played.rollout.attempts, played.rollout.verdict["heard"]) == (4, ["x", "y", "z"]), "not tried for ever"


def test_an_evaluation_meanwhile_has_nothing_of_a_rollout_that_goes_on() -> None:
    evaluated: list[Rollout] = []
    died: list[str] = []

    class Noted(InProcess):
        async def call(self, method: str, name: str, *arguments: Any) -> Any:
            try:
                return await super().call(method, name, *arguments)
            except EnvironmentDied:
                died.append(method)
                raise

    async def meanwhile(rollouts: Any, boxes: Any, clock: Any) -> None:
        while not died:
            await clock.sleep(0.05)
        evaluated.append(await rollouts.for_evaluation("evaluation-validation-").generate_member(GROUP, 1))

    answers = iter([*SAID[:2], "x", "x", "x", "x"])
    played = play(
        Counting(),
        lambda prompt, number: next(answers),
        gate=waiting([]),
        dies_at=[4],
        meanwhile=meanwhile,
        pool_of=Noted,
    )
    assert [one.verdict["heard"] for one in evaluated] == [["x", "x", "x"]]
    assert played.rollout.verdict["heard"] == ["a", "b1b2", "x"]


def test_parked_with_what_no_other_worker_has_it_begins_anew() -> None:
    class Held(Counting):
        async def begin(self, episode: Episode) -> None:
            episode.pin_to_process("a connection")
            await super().begin(episode)

    answers = iter([*SAID[:2], "x", "y", "z"])
    played = play(Held(), lambda prompt, number: next(answers), gate=waiting([]), dies_at=[4], retries=1)
    assert played.rollout.failure is None, "at once: no attempt is lost in trying to go on"
    assert played.rollout.verdict["heard"] == ["x", "y", "z"]


def test_its_worker_dies_while_it_is_parked_for_too_long() -> None:
    answers = iter([*SAID[:2], "x", "y", "z"])
    played = play(Counting(), lambda prompt, number: next(answers), gate=waiting([], how="restart"), dies_at=[4])
    assert (played.rollout.failure, played.rollout.verdict["heard"]) == (None, ["x", "y", "z"])


@pytest.mark.parametrize("allowed", [True, False])
def test_its_conversation_takes_constraints_where_its_sampler_does(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TurnSampler, "constraints", allowed)
    opened, open_ = list[bool](), Sessions.open

    def noted(self: Sessions, rollout: str, sample: Any, *, constraints: bool) -> Any:
        opened.append(constraints)
        return open_(self, rollout, sample, constraints=constraints)

    monkeypatch.setattr(Sessions, "open", noted)
    play(Counting(), ["a", "b", "c"])
    assert opened == [allowed]
