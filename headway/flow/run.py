"""`run`: executes a workflow, a plain procedure over workers and channels, by an execution plan."""

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
from headway.control.channel_state import ConsumerBalance
from headway.flow.auto import AutoPlanner
from headway.flow.channel import BYTES, ITEMS, Channel
from headway.flow.channels import Channels
from headway.flow.device_locks import DeviceLocks
from headway.flow.group import WorkerGroup
from headway.flow.machines import open_machines
from headway.flow.peers import PeerNetwork
from headway.flow.placement import same_placement, text_of
from headway.flow.process import set_current_process
from headway.flow.stage import STOP_GRACE_S, Stage, StageContext
from headway.flow.steps import StepRecorder
from headway.flow.watch import FlowWatch
from headway.flow.worker import StageTimes, Worker
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.records.ledger import EventRecord
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import split_node
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher

Result = TypeVar("Result")
PlanLike = ExecutionPlan | Mapping[str, Any] | Literal["auto"] | AutoPlanner
MakeLauncher = Callable[[Clock, EventCallback, Waits], Launcher]
STALL_S = 120.0


class FlowOptions(NamedTuple):
    """The options of `run`, which documents them."""

    devices: Sequence[str] = ()
    items: int | None = None
    directory: str | Path | None = None
    resume: bool = False
    stall_s: float = STALL_S
    launcher: MakeLauncher | None = None
    cluster: ClusterConfig | None = None
    on_event: Callable[[EventRecord], None] | None = None


def run(workflow: Callable[..., Awaitable[Result]], plan: PlanLike, *arguments: Any, **options: Any) -> Result:
    """Run ``workflow(flow, *arguments)`` to its end and return its result.

    ``plan``: an `ExecutionPlan`, or a mapping of its form; or ``{"generate": "cpu:0", "train": ["cpu:1"]}``; or "auto":
    the first steps measure the stages on all ``devices``, later ones run by the plan expected to be fastest. Options:
    ``devices``; ``items`` of a step, required by "auto", and by a stage whose several workers share all of them;
    ``directory`` for logs, events and steps, and ``resume`` to continue those that it has; ``stall_s``: after this time
    without progress while all workers wait, the workflow ends with an error that lists the waits; ``launcher``: starts
    the processes, by default on this machine; ``cluster``: the other machines, whose agents (`headway node`) start
    separately; ``on_event``: receives the events (deaths of workers, changes of plan), also without a directory.

    Raises any error of the workflow; ConfigurationError for a plan that doesn't fit it; RemoteError with the traceback
    of a worker's method; WorkerDied.
    """
    if unknown_options := options.keys() - set(FlowOptions._fields):
        valid_options = ", ".join(FlowOptions._fields)
        raise ConfigurationError(f"run has no option {', '.join(sorted(unknown_options))}; valid: {valid_options}")
    flow_options = FlowOptions(**options)
    first_plan, planner = _first_plan(plan, flow_options)
    _require_possible(first_plan, flow_options)

    async def execute() -> Result:
        async with Flow(first_plan, flow_options, planner) as flow:
            return await flow.execute(workflow, arguments)

    return asyncio.run(execute())


def _first_plan(plan: PlanLike, options: FlowOptions) -> tuple[ExecutionPlan, AutoPlanner | None]:
    """Return the initial plan, and the planner that changes it, if there is one."""
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
    """Raise ConfigurationError for a plan, or options, that are invalid for every workflow."""
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
        for device in placed.devices:
            if (node_name := split_node(device)[0]) and options.cluster is None:
                raise ConfigurationError(f"plan: stage {stage!r}: {device}: node {node_name!r} needs cluster = ...")


