"""Changes a run's placement between two of its steps: computes the actions in their order, and executes them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from headway.config.load import placed_experiment
from headway.config.schema import Experiment
from headway.control.stalls import LOOPS
from headway.control.tuning.knob_search import first_knobs
from headway.orchestrator.context import RunContext, WorkerPools
from headway.orchestrator.recovery import restart_trainer
from headway.orchestrator.run_device_locks import TRAINER, placed_locks
from headway.records.errors import ConfigurationError, EpochLost, HeadwayError
from headway.records.plan import ExecutedMove, PlacementFile, PlannedMove, RunPlacement
from headway.runtime.devices import interchangeable, parse_device
from headway.runtime.run_directory import RunDirectory, placement_of
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT


class MoveAction(NamedTuple):
    """A part of a move: replicas join or leave, or all ranks stop or start."""

    kind: Literal["join", "leave", "stop", "start"]
    devices: tuple[str, ...]

    def __str__(self) -> str:
        pool_prefix = "trainer: " if self.kind in ("stop", "start") else "generator: "
        return f"{pool_prefix}{self.kind} on {', '.join(self.devices)}"


def actions_between(current: RunPlacement, target: RunPlacement) -> list[MoveAction]:
    """Compute the actions that lead from one placement to another; processes that both have aren't touched.

    After each action some replica generates, and generator and trainer share a device only where one of the two
    placements has it so. The trainer is stopped as briefly as these two conditions allow: every action that can come
    before its stop does.

    Example: generator and trainer change places. The trainer stops, a replica joins on its device, the old replica
    leaves, the trainer starts on the device that this frees.
    """
    removed_devices = tuple(device for device in current.generator if device not in target.generator)
    added_devices = tuple(device for device in target.generator if device not in current.generator)
    trainer_moves = current.trainer != target.trainer
    freed_by_trainer = set(current.trainer) - set(target.trainer)  # once it has stopped
    early_devices = tuple(device for device in added_devices if device not in freed_by_trainer)
    late_devices = tuple(device for device in added_devices if device in freed_by_trainer)
    stopping = [MoveAction("stop", current.trainer)] if trainer_moves else []
    start = [MoveAction("start", target.trainer)] if trainer_moves else []
    leave = MoveAction("leave", removed_devices)
    if early_devices or len(removed_devices) < len(current.generator):  # others take the requests of those that leave
        actions = [MoveAction("join", early_devices), leave, *stopping, *start, MoveAction("join", late_devices)]
    else:
        actions = [*stopping, MoveAction("join", late_devices[:1]), leave, *start, MoveAction("join", late_devices[1:])]
    return [action for action in actions if action.devices]


def require_movable(experiment: Experiment) -> None:
    """Raise ConfigurationError where ``control.devices = "move"`` has no other placement, or none to compare."""
    if experiment.control.devices != "move":
        return
    placement = placement_of(experiment)
    devices = list(dict.fromkeys((*placement.generator, *placement.trainer)))
    device_pairs = itertools.combinations(map(parse_device, devices), 2)
    if experiment.control.mode != "act":
        reason = f"control.mode = {experiment.control.mode!r} changes nothing in a run; valid: control.mode = 'act'"
    elif experiment.generator.engine == "vllm-server":
        reason = "a server takes no turns with the trainer; valid: generator.engine = 'torch' or 'vllm'"
    elif len(devices) == 1:
        reason = "with one device there is one plan, temporal, in which the sides take turns; leave it out"
    elif not interchangeable(devices) or experiment.generator.engine_arguments.get("tensor_parallel_size", 1) != 1:
        reason = "placement can only change on devices of one kind and size, one device a replica"
    elif overlap := next((pair for pair in device_pairs if pair[0].shares_with(pair[1])), None):
        reason = f"{overlap[0]} and {overlap[1]} overlap in part; valid: equal names, or no overlap"
    else:
        return
    raise ConfigurationError(f"control.devices = 'move' (--plan auto) with {', '.join(devices)}: {reason}")


class PlacementChanger:
    """Executes the changes of placement that the controller decides, at the boundary of a step.

    Nothing of the run is lost by one: requests move with their tokens, the trainer's state goes through a checkpoint of
    the boundary's version, and processes that stay in place continue. An action that fails is undone: the run continues
    in the previous placement. A process that dies amid a move is handled as at any other time: a dead replica's
    requests are elsewhere or held, dead ranks are started again from that checkpoint, and a resume uses the placement
    that was in effect before the move.
    """

    def __init__(self, run: RunContext, ensure_checkpoint: Callable[[], Awaitable[None]]) -> None:
        """``ensure_checkpoint()`` returns when there is one of the present version."""
        self._run = run
        self._configured = run.experiment if run.worker_pools is None else run.worker_pools.configured
        self._ensure_checkpoint = ensure_checkpoint
        self._present = placement_of(run.experiment)  # the actual one, also amid a move
        self._names = {device: f"generator-{i}" for i, device in enumerate(self._present.generator)}  # of replicas

    async def apply_planned(self) -> None:
        """Execute the pending change of placement, if there is one."""
        run, pools = self._run, self._run.worker_pools
        plan, run.state.pending_move = run.state.pending_move, None
        if plan is None or pools is None or plan.placement == self._present:
            return
        former_placement, began_s = self._present, run.clock.now()
        with run.waits.on("a change of plan", LOOPS, "the train loop"):
            failure = await self._apply(pools, plan.placement, former_placement)
        await self._place_locks(self._present.trainer)
        if run.memory is not None:
            await run.locks.evict(TRAINER)
        cost_s = run.clock.now() - began_s
        run.state.moved = ExecutedMove(
            planned=plan, version=run.state.version, cost_s=cost_s, previous=former_placement, placement=self._present
        )
        if not failure:
            self._store_present(pools)
        figures = {"gain": plan.gain, "rate": plan.rate, "expected_cost_s": plan.cost_s, "cost_s": cost_s}
        figures = {event_name: round(figure, 3) for event_name, figure in figures.items()}
        detail = f"{failure}; still {self._present}" if failure else f"{former_placement} -> {self._present}"
        event_name = EVENT_PLAN_KEPT if failure else EVENT_PLAN_CHANGED
        run.event(event_name, detail, before=str(former_placement), after=str(plan.placement), **figures)

    async def _apply(self, pools: WorkerPools, requested: RunPlacement, previous: RunPlacement) -> str:
        """Change to the ``requested`` placement; where an action fails, back to ``previous``. Returns the failure, ""
        for none. Raises the error of the way back, where that fails twice."""
        reason = ""
        for is_last, target in ((False, requested), (False, previous), (True, previous)):
            for action in actions_between(self._present, target):
                began_s = self._run.clock.now()
                try:
                    await self._execute(pools, action)
                except (HeadwayError, ValueError) as error:  # the latter: of a replica that is lost, or alone
                    if is_last or isinstance(error, EpochLost):
                        raise
                    reason = reason or f"{action}: {error}"
                    break
                self._run.meter.moved(str(action), self._run.clock.now() - began_s)
            else:
                self._present = target  # in its order
                return reason
        raise AssertionError("unreachable")

    async def _execute(self, pools: WorkerPools, action: MoveAction) -> None:
        run, devices = self._run, action.devices
        if action.kind in ("join", "leave"):
            operation = self._join if action.kind == "join" else self._leave
            # All have ended before an error is raised: the way back begins from the processes that exist then.
            for outcome in await asyncio.gather(*(operation(pools, name) for name in devices), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        elif action.kind == "stop":
            await run.state.finish_update()
            await self._ensure_checkpoint()
            # Killed, not stopped: the weights that it has published stay readable for a replica that joins or restarts.
            await pools.trainer.kill()
            self._present = msgspec.structs.replace(self._present, trainer=())
        else:
            pools.trainer.set_devices(devices)
            await self._place_locks(devices)
            await restart_trainer(run, run.state.version, moved=True)
            self._present = msgspec.structs.replace(self._present, trainer=devices)

    async def _place_locks(self, ranks: Sequence[str]) -> None:
        """Make the device lock of the present replicas and of a trainer on ``ranks``."""
        run = self._run
        await run.locks.wait_until_idle()
        replicas = {self._names[device]: device for device in self._present.generator}
        run.locks = placed_locks(replicas, ranks, run.generator, run.clock, run.waits, run.memory)

    async def _join(self, pools: WorkerPools, device: str) -> None:
        self._names[device] = await pools.generator.join(device)
        generator = (*self._present.generator, device)
        self._present = msgspec.structs.replace(self._present, generator=generator)

    async def _leave(self, pools: WorkerPools, device: str) -> None:
        await pools.generator.leave(self._names[device], move=True)
        generator = tuple(other for other in self._present.generator if other != device)
        self._present = msgspec.structs.replace(self._present, generator=generator)

    def _store_present(self, pools: WorkerPools) -> None:
        """Make the present placement the run's: for its knobs, for the controller, and for a resume."""
        run, knobs = self._run, self._run.state.knobs
        run.experiment = placed_experiment(self._configured, self._present.settings)
        kept_knobs = {"steps_per_publish": knobs.steps_per_publish, "verifier_workers": knobs.verifier_workers}
        run.state.knobs = msgspec.structs.replace(first_knobs(run.experiment), **kept_knobs)
        run.state.changed.notify()
        directory = RunDirectory(run.directory)
        file = PlacementFile(configured=placement_of(pools.configured), present=self._present)
        directory.write_json(directory.placement, file)


def planned_move(settings: dict[str, str], gain: float, rate: float, cost_s: float) -> PlannedMove:
    """The move to the placement in ``settings``: the JSON text of ``generator.devices`` and ``trainer.devices``."""
    sections = ("generator", "trainer")
    devices = {key: msgspec.json.decode(settings[f"{key}.devices"], type=tuple[str, ...]) for key in sections}
    return PlannedMove(placement=RunPlacement(**devices), gain=gain, rate=rate, cost_s=cost_s)
