"""Games of the package gymnasium, played in a real worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from environment_player import Player, played, rollout, service, workers
from packages import needs

from headway.records.errors import ConfigurationError
from headway.records.task import Task

needs("gymnasium", "gymnasium isn't installed: pip install 'headway[gym]'")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]

LAKE = {
    "env": "FrozenLake-v1",
    "arguments": {"is_slippery": False, "render_mode": "ansi"},
    "actions": ["left", "down", "right", "up"],
    "deterministic": True,
}
PATH = ["down", "down", "right", "right", "down", "right"]
TASK = Task(task_id="t", prompt="Cross the lake.", metadata={"gym": {"seed": 3}})


def lake(**parameters: Any) -> Any:
    return service(name="gym", parameters={**LAKE, **parameters})


def test_a_lake_is_crossed_in_a_worker() -> None:
    def says(prompt: str) -> str:
        return f"I go\n{PATH[prompt.count('I go')]}"

    async def main() -> Any:
        async with workers(name="gym", parameters=LAKE) as pool:
            made = [rollout(pool, says, TASK) for _ in range(1)]
            return await asyncio.gather(*made)

    [made] = played(main)
    assert made.failure is None, made.failure
    assert (made.reward, made.solved, made.turn_rewards) == (1.0, True, (0.0,) * 5 + (1.0,))


def test_the_lake_is_shown_with_where_one_is() -> None:
    async def main() -> Player:
        player = Player(lake(), TASK)
        assert (await player.begin()).splitlines()[2:] == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
        assert (await player.answer("down")).splitlines() == ["  (Down)", "SFFF", "[F]HFH", "FFFH", "HFFG"]
        assert await player.answer("right") == ""
        return player

    player = played(main)
    assert (player.last.over, player.rewards) == ("terminated", [0.0, 0.0])  # a hole


def test_a_parked_lake_is_where_it_was() -> None:
    async def main() -> Player:
        slippery = {"arguments": {"is_slippery": True, "render_mode": "ansi"}}
        player = Player(lake(**slippery), TASK)
        await player.begin()
        for _ in range(3):
            await player.answer("up")
        before = player.messages[""][-1]["content"]
        assert await player.moved(lake(**slippery)) is None
        env = player.episodes._environment._games["7-0"].env  # type: ignore[attr-defined]
        assert env.unwrapped.s == sum(line.index("[") + 4 * row for row, line in lines(before) if "[" in line)
        return player

    def lines(text: str) -> list[tuple[int, str]]:
        return list(enumerate(line for line in text.splitlines() if "(" not in line))

    played(main)


@pytest.mark.parametrize(
    ("name", "said", "actions"),
    [
        ("Blackjack-v1", "0", ["stick", "hit"]),
        ("Taxi-v4", "pickup", ["south", "north", "east", "west", "pickup", "drop"]),
    ],
)
def test_other_games(name: str, said: str, actions: list[str]) -> None:
    async def main() -> Player:
        parameters: dict[str, Any] = {"env": name, "actions": actions, "shows": "observation"}
        player = Player(service(name="gym", parameters=parameters), TASK)
        print(await player.begin())
        await player.answer(said)
        return player

    player = played(main)
    assert player.rewards[0] is not None
    if name == "Taxi-v4":
        assert player.rewards == [-10.0]  # nobody is there
    else:
        assert player.last.over == "terminated"


def test_numbers_in_the_shape_of_a_space() -> None:
    async def main() -> Player:
        player = Player(service(name="gym", parameters={"env": "Pendulum-v1", "reads": "whole"}), TASK)
        await player.begin()
        assert "error" in await player.answer("[9.0]")
        assert "error" in await player.answer("fast")
        assert (await player.answer("[0.5]")).startswith("[")
        return player

    assert played(main).rewards[0] == 0.0


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(ConfigurationError, match="FrozenLagoon"):
        lake(env="FrozenLagoon-v1")
