"""Rollouts in environments: turn by turn, token-exact, parked and resumed, and what failures come to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from endpoint_server import chat
from played import GROUP, Parts, Played, Policy, play, text_of

from headway.generator.recording.sessions import Session
from headway.records.environment import PartialRollout
from headway.records.rollout import Failure
from headway.records.sandbox import SandboxError, infrastructure_failure, model_failure
from headway.records.tokens import decoder, encoder
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.tools import ToolError

CALL = 'look\n<tool_call>\n{"name": "price", "arguments": {"item": "tea"}}\n</tool_call>'


class Shop(Environment):
    system = "Look prices up."

    def tools(self) -> Any:
        return (self.price,)

    async def price(self, item: str, episode: Episode) -> str:
        """The price of an item."""
        if item != "tea":
            raise ToolError(f"there is no {item}")
        return "3"


class Counting(Environment):
    """Counts turns in its state and in a file; ends after ``turns``."""

    def __init__(self, turns: int = 3, **options: Any) -> None:
        self.turns = turns
        self.resumed: list[str] = []
        vars(self).update(options)

    async def begin(self, episode: Episode) -> None:
        await super().begin(episode)
        episode.state["heard"] = []

    async def reply(self, episode: Episode, answer: Answer) -> None:
        episode.state["heard"].append(answer.text)
        before = await episode.sandbox.read("heard") if len(episode.state["heard"]) > 1 else b""
        await episode.sandbox.write("heard", before + answer.text.encode())
        if len(episode.state["heard"]) == self.turns:
            episode.end("enough")
        else:
            episode.add_message(f"{len(episode.state['heard'])}?")

    async def score(self, episode: Episode) -> Any:
        return {"reward": 1.0, "heard": episode.state["heard"], "file": (await episode.sandbox.read("heard")).decode()}

    async def resume(self, episode: Episode) -> None:
        self.resumed.append(episode.name)


def sampled(played: Played) -> str:
    rollout = played.rollout
    ids = [token for token, mine in zip(rollout.response_ids, rollout.response_mask, strict=True) if mine]
    return chat().tokenizer.decode(ids)


# --- turns -------------------------------------------------------------------------------------------------------


def test_calls_are_carried_out_until_an_answer_has_none() -> None:
    played = play(Shop(), [CALL, "It is 3."])
    rollout = played.rollout
    assert (rollout.failure, rollout.turns, rollout.calls, rollout.branches) == (None, 2, 2, ())
    assert rollout.finished_s == 0.0, "the run's verifier judges it"
    assert sampled(played) == CALL + "It is 3."
    assert "Look prices up." in text_of(played)
    assert '"name": "price"' in text_of(played), "the tool is described"
    assert "<tool_response>\n3\n</tool_response>" in text_of(played)
    assert len(rollout.turn_ends) == 2
    assert chat().tokenizer.decode(rollout.judged_ids) == "It is 3."


class SlowShop(Shop):
    async def price(self, item: str) -> str:
        """The price of an item."""
        await asyncio.sleep(2.5)
        if item == "glass":
            raise ConnectionError("broken")
        if item != "tea":
            raise ToolError(f"there is no {item}")
        return "3"


def test_times_of_model_calls_and_tools() -> None:
    says = [CALL, CALL.replace("tea", "gold"), CALL.replace("price", "cost"), "It is 3."]
    rollout = play(SlowShop(), says).rollout  # each answer takes a second
    times = [(call.start_s, call.first_token_s, call.end_s, call.tokens) for call in rollout.call_times]
    lengths = [len(text) + 1 for text in says]
    assert times == list(zip([0, 3.5, 7, 8], [1, 4.5, 8, 9], [1, 4.5, 8, 9], lengths, strict=True))
    assert [(tool.name, tool.start_s, tool.end_s, tool.error) for tool in rollout.tool_times] == [
        ("begin", 0, 0, False), ("price", 1, 3.5, False), ("price", 4.5, 7, True), ("", 8, 8, True),
        ("reply", 9, 9, False),
    ]  # fmt: skip


def test_a_tool_that_breaks_has_its_time_too() -> None:
    rollout = play(SlowShop(), [CALL.replace("tea", "glass")] * 3, retries=0).rollout
    assert rollout.failure is not None
    assert [(tool.name, tool.end_s - tool.start_s, tool.error) for tool in rollout.tool_times][1:] == [
        ("price", 2.5, True)
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (CALL.replace("tea", "gold"), "error: there is no gold"),
        (CALL.replace("price", "cost"), "error: there is no tool 'cost'; valid: price"),
        (CALL.replace('"item": "tea"', ""), "error: item: Field required"),
        (CALL.replace('{"name"', '{name"'), "error: a call must be valid JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(said: str, told: str) -> None:
    played = play(Shop(), [said, "sorry"])
    assert played.rollout.failure is None
    assert told in text_of(played)


def test_no_more_turns_than_allowed() -> None:
    played = play(Counting(turns=9), ["a", "b", "c"], max_turns=2)
    assert (played.rollout.turns, played.rollout.verdict["ended"]) == (2, "environment.max_turns")
    assert played.rollout.verdict["heard"] == ["a", "b"]


def test_a_context_that_is_full_is_an_outcome() -> None:
    played = play(Counting(turns=99), lambda prompt, answers: "x" * 60, max_turns=99, context_tokens=500)
    rollout = played.rollout
    assert (rollout.failure, rollout.reward, rollout.finish_reason) == (None, 1.0, "length")
    assert len(rollout.prompt_ids) + len(rollout.response_ids) <= 500
    assert rollout.verdict["ended"] in ("context_length_exceeded", "environment.max_turns", "enough")


def test_an_environments_score_is_the_reward_and_its_time_is_measured() -> None:
    played = play(Counting(turns=2), ["a", "b"])
    rollout = played.rollout
    assert (rollout.reward, rollout.solved, rollout.verdict["ended"]) == (1.0, True, "enough")
    assert rollout.finished_s == played.duration_s
    assert 0 < rollout.environment_s < 1, "two turns of a second each were the engine's"


# --- several speakers --------------------------------------------------------------------------------------------


class Debate(Environment):
    """A solver and a critic, each in a conversation of its own."""

    def __init__(self, learned: bool = True) -> None:
        self.learned = learned

    async def begin(self, episode: Episode) -> None:
        episode.set_active_agent("solver")
        await super().begin(episode)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if answer.speaker == "solver":
            if episode.turns == 3:
                return episode.end()
            episode.set_active_agent("critic", learned=self.learned)
            episode.add_message(f"Is {answer.text} right?")
        else:
            episode.set_active_agent("solver")
            episode.add_message(answer.text)
        return None

    async def score(self, episode: Episode) -> float:
        return 0.5


def test_each_speaker_has_a_conversation_and_all_share_the_reward() -> None:
    played = play(Debate(), ["four", "no", "three"])
    rollout = played.rollout
    assert (rollout.failure, rollout.reward, rollout.turns, len(rollout.branches)) == (None, 0.5, 3, 1)
    assert sampled(played) == "fourthree"
    assert "Is four right?" not in text_of(played)
    [critic] = rollout.branches
    assert "Is four right?" in chat().tokenizer.decode(list(critic.prompt_ids))
    assert chat().tokenizer.decode(list(critic.response_ids)) == "no"


def test_a_role_that_is_not_learned_has_no_part_in_the_loss() -> None:
    rollout = play(Debate(learned=False), ["four", "no", "three"]).rollout
    assert (rollout.failure, rollout.reward, rollout.turns, rollout.branches) == (None, 0.5, 2, ())


# --- parked ------------------------------------------------------------------------------------------------------


def waiting(parked: list[PartialRollout], version: int | None = None, how: str = "continue") -> Any:
    """A gate that lets everybody through, under a new version."""

    def of(policy: Policy) -> Any:
        async def gate(one: PartialRollout) -> str:
            parked.append(one)
            await asyncio.sleep(5)
            if version is not None:
                policy.version = version
            return how

        return gate

    return of


SAID = ["a", Parts("b1", "b2"), "c"]


def test_parked_in_the_middle_of_a_turn_it_goes_on_with_all_it_had() -> None:
    parked: list[PartialRollout] = []
    played = play(Counting(), SAID, gate=waiting(parked, version=4))
    rollout = played.rollout
    assert (rollout.failure, rollout.verdict["heard"], rollout.verdict["file"]) == (None, ["a", "b1b2", "c"], "ab1b2c")
    assert [span.version for span in rollout.versions] == [0, 4]
    assert (rollout.resumes, rollout.environment_version) == (1, 0)
    assert played.backend.made == 1, "its sandbox stood still meanwhile"
    [one] = parked
    assert one.episode is not None
    assert [len(exchange.result.response.ids) for exchange in one.episode.exchanges] == [2]  # "a" and the end
    assert (one.first_version, one.environment_version, len(one.response.ids)) == (0, 0, 2)


def test_parked_before_its_environment_has_heard_anything_it_holds_nothing() -> None:
    parked: list[PartialRollout] = []
    rollout = play(Counting(turns=2), [Parts("a", "b"), "c"], gate=waiting(parked, version=4)).rollout
    assert (rollout.resumes, rollout.environment_version) == (1, -1)
    assert parked[0].environment_version == -1


def test_its_sandbox_is_lent_to_others_while_it_is_parked() -> None:
    async def meanwhile(rollouts: Any, boxes: Any, clock: Any) -> None:
        await clock.sleep(1.5)  # the first turn is over, its sandbox in use
        async with boxes.lease(rollouts.environments.pool.episodes._spec):
            assert clock.now() == pytest.approx(2.0, abs=0.1), "as soon as the other was parked"

    played = play(Counting(), SAID, gate=waiting([]), live=1, meanwhile=meanwhile)
    assert (played.rollout.failure, played.rollout.verdict["file"]) == (None, "ab1b2c")
    assert played.backend.made == 3


def test_it_goes_on_in_another_process() -> None:
    parked: list[PartialRollout] = []
    first = play(Counting(), SAID, gate=waiting(parked))
    # through the buffer and back
    kept = decoder(PartialRollout).decode(encoder().encode(parked[0]))
    environment = Counting()
    second = play(environment, ["b2", "c"], parked=kept, snapshots=first.backend.snapshots)
    assert environment.resumed == ["7-1"]
    assert second.rollout.verdict == first.rollout.verdict
    assert (second.rollout.response_ids, second.rollout.prompt_ids) == (
        first.rollout.response_ids,
        first.rollout.prompt_ids,
    )
    assert second.rollout.turn_ends == first.rollout.turn_ends
    assert (second.rollout.resumes, second.rollout.environment_version) == (1, 0)
    assert [request.sampling.seed for request in second.policy.requests] == [
        request.sampling.seed for request in first.policy.requests[2:]
    ], "the random numbers of a turn are its own"


def test_others_go_on_between_the_turns_that_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parked: list[PartialRollout] = []
    first = play(Counting(turns=6), ["a", "b", "c", "d", Parts("e", "f"), "g"], gate=waiting(parked))
    passes, recorded_in = 0, []
    replay = Session.replay

    def noted(*args: Any, **named: Any) -> Any:
        recorded_in.append(passes)
        return replay(*args, **named)

    async def meanwhile(*_: Any) -> None:
        nonlocal passes
        while passes < 100:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Session, "replay", noted)
    play(Counting(turns=6), ["f", "g"], parked=parked[0], snapshots=first.backend.snapshots, meanwhile=meanwhile)
    assert len(set(recorded_in)) == len(recorded_in) == 4


def test_several_speakers_go_on_in_another_process() -> None:
    parked: list[PartialRollout] = []
    first = play(Debate(), ["four", Parts("n", "o"), "three"], gate=waiting(parked))
    second = play(Debate(), ["o", "three"], parked=parked[0])
    assert second.rollout.branches == first.rollout.branches
    assert second.rollout.response_ids == first.rollout.response_ids


def test_files_that_are_lost_meanwhile_are_infrastructure() -> None:
    parked: list[PartialRollout] = []
    play(Counting(), SAID, gate=waiting(parked))

    class Gone(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            from headway.records.sandbox import SandboxError, environment_failure

            raise SandboxError(environment_failure("no such snapshot"))

    played = play(Counting(turns=2), ["b2", "x", "y"], parked=parked[0], failures=[infrastructure_failure("gone")])
    assert played.rollout.failure is None, "it began anew"
    assert played.rollout.verdict["heard"] == ["x", "y"]
    assert played.rollout.verdict["file"] == "xy"


def test_what_can_be_done_again_is() -> None:
    parked: list[PartialRollout] = []
    first = play(Counting(repeatable=True), SAID, gate=waiting(parked))
    assert first.rollout.failure is None
    lost = [infrastructure_failure("the snapshot is gone")]
    second = play(Counting(repeatable=True), ["b2", "c"], parked=parked[0], failures=lost)
    assert second.rollout.verdict == first.rollout.verdict
    assert second.backend.made == 1


def test_parked_for_too_long_it_begins_anew() -> None:
    parked: list[PartialRollout] = []
    answers = iter(["a", Parts("b", ""), "x", "y", "z"])
    rollout = play(Counting(), lambda prompt, number: next(answers), gate=waiting(parked, how="restart")).rollout
    assert (rollout.failure, rollout.verdict["heard"]) == (None, ["x", "y", "z"])
    assert rollout.environment_version == -1


# --- failures ----------------------------------------------------------------------------------------------------


class Raising(Environment):
    def __init__(self, error: Exception, where: str = "reply") -> None:
        self.error, self.where = error, where

    async def begin(self, episode: Episode) -> None:
        await super().begin(episode)
        self._raise("begin")

    async def reply(self, episode: Episode, answer: Answer) -> None:
        self._raise("reply")
        episode.end()

    async def score(self, episode: Episode) -> float:
        self._raise("score")
        return 0.0

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise self.error


@pytest.mark.parametrize("where", ["begin", "reply", "score"])
def test_what_an_environment_raises_fails_its_rollout(where: str) -> None:
    played = play(Raising(RuntimeError("a bug"), where), lambda prompt, answers: "a")
    failure = played.rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("environment", False)
    assert failure.raised_at.endswith(" in _raise")
    assert failure.cause == f"RuntimeError: a bug ({failure.raised_at})"
    assert "in _raise" in failure.detail
    assert played.rollout.reward == 0.0
    assert played.pool.calls.count("begin") == 1, "it isn't tried again"


@pytest.mark.parametrize("where", ["begin", "reply", "score"])
def test_what_failed_from_outside_is_tried_again_and_never_rewarded(where: str) -> None:
    played = play(Raising(ConnectionError("no route"), where), lambda prompt, answers: "a")
    failure = played.rollout.failure
    assert failure is not None
    assert failure.infrastructure
    assert played.pool.calls.count("begin") == 3


def test_a_sandbox_that_fails_is_infrastructure_at_its_boundary() -> None:
    lost = [infrastructure_failure("no memory")] * 3
    failure = play(Counting(), ["a"] * 9, failures=lost).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("sandbox", True)
    assert failure.cause.startswith("no memory")
    assert play(Counting(turns=1), ["a"] * 9, failures=lost[:2]).rollout.failure is None


def test_a_sandbox_that_fails_is_no_outcome_though_its_environment_says_so() -> None:
    class Swallowing(Counting):
        async def reply(self, episode: Episode, answer: Answer) -> None:
            try:
                await super().reply(episode, answer)
            except SandboxError:
                episode.add_message("something went wrong")

        async def score(self, episode: Episode) -> float:
            return 0.0

    lost = [infrastructure_failure("no memory")] * 3
    rollout = play(Swallowing(), ["a"] * 9, failures=lost).rollout
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.infrastructure, rollout.attempts) == ("sandbox", True, 3)
    rollout = play(Swallowing(turns=1), ["a"] * 9, failures=lost[:1]).rollout
    assert (rollout.failure, rollout.reward, rollout.attempts) == (None, 0.0, 2)


def test_a_sandbox_that_the_policy_used_up_is_an_outcome() -> None:
    class Greedy(Counting):
        async def reply(self, episode: Episode, answer: Answer) -> None:
            raise SandboxError(model_failure("out of memory"))

        async def score(self, episode: Episode) -> float:
            raise SandboxError(model_failure("out of memory"))

    rollout = play(Greedy(), ["a"]).rollout
    assert (rollout.failure, rollout.reward, rollout.turns) == (None, 0.0, 1)
    assert rollout.verdict["ended"] == "out of memory"


def test_no_more_calls_in_an_answer_than_allowed() -> None:
    played = play(Shop(), [CALL + CALL.removeprefix("look\n") * 17, "done"], context_tokens=9000)
    assert played.rollout.failure is None
    assert text_of(played).count("\n3\n</tool_response>") == 16
    assert text_of(played).count("error: at most 16 calls in one answer") == 2


def test_a_worker_that_dies_takes_the_attempt_along_and_no_more() -> None:
    played = play(Counting(turns=2), ["a", "b", "c", "d"], dies_at=[2])
    assert played.rollout.failure is None
    assert played.rollout.verdict["heard"] == ["b", "c"]


def test_an_engine_that_fails_is_the_engines() -> None:
    failure = play(Counting(), lambda prompt, answers: None).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure, failure.cause) == ("engine", True, "no engine")


def test_stopped_for_good_it_ends_and_gives_its_sandbox_back() -> None:
    why = Failure(boundary="engine", cause="the group is overdue", infrastructure=True)

    async def meanwhile(rollouts: Any, boxes: Any, clock: Any) -> None:
        await clock.sleep(1.5)
        assert boxes.statistics().used == 1
        rollouts.stop(GROUP.index, 1, why)

    played = play(Counting(), ["a", "b", "c"], meanwhile=meanwhile)
    assert played.rollout.failure == why


def test_a_hang_has_an_end() -> None:
    class Hanging(Environment):
        async def reply(self, episode: Episode, answer: Answer) -> None:
            await asyncio.sleep(10_000)

    failure = play(Hanging(), ["a"] * 3, timeout_s=10_000.0).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("environment", True)
    assert "environment.timeout_s = 300 s" in failure.cause


def test_state_must_be_json() -> None:
    class Odd(Counting):
        async def begin(self, episode: Episode) -> None:
            await super().begin(episode)
            episode.state["odd"] = object()

    failure = play(Odd(), SAID, gate=waiting([])).rollout.failure
    assert failure is not None
    assert "episode.state must hold JSON types alone" in failure.cause
