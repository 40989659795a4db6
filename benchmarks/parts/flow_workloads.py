"""Workflows of the flow benchmark: timed workers on virtual devices, and tiny models on real cores."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.flow.auto import AutoPlanner
from headway.flow.channel import Channel
from headway.flow.run import Flow
from headway.flow.worker import Worker
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, LocalLauncher, WorkerHandle, WorkerSpec

Placement = dict[str, tuple[str, ...]]  # stage -> devices


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of a turn of a timed worker: fixed + each item's length x ``item_s``, or of the longest one, as decoding
    in a batch takes; and of a load or an offload."""

    fixed_s: float
    item_s: float
    longest: bool = False
    switch_s: float = 0.0
    most: int | None = None


class TimedWorker(Worker):
    """Waits as long as a turn would take on a device of its own; has no result but the items it was given."""

    stateless = True

    def __init__(self, times: StageTime) -> None:
        self.times = times

    async def run(self, source: Channel, result: Channel | None) -> None:
        async for lengths in source.chunks():
            async with self.turn():
                work = max(lengths) + 0.02 * sum(lengths) if self.times.longest else sum(lengths)
                await asyncio.sleep(self.times.fixed_s + self.times.item_s * work)
            if result is not None:
                await result.put_all(lengths)

    async def onload(self) -> None:
        await asyncio.sleep(self.times.switch_s)

    async def offload(self) -> None:
        await asyncio.sleep(self.times.switch_s)


async def timed(flow: Flow, stages: Mapping[str, StageTime], items: Callable[[int], list[float]], steps: int) -> Any:
    """A chain of timed stages; returns the steps."""
    groups = [
        (name, await flow.workers(name, TimedWorker, times, most_workers=times.most)) for name, times in stages.items()
    ]
    async for step in flow.steps(steps):
        channels: list[Channel | None] = [flow.channel(f"to {name}") for name, _ in groups]
        source = channels[0]
        assert source is not None
        await source.put_all(items(step))
        source.close()
        channels.append(None)
        calls = [group.run(channels[place], channels[place + 1]) for place, (_, group) in enumerate(groups)]
        for place, call in enumerate(calls):
            await call
            if (result := channels[place + 1]) is not None:
                result.close()
    return list(flow.history), flow.plan


class VirtualDevices:
    """A launcher that starts workers of any device on this machine's cores."""

    def __init__(self, clock: Clock, on_event: EventCallback, waits: Waits) -> None:
        self._local = LocalLauncher(clock, on_event=on_event, waits=waits)

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        return await self._local.start(dataclasses.replace(spec, device="cpu:all"))


class Scripted(AutoPlanner):
    """Goes through the plans of one placement, ``each`` steps with each."""

    def __init__(self, placement: Placement, chunks: Sequence[int | None], items: int, each: int) -> None:
        super().__init__((), items)
        self._plans = [
            ExecutionPlan(
                stages={name: StagePlacement(devices=devices, chunk=chunk) for name, devices in placement.items()},
                items=items,
            )
            for chunk in chunks
        ]
        self._each = each

    def with_stage(self, plan: ExecutionPlan, stage: str, max_workers: int | None) -> ExecutionPlan:
        return self._plans[0]

    def add_step(self, *measured: object) -> None:
        pass

    def plan_for(self, step: int, plan: ExecutionPlan, history: Sequence[FlowStep]) -> ExecutionPlan | None:
        return self._plans[step // self._each] if step % self._each == 0 else None


def long_tail(count: int, spread: float, seed: int = 0) -> Callable[[int], list[float]]:
    """Lengths of a step's items: log-normal with median 1, the same in every step, so that plans can be compared."""
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(0.0, spread) for _ in range(count)]
    return lambda step: list(lengths)


def placements(devices: Sequence[str], stages: Sequence[str], most: Mapping[str, int | None]) -> Iterable[Placement]:
    """Every way to give a chain of stages devices: all of them all (temporal), a share each (spatial), or two
    neighbours together beside the others (hybrid)."""

    def limited(stage: str, given: Sequence[str]) -> tuple[str, ...]:
        return tuple(given[: most.get(stage)])

    yield {stage: limited(stage, devices) for stage in stages}
    seen: list[Placement] = []
    for parts in _partitions(list(stages)):
        if len(parts) < 2:
            continue
        for counts in _splits(len(devices), len(parts)):
            placement: Placement = {}
            first = 0
            for part, count in zip(parts, counts, strict=True):
                for stage in part:
                    placement[stage] = limited(stage, devices[first : first + count])
                first += count
            if placement not in seen:
                seen.append(placement)
                yield placement


def _partitions(stages: list[str]) -> Iterable[list[list[str]]]:
    """Ways to cut a chain into runs of neighbours."""
    if not stages:
        yield []
        return
    for size in range(1, len(stages) + 1):
        for rest in _partitions(stages[size:]):
            yield [stages[:size], *rest]


def _splits(devices: int, parts: int) -> Iterable[tuple[int, ...]]:
    if parts == 1:
        yield (devices,)
        return
    for first in range(1, devices - parts + 2):
        for rest in _splits(devices - first, parts - 1):
            yield (first, *rest)


def spin(seconds: float) -> None:
    """Compute for so long of this thread's processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