class Flow:
    """A running workflow: starts its workers on the plan's devices, makes its channels, counts its steps."""

    def __init__(self, plan: ExecutionPlan, options: FlowOptions, planner: AutoPlanner | None) -> None:
        self.plan = plan
        self.history: list[FlowStep] = []  # records of the steps that have ended
        self._options = options
        self._planner = planner
        self._clock = RealClock()
        self._waits = Waits(self._clock.now)
        self._recorder = StepRecorder(options.directory, self._clock, resume=options.resume)
        self._recorder.on_event = options.on_event
        self._locks = DeviceLocks(self._clock, self._waits, on_event=self._recorder.event, on_span=self._recorder.span)
        self._channels = Channels(self._clock, self._waits)
        self._stages: dict[str, Stage] = {}
        self._stack = AsyncExitStack()
        self._failure: BaseException | None = None
        self._failed = False
        self._workflow_task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Flow:
        options = self._options
        local_launcher = (options.launcher or _make_local_launcher)(self._clock, self._recorder.event, self._waits)
        machines_context = open_machines(options.cluster, local_launcher, self._clock, self._recorder.event)
        machines = await self._stack.enter_async_context(machines_context)
        self._context = StageContext(
            network=PeerNetwork(
                "driver",
                machines.settings_for(""),
                driver=None,
                services=self._services(),
                waits=self._waits,
                on_path=self._on_path,
            ),
            clock=self._clock,
            channels=self._channels,
            locks=self._locks,
            recorder=self._recorder,
            fail=self._fail,
            logs=None if options.directory is None else Path(options.directory) / "logs",
            machines=machines,
        )
        self._channels.network, self._channels.on_lost = self._context.network, self._recorder.event
        await self._context.network.start()
        set_current_process(self._channels)
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.unread():
            self._recorder.event("channel_unread", f"channel {channel} has items; no worker has ever read from it")
        grace_s = 0.0 if self._failed else STOP_GRACE_S
        await asyncio.gather(*(stage.stop(grace_s) for stage in self._stages.values()))
        await self._context.network.close()
        set_current_process(None)
        await self._stack.aclose()
        self._recorder.close()

    async def execute(self, workflow: Callable[..., Awaitable[Result]], arguments: Sequence[Any]) -> Result:
        """Run the workflow's function to its end; a failure outside it cancels it."""
        self._workflow_task = asyncio.ensure_future(workflow(self, *arguments))
        network, stall_s = self._context.network, self._options.stall_s
        flow_watch = FlowWatch(self._groups, self._channels, network, self._clock, stall_s, self._fail)
        watch_task = asyncio.create_task(flow_watch.loop(), name="watch")
        self._failed = True  # until success, which gives workers time to end
        try:
            result = await self._workflow_task
            if self._failure is not None:
                raise self._failure
            for worker in [worker for group in self._groups().values() for worker in group.busy]:
                self._recorder.event(
                    "call_not_awaited", f"the workflow has ended; a call of {worker} still runs", worker=worker
                )
            self._failed = False
            return result
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            self._workflow_task.cancel()
            raise
        finally:
            watch_task.cancel()

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

        ``restarts``: consecutive deaths after which a worker is still restarted, with its ``state()`` of the end of the
        last step; its call is then repeated, and items that it had got from channels are delivered again.
        ``most_workers``: the largest number of devices that a plan may give the stage.
        """
        caller = _caller_line()
        if stage in self._stages:
            raise ConfigurationError(f"stage {stage!r} ({caller}): its workers have already started")
        if self._planner is not None:
            previous_plan, self.plan = self.plan, self._planner.with_stage(self.plan, stage, most_workers)
            for other_stage in self._stages.values():  # the new stage may share their devices
                await other_stage.move(previous_plan, self.plan)
        if stage not in self.plan.stages:
            stages = ", ".join(self.plan.stages)
            raise ConfigurationError(f"stage {stage!r} ({caller}): the plan has no devices for it; it has: {stages}")
        arguments = (positional, named)
        order = len(self._stages)
        new_stage = Stage(
            stage, kind, arguments, self._context, order=order, restarts=restarts, max_workers=most_workers, site=caller
        )
        self._stages[stage] = new_stage
        await new_stage.start(self.plan)
        return new_stage.group

    def channel(
        self,
        name: str,
        *,
        items: int = ITEMS,
        bytes: int = BYTES,
        balance: ConsumerBalance | None = None,
        consumers: WorkerGroup | None = None,
    ) -> Channel:
        """Make a channel of at most ``items`` items and ``bytes`` bytes. ``balance``: how ``consumers`` share its
        items; by default the first consumer to ask gets the oldest item."""
        return self._channels.make(name, items, bytes, balance, [] if consumers is None else consumers.names)

    async def pipeline(self, items: Iterable[Any], *groups: WorkerGroup) -> list[Any]:
        """Send items through a chain of stages that run concurrently: calls each group's ``run(source, result)``, and
        the last one's ``run(source)``. Returns the results of the last group's workers."""
        channels, results = [self.channel(f"to {group.stage}") for group in groups], list[Any]()
        calls = [group.run(*channels[index : index + 2]) for index, group in enumerate(groups)]
        await channels[0].put_all(items)
        for channel, call in zip(channels, calls, strict=True):
            channel.close()
            results = await call
        return results

    async def steps(self, count: int, start: int | None = None) -> AsyncIterator[int]:
        """Yield the numbers of ``count`` steps from ``start``, by default 0, or with ``resume`` the number after the
        last recorded step; between two steps the last one is recorded, and the plan may change."""
        first_step = self._recorder.next_step if start is None else start
        for step in range(first_step, first_step + count):
            self._require_all_declared()
            better_plan = self._planner and self._planner.plan_for(self.plan, self.history)
            if better_plan is not None:
                await self._move(better_plan)
            self._recorder.begin_step(step, self._locks.statistics().idle_wanted_s)
            yield step
            idle_s = self._locks.statistics().idle_wanted_s
            ended_step, worker_times = await self._recorder.end_step(self.plan, self._groups(), self._times, idle_s)
            self.history.append(ended_step)
            if self._planner is not None:
                movable_stages = {stage_name for stage_name, stage in self._stages.items() if stage.is_movable}
                self._planner.add_step(ended_step, worker_times, self._channels.edges, movable_stages)
            self._channels.forget_closed()
            await asyncio.gather(*(stage.save_states() for stage in self._stages.values()))

    async def _move(self, plan: ExecutionPlan) -> None:
        """Change the plan between two steps, when no stage has a call."""
        previous, started_s = self.plan, time.monotonic()
        if same_placement(previous, plan):  # only the expected times differ
            self.plan = plan
            return
        if busy := [stage_name for stage_name, stage in self._stages.items() if stage.group.busy]:
            raise ConfigurationError(
                f"the plan can't be changed before step {len(self.history)}: {', '.join(busy)} still has a call; await "
                "all calls inside their step"
            )
        for stage in self._stages.values():
            stage.require_movable(previous, plan)
        self.plan = plan
        for stage in self._stages.values():  # upstream first: weights are gone with the trainer that published them
            await stage.move(previous, plan)
        seconds = time.monotonic() - started_s
        self._recorder.add_move_time(seconds)
        expected = "" if plan.expected_s is None else f", expected {plan.expected_s:.3g} s a step"
        self._recorder.event(
            "plan_changed", f"{text_of(previous)} -> {text_of(plan)}{expected}; took {seconds:.1f} s", seconds=seconds
        )

    async def _times(self, worker: str) -> StageTimes:
        return await self._context.network.call(worker, "times")

    def _services(self) -> SimpleNamespace:
        """Return the methods of this process that the workers call."""
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
        self._recorder.event("path", f"{sender} -> {receiver}: {path}", worker=receiver)

    def _groups(self) -> Mapping[str, WorkerGroup]:
        return {name: stage.group for name, stage in self._stages.items()}

    def _require_all_declared(self) -> None:
        missing_stages = [stage for stage in self.plan.stages if stage not in self._stages]
        if missing_stages:
            declared_stages = ", ".join(self._stages)
            raise ConfigurationError(
                f"the plan has stages that the workflow doesn't: {', '.join(missing_stages)}; it has: {declared_stages}"
            )

    def _fail(self, error: BaseException) -> None:
        """End the workflow with an error that nothing in it awaits: of an unawaited call, or of the watch."""
        if self._failure is None:
            self._failure = error
            if self._workflow_task is not None:
                self._workflow_task.cancel()


def _make_local_launcher(clock: Clock, on_event: EventCallback, waits: Waits) -> Launcher:
    return LocalLauncher(clock, on_event=on_event, waits=waits)


def _caller_line() -> str:
    """Return the file and line of the user's code that called this package."""
    package_folder = os.path.dirname(__file__) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package_folder):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
