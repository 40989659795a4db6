"""Prompts wait for a replica that is free, in order."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.generator.routing.prompt_calls import PromptCalls
from headway.records.tokens import TokenIds
from headway.runtime.clock import Clock, run_virtual


class OneAfterAnother:
    """A replica that takes a millisecond for a prompt."""

    live, draining, yielded, silent, update, index = True, False, False, False, 0, 0
    calls = ()

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, asyncio.Semaphore(1)
        self.prompts: list[int] = []

    async def prompt_logprobs(self, ids: TokenIds, top: int, adapter: str) -> Any:
        async with self._free:
            self.prompts.append(ids[0])
            await self._clock.sleep(0.001)


def test_a_quick_replica_is_never_idle_while_prompts_wait() -> None:
    async def main(clock: Clock) -> tuple[list[int], float]:
        replica: Any = OneAfterAnother(clock)
        calls, started_s = PromptCalls([replica], clock, lambda: None), clock.now()
        await asyncio.gather(*(calls.logprobs(TokenIds([number])) for number in range(60)))
        return replica.prompts, clock.now() - started_s

    prompts, seconds = run_virtual(main)
    assert prompts == list(range(60))
    assert abs(seconds - 0.06) < 1e-6
