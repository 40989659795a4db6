"""`run`: executes a workflow, a plain procedure over workers and channels, as a plan says."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from headway.config.cluster import ClusterConfig
from headway.control.channel_state import Balance
from headway.flow.auto import AutoPlanner
from headway.flow.channel import BYTES, ITEMS, Channel
from headway.flow.channels import Channels
from headway.flow.device_locks import DeviceLocks
from headway.flow.group import WorkerGroup
from headway.flow.machines import open_machines
from headway.flow.peers import Hub
from headway.flow.placement import same_places, text_of
from headway.flow.process import enter
from headway.flow.stage import STOP_GRACE_S, Stage, Surroundings
from headway.flow.steps import StepBook
from headway.flow.watch import FlowWatch
from headway.flow.worker import StageTimes, Worker
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import split_node
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher

Result = TypeVar("Result")
PlanLike = ExecutionPlan | Mapping[str, Any] | Literal["auto"] | AutoPlanner
MakeLauncher = Callable[[Clock, EventCallback, Waits], Launcher]
STALL_S = 120.0


class FlowOptions(NamedTuple):
    """How a workflow is run: see `run`."""

    devices: Sequence[str] = ()
    items: int | None = None
    directory: str | Path | None = None
    stall_s: float = STALL_S
    launcher: MakeLauncher | None = None
    cluster: ClusterConfig | None = None


def run(workflow: Callable[..., Awaitable[Result]], plan: PlanLike, *arguments: Any, **options: Any) -> Result:
    """Run ``workflow(flow, *arguments)`` to its end and return its result.

    ``plan``: an `ExecutionPlan`, or a mapping of its form; or ``{"generate": "cpu:0", "train": ["cpu:1"]}``; or
    "auto": the first steps measure the stages on all ``devices``, the following ones run as is expected to be fastest.
    Options: ``devices``; ``items`` of a step, which "auto" needs, as do several workers that share all of them;
    ``directory``, where logs, events and steps are written; ``stall_s``: when nothing has moved for so long and all
    workers wait, the workflow ends with what they wait for; ``launcher``: what starts processes, by default this
    machine; ``cluster``: the other machines, whose agents (`headway node`) somebody starts.

    Raises what the workflow raises; ConfigurationError for a plan that doesn't fit it; RemoteError with the traceback
    of a worker's method; WorkerDied.
    """
    if unknown := options.keys() - set(FlowOptions._fields):
        valid = ", ".join(FlowOptions._fields)
        raise ConfigurationError(f"run has no option {', '.join(sorted(unknown))}; valid: {valid}")
    chosen = FlowOptions(**options)
    first, planner = _first_plan(plan, chosen)
    _require_possible(first, chosen)

    async def play() -> Result:
        async with Flow(first, chosen, planner) as flow:
            return await flow.play(workflow, arguments)

    return asyncio.run(play())


def _first_plan(plan: PlanLike, options: FlowOptions) -> tuple[ExecutionPlan, AutoPlanner | None]:
    """The plan to begin with, and what changes it."""
    if isinstance(plan, ExecutionPlan):
        return msgspec.structs.replace(plan, items=plan.items or options.items), None
    if isinstance(plan, AutoPlanner):
        return ExecutionPlan(stages={}, items=options.items), plan
    if isinstance(plan, Mapping) and "stages" in plan:
        try:
            return msgspec.convert({"items": options.items, **plan}, ExecutionPlan), None
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"plan: {error}") from None
    if isinstance(plan, Mapping):
        stages = {
            stage: StagePlacement(devices=(devices,) if isinstance(devices, str) else tuple(devices))
            for stage, devices in plan.items()
        }
        return ExecutionPlan(stages=stages, items=options.items), None
    if plan != "auto" or not options.devices or options.items is None:
        raise ConfigurationError(f"plan = {plan!r}: valid: stages with devices, or 'auto' with devices and items")
    return ExecutionPlan(stages={}, items=options.items), AutoPlanner(options.devices, options.items)


def _require_possible(plan: ExecutionPlan, options: FlowOptions) -> None:
    """Raise ConfigurationError for a plan, or options, that no workflow can be run by."""
    if options.cluster is not None and options.launcher is not None:
        raise ConfigurationError(
            "run: launcher and cluster exclude each other: a cluster's workers are started by its nodes"
        )
    for stage, placed in plan.stages.items():
        if not placed.devices or (placed.chunk is not None and placed.chunk < 1):
            raise ConfigurationError(
                f"plan: stage {stage!r}: devices {list(placed.devices)}, chunk {placed.chunk}: valid: at least one "
                "device, and a chunk of at least one item, or none"
            )
        if repeated := {device for device in placed.devices if placed.devices.count(device) > 1}:
            raise ConfigurationError(f"plan: stage {stage!r} has {', '.join(sorted(repeated))} more than once")
        for device in placed.devices:
            if (node := split_node(device)[0]) and options.cluster is None:
                raise ConfigurationError(f"plan: stage {stage!r}: {device}: node {node!r} needs cluster = ...")


class Flow:
    """A running workflow: starts its workers where the plan puts them, makes its channels, counts its steps."""

    def __init__(self, plan: ExecutionPlan, options: FlowOptions, planner: AutoPlanner | None) -> None:
        self.plan = plan
        self.history: list[FlowStep] = []  # of the steps that have ended
        self._options = options
        self._planner = planner
        self._clock = RealClock()
        self._waits = Waits(self._clock.now)
        self._book = StepBook(options.directory, self._clock)
        self._locks = DeviceLocks(self._clock, self._waits, on_event=self._book.event, on_span=self._book.span)
        self._channels = Channels(self._clock, self._waits)
        self._stages: dict[str, Stage] = {}
        self._stack = AsyncExitStack()
        self._failure: BaseException | None = None
        self._failed = False
        self._playing: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Flow:
        options = self._options
        local = (options.launcher or _local)(self._clock, self._book.event, self._waits)
        opened = open_machines(options.cluster, local, self._clock, self._book.event)
        machines = await self._stack.enter_async_context(opened)
        self._around = Surroundings(
            hub=Hub(
                "driver",
                machines.settings_at(""),
                driver=None,
                services=self._services(),
                waits=self._waits,
                on_path=self._on_path,
            ),
            clock=self._clock,
            channels=self._channels,
            locks=self._locks,
            book=self._book,
            fail=self._fail,
            logs=None if options.directory is None else Path(options.directory) / "logs",
            machines=machines,
        )
        self._channels.hub, self._channels.on_lost = self._around.hub, self._book.event
        await self._around.hub.start()
        enter(self._channels)
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in self._channels.unread():
            self._book.event("channel_unread", f"channel {name} has items; nobody has ever asked it for any")
        grace_s = 0.0 if self._failed else STOP_GRACE_S
        await asyncio.gather(*(stage.stop(grace_s) for stage in self._stages.values()))
        await self._around.hub.close()
        enter(None)
        await self._stack.aclose()
        self._book.close()

    async def play(self, workflow: Callable[..., Awaitable[Result]], arguments: Sequence[Any]) -> Result:
        """Run the workflow; what fails outside of it ends it."""
        self._playing = asyncio.ensure_future(workflow(self, *arguments))
        hub, stall_s = self._around.hub, self._options.stall_s
        watch = FlowWatch(self._groups, self._channels, hub, self._clock, stall_s, self._fail)
        watching = asyncio.create_task(watch.loop(), name="watch")
        self._failed = True  # until it has ended well: then workers are given time to end
        try:
            result = await self._playing
            if self._failure is not None:
                raise self._failure
            for name in [name for group in self._groups().values() for name in group.busy]:
                self._book.event("call_not_awaited", f"the workflow has ended; {name} still has a call", worker=name)
            self._failed = False
            return result
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            self._playing.cancel()
            raise
        finally:
            watching.cancel()

    async def workers(
        self,
        stage: str,
        kind: type[Worker],
        *positional: Any,
        restarts: int = 0,
        most_workers: int | None = None,
        **named: Any,
    ) -> WorkerGroup:
        """Start the workers of a stage, one on each of its devices, each built as ``kind(*positional, **named)``.
        Declare stages upstream first.

        ``restarts``: deaths in a row after which a worker is started anew, with its ``state()`` of the end of the last
        step; its call is then made again, and what it had got from channels is delivered again. ``most_workers``: a
        plan may give it so many devices.
        """
        where = _line()
        if stage in self._stages:
            raise ConfigurationError(f"stage {stage!r} ({where}): it has its workers already")
        if self._planner is not None:
            before, self.plan = self.plan, self._planner.with_stage(self.plan, stage, most_workers)
            for other in self._stages.values():  # it may share their devices
                await other.move(before, self.plan)
        if stage not in self.plan.stages:
            valid = ", ".join(self.plan.stages)
            raise ConfigurationError(f"stage {stage!r} ({where}): the plan has no devices for it; it has: {valid}")
        arguments = (positional, named)
        order = len(self._stages)
        made = Stage(
            stage, kind, arguments, self._around, order=order, restarts=restarts, most=most_workers, where=where
        )
        self._stages[stage] = made
        await made.start(self.plan)
        return made.group

    def channel(
        self,
        name: str,
        *,
        items: int = ITEMS,
        bytes: int = BYTES,
        balance: Balance | None = None,
        consumers: WorkerGroup | None = None,
    ) -> Channel:
        """Make a channel of at most ``items`` items and ``bytes`` bytes. ``balance``: how ``consumers`` share its
        items; by default whoever asks first gets the oldest."""
        return self._channels.make(name, items, bytes, balance, [] if consumers is None else consumers.names)

    async def pipeline(self, items: Iterable[Any], *groups: WorkerGroup) -> list[Any]:
        """Send items through a chain of stages, all at work at once: each group's ``run(source, result)``, the last
        one's ``run(source)``. Returns what the last one's workers return."""
        channels, results = [self.channel(f"to {group.stage}") for group in groups], list[Any]()
        calls = [group.run(*channels[place : place + 2]) for place, group in enumerate(groups)]
        await channels[0].put_all(items)
        for channel, call in zip(channels, calls, strict=True):
            channel.close()
            results = await call
        return results

    async def steps(self, count: int) -> AsyncIterator[int]:
        """Number the steps from 0; between two of them they are counted, and the plan may change."""
        for step in range(count):
            self._require_all_declared()
            better = self._planner and self._planner.plan_for(step, self.plan, self.history)
            if better is not None:
                await self._move(better)
            self._book.begin(step, self._locks.statistics().idle_wanted_s)
            yield step
            idle_s = self._locks.statistics().idle_wanted_s
            ended, turns = await self._book.end(self.plan, self._groups(), self._times, idle_s)
            self.history.append(ended)
            if self._planner is not None:
                movable = {name for name, stage in self._stages.items() if stage.keeps_state}
                self._planner.take(ended, turns, self._channels.edges, movable)
            self._channels.forget_closed()
            await asyncio.gather(*(stage.remember() for stage in self._stages.values()))

    async def _move(self, plan: ExecutionPlan) -> None:
        """Change the plan between two steps: what moves has nothing in hand."""
        before, started = self.plan, time.monotonic()
        if same_places(before, plan):  # other expectations alone
            self.plan = plan
            return
        if busy := [name for name, stage in self._stages.items() if stage.group.busy]:
            raise ConfigurationError(
                f"the plan can't be changed before step {len(self.history)}: {', '.join(busy)} still has a call; await "
                "all calls inside their step"
            )
        for stage in self._stages.values():
            stage.require_movable(before, plan)
        self.plan = plan
        for stage in self._stages.values():  # upstream first: weights are gone with the trainer that published them
            await stage.move(before, plan)
        seconds = time.monotonic() - started
        self._book.moved(seconds)
        expected = "" if plan.expected_s is None else f", expected {plan.expected_s:.3g} s a step"
        self._book.event(
            "plan_changed", f"{text_of(before)} -> {text_of(plan)}{expected}; took {seconds:.1f} s", seconds=seconds
        )

    async def _times(self, worker: str) -> StageTimes:
        return await self._around.hub.call(worker, "times")

    def _services(self) -> SimpleNamespace:
        """Methods that the workers call in this process."""
        channels, locks = self._channels, self._locks
        return SimpleNamespace(
            put=channels.put_refs,
            get=channels.get_refs,
            give_back=channels.give_back,
            channel_statistics=channels.statistics_of,
            acquire=locks.acquire,
            release=locks.release,
        )

    def _on_path(self, sender: str, receiver: str, path: str) -> None:
        self._book.event("path", f"{sender} -> {receiver}: {path}", worker=receiver)

    def _groups(self) -> Mapping[str, WorkerGroup]:
        return {name: stage.group for name, stage in self._stages.items()}

    def _require_all_declared(self) -> None:
        missing = [stage for stage in self.plan.stages if stage not in self._stages]
        if missing:
            has = ", ".join(self._stages)
            raise ConfigurationError(
                f"the plan has stages that the workflow doesn't: {', '.join(missing)}; it has: {has}"
            )

    def _fail(self, error: BaseException) -> None:
        """End the workflow: a call of it failed and nobody was waiting for it."""
        if self._failure is None:
            self._failure = error
            if self._playing is not None:
                self._playing.cancel()


def _local(clock: Clock, on_event: EventCallback, waits: Waits) -> Launcher:
    return LocalLauncher(clock, on_event=on_event, waits=waits)


def _line() -> str:
    """File and line of the user's code that called us."""
    package = os.path.dirname(__file__) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
