"""A real OpenEnv server on this machine: answers as actions, what is told, what fails, who dies with whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environment_player import Player, asked_tools, call, played, rollout, service, workers
from packages import needs

from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.environments.openenv_server import LocalServer, fetch_json, free_port

needs("websockets", "websockets isn't installed: pip install 'headway[openenv]'")
needs("openenv", "openenv-core isn't installed")
pytestmark = pytest.mark.real

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "support" / "openenv_server.py"), "{port}"]
TASK = Task(task_id="t", prompt="Guess.", metadata={"gym": {"seed": 7}})


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    one = LocalServer(COMMAND, free_port(), 60.0)
    one.start()
    try:
        yield one
    finally:
        one.stop()


def guess(server: LocalServer, **parameters: Any) -> Any:
    return service(name="openenv", parameters={"address": server.address, **parameters})


def test_a_rollout_in_a_worker_that_starts_its_server() -> None:
    def says(prompt: str) -> str:
        return "7" if "Higher" in prompt else "3"

    async def main() -> Any:
        async with workers(name="openenv", parameters={"command": COMMAND}) as pool:
            return await rollout(pool, says, TASK)

    made = played(main)
    assert made.failure is None, made.failure
    assert made.reward == pytest.approx(0.9)
    assert made.turn_rewards == pytest.approx((-0.1, 1.0))
    assert made.verdict["state"]["step_count"] == 2


def test_what_is_told(server: LocalServer) -> None:
    async def main() -> Player:
        player = Player(guess(server, solved_at=0.5), TASK)
        assert await player.begin() == "A number below 10."
        assert await player.answer("many") == "error: number must be a JSON integer"
        assert (await player.answer("[1]")).startswith("error: ")
        assert await player.answer("9") == "Lower."
        await player.answer("7")
        verdict = (await player.episodes.score(player.name)).verdict
        assert verdict is not None
        assert verdict.solved
        await player.episodes.end(player.name)
        return player

    player = played(main)
    assert (player.last.over, player.rewards) == ("done", [None, None, -0.1, 1.0])


def test_no_action_at_all_is_worth_nothing(server: LocalServer) -> None:
    async def main() -> Any:
        player = Player(guess(server), TASK)
        await player.play(["", "many"])
        nothing = (await player.episodes.score(player.name)).verdict
        await player.answer("[7]")
        return nothing, (await player.episodes.score(player.name)).verdict

    for verdict in played(main):
        assert (verdict.reward, verdict.solved, verdict.failure) == (0.0, False, None)


def test_actions_as_calls_and_arguments_of_reset(server: LocalServer) -> None:
    async def main() -> Player:
        task = Task(task_id="t", prompt="Guess.", metadata={"openenv": {"highest": 5, "seed": 2}})
        player = Player(guess(server, reads="tool"), task)
        assert await player.begin() == "A number below 5."
        assert asked_tools(player.last.asked) == ["act"]
        assert player.last.asked is not None
        assert player.last.asked.tools[0]["function"]["parameters"]["required"] == ["number"]
        assert "act" in await player.answer("2")
        assert "error" in await player.answer(call("act", '{"letter": 3}'))
        assert await player.answer(call("act", '{"number": 3}')) == "Lower."
        await player.answer(call("act", '{"number": 2}'))
        return player

    assert played(main).last.over == "done"


def test_what_fails(server: LocalServer) -> None:
    async def main() -> Any:
        broken, moved = Player(guess(server), TASK), Player(guess(server), TASK, "7-1")
        await broken.play(["13"])
        await moved.begin()
        return broken.last.failure, await moved.moved(guess(server))

    broken, moved = played(main)
    assert "unlucky" in broken.cause
    assert (broken.boundary, broken.infrastructure) == ("environment", False)
    assert moved.infrastructure


@pytest.mark.slow
def test_a_server_that_dies_is_infrastructure_and_started_again() -> None:
    async def main() -> Any:
        episodes = service(name="openenv", parameters={"command": COMMAND})
        address = episodes._environment._address  # type: ignore[attr-defined]
        one, other = Player(episodes, TASK), Player(episodes, TASK, "7-1")
        await one.play(["666"])
        await other.play(["7"])
        await episodes.shut_down()
        with pytest.raises(OSError):  # noqa: PT011  (refused or reset)
            fetch_json(f"{address}/health", 1.0)
        return one.last.failure, other.last.over

    failure, over = played(main)
    assert failure.infrastructure
    assert over == "done"


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({}, "either address"),
        ({"address": "http://127.0.0.1:9"}, "the server at http://127.0.0.1:9"),
        ({"command": ["false"], "start_timeout_s": 0.5}, "not up within"),
        ({"address": "", "reads": "all", "command": ["x"]}, "valid: whole"),
    ],
)
def test_what_is_wrong_is_known_before_the_run(parameters: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        service(name="openenv", parameters=parameters)


def test_a_field_that_is_none(server: LocalServer) -> None:
    with pytest.raises(ConfigurationError, match="gets the answer: number"):
        guess(server, field="text")
