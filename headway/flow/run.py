"""`run`: executes a workflow, a plain procedure over workers and channels, as a plan says."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headway.control.channel_state import Balance
from headway.flow.channel import BYTES, ITEMS, Channel
from headway.flow.channels import Channels
from headway.flow.group import WorkerGroup
from headway.flow.host import WorkerSetup
from headway.flow.peers import Hub, new_folder
from headway.flow.process import enter
from headway.flow.steps import StepBook
from headway.flow.watch import Watch
from headway.flow.worker import Worker
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.records.plan import Mode
from headway.runtime.clock import Clock, RealClock
from headway.runtime.device_lock import DeviceLocks
from headway.runtime.stalls.waits import Waits
from headway.runtime.worker_slots import WorkerSlot, start_all, stop_all
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher, WorkerSpec

Result = TypeVar("Result")
PlanLike = ExecutionPlan | Mapping[str, str | Sequence[str]]
_FACTORY = "headway.flow.host:WorkerHost"
_STOP_GRACE_S = 10.0
STALL_S = 120.0


class Workflow(Protocol):
    """A workflow: an async function of the `Flow` and of what `run` is given besides."""

    def __call__(self, flow: Flow, /, *arguments: Any) -> Awaitable[Any]: ...


def run(
    workflow: Callable[..., Awaitable[Result]],
    plan: PlanLike,
    *arguments: Any,
    directory: str | Path | None = None,
    stall_s: float = STALL_S,
    launcher: Callable[[Clock, EventCallback, Waits], Launcher] | None = None,
) -> Result:
    """Run ``workflow(flow, *arguments)`` to its end and return its result.

    ``plan``: which stage is on which devices, or ``{"generate": "cpu:0", "train": ["cpu:1", "cpu:2"]}``.
    ``directory``: where logs, events and steps are written. ``stall_s``: when nothing has moved for so long and all
    workers wait, the workflow ends with what they wait for. Raises what the workflow raises; ConfigurationError for a
    plan that doesn't fit it; RemoteError with the traceback of a worker's method; WorkerDied.
    """
    return asyncio.run(run_async(workflow, plan, *arguments, directory=directory, stall_s=stall_s, launcher=launcher))


async def run_async(
    workflow: Callable[..., Awaitable[Result]],
    plan: PlanLike,
    *arguments: Any,
    directory: str | Path | None = None,
    stall_s: float = STALL_S,
    launcher: Callable[[Clock, EventCallback, Waits], Launcher] | None = None,
) -> Result:
    """`run`, inside an event loop."""
    async with Flow(_plan_of(plan), directory, stall_s, launcher) as flow:
        return await flow.play(workflow, arguments)


def _plan_of(plan: PlanLike) -> ExecutionPlan:
    if isinstance(plan, ExecutionPlan):
        return plan
    stages = {
        stage: StagePlacement(devices=(devices,) if isinstance(devices, str) else tuple(devices))
        for stage, devices in plan.items()
    }
    return ExecutionPlan(stages=stages)


class Flow:
    """A running workflow: starts its workers where the plan puts them, makes its channels, counts its steps."""

    def __init__(
        self,
        plan: ExecutionPlan,
        directory: str | Path | None,
        stall_s: float,
        launcher: Callable[[Clock, EventCallback, Waits], Launcher] | None,
    ) -> None:
        self.plan = plan
        self.steps_done: list[FlowStep] = []
        self._clock = RealClock()
        self._waits = Waits(self._clock.now)
        self._book = StepBook(directory, self._clock)
        self._launcher = (launcher or _local)(self._clock, self._book.event, self._waits)
        self._locks = DeviceLocks(self._clock, self._waits)
        self._groups: dict[str, WorkerGroup] = {}
        self._deaths: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._failed = False
        self._playing: asyncio.Task[Any] | None = None
        self._stack = AsyncExitStack()
        self._stall_s = stall_s
        self._logs = None if directory is None else Path(directory) / "logs"

    async def __aenter__(self) -> Flow:
        self._key, self._folder = secrets.token_hex(16), str(new_folder())
        self._channels = Channels(self._clock, self._waits)
        services = _Services(self._channels, self._locks)
        self._hub = Hub(
            "driver", driver=None, key=self._key, epoch=0, device="cpu:0", folder=self._folder, services=services
        )
        self._channels.hub = self._hub
        await self._hub.start()
        enter(self._channels)
        return self

    async def __aexit__(self, *_: object) -> None:
        stops = [
            slot.stop(0.0 if self._failed or slot.name in group.abandoned else _STOP_GRACE_S)
            for group in self._groups.values()
            for slot in group.slots
        ]
        await asyncio.gather(*stops)
        for death in self._deaths.values():
            death.cancel()
        await self._hub.close()
        enter(None)
        self._book.close()
        await self._stack.aclose()

    async def play(self, workflow: Callable[..., Awaitable[Result]], arguments: Sequence[Any]) -> Result:
        """Run the workflow; what fails outside of it ends it."""
        self._playing = asyncio.ensure_future(_awaited(workflow(self, *arguments)))
        watch = Watch(self._groups, self._channels, self._hub, self._clock, self._stall_s, self._fail)
        watching = asyncio.create_task(watch.loop(), name="watch")
        self._failed = True  # until it has ended well: then workers are given time to end
        try:
            result = await self._playing
            self._failed = False
            return result
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            self._playing.cancel()
            raise
        finally:
            watching.cancel()

    async def workers(self, stage: str, kind: type[Worker], *positional: Any, restarts: int = 0, **named: Any) -> Any:
        """Start the workers of a stage, one on each of its devices, each built as ``kind(*positional, **named)``; returns
        their `WorkerGroup`. Declare stages upstream first.

        ``restarts``: deaths in a row after which a worker is started anew; its call is then made again, and what it had
        got from channels is delivered again.
        """
        if stage not in self.plan.stages:
            valid = ", ".join(self.plan.stages)
            raise ConfigurationError(f"stage {stage!r} ({_line()}): the plan has no devices for it; it has: {valid}")
        if stage in self._groups:
            raise ConfigurationError(f"stage {stage!r} ({_line()}): it has its workers already")
        factory, script = _factory_of(kind)
        group = WorkerGroup(stage, kind, self._dealt_with, self._fail)
        self._groups[stage] = group
        devices = self.plan.stages[stage].devices
        for rank, device in enumerate(devices):
            setup = WorkerSetup(
                stage=stage,
                rank=rank,
                world_size=len(devices),
                device=device,
                driver=self._hub.address,
                key=self._key,
                epoch=0,
                folder=self._folder,
                chunk=self.plan.worker_chunk(stage),
                shares=self._shares(stage),
                script=script,
            )
            group.slots.append(self._slot(setup, factory, (positional, named), restarts))
        await start_all(group.slots)
        return group

    def channel(
        self,
        name: str,
        *,
        items: int = ITEMS,
        bytes: int = BYTES,
        balance: Balance | None = None,
        consumers: WorkerGroup | None = None,
    ) -> Channel:
        """Make a channel of at most ``items`` items and ``bytes`` bytes. ``balance``: how ``consumers`` share its items;
        by default whoever asks first gets the oldest."""
        return self._channels.make(name, items, bytes, balance, [] if consumers is None else consumers.names)

    async def steps(self, count: int) -> AsyncIterator[int]:
        """Number the steps from 0; between two of them they are counted, and the plan may change."""
        for step in range(count):
            self._require_all_declared()
            self._book.begin(step, self._locks.idle_wanted_s)
            yield step
            self.steps_done.append(await self._book.end(self.plan, self.mode, self._groups, self._locks.idle_wanted_s))
            self._channels.forget_closed()

    @property
    def mode(self) -> Mode:
        """Temporal: all stages on the same devices. Spatial: none shares any. Else hybrid."""
        sets = [frozenset(stage.devices) for stage in self.plan.stages.values()]
        if len(sets) > 1 and len(set(sets)) == 1:
            return "temporal"
        return "hybrid" if any(self._shares(stage) for stage in self.plan.stages) else "spatial"

    def _shares(self, stage: str) -> bool:
        own = set(self.plan.stages[stage].devices)
        return any(own & set(other.devices) for name, other in self.plan.stages.items() if name != stage)

    def _require_all_declared(self) -> None:
        missing = [stage for stage in self.plan.stages if stage not in self._groups]
        if missing:
            raise ConfigurationError(
                f"the plan has stages that the workflow doesn't: {', '.join(missing)}; it has: {', '.join(self._groups)}"
            )

    def _slot(self, setup: WorkerSetup, factory: str, arguments: Any, restarts: int) -> WorkerSlot:
        name = f"{setup.stage}-{setup.rank}"
        spec = WorkerSpec(
            name=name,
            factory=_FACTORY,
            arguments={"setup": setup, "factory": factory, "arguments": arguments},
            device=setup.device,
            log_path=None if self._logs is None else self._logs / f"{name}.log",
        )

        async def watch(worker: Any) -> None:
            self._deaths[name] = asyncio.create_task(self._on_death(name, worker), name=f"{name}'s death")

        return WorkerSlot(spec, self._launcher, self._clock, self._book.event, limit=restarts, prepare=watch)

    async def _on_death(self, name: str, worker: Any) -> None:
        """What follows from a worker's death: its devices are free, what it had got is delivered again."""
        await worker.died
        self._locks.died(name)
        returned = self._channels.bring_back(name)
        if returned:
            self._book.event("items_returned", f"{returned} items that {name} had got are delivered again", worker=name)

    async def _dealt_with(self, name: str) -> None:
        await asyncio.shield(self._deaths[name])

    def _fail(self, error: BaseException) -> None:
        """End the workflow: a call of it failed and nobody was waiting for it."""
        if self._failure is None:
            self._failure = error
            if self._playing is not None:
                self._playing.cancel()


