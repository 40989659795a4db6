"""Several who speak in one rollout: fixed models, the policy in roles that are learned and in one that isn't."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from completions_server import Endpoint, serving
from environment_player import Player, played, rollout, service

from headway.algorithms.aggregation import weighting
from headway.algorithms.samples import build_arrays, sequence_of_token
from headway.records.environment import NextTurn, TurnRecord
from headway.records.errors import ConfigurationError
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Rollout, Sample
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.makers.environment import learned_turn_rewards

TASK = Task(task_id="t", prompt="I need a ticket.", metadata={"goal": "to Rome, on Monday"})
ENDS = {"[DONE]": 1.0, "[GIVE UP]": -1.0}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    yield from serving()


class SolverAndCritic(Environment):
    """The solver answers, the critic objects once; the second answer counts."""

    async def begin(self, episode: Episode) -> None:
        episode.add_message("Solve: 1+2?", to="solver")
        episode.set_active_agent("solver")

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if answer.speaker == "critic":
            episode.add_message(f"The critic says: {answer.text}", to="solver")
            episode.set_active_agent("solver")
        elif episode.turns == 1:
            episode.add_message(f"Criticise: {answer.text}", to="critic")
            episode.set_active_agent("critic")
        else:
            episode.reward(1.0 if answer.text == "3" else 0.0)
            episode.end()


class Scored(SolverAndCritic):
    async def score(self, episode: Episode) -> Any:
        return {"turn_rewards": [1.0, 2.0, 3.0]}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.external_models._RETRY_S", 0.001)


def model(endpoint: Endpoint, **settings: Any) -> dict[str, Any]:
    return {"address": endpoint.url, "model": "m", "timeout_s": 5, **settings}


def dialogue(endpoint: Endpoint | None = None, **parameters: Any) -> Any:
    if endpoint is None:
        return service(name="dialogue", parameters={"ends": ENDS, **parameters})
    given = {"user": "traveller", "ends": ENDS, **parameters}
    return service(name="dialogue", parameters=given, models={"traveller": model(endpoint)})


def test_a_user_that_is_a_fixed_model(endpoint: Endpoint) -> None:
    words = iter(["To Rome.", "Thank you.\n\n [DONE] \n"])
    endpoint.answer = lambda body: next(words)

    async def main() -> Player:
        player = Player(dialogue(endpoint, system="You sell tickets."), TASK)
        assert await player.begin() == "I need a ticket."
        assert await player.answer("Where to?") == "To Rome."
        await player.answer("Here it is.")
        return player

    player = played(main)
    assert (player.last.over, player.rewards) == ("[DONE]", [0.0, 1.0])
    assert not any("Monday" in message["content"] for message in player.messages[""])
    script, *talk = endpoint.asked[-1][2]["messages"]
    assert "to Rome, on Monday" in script["content"]
    assert "I need a ticket." in script["content"]
    assert "[DONE] or [GIVE UP]" in script["content"]
    assert [(m["role"], m["content"]) for m in talk] == [
        ("user", "Where to?"),
        ("assistant", "To Rome."),
        ("user", "Here it is."),
    ]


def test_a_parked_conversation_goes_on_with_the_same_user(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: f"word {len(body['messages'])}"

    async def main() -> Player:
        player = Player(dialogue(endpoint), TASK)
        await player.begin()
        await player.answer("Where to?")
        assert await player.moved(dialogue(endpoint)) is None
        assert await player.answer("And when?") == "word 4"
        return player

    played(main)


def test_the_policy_as_its_own_user_is_not_learned_in_that_role() -> None:
    def says(prompt: str) -> str:
        if "You play a person" in prompt:
            return "To Rome." if "Here" not in prompt else "[DONE]"
        return "Here it is." if "To Rome" in prompt else "Where to?"

    async def main() -> Rollout:
        return await rollout(dialogue(), says, TASK)

    made = played(main)
    assert made.failure is None, made.failure
    assert (made.reward, made.solved, made.turns, made.turn_rewards) == (1.0, True, 2, (0.0, 1.0))
    assert made.branches == ()
    assert made.verdict["ended"] == "[DONE]"


@pytest.mark.parametrize("said", ["I won't say [DONE] yet.", "[DONE]? No.", "Is this [GIVE UP]\nor what?", "[DONE].\n"])
def test_a_user_who_speaks_of_the_end_has_not_come_to_it(said: str, endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: said

    async def main() -> None:
        player = Player(dialogue(endpoint), TASK)
        await player.begin()
        assert await player.answer("Are you done?") == said

    played(main)


def test_a_user_who_gives_up() -> None:
    async def main() -> Rollout:
        return await rollout(dialogue(), lambda prompt: "[GIVE UP]" if "You play" in prompt else "No.", TASK)

    assert played(main).reward == -1.0


@pytest.mark.parametrize("broken", [(503, {}, "busy"), (401, {}, "no"), None, (200, {}, {"choices": []})])
def test_a_model_that_does_not_answer_is_infrastructure(broken: Any, endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: broken

    async def main() -> Any:
        return await Player(dialogue(endpoint), TASK).play(["Where to?"])

    failure = played(main).failure
    assert (failure.boundary, failure.infrastructure) == ("environment", True)
    assert "the model traveller" in failure.cause
    assert len(endpoint.asked) == (1 if broken and broken[0] == 401 else 3)


def test_what_a_model_is_asked_with(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "secret")
    endpoint.answer = lambda body: "[DONE]"
    settings = model(endpoint, api_key_env="USER_KEY", body={"temperature": 0.5, "max_tokens": 9, "top_k": 3})

    async def main() -> Any:
        models = {"traveller": settings}
        episodes = service(name="dialogue", parameters={"user": "traveller"}, models=models)
        return await Player(episodes, TASK).play(["Where to?"])

    reply = played(main)
    assert (reply.over, reply.reward) == ("[DONE]", None)  # the verifier's
    [(path, headers, body)] = endpoint.asked
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert {key: body[key] for key in ("model", "temperature", "max_tokens", "top_k")} == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 9,
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("parameters", "settings", "what"),
    [
        ({"user": "clerk"}, {}, "uses the model 'clerk'; valid: traveller"),
        ({}, {"api_key_env": "NO_SUCH_KEY"}, "has no NO_SUCH_KEY"),
        ({}, {"timeout_s": 100.0}, "may take 320 s"),
        ({"ends": []}, {}, "ends must not be empty"),
        ({"prompt": "Talk."}, {}, "must contain {goal}"),
    ],
)
def test_bad_settings(parameters: Any, settings: Any, what: str) -> None:
    traveller = {"address": "http://127.0.0.1:9/v1", "model": "m", **settings}
    with pytest.raises(ConfigurationError, match=what):
        service(name="dialogue", parameters={"user": "traveller", **parameters}, models={"traveller": traveller})


def test_two_learned_speakers_share_a_rollout() -> None:
    asked: list[Any] = []

    def says(prompt: str) -> str:
        if "Criticise" in prompt:
            return "Are you sure?"
        return "3" if "sure" in prompt else "4"

    async def main() -> Rollout:
        return await rollout(
            service(name="test_environment_speakers:SolverAndCritic"), says, Task(task_id="t", prompt="1+2?"), asked
        )

    made = played(main)
    assert made.failure is None, made.failure
    assert (made.reward, made.solved, made.turns, len(made.branches)) == (1.0, True, 3, 1)
    assert made.turn_rewards == ()  # branches have no one order of turns
    solver, critic = made.sequences
    assert len(asked) == 3
    # what was sampled stands where it was sampled: each conversation is what the engine was asked, token by token
    first, second, third = (request.prompt_ids for request in asked)
    whole = (*solver.prompt_ids, *solver.response_ids)
    assert solver.prompt_ids == first
    assert whole[: len(third)] == third
    assert critic.prompt_ids == second
    assert all(critic.response_mask)
    heard = [
        logprob
        for s in (solver, critic)
        for logprob, mask in zip(s.response_logprobs, s.response_mask, strict=True)
        if mask
    ]
    assert len(set(heard)) == len(heard)
    numbers = {int(-logprob) for logprob in heard}
    assert numbers == {2, 3, 4}  # of the requests: every answer is learned
    between = solver.response_ids[solver.response_mask.index(False) : len(third) - len(first)]
    assert between  # the critic's words, as the solver was told them, have no loss
    weight_is_shared(made)


def test_a_score_by_turn_of_several_conversations_counts_as_a_whole() -> None:
    async def main() -> Rollout:
        return await rollout(service(name="test_environment_speakers:Scored"), lambda prompt: "3")

    made = played(main)
    assert (made.failure, made.reward, made.turn_rewards) == (None, 6.0, ())


def weight_is_shared(made: Rollout) -> None:
    """A rollout of two conversations weighs as much as one of a single one."""
    plain = msgspec.structs.replace(made, branches=())
    samples = tuple(Sample(rollout=one, advantage=1.0) for one in (plain, made))
    arrays = build_arrays(TrainBatch(step=0, samples=samples))
    assert arrays.branches_s is not None
    rollouts_s = np.cumsum(arrays.branches_s == 0) - 1
    weights = weighting("seq_mean_token_mean", arrays, np.arange(3), max_response_tokens=1000)
    tokens_s = np.bincount(sequence_of_token(arrays), weights=arrays.loss_mask_n)
    assert np.bincount(rollouts_s, weights=tokens_s * weights.weights_s).tolist() == pytest.approx([1.0, 1.0])


def test_what_a_turn_without_loss_is_rewarded_with_counts_in_the_turn_before() -> None:
    def exchange(reward: float | None, learned: bool) -> TurnRecord:
        response = GenerationResult(request_id="", response=PartialResponse(), finish_reason="stop")
        return TurnRecord(asked=NextTurn(messages=(), learned=learned), result=response, reward=reward)

    turns = [
        exchange(1.0, False),
        exchange(None, True),
        exchange(2.0, False),
        exchange(4.0, True),
        exchange(8.0, False),
    ]
    assert learned_turn_rewards(turns) == [3.0, 12.0]
