"""An environment whose policy has always called a tool: three turns, the second of them with an error."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from headway.rollout.environment import Answer, Call, Environment, Episode
from headway.rollout.tools import Tool, ToolError, tools_by_name

WAIT_S = 0.02


class Clerk(Environment):
    """Carries out a call of `wait` in each turn, whatever was answered; a model of a few weights writes none."""

    def __init__(self) -> None:
        self._tools = tools_by_name([Tool.of(self.wait)])

    async def wait(self, refused: bool) -> str:
        """Wait a moment."""
        await asyncio.sleep(WAIT_S)
        if refused:
            raise ToolError("not now")
        return "done"

    async def reply(self, episode: Episode, answer: Answer) -> None:
        call = Call(name="wait", arguments=json.dumps({"refused": episode.turns == 2}), call_id="1")
        self.offered = self._tools  # not shown to the model
        vars(episode)["add_tool_result"] = lambda call, content: episode.add_message(
            content
        )  # for its message holds no call
        await self.call_tools(episode, dataclasses.replace(answer, calls=(call,)))
        if episode.turns == 3:
            episode.end()

    async def score(self, episode: Episode) -> Any:
        return float(len(episode.messages[""][-1]["content"]) % 2)
