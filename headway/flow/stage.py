"""A stage of a workflow: starts its workers on the plan's devices, moves them, and replaces dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.flow.channels import Channels
from headway.flow.device_locks import DeviceLocks
from headway.flow.group import WorkerGroup
from headway.flow.machines import FlowMachines
from headway.flow.paths import PayloadRef
from headway.flow.peers import PeerNetwork
from headway.flow.placement import shares_device
from headway.flow.steps import StepRecorder
from headway.flow.worker import Worker, WorkerPlacement
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.records.execution import ExecutionPlan, Participant
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.fork_server import TORCH_CODE
from headway.runtime.transport.packing import pack
from headway.runtime.worker_slots import WorkerSlot, start_all, typed_cause
from headway.runtime.workers import Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.flow.host:WorkerHost"
STOP_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The services of a workflow that all of its stages use."""

    network: PeerNetwork
    clock: Clock
    channels: Channels
    locks: DeviceLocks
    recorder: StepRecorder
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
        context: StageContext,
        *,
        order: int = 0,
        restarts: int = 0,
        max_workers: int | None = None,
        site: str = "",
    ) -> None:
        """``order``: its position in the workflow, upstream first. ``max_workers``: None: unlimited. ``site``:
        file and line of its declaration."""
        self._order = order
        self.name = name
        self.kind = kind
        self.max_workers = max_workers
        self.group = WorkerGroup(name, kind, self._death_handled, context.fail, context.channels.acknowledge)
        self._arguments = pack(arguments, f"arguments of stage {name!r} ({site})")
        self._factory, self._script = _factory_of(kind, site, b"__main__" in self._arguments.pickled)
        self._context = context
        self._restarts = restarts
        self._site = site
        if restarts and not self.is_movable:
            raise ConfigurationError(
                f"stage {name!r} ({site}): restarts = {restarts}: a new worker would lack what the "
                "dead one held; valid for a class with state() and restore(), or stateless = True"
            )
        self._deaths: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, PayloadRef] = {}  # states of replaceable workers at the end of the last step
        self._reported_offloads: set[str] = set()  # workers whose offload was reported to free nothing

    @property
    def is_movable(self) -> bool:
        """Whether the workers can be moved or restarted: they are stateless, or have ``state`` and ``restore``."""
        return self.kind.stateless or (hasattr(self.kind, "state") and hasattr(self.kind, "restore"))

    async def start(self, plan: ExecutionPlan) -> None:
        """Start one worker on each of the plan's devices. Raises ConfigurationError, and any error of their start."""
        devices = plan.stages[self.name].devices
        if self.max_workers is not None and len(devices) > self.max_workers:
            raise ConfigurationError(
                f"stage {self.name!r} ({self._site}): the plan gives it {len(devices)} devices; it can have "
                f"{self.max_workers} worker(s), one on each"
            )
        slots = [self._slot(self._placement(plan, rank)) for rank in range(len(devices))]
        self.group.slots[:] = slots
        await start_all(slots)

    async def save_states(self) -> None:
        """Save the workers' states for their successors, if the stage has restarts: large ones in shared memory of
        their machine, so that they don't pass through this process."""
        network = self._context.network
        for slot in self.group.slots if self._restarts and not self.kind.stateless else []:
            if slot.live and slot.name not in self.group.busy:
                with contextlib.suppress(WorkerDied):  # then the previous state stays
                    ref: PayloadRef = await slot.live.call("hold_state")
                    if not ref.outlives_owner(network.address.machine):
                        ref, unsafe_ref = await network.hold(await network.fetch(ref)), ref
                        network.release(unsafe_ref)
                    self._forget_state(slot.name)
                    self._states[slot.name] = ref

    def _forget_state(self, name: str) -> None:
        if (ref := self._states.pop(name, None)) is not None:
            self._context.network.release(ref)

    def require_movable(self, previous_plan: ExecutionPlan, plan: ExecutionPlan) -> None:
        """Raise ConfigurationError if ``plan`` changes the stage's devices, and its workers can't pass on their
        state."""
        if plan.stages[self.name].devices != previous_plan.stages[self.name].devices and not self.is_movable:
            raise ConfigurationError(
                f"stage {self.name!r} ({self._site}) can't be moved: its class has no state() and restore(), "
                "and isn't stateless"
            )

    async def move(self, previous_plan: ExecutionPlan, plan: ExecutionPlan) -> None:
        """Follow another plan: on other devices, new workers take over the states of the old ones."""
        if plan.stages[self.name].devices != previous_plan.stages[self.name].devices:
            for name in list(self._states):
                self._forget_state(name)
            states = [] if self.kind.stateless else [await self._ask(slot, "state") for slot in self.group.slots]
            await self.stop()
            await self.start(plan)
            for rank, slot in enumerate(self.group.slots if states else []):
                state = states[min(rank, len(states) - 1)]
                await self._ask(slot, "restore", state)
            await self.save_states()
            return
        for rank, slot in enumerate(self.group.slots):
            slot.spec.arguments["placement"] = placement = self._placement(plan, rank)
            was_loaded = self._context.locks.is_loaded(slot.name)
            self._context.locks.remove(slot.name)
            self._add_participant(placement, loaded=was_loaded)
            if slot.live is not None:
                await slot.live.call("move_to", placement)
                if not was_loaded and not placement.shares:
                    await self._context.network.call(slot.name, "onload")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all workers; those with an abandoned call without a grace period."""
        slots = self.group.slots
        await asyncio.gather(*(slot.stop(0.0 if slot.name in self.group.abandoned else grace_s) for slot in slots))
        for slot in slots:
            if (death_task := self._deaths.pop(slot.name, None)) is not None:
                await asyncio.wait((death_task,), timeout=STOP_GRACE_S)
            self._context.locks.remove(slot.name)

    async def _ask(self, slot: WorkerSlot, method: str, *arguments: Any) -> Any:
        while (worker := slot.live or await self.group.restarted_worker(slot)) is None:
            pass
        return (await worker.call("call", method, arguments, {})).value

    def _placement(self, plan: ExecutionPlan, rank: int) -> WorkerPlacement:
        devices = plan.stages[self.name].devices
        return WorkerPlacement(
            stage=self.name,
            rank=rank,
            world_size=len(devices),
            device=devices[rank],
            chunk=plan.worker_chunk(self.name),
            shares=shares_device(plan, self.name, devices[rank]),
        )

    def _slot(self, placement: WorkerPlacement) -> WorkerSlot:
        context, name = self._context, placement.name
        arguments: dict[str, Any] = {
            "placement": placement,
            "driver": context.network.address,
            "peers": context.machines.settings_for(placement.device),
            "factory": self._factory,
            "arguments": self._arguments,
            "script": self._script,
        }
        log_path = None if context.logs is None else context.logs / f"{name}.log"
        spec = WorkerSpec(
            name=name,
            factory=_FACTORY,
            arguments=arguments,
            device=placement.device,
            preload=TORCH_CODE if "torch" in sys.modules else (),
            log_path=log_path,
        )
        self._add_participant(placement, loaded=False)

        async def prepare(worker: WorkerHandle) -> None:
            self._deaths[name] = asyncio.create_task(self._on_death(name, worker), name=f"{name}'s death")
            if name in self._states:
                await worker.call("restore_state", self._states[name])

        launcher = _Launcher(context.machines.launcher, context.locks)
        return WorkerSlot(spec, launcher, context.clock, context.recorder.event, limit=self._restarts, prepare=prepare)

    def _add_participant(self, placement: WorkerPlacement, *, loaded: bool) -> None:
        """Add a worker to the device locks, if other stages share its devices."""
        if not placement.shares:
            return
        name, network = placement.name, self._context.network

        async def recall() -> None:
            with contextlib.suppress(WorkerDied):  # its death frees its devices
                await network.call(name, "recall")

        async def offload() -> None:
            try:
                seconds, has_freed = await network.call(name, "offload")
            except RemoteError as error:
                raise typed_cause(error) from None
            if not has_freed and name not in self._reported_offloads:
                self._reported_offloads.add(name)
                self._context.recorder.event("offload_frees_nothing", f"{name}: after {seconds:.3g} s", worker=name)

        self._context.locks.add(
            Participant(
                name=name, stage=placement.stage, devices=parse_device(placement.device).units(), order=self._order
            ),
            on_requested=recall,
            onload=lambda: network.call(name, "onload"),
            offload=offload,
            loaded=loaded,
        )

    async def _on_death(self, name: str, worker: WorkerHandle) -> None:
        """Wait for a worker's death, then free its devices and deliver its unacknowledged items again."""
        await worker.died
        self._context.locks.died(name)
        if returned_count := self._context.channels.redeliver(name):
            detail = f"{returned_count} items that {name} had received are delivered again"
            self._context.recorder.event("items_returned", detail, worker=name)

    async def _death_handled(self, name: str) -> None:
        await asyncio.shield(self._deaths[name])


