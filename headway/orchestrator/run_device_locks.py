"""Builds a run's device lock, whose participants are the trainer and every replica on one of the trainer's devices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

from headway.config.schema import Experiment
from headway.flow.device_locks import DeviceLocks, SwitchCallback
from headway.generator.client import GeneratorPool
from headway.orchestrator.step_metrics import StepMetrics
from headway.records.clients import Generator
from headway.records.errors import ConfigurationError, WorkerDied
from headway.records.execution import MemoryMove, Participant
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback
from headway.trainer.client import TrainerClient

TRAINER = "trainer"
GENERATE, TRAIN = "generate", "train"  # stages, in the workflow's order
LEAST_FREED_SHARE = 0.1  # of the bytes that an offload moved: below it, the offload freed nothing


def require_offload(experiment: Experiment) -> None:
    """Raise ConfigurationError for run.offload where no device is shared, or the engine can't free its memory."""
    generator, ranks = experiment.generator, experiment.trainer.devices
    if not experiment.run.offload:
        return
    if generator.engine == "vllm-server":
        raise ConfigurationError(
            "run.offload = true with generator.engine = 'vllm-server': a server keeps its memory; valid: "
            "generator.engine = 'torch' or 'vllm', or run.offload = false"
        )
    shared = any(parse_device(device).shares_with(parse_device(rank)) for device in generator.devices for rank in ranks)
    if not shared and experiment.control.devices != "move":
        raise ConfigurationError(
            f"run.offload = true with generator.devices = {list(generator.devices)} and trainer.devices = "
            f"{list(ranks)}: no device is shared, so neither side needs to offload; valid: run.offload = false"
        )


class RunMemory:
    """Offloads and onloads the memory of a run's trainer and replicas, with ``run.offload``, and records the cost.

    The ledger gets an event for the first move of each participant and kind, one for an offload that frees nothing, and
    sums in the step's record; the trace gets spans on the device's track.
    """

    def __init__(
        self, generator: GeneratorPool, trainer: TrainerClient, meter: StepMetrics, on_event: EventCallback
    ) -> None:
        self.on_event, self.on_span = on_event, meter.on_device
        self._generator, self._trainer, self._meter = generator, trainer, meter
        self._reported = set[tuple[str, str]]()

    def of_trainer(self, onload: bool) -> SwitchCallback:
        """Make the function that onloads or offloads the trainer."""
        trainer = self._trainer
        return lambda: self._count(TRAINER, trainer.onload() if onload else trainer.offload())

    def of_replica(self, index: int, onload: bool) -> SwitchCallback:
        """Make the function that onloads or offloads a replica. A death during the onload is ignored: the pool replaces
        it."""

        async def move_memory() -> None:
            pool = self._generator
            with contextlib.suppress(*((WorkerDied,) if onload else ())):
                await self._count(f"generator-{index}", pool.onload(index) if onload else pool.offload(index))

        return move_memory

    async def _count(self, participant: str, moving: Awaitable[list[MemoryMove]]) -> None:
        transfers = await moving
        for kind, kind_moves in itertools.groupby(transfers, key=lambda move: "onload" if move.onload else "offload"):
            rank_moves = list(kind_moves)
            moved, freed = (sum(getattr(move, name) for move in rank_moves) for name in ("moved_bytes", "freed_bytes"))
            if not moved:
                continue  # it was in that state already
            seconds = max(move.seconds for move in rank_moves)  # ranks move in parallel
            self._meter.switched(seconds, freed)
            fields = {"worker": participant, "moved_bytes": moved, "seconds": round(seconds, 4), "freed_bytes": freed}
            detail = f"{participant}: {moved / 1e6:.1f} MB in {seconds:.3g} s, {freed / 1e6:.1f} MB freed"
            self._report_once(participant, kind, detail, **fields)
            if kind == "offload" and freed < moved * LEAST_FREED_SHARE:
                self._report_once(participant, "offload_frees_nothing", detail, **fields)

    def _report_once(self, participant: str, name: str, message: str, /, **data: Any) -> None:
        if (participant, name) not in self._reported:
            self._reported.add((participant, name))
            self.on_event(name, message, **data)


def open_locks(
    experiment: Experiment,
    generator: Generator,
    clock: Clock,
    waits: Waits,
    shared: Collection[int] | None = None,
    memory: RunMemory | None = None,
) -> DeviceLocks:
    """Make the device lock of a run. ``shared``: replicas on devices of the trainer, by default as ``experiment``
    places both. ``memory``: offloads the others in a participant's turn; None: all memory stays."""
    if shared is None:
        replicas = {f"generator-{index}": device for index, device in enumerate(experiment.generator.devices)}
        return placed_locks(replicas, experiment.trainer.devices, generator, clock, waits, memory)
    locks = DeviceLocks(clock, waits)  # of actors whose devices are only described
    units_by_replica = {f"generator-{index}": frozenset({f"device-{index}"}) for index in shared}
    trainer_units = frozenset({TRAINER}).union(*units_by_replica.values())
    locks.add(Participant(name=TRAINER, stage=TRAIN, devices=trainer_units, order=1))
    for replica, units in units_by_replica.items():
        add_replica(locks, generator, replica, units)
    return locks


def placed_locks(
    replicas: Mapping[str, str],
    ranks: Sequence[str],
    generator: Generator,
    clock: Clock,
    waits: Waits,
    memory: RunMemory | None = None,
) -> DeviceLocks:
    """Make the device lock of the ``replicas`` (name -> device) and of a trainer with the devices ``ranks``."""
    if memory is None:
        locks, onload, offload = DeviceLocks(clock, waits), None, None
    else:
        locks = DeviceLocks(clock, waits, on_event=memory.on_event, on_span=memory.on_span)
        onload, offload = memory.of_trainer(True), memory.of_trainer(False)
    trainer_units = frozenset[str]().union(*(parse_device(rank).units() for rank in ranks))
    locks.add(Participant(name=TRAINER, stage=TRAIN, devices=trainer_units, order=1), onload=onload, offload=offload)
    for replica, device in replicas.items():
        add_replica(locks, generator, replica, parse_device(device).units(), memory)
    return locks


def add_replica(
    locks: DeviceLocks, generator: Generator, name: str, devices: frozenset[str], memory: RunMemory | None = None
) -> None:
    """Add a replica as a participant that pauses while the trainer has its devices. No-op for one that is a participant
    already, or shares no device with the trainer."""
    if name in locks.participants or not devices & locks.participants[TRAINER].devices:
        return
    index = int(name.rpartition("-")[2])
    locks.add(
        Participant(name=name, stage=GENERATE, devices=devices, order=0),
        recall=lambda: generator.pause_replicas([index]),
        resume=lambda: generator.resume_replicas([index]),
        onload=None if memory is None else memory.of_replica(index, True),
        offload=None if memory is None else memory.of_replica(index, False),
    )


async def join_replica(locks: DeviceLocks, pool: GeneratorPool, memory: RunMemory | None, device: str) -> str:
    """Start a replica on ``device`` and return its name. On a device of the trainer it pauses for the trainer."""
    name = await pool.join(device)
    add_replica(locks, pool, name, parse_device(device).units(), memory)
    return name
