"""An environment that notices when anything of a rollout is lost or happens twice: it keeps a diary, in its sandbox and
in its state, and compares both with the conversation at every turn."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.records.rollout import Group, Rollout
from headway.records.tokens import plain
from headway.rollout.environment import Answer, Environment, Episode

ANSWER_TOKENS = 60  # a random model knows no end
KEPT = "DIARY_KEPT"  # environment variable: the file that `keep` writes


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def turns_of(rollout: str) -> int:
    """Some are much longer than others: those are in the middle when a batch is full."""
    return 2 + int(digest(rollout), 16) % 7


def keep(group: Group, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """hooks.group_meta: write down what has finished, for the run itself keeps no tokens of what it has trained."""
    with Path(os.environ[KEPT]).open("ab") as file:
        for rollout in rollouts if rollouts[0].opened_s else ():  # not the made-up ones that hooks are tried with
            file.write(msgspec.json.encode(rollout, enc_hook=plain) + b"\n")
    return {}


class Diary(Environment):
    uses_sandbox = True

    async def begin(self, episode: Episode) -> None:
        await super().begin(episode)
        episode.state.update(lines=[], parked=[], resumed=0, drawn=[], turns=turns_of(episode.name))
        episode.set_active_agent("", max_tokens=ANSWER_TOKENS)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        lines = episode.state["lines"]
        await self.compare(episode)
        said = [message for message in episode.messages[""] if message["role"] == "assistant"]
        assert len(said) == len(lines) + 1 == episode.turns, (len(said), lines, episode.turns)
        lines.append(f"{len(lines)} {digest(answer.text)}\n")
        episode.state["drawn"].append(episode.random.random())
        await self.write(lines[-1], episode)
        if len(lines) == episode.state["turns"]:
            episode.end("full")
        else:
            episode.add_message(f"{len(lines)}?")

    async def score(self, episode: Episode) -> Any:
        await self.compare(episode)
        lines = episode.state["lines"]
        return {"reward": float(len(lines[-1]) > 0 and int(lines[-1].split()[1], 16) % 2), **episode.state}

    async def park(self, episode: Episode) -> None:
        episode.state["parked"].append(episode.turns)

    async def resume(self, episode: Episode) -> None:
        episode.state["resumed"] += 1

    async def compare(self, episode: Episode) -> None:
        """The files, as its state remembers them."""
        lines = episode.state["lines"]
        if lines:
            assert await self.read(episode) == "".join(lines)

    async def write(self, line: str, episode: Episode) -> None:
        written = await episode.sandbox.exec(["sh", "-c", "cat >> diary"], stdin=line.encode())
        assert written.ok, written

    async def read(self, episode: Episode) -> str:
        return (await episode.sandbox.read("diary")).decode()
