"""A stage of a workflow on the devices of its plan: its workers are started there, moved, and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.flow.channels import Channels
from headway.flow.device_locks import DeviceLocks
from headway.flow.group import WorkerGroup
from headway.flow.machines import FlowMachines
from headway.flow.packing import pack
from headway.flow.peers import Hub
from headway.flow.placement import shares
from headway.flow.steps import StepBook
from headway.flow.worker import Worker, WorkerPlace
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.records.execution import ExecutionPlan, Party
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.fork_server import TENSORS
from headway.runtime.worker_slots import WorkerSlot, own_cause, start_all
from headway.runtime.workers import Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.flow.host:WorkerHost"
STOP_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The surroundings that the stages of a workflow have in common."""

    hub: Hub
    clock: Clock
    channels: Channels
    locks: DeviceLocks
    book: StepBook
    fail: Callable[[BaseException], None]
    logs: Path | None
    machines: FlowMachines


class Stage:
    """A stage: the class of its workers, how they are built, and its `WorkerGroup`, which stays when they move.

    Lifecycle: *declared* -> ``start`` -> *running*, here or elsewhere (``move``) -> ``stop``.
    """

    def __init__(
        self,
        name: str,
        kind: type[Worker],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        around: Surroundings,
        *,
        order: int = 0,
        restarts: int = 0,
        most: int | None = None,
        where: str = "",
    ) -> None:
        """``order``: its place in the workflow, upstream first. ``most``: workers that it can have. ``where``: file and
        line of its declaration."""
        self._order = order
        self.name = name
        self.kind = kind
        self.most = most
        self.group = WorkerGroup(name, kind, self._dealt_with, around.fail, around.channels.acknowledge)
        self._factory, self._script = _factory_of(kind, where)
        self._arguments = arguments
        self._around = around
        self._restarts = restarts
        self._where = where
        if restarts and not self.keeps_state:
            raise ConfigurationError(
                f"stage {name!r} ({where}): restarts = {restarts}: a new worker would have nothing of what the dead "
                "one held; valid for a class with state() and restore(), or stateless = True"
            )
        self._deaths: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, Any] = {}  # of workers that may be replaced, at the end of the last step
        self._idle_offloads: set[str] = set()  # workers whose offload frees nothing, which was reported

    @property
    def keeps_state(self) -> bool:
        """Whether its workers can be moved: they keep nothing, or hand it on."""
        return self.kind.stateless or (hasattr(self.kind, "state") and hasattr(self.kind, "restore"))

    async def start(self, plan: ExecutionPlan) -> None:
        """Start one worker on each of the plan's devices. Raises ConfigurationError, and what building them raises."""
        devices = plan.stages[self.name].devices
        if self.most is not None and len(devices) > self.most:
            raise ConfigurationError(
                f"stage {self.name!r} ({self._where}): the plan gives it {len(devices)} devices; it can have "
                f"{self.most} worker(s), one on each"
            )
        slots = [self._slot(self._place(plan, rank)) for rank in range(len(devices))]
        self.group.slots[:] = slots
        try:
            await start_all(slots)
        except (AttributeError, TypeError, pickle.PicklingError):
            pack(self._arguments, f"arguments of stage {self.name!r} ({self._where})")  # says what can't be pickled
            raise

    async def remember(self) -> None:
        """Ask the workers for what their successors will need, where they may have any."""
        for slot in self.group.slots if self._restarts and not self.kind.stateless else []:
            if slot.live and slot.name not in self.group.busy:
                with contextlib.suppress(WorkerDied):  # then the last one stands
                    self._states[slot.name] = await self._ask(slot, "state")

    def require_movable(self, before: ExecutionPlan, plan: ExecutionPlan) -> None:
        """Raise ConfigurationError where another plan gives it other devices, and its workers can't hand on what they
        have."""
        if plan.stages[self.name].devices != before.stages[self.name].devices and not self.keeps_state:
            raise ConfigurationError(
                f"stage {self.name!r} ({self._where}) can't be moved: its class has no state() and restore(), and "
                "isn't stateless"
            )

    async def move(self, before: ExecutionPlan, plan: ExecutionPlan) -> None:
        """Take another plan's part: on other devices new workers take over the old ones' states."""
        if plan.stages[self.name].devices != before.stages[self.name].devices:
            self._states.clear()
            states = [] if self.kind.stateless else [await self._ask(slot, "state") for slot in self.group.slots]
            await self.stop()
            await self.start(plan)
            for rank, slot in enumerate(self.group.slots if states else []):
                state = states[min(rank, len(states) - 1)]
                await self._ask(slot, "restore", state)
                self._states[slot.name] = state
            return
        for rank, slot in enumerate(self.group.slots):
            slot.spec.arguments["place"] = place = self._place(plan, rank)
            loaded = self._around.locks.loaded(slot.name)
            self._around.locks.remove(slot.name)
            self._add_party(place, loaded=loaded)
            if slot.live is not None:
                await slot.live.call("move_to", place)
                if not loaded and not place.shares:
                    await self._around.hub.call(slot.name, "onload")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all workers; those whose call nobody waits for at once."""
        slots = self.group.slots
        await asyncio.gather(*(slot.stop(0.0 if slot.name in self.group.abandoned else grace_s) for slot in slots))
        for slot in slots:
            if (death := self._deaths.pop(slot.name, None)) is not None:
                await asyncio.wait((death,), timeout=STOP_GRACE_S)
            self._around.locks.remove(slot.name)

    async def _ask(self, slot: WorkerSlot, method: str, *arguments: Any) -> Any:
        while (worker := slot.live or await self.group.revived(slot)) is None:
            pass
        return (await worker.call("call", method, arguments, {})).value

    def _place(self, plan: ExecutionPlan, rank: int) -> WorkerPlace:
        devices = plan.stages[self.name].devices
        return WorkerPlace(
            stage=self.name,
            rank=rank,
            world_size=len(devices),
            device=devices[rank],
            chunk=plan.worker_chunk(self.name),
            shares=shares(plan, self.name, devices[rank]),
        )

    def _slot(self, place: WorkerPlace) -> WorkerSlot:
        around, name = self._around, place.name
        arguments: dict[str, Any] = {
            "place": place,
            "driver": around.hub.address,
            "peers": around.machines.settings_at(place.device),
            "factory": self._factory,
            "arguments": self._arguments,
            "script": self._script,
        }
        log = None if around.logs is None else around.logs / f"{name}.log"
        spec = WorkerSpec(
            name=name,
            factory=_FACTORY,
            arguments=arguments,
            device=place.device,
            preload=TENSORS if "torch" in sys.modules else (),
            log_path=log,
        )
        self._add_party(place, loaded=False)

        async def watch(worker: WorkerHandle) -> None:
            self._deaths[name] = asyncio.create_task(self._on_death(name, worker), name=f"{name}'s death")
            if name in self._states:
                await worker.call("call", "restore", (self._states[name],), {})

        launcher = _Launcher(around.machines.launcher, around.locks)
        return WorkerSlot(spec, launcher, around.clock, around.book.event, limit=self._restarts, prepare=watch)

    def _add_party(self, place: WorkerPlace, *, loaded: bool) -> None:
        """Have a worker whose devices are others' too take turns on them."""
        if not place.shares:
            return
        name, hub = place.name, self._around.hub

        async def recall() -> None:
            with contextlib.suppress(WorkerDied):  # which frees its devices
                await hub.call(name, "recall")

        async def offload() -> None:
            try:
                seconds, freed = await hub.call(name, "offload")
            except RemoteError as error:
                raise own_cause(error) from None
            if not freed and name not in self._idle_offloads:
                self._idle_offloads.add(name)
                self._around.book.event("offload_frees_nothing", f"{name}: after {seconds:.3g} s", worker=name)

        self._around.locks.add(
            Party(name=name, stage=place.stage, devices=parse_device(place.device).units(), order=self._order),
            wanted=recall,
            onload=lambda: hub.call(name, "onload"),
            offload=offload,
            loaded=loaded,
        )

    async def _on_death(self, name: str, worker: WorkerHandle) -> None:
        """Deal with a worker's death: its devices are free, what it had got is delivered again."""
        await worker.died
        self._around.locks.died(name)
        if returned := self._around.channels.bring_back(name):
            what = f"{returned} items that {name} had got are delivered again"
            self._around.book.event("items_returned", what, worker=name)

    async def _dealt_with(self, name: str) -> None:
        await asyncio.shield(self._deaths[name])


class _Launcher:
    """A launcher that frees the devices of a worker that can't be built."""

    def __init__(self, launcher: Launcher, locks: DeviceLocks) -> None:
        self._launcher, self._locks = launcher, locks

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """See :meth:`headway.runtime.workers.Launcher.start`."""
        try:
            return await self._launcher.start(spec)
        except BaseException:
            self._locks.died(spec.name)
            raise


def _factory_of(kind: type[Worker], where: str) -> tuple[str, str]:
    """A class as a worker's process finds it, and the module of the script that was started, if it is defined there."""
    if not (isinstance(kind, type) and issubclass(kind, Worker)):
        raise ConfigurationError(f"{kind!r} ({where}): must be a class that extends headway.flow.Worker")
    if "<locals>" in kind.__qualname__:
        raise ConfigurationError(f"{kind.__qualname__} ({where}): must be defined at the top level of a module")
    module, script = kind.__module__, ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = script = spec.name if spec is not None else Path(str(main.__file__)).stem
        sys.modules.setdefault(module, main)  # what comes back from workers is of these classes
    return f"{module}:{kind.__qualname__}", script
