"""Games in words: what counts as an action, what an answer without one leads to, games that are played again."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from environment_player import Player, asked_tools, call, played, rollout, service

from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.environments.gym import seed_of, tasks, uncoloured

WORDS = ["crane", "slate", "pious"]
LIVE: set[int] = set()
RUNS = itertools.count()
CONSTRUCTED: list[Any] = []


class Discrete:
    """As gymnasium's."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Guess:
    """A word is guessed: a letter's place is told by an upper-case letter."""

    def __init__(self, tries: int = 3, hangs: bool = False, breaks: bool = False, lucky: bool = False) -> None:
        self.tries, self.hangs, self.breaks, self.lucky = tries, hangs, breaks, lucky
        self.threads = set()
        self.release = threading.Event()
        LIVE.add(id(self))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.word = WORDS[(next(RUNS) if self.lucky else seed or 0) % 3]
        self.left = (options or {}).get("tries", self.tries)
        return "Guess five letters.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1
        if self.hangs:
            self.release.wait(20)
        if self.breaks:
            raise ZeroDivisionError("the game is broken")
        self.left -= 1
        shown = "".join(a.upper() if a == b else "-" for a, b in zip(action, self.word, strict=False))
        return f"{shown} {self.left} left", float(action == self.word), action == self.word, self.left <= 0, {}

    def close(self) -> None:
        LIVE.discard(id(self))


class Diary:
    """Shows the day; ``leaks``: its reset doesn't begin at day 0."""

    def __init__(self, leaks: bool = False, random: bool = False) -> None:
        self.leaks, self.random, self.day = leaks, random, 0
        CONSTRUCTED.append(self)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.day = self.day if self.leaks else 0
        return f"day {self.day} of {seed}" + (f", run {next(RUNS)}" if self.random else ""), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.day += 1
        return f"day {self.day}", 1.0, action == "end", False, {}


class Door:
    """The right one of three doors; then it is over."""

    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, int], dict[str, Any]]:
        return {"doors": 3}, {}

    def step(self, action: int) -> tuple[dict[str, int], float, bool, bool, dict[str, Any]]:
        assert type(action) is int
        return {"opened": action}, float(action == 1) * 0.5, action == 1, False, {}


class Text:
    """As gymnasium's: five small letters."""

    def contains(self, text: Any) -> bool:
        return len(text) == 5 and text.isascii() and text.islower()


class Box:
    """As gymnasium's: two numbers of any size."""

    dtype = float

    def contains(self, array: Any) -> bool:
        return array.shape == (2,)


class Written:
    """Shows what it was given; ``space``: which of those above."""

    def __init__(self, space: str) -> None:
        self.action_space = {"Text": Text, "Box": Box}[space]()

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"given {action}", 1.0, False, False, {}


def guess(**parameters: Any) -> Any:
    return service(name="gym", parameters={"env": "test_environment_gym:Guess", **parameters}, timeout_s=5)


def doors(**parameters: Any) -> Any:
    return service(name="gym", parameters={"env": "test_environment_gym:Door", **parameters})


def task(seed: int = 1, **gym: Any) -> Task:
    return Task(task_id="t", prompt="Play.", metadata={"gym": {"seed": seed, **gym}})


def test_a_text_game_is_a_rollout_with_rewards_by_turn() -> None:
    async def main() -> Any:
        return await rollout(guess(), lambda text: "I think:\nslate" if "A" in text else "a try:\ncrane", task())

    made = played(main)
    assert made.failure is None
    assert (made.reward, made.solved, made.turn_rewards) == (1.0, True, (0.0, 1.0))
    assert made.verdict["ended"] == "terminated"
    assert len(made.turn_ends) == 2


def test_what_is_said() -> None:
    async def main() -> Player:
        player = Player(guess(), task(options={"tries": 2}))
        assert await player.begin() == "Play.\n\nGuess five letters."
        assert await player.answer("crane") == "--A-E 1 left"
        assert await player.answer("slats") == ""
        return player

    player = played(main)
    assert player.messages[""][0] == {"role": "system", "content": "Write the action on the last line of your answer."}
    assert (player.last.over, player.rewards) == ("truncated", [0.0, 0.0])


@pytest.mark.parametrize(
    ("reads", "answer", "found"),
    [
        ("whole", "1", True),
        ("whole", "I take\n1", False),
        ("last_line", "I take\n1.\n", True),
        ("last_line", " ", False),
        ("tag", "<action>0</action> no, <action> 1 </action> is right", True),
        ("tag", "1", False),
    ],
)
def test_where_the_action_is(reads: str, answer: str, found: bool) -> None:
    async def main() -> Player:
        player = Player(doors(reads=reads, invalid_reward=-0.25))
        await player.begin()
        told = await player.answer(answer)
        assert found or "valid: a number from 0 to 2" in told
        return player

    player = played(main)
    assert player.rewards == [0.5 if found else -0.25]
    assert player.last.over == ("terminated" if found else "")


