"""A verifiers environment of a taskset and a harness: two turns, rewarded for how much of them is digits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class DigitData(vf.TaskData):
    digits: str


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        if self.data.name == "broken":
            raise ValueError("nobody knows the digits")
        text = "".join(str(message.content or "") for message in trace.assistant_messages)
        return sum(text.count(digit) for digit in self.data.digits) / max(1, len(text))

    @vf.reward(weight=0.5)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == 2)


class DigitsConfig(vf.TasksetConfig):
    numbers: int = 20
    digits: str = "0123456789"


class Digits(vf.Taskset[DigitTask, DigitsConfig]):
    def load(self) -> Iterable[DigitTask]:
        for number in range(10, 10 + self.config.numbers):
            data = DigitData(prompt=f"{number}+{number % 7}=", digits=self.config.digits, name=f"n{number}")
            yield DigitTask(data, self.config.task)


class Twice(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again. Its loop runs in this process; every call goes to the endpoint it is given."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        name = data.name or ""
        if name.startswith("hangs:"):
            await _hang(Path(name.removeprefix("hangs:")))
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            for again in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
                said = "9" * 500 if name == "long" else str(again)
                messages += [answer.choices[0].message, {"role": "user", "content": said}]
        return vf.ProgramResult(0, "", "")


async def _hang(mark: Path) -> None:
    mark.with_suffix(".begun").touch()
    try:
        await asyncio.sleep(1000)
    finally:
        mark.with_suffix(".ended").touch()


__all__ = ["Digits", "Twice"]
