"""Passes that wait at the same time are computed together, and each caller has its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headway.records.errors import WorkerDied
from headway.records.tenants.protocols import PassOutcome, TenantRefused, TrainingPass
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.tenants.shared_passes import SharedPasses

NOTHING = TrainingPass(data=(), loss="ppo")


class Worker:
    """A trainer that computes any pass in a second."""

    def __init__(self, clock: Clock) -> None:
        self.calls: list[str] = []
        self.clock = clock

    async def compute(self, passes: list[tuple[str, TrainingPass]]) -> Sequence[PassOutcome | Exception]:
        self.calls.append("".join(model_id for model_id, _ in passes))
        await self.clock.sleep(1.0)
        if "!" in self.calls[-1]:
            raise WorkerDied("trainer", "exit code 1")
        outcomes = [PassOutcome(logprobs=(), metrics={"loss:sum": float(ord(id))}) for id, _ in passes]
        return [
            TenantRefused("no") if id == "?" else outcome for (id, _), outcome in zip(passes, outcomes, strict=True)
        ]


def test_passes_that_wait_share_a_call_and_each_has_its_outcome() -> None:
    async def main(clock: Clock) -> None:
        worker, busy = Worker(clock), asyncio.Lock()
        shared = SharedPasses(worker.compute, busy)

        async def ask(model_id: str, at_s: float) -> float:
            await clock.sleep(at_s)
            return (await shared.forward_backward(model_id, NOTHING)).metrics["loss:sum"]

        async def other_call() -> None:
            await clock.sleep(2.1)
            async with busy:
                await clock.sleep(2.0)

        times = {"a": 0.0, "b": 0.2, "c": 0.7, "d": 2.2, "e": 3.9, "f": 9.0}
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(model_id, at_s)) for model_id, at_s in times.items()]
            group.create_task(other_call())
        assert [task.result() for task in asked] == [float(ord(model_id)) for model_id in times]
        assert worker.calls == ["a", "bc", "de", "f"]

    run_virtual(main)


def test_a_refusal_is_one_callers_and_a_death_all_callers_of_its_call() -> None:
    async def main(clock: Clock) -> None:
        worker = Worker(clock)
        shared = SharedPasses(worker.compute, asyncio.Lock())
        asked = [asyncio.ensure_future(shared.forward_backward(model_id, NOTHING)) for model_id in "ab?c"]
        await clock.sleep(0.5)
        asked[0].cancel()
        later = [asyncio.ensure_future(shared.forward_backward(model_id, NOTHING)) for model_id in "d!"]
        with pytest.raises(TenantRefused):
            await asked[2]
        assert (await asked[3]).metrics == {"loss:sum": float(ord("c"))}
        for call in later:
            with pytest.raises(WorkerDied):
                await call
        assert (await shared.forward_backward("e", NOTHING)).metrics == {"loss:sum": float(ord("e"))}
        assert worker.calls == ["ab?c", "d!", "e"]

    run_virtual(main)