@pytest.mark.parametrize(
    ("said", "right"), [("Middle!", True), ("1", True), ("roof", False), ("3", False), ("-1", False)]
)
def test_actions_by_name_or_number(said: str, right: bool) -> None:
    async def main() -> Player:
        player = Player(doors(actions=["left", "middle", "right"]))
        await player.play([said])
        return player

    player = played(main)
    assert player.rewards == [0.5 if right else 0.0]
    assert right or "valid: left, middle, right" in player.messages[""][-1]["content"]


@pytest.mark.parametrize(
    ("space", "said", "valid"),
    [
        ("Text", "crane", True),
        ("Text", "cranes", False),
        ("Text", "CRANE", False),
        ("Box", "[1, -2.5e3]", True),
        ("Box", "[1, Infinity]", False),
        ("Box", "[1, NaN]", False),
        ("Box", "[1, null]", False),
        ("Box", "[1, 1e999]", False),
        ("Box", f"[1, {10**30}]", False),  # it couldn't be kept
    ],
)
def test_what_is_not_of_its_space_is_no_action(space: str, said: str, valid: bool) -> None:
    async def main() -> None:
        parameters = {"env": "test_environment_gym:Written", "arguments": {"space": space}, "invalid_reward": -1.0}
        player = Player(service(name="gym", parameters={**parameters, "deterministic": True}))
        await player.begin()
        assert (await player.answer(said)).startswith("given" if valid else "error: that is no action")
        assert player.rewards == [1.0 if valid else -1.0]
        await player.parked()

    played(main)


def test_an_invalid_action_may_end_the_game() -> None:
    async def main() -> Any:
        return await Player(doors(invalid="end", invalid_reward=-1.0)).play(["nothing"])

    reply = played(main)
    assert (reply.over, reply.reward) == ("invalid action", -1.0)


def test_actions_as_calls_of_a_tool() -> None:
    async def main() -> Player:
        player = Player(doors(reads="tool", actions=["left", "middle", "right"], solved_at=0.5))
        await player.begin()
        assert asked_tools(player.last.asked) == ["act"]
        assert player.last.asked is not None
        schema = player.last.asked.tools[0]["function"]["parameters"]
        assert schema["properties"]["action"]["enum"] == ["left", "middle", "right"]
        assert await player.answer(call("act", '{"action": "left"}')) == '{"opened": 0}'
        assert "valid JSON" not in await player.answer("left")
        assert "error" in await player.answer(call("act", "[1]"))
        assert "error" in await player.answer(call("act", '{"action": "\\ud800"}'))
        assert "no tool" in await player.answer(call("open", "{}"))
        both = call("act", '{"action": 1}')
        both["tool_calls"] += call("act", '{"action": 2}', "2")["tool_calls"]
        await player.answer(both)
        verdict = (await player.episodes.score(player.name)).verdict
        assert verdict is not None
        assert verdict.solved
        return player

    player = played(main)
    assert (player.last.over, player.rewards) == ("terminated", [0.0, 0.0, 0.0, 0.0, None, 0.5])


def test_half_a_character_is_no_action() -> None:
    async def main() -> Player:
        player = Player(guess(reads="tool"))
        await player.begin()
        assert "error" in await player.answer(call("act", '{"action": "\\ud800"}'))
        assert "left" in await player.answer(call("act", '{"action": "crane"}'))
        return player

    assert played(main).last.failure is None


def test_a_parked_game_is_played_again_in_another_process() -> None:
    async def main() -> None:
        one, other = guess(deterministic=True), guess(deterministic=True)
        player = Player(one, task())
        await player.begin()
        await player.answer("crane")
        assert await player.moved(other) is None
        await one.shut_down()
        assert await player.answer("slats") == "SLAT- 1 left"
        assert len(player.messages[""]) == 6
        await other.end(player.name)
        await other.shut_down()

    LIVE.clear()
    played(main)
    assert not LIVE


def test_a_game_that_cannot_be_played_again_fails_as_infrastructure() -> None:
    async def main(parameters: Any) -> Any:
        player = Player(guess(**parameters), task())
        await player.begin()
        await player.answer("crane")
        failure = await player.moved(guess(**parameters))
        await player.episodes.end(player.name)
        return failure

    failure = played(lambda: main({}))
    assert (failure.boundary, failure.infrastructure) == ("environment", True)
    assert "its game was lost" in failure.cause


def test_a_game_that_only_says_that_it_is_deterministic_is_found_out() -> None:
    async def main() -> Any:
        player = Player(guess(deterministic=True, arguments={"lucky": True}), task())
        await player.begin()
        await player.answer("stare")
        return await player.moved(guess(deterministic=True, arguments={"lucky": True}))

    failure = played(main)
    assert failure.infrastructure
    assert "isn't deterministic" in failure.cause


def test_a_game_that_breaks_fails_its_rollout_alone() -> None:
    async def main() -> Any:
        episodes = guess()
        broken, well = Player(episodes, task(arguments={"breaks": True})), Player(episodes, task(), "7-1")
        await broken.play(["crane"])
        await well.play(["slate"])
        return broken.last, well.last

    broken, well = played(main)
    assert (broken.failure.boundary, broken.failure.infrastructure) == ("environment", False)
    assert "the game is broken" in broken.failure.cause
    assert well.over == "terminated"


