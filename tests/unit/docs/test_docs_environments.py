"""docs/environments.md: its environments, played."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from played import play

from headway.rollout.environment import Answer, Environment, Episode

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")


def classes() -> dict[str, Any]:
    """Those that the page writes."""
    names: dict[str, Any] = {"Environment": Environment, "Episode": Episode, "Answer": Answer}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(compile(f"from __future__ import annotations\n{block}", "environments.md", "exec"), names)
    return names


def test_an_answer_that_is_no_number_is_told_and_the_game_goes_on() -> None:
    guess = classes()["Guess"]

    class Fixed(guess):
        async def begin(self, episode: Episode) -> None:
            await super().begin(episode)
            episode.state["number"] = 50

    played = play(Fixed(), ["a number?", "40", "50"])
    assert played.rollout.failure is None
    assert (played.rollout.reward, played.rollout.turns) == (1.0, 3)
    assert played.rollout.verdict["ended"] == "found"