class _Services:
    """What workers call in the workflow's process."""

    def __init__(self, channels: Channels, locks: DeviceLocks) -> None:
        self._channels = channels
        self._locks = locks

    async def put(self, producer: str, number: int, refs: Sequence[Any], weights: Sequence[float]) -> bool:
        """See `Channels.put_refs`."""
        return await self._channels.put_refs(producer, number, refs, weights)

    async def get(self, consumer: str, number: int, weight: float | None) -> Sequence[Any]:
        """See `Channels.get_refs`."""
        return await self._channels.get_refs(consumer, number, weight)

    async def acknowledge(self, consumer: str) -> None:
        """See `Channels.acknowledge`."""
        self._channels.acknowledge(consumer)

    async def channel_statistics(self, number: int) -> Any:
        """See `Channels.statistics_of`."""
        return await self._channels.statistics_of(number)

    async def acquire(self, worker: str) -> None:
        """Wait until a worker has its devices."""
        await self._locks.acquire(worker)

    async def release(self, worker: str) -> None:
        """Take a worker's devices back."""
        self._locks.release(worker)


def _local(clock: Clock, on_event: EventCallback, waits: Waits) -> Launcher:
    return LocalLauncher(clock, on_event=on_event, waits=waits)


def _factory_of(kind: type[Worker]) -> tuple[str, str]:
    """A class as a worker's process finds it, and the module of the script that was started, if it is defined there."""
    if not issubclass(kind, Worker):
        raise ConfigurationError(f"{kind.__qualname__} must extend headway.flow.Worker ({_line()})")
    if "<locals>" in kind.__qualname__:
        raise ConfigurationError(f"{kind.__qualname__} ({_line()}): must be defined at the top level of a module")
    module, script = kind.__module__, ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = script = spec.name if spec is not None else Path(str(main.__file__)).stem
        sys.modules.setdefault(module, main)  # what comes back from workers is of these classes
    return f"{module}:{kind.__qualname__}", script


def _line() -> str:
    """File and line of the user's code that called us."""
    package = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


async def _awaited(awaitable: Awaitable[Result]) -> Result:
    return await awaitable
