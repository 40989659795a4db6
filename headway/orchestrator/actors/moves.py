"""Changes of a run's placement while it goes on: the actions in their order, and their execution between two steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from headway.config.load import changed_experiment
from headway.config.schema import Experiment
from headway.control.stalls import LOOPS
from headway.control.tuning.knob_search import first_knobs
from headway.orchestrator.context import RunContext, Sides
from headway.orchestrator.device_turns import TRAINER, placed_locks
from headway.orchestrator.recovery import restart_trainer
from headway.records.errors import ConfigurationError, EpochLost, HeadwayError
from headway.records.plan import ExecutedMove, PlacementFile, PlannedMove, RunPlacement
from headway.runtime.devices import alike, parse_device
from headway.runtime.run_directory import RunDirectory, placement_of
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT
from headway.trainer.checkpoints import checkpoint_path


class MoveAction(NamedTuple):
    """A part of a move: replicas join or leave, or all ranks stop or start."""

    kind: Literal["join", "leave", "stop", "start"]
    devices: tuple[str, ...]

    def __str__(self) -> str:
        side = "trainer: " if self.kind in ("stop", "start") else "generator: "
        return f"{side}{self.kind} on {', '.join(self.devices)}"


def actions_between(before: RunPlacement, after: RunPlacement) -> list[MoveAction]:
    """The actions that lead from one placement to another; whatever both have isn't touched.

    After each action some replica generates, and a device is used by both sides only where one of the two placements
    has it so. The trainer stands no longer than these two need: what can be done before it stops is.

    Example: generator and trainer change places. The trainer stops, a replica joins on its device, the old replica
    leaves, the trainer starts on the device that this frees.
    """
    leaving = tuple(device for device in before.generator if device not in after.generator)
    joining = tuple(device for device in after.generator if device not in before.generator)
    moves = before.trainer != after.trainer
    held = set(before.trainer) - set(after.trainer)  # until the trainer has stopped
    early = tuple(device for device in joining if device not in held)
    late = tuple(device for device in joining if device in held)
    stop = [MoveAction("stop", before.trainer)] if moves else []
    start = [MoveAction("start", after.trainer)] if moves else []
    leave = MoveAction("leave", leaving)
    if early or len(leaving) < len(before.generator):  # others take the requests of those that leave
        found = [MoveAction("join", early), leave, *stop, *start, MoveAction("join", late)]
    else:
        found = [*stop, MoveAction("join", late[:1]), leave, *start, MoveAction("join", late[1:])]
    return [action for action in found if action.devices]


def require_movable(experiment: Experiment) -> None:
    """Raise ConfigurationError where ``control.devices = "move"`` finds no other placement, or none it could judge."""
    if experiment.control.devices != "move":
        return
    placed = placement_of(experiment)
    names = list(dict.fromkeys((*placed.generator, *placed.trainer)))
    pairs = itertools.combinations(map(parse_device, names), 2)
    if experiment.control.mode != "act":
        said = f"control.mode = {experiment.control.mode!r} changes nothing in a run; valid: control.mode = 'act'"
    elif len(names) == 1:
        said = "with one device there is one plan, temporal, in which the sides take turns; leave it out"
    elif not alike(names) or experiment.generator.engine_arguments.get("tensor_parallel_size", 1) != 1:
        said = "the sides can only change places on devices of one kind and size, one device a replica"
    elif clash := next((pair for pair in pairs if pair[0].shares_with(pair[1])), None):
        said = f"{clash[0]} and {clash[1]} share a part; valid: equal names, or nothing shared"
    else:
        return
    raise ConfigurationError(f"control.devices = 'move' (--plan auto) with {', '.join(names)}: {said}")


class Moves:
    """Executes the changes of placement that the controller decides, at the boundary of a step.

    Nothing of the run is lost by one: requests move with their tokens, the trainer's state goes through a checkpoint of
    the boundary's version, and what stays where it is works on. An action that fails is taken back: the run goes on in
    the placement before. A process of the run that ends amid a move is no other case than one that ends elsewhere: a
    dead replica's requests are elsewhere or held, dead ranks are started again from that checkpoint, and a resume uses
    the placement that was in effect before the move.
    """

    def __init__(self, run: RunContext, checkpoint: Callable[[], Awaitable[None]]) -> None:
        """``checkpoint()`` writes one of the present version."""
        self._run = run
        self._checkpoint = checkpoint
        self._present = placement_of(run.experiment)  # as it is, also amid a move
        self._names = {device: f"generator-{i}" for i, device in enumerate(self._present.generator)}  # of replicas

    async def at_boundary(self) -> None:
        """Make the change that is wanted, if any."""
        run, sides = self._run, self._run.sides
        wanted, run.state.wanted_move = run.state.wanted_move, None
        if wanted is None or sides is None or wanted.placement == self._present:
            return
        before, began_s = self._present, run.clock.now()
        with run.waits.on("a change of plan", LOOPS, "the train loop"):
            failed = await self._reach(sides, wanted.placement, before)
        await self._place_locks(self._present.trainer)
        if run.memory is not None:
            await run.locks.vacate(TRAINER)
        cost_s = run.clock.now() - began_s
        run.state.moved = ExecutedMove(
            planned=wanted, version=run.state.version, cost_s=cost_s, before=before, placement=self._present
        )
        if not failed:
            self._adopt(sides)
        data = {"gain": wanted.gain, "rate": wanted.rate, "expected_cost_s": wanted.cost_s, "cost_s": cost_s}
        data = {name: round(value, 3) for name, value in data.items()}
        said = f"{failed}; still {self._present}" if failed else f"{before} -> {self._present}"
        name = EVENT_PLAN_KEPT if failed else EVENT_PLAN_CHANGED
        run.event(name, said, before=str(before), after=str(wanted.placement), **data)

    async def _reach(self, sides: Sides, wanted: RunPlacement, before: RunPlacement) -> str:
        """Go to ``wanted``; where an action fails, back to ``before``. Returns what failed; "": nothing. Raises the
        error of the way back, where it fails twice."""
        failed = ""
        for last, goal in ((False, wanted), (False, before), (True, before)):
            for action in actions_between(self._present, goal):
                began_s = self._run.clock.now()
                try:
                    await self._execute(sides, action)
                except (HeadwayError, ValueError) as error:  # the latter: of a replica that is lost, or alone
                    if last or isinstance(error, EpochLost):
                        raise
                    failed = failed or f"{action}: {error}"
                    break
                self._run.meter.moved(str(action), self._run.clock.now() - began_s)
            else:
                self._present = goal  # in its order
                return failed
        raise AssertionError("unreachable")

    async def _execute(self, sides: Sides, action: MoveAction) -> None:
        run, devices = self._run, action.devices
        if action.kind in ("join", "leave"):
            one = self._join if action.kind == "join" else self._leave
            # All have ended before an error is raised: the way back begins from what is there then.
            for outcome in await asyncio.gather(*(one(sides, name) for name in devices), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        elif action.kind == "stop":
            await run.state.finish_update()
            if not checkpoint_path(run.directory, run.state.version).exists():
                await self._checkpoint()
            # Killed, not stopped: the weights that it has published stay readable for a replica that joins or restarts.
            await sides.trainer.kill()
            self._present = msgspec.structs.replace(self._present, trainer=())
        else:
            sides.trainer.place(devices)
            await self._place_locks(devices)
            await restart_trainer(run, run.state.version, moved=True)
            self._present = msgspec.structs.replace(self._present, trainer=devices)

    async def _place_locks(self, ranks: Sequence[str]) -> None:
        """Make the device lock of the replicas that are there and a trainer on ``ranks``."""
        run = self._run
        await run.locks.quiet()
        replicas = {self._names[device]: device for device in self._present.generator}
        run.locks = placed_locks(replicas, ranks, run.generator, run.clock, run.waits, run.memory)

    async def _join(self, sides: Sides, device: str) -> None:
        self._names[device] = await sides.generator.join(device)
        generator = (*self._present.generator, device)
        self._present = msgspec.structs.replace(self._present, generator=generator)

    async def _leave(self, sides: Sides, device: str) -> None:
        await sides.generator.leave(self._names[device], move=True)
        generator = tuple(name for name in self._present.generator if name != device)
        self._present = msgspec.structs.replace(self._present, generator=generator)

    def _adopt(self, sides: Sides) -> None:
        """Make the present placement the run's: for its knobs, for the controller, and for a resume."""
        run, before = self._run, self._run.state.knobs
        run.experiment = changed_experiment(run.experiment, self._present.settings)
        kept = {"steps_per_publish": before.steps_per_publish, "verifier_workers": before.verifier_workers}
        run.state.knobs = msgspec.structs.replace(first_knobs(run.experiment), **kept)
        run.state.changed.notify()
        directory = RunDirectory(run.directory)
        directory.write_json(directory.placement, PlacementFile(configured=sides.configured, present=self._present))


def planned_move(settings: dict[str, str], gain: float, rate: float, cost_s: float) -> PlannedMove:
    """The move to the placement that ``settings`` of the configuration say."""
    names = ("generator", "trainer")
    sides = {side: msgspec.json.decode(settings[f"{side}.devices"], type=tuple[str, ...]) for side in names}
    return PlannedMove(placement=RunPlacement(**sides), gain=gain, rate=rate, cost_s=cost_s)