class _Launcher:
    """A launcher that frees the devices of a worker whose start fails."""

    def __init__(self, launcher: Launcher, locks: DeviceLocks) -> None:
        self._launcher, self._locks = launcher, locks

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """See :meth:`headway.runtime.workers.Launcher.start`."""
        try:
            return await self._launcher.start(spec)
        except BaseException:
            self._locks.died(spec.name)
            raise


def _factory_of(kind: type[Worker], site: str, needs_script: bool) -> tuple[str, str]:
    """Return a class as ``module:Class`` for a worker's process, and the module of the started script if that defines
    the class, or ``needs_script``, else ""."""
    if not (isinstance(kind, type) and issubclass(kind, Worker)):
        raise ConfigurationError(f"{kind!r} ({site}): must be a class that extends headway.flow.Worker")
    if "<locals>" in kind.__qualname__:
        raise ConfigurationError(f"{kind.__qualname__} ({site}): must be defined at the top level of a module")
    module_name, script_module = kind.__module__, ""
    if module_name == "__main__" or needs_script:
        main_module = sys.modules["__main__"]
        main_spec = getattr(main_module, "__spec__", None)
        script_module = main_spec.name if main_spec is not None else Path(str(main_module.__file__)).stem
        module_name = script_module if module_name == "__main__" else module_name
        sys.modules.setdefault(script_module, main_module)  # objects that workers return have these classes
    return f"{module_name}:{kind.__qualname__}", script_module
