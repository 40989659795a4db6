"""A verifiers environment as anyone would write it for that package: it knows nothing of Headway.

Sums, worked out one step at a time. The model rewrites what remains, "19+8-3=" -> "27-3", until a number is left; each
step is a turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

STEPS = 14  # turns before it gives up


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    path: Path = Path("tasks.jsonl")  # of rows with a prompt and an answer


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterable[SumTask]:
        for line in self.config.path.read_text().splitlines():
            row = json.loads(line)
            data = SumData.model_validate({"prompt": row["prompt"], "answer": row["answer"]})
            yield SumTask(data, self.config.task)


class Steps(vf.Harness[vf.HarnessConfig]):
    """Its loop runs in the process of the episode; every call goes to the endpoint it is given."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

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
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            for _ in range(STEPS):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, stop="=", max_tokens=40
                )
                text = answer.choices[0].message.content or ""
                if not text or text.isdigit():
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "="}]
        return vf.ProgramResult(0, "", "")


__all__ = ["Sums", "Steps"]
