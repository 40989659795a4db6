"""Prompts wait in order for a replica that is free: how many each has at once, also when callers leave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
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

    async def prompt_logprobs(self, ids: TokenIds, top: int, adapter: str, targets: Any) -> Any:
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


def test_a_replica_has_two_prompts_although_callers_leave() -> None:
    passes: list[int] = []
    ends = asyncio.Event()

    async def prompt_logprobs(ids: TokenIds, top: int, adapter: str, targets: Any) -> Any:
        passes.append(ids[0])
        await ends.wait()
        return ids

    async def main(clock: Clock) -> None:
        state = dict.fromkeys(("draining", "yielded", "silent"), False)
        replica: Any = SimpleNamespace(index=0, live=True, update=0, calls=(), prompt_logprobs=prompt_logprobs, **state)
        prompts = PromptCalls([replica], clock, lambda: None)
        callers = [asyncio.create_task(prompts.logprobs(TokenIds((number,)))) for number in range(4)]
        await clock.sleep(1)
        assert passes == [0, 1]
        for leaving in callers[:3]:  # two that are computed, and one that waits
            leaving.cancel()
        await clock.sleep(1)
        assert passes == [0, 1]
        ends.set()
        assert list(await callers[3]) == [3]
        assert passes == [0, 1, 3]

    run_virtual(main)