def test_a_game_that_hangs_holds_up_nobody_else() -> None:
    async def main() -> Any:
        episodes = service(name="gym", parameters={"env": "test_environment_gym:Guess"}, timeout_s=2)
        stuck = [Player(episodes, task(arguments={"hangs": True}), f"7-{n}") for n in range(40)]
        for one in stuck:
            await one.begin()
        waiting = [asyncio.create_task(one.answer("crane")) for one in stuck]
        await asyncio.sleep(0)
        well = Player(episodes, task(), "7-99")
        await well.play(["slate"])
        await asyncio.gather(*waiting)
        return stuck[0].last, well.last

    stuck, well = played(main)
    assert well.over == "terminated"
    assert stuck.failure.infrastructure
    assert "timeout_s" in stuck.failure.cause


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"reads": "first_line"}, "reads = 'first_line': valid: whole"),
        ({"invalid": "ignore"}, "valid: tell, end"),
        ({"shows": "pixels"}, "valid: auto"),
        ({"actions": ["a"]}, "has 1 names, and the game has 3 actions"),
        ({"env": "test_environment_gym:Nothing"}, "has no 'Nothing'"),
        ({"arguments": {"depth": 3}}, "takes no arguments"),
    ],
)
def test_what_is_wrong_is_known_before_the_run(parameters: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        doors(**parameters)


def test_rollouts_of_a_task_have_the_same_game() -> None:
    rows = list(tasks(2, first_seed=5, arguments={"tries": 2}))
    assert [row["gym"]["seed"] for row in rows] == [5, 6]
    assert rows[0]["gym"]["arguments"] == {"tries": 2}
    plain = Task(task_id="a", prompt="")
    assert seed_of(plain) == seed_of(plain) != seed_of(Task(task_id="b", prompt=""))
    assert seed_of(task(0)) == 0


def test_a_place_marked_by_colour_stays_marked() -> None:
    assert uncoloured("\n\x1b[41mS\x1b[0mFFF\nF\x1b[35mH\x1b[0mFH\n") == "[S]FFF\nFHFH"


def diaries(count: int, at_once: int, **arguments: Any) -> tuple[list[str], int]:
    """What ``count`` rollouts saw first, two of each seed, ``at_once`` beside each other; how many games were built."""

    async def main() -> list[str]:
        parameters = {"env": "test_environment_gym:Diary", "arguments": arguments}
        episodes, seen = service(name="gym", parameters=parameters, timeout_s=5), list[str]()
        CONSTRUCTED.clear()
        for first in range(0, count, at_once):
            numbers = range(first, first + at_once)
            players = [Player(episodes, task(number // 2), f"7-{number}") for number in numbers]
            seen += [(await player.begin()).removeprefix("Play.\n\n") for player in players]
            for player in players:
                await player.answer("work")
                await player.answer("end")
                await episodes.end(player.name)
        await episodes.shut_down()
        return seen

    return played(main), len(CONSTRUCTED)


@pytest.mark.parametrize("at_once", [1, 4])
def test_simulators_are_built_once_for_the_games_that_run_at_once(at_once: int) -> None:
    seen, constructed = diaries(32, at_once)
    assert seen == [f"day 0 of {number // 2}" for number in range(32)]
    assert constructed <= at_once + 1  # another may be built once, to compare a used game with


def test_simulators_whose_reset_keeps_the_game_before_are_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    seen, constructed = diaries(16, 2, leaks=True)
    assert seen == [f"day 0 of {number // 2}" for number in range(16)]
    assert constructed >= 16
    [message] = [record.getMessage() for record in caplog.records if "used game" in record.getMessage()]
    assert '"leaks": true' in message


def test_games_that_begin_by_chance_are_used_again(caplog: pytest.LogCaptureFixture) -> None:
    _, constructed = diaries(16, 2, random=True)
    assert constructed <= 4
    assert not [record for record in caplog.records if "used game" in record.getMessage()]


def test_no_more_simulators_are_kept_than_have_run_at_once() -> None:
    async def main() -> int:
        episodes = guess()
        LIVE.clear()
        for tries in range(1, 9):
            player = Player(episodes, task(arguments={"tries": tries}), f"7-{tries}")
            await player.begin()
            await episodes.end(player.name)
        await asyncio.sleep(0.1)
        kept = len(LIVE)
        await episodes.shut_down()
        assert not LIVE
        return kept

    assert played(main) == 1


def test_a_game_that_broke_or_hangs_is_not_used_again() -> None:
    async def main() -> set[int]:
        episodes = service(name="gym", parameters={"env": "test_environment_gym:Guess"}, timeout_s=1)
        used: set[int] = set()
        for number, fault in enumerate(("breaks", "hangs")):
            for again in range(2):
                player = Player(episodes, task(arguments={fault: True}), f"7-{2 * number + again}")
                await player.begin()
                [game] = episodes._environment._games.values()
                used.add(id(game.env))
                await player.answer("crane")
                await episodes.end(player.name)
                game.env.release.set()
        return used

    assert len(played(main)) == 4
