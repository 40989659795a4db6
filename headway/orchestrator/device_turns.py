"""The parties of a run's device lock: the trainer, and every replica on one of its devices."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

from headway.config.schema import Experiment
from headway.flow.device_locks import DeviceLocks, Move
from headway.generator.client import GeneratorPool
from headway.orchestrator.meter import Meter
from headway.records.clients import Generator
from headway.records.errors import ConfigurationError, WorkerDied
from headway.records.execution import MemoryMove, Party
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback
from headway.trainer.client import TrainerClient

TRAINER = "trainer"
GENERATE, TRAIN = "generate", "train"  # stages, in the workflow's order
FREED = 0.1  # of what an offload has moved: less is nothing


def require_offload(experiment: Experiment) -> None:
    """Raise ConfigurationError for run.offload where nobody would use the memory, or a side couldn't free it."""
    generator, ranks = experiment.generator, experiment.trainer.devices
    if not experiment.run.offload:
        return
    if generator.engine == "vllm-server":
        raise ConfigurationError(
            "run.offload = true with generator.engine = 'vllm-server': a server keeps its memory; valid: "
            "generator.engine = 'torch' or 'vllm', or run.offload = false"
        )
    shared = any(parse_device(one).shares_with(parse_device(rank)) for one in generator.devices for rank in ranks)
    if not shared and experiment.control.devices != "move":
        raise ConfigurationError(
            f"run.offload = true with generator.devices = {list(generator.devices)} and trainer.devices = "
            f"{list(ranks)}: no device is shared, so nobody needs room; valid: run.offload = false"
        )


class RunMemory:
    """Frees the memory of a run's two sides and brings it back, with ``run.offload``; the ledger says what that took.

    In it are an event for the first move of each party and kind, one for an offload that frees nothing, and sums in the
    step's record; in the trace, spans on the device's track.
    """

    def __init__(self, generator: GeneratorPool, trainer: TrainerClient, meter: Meter, on_event: EventCallback) -> None:
        self.on_event, self.on_span = on_event, meter.on_device
        self._generator, self._trainer, self._meter = generator, trainer, meter
        self._told = set[tuple[str, str]]()

    def of_trainer(self, onload: bool) -> Move:
        """The trainer's move."""
        side = self._trainer
        return lambda: self._count(TRAINER, side.onload() if onload else side.offload())

    def of_replica(self, index: int, onload: bool) -> Move:
        """A replica's move. One that dies in coming back is none: the pool replaces it."""

        async def move() -> None:
            side = self._generator
            with contextlib.suppress(*((WorkerDied,) if onload else ())):
                await self._count(f"generator-{index}", side.onload(index) if onload else side.offload(index))

        return move

    async def _count(self, party: str, moving: Awaitable[list[MemoryMove]]) -> None:
        moves = await moving
        for kind, these in itertools.groupby(moves, key=lambda move: "onload" if move.onload else "offload"):
            together = list(these)
            moved, freed = (sum(getattr(one, name) for one in together) for name in ("moved_bytes", "freed_bytes"))
            if not moved:
                continue  # it was there, or away, already
            seconds = max(one.seconds for one in together)  # ranks move side by side
            self._meter.switched(seconds, freed)
            data = {"worker": party, "moved_bytes": moved, "seconds": round(seconds, 4), "freed_bytes": freed}
            said = f"{party}: {moved / 1e6:.1f} MB in {seconds:.3g} s, {freed / 1e6:.1f} MB freed"
            self._once(party, kind, said, **data)
            if kind == "offload" and freed < moved * FREED:
                self._once(party, "offload_frees_nothing", said, **data)

    def _once(self, party: str, name: str, said: str, /, **data: Any) -> None:
        if (party, name) not in self._told:
            self._told.add((party, name))
            self.on_event(name, said, **data)


def open_locks(
    experiment: Experiment,
    generator: Generator,
    clock: Clock,
    waits: Waits,
    shared: Collection[int] | None = None,
    memory: RunMemory | None = None,
) -> DeviceLocks:
    """Make the device lock of a run. ``shared``: replicas on devices of the trainer, by default as
    ``experiment`` places both. ``memory``: who computes alone has it alone."""
    if shared is None:
        replicas = {f"generator-{index}": device for index, device in enumerate(experiment.generator.devices)}
        return placed_locks(replicas, experiment.trainer.devices, generator, clock, waits, memory)
    locks = DeviceLocks(clock, waits)  # of actors whose devices are only described
    devices = {f"generator-{index}": frozenset({f"device-{index}"}) for index in shared}
    mine = frozenset({TRAINER}).union(*devices.values())
    locks.add(Party(name=TRAINER, stage=TRAIN, devices=mine, order=1))
    for name, units in devices.items():
        add_replica(locks, generator, name, units)
    return locks


def placed_locks(
    replicas: Mapping[str, str],
    ranks: Sequence[str],
    generator: Generator,
    clock: Clock,
    waits: Waits,
    memory: RunMemory | None = None,
) -> DeviceLocks:
    """Make the device lock of the ``replicas``, by name on their devices, and of a trainer with ``ranks`` on theirs."""
    if memory is None:
        locks, onload, offload = DeviceLocks(clock, waits), None, None
    else:
        locks = DeviceLocks(clock, waits, on_event=memory.on_event, on_span=memory.on_span)
        onload, offload = memory.of_trainer(True), memory.of_trainer(False)
    mine = frozenset[str]().union(*(parse_device(rank).units() for rank in ranks))
    locks.add(Party(name=TRAINER, stage=TRAIN, devices=mine, order=1), onload=onload, offload=offload)
    for name, device in replicas.items():
        add_replica(locks, generator, name, parse_device(device).units(), memory)
    return locks


def add_replica(
    locks: DeviceLocks, generator: Generator, name: str, devices: frozenset[str], memory: RunMemory | None = None
) -> None:
    """Make a replica a party that pauses while the trainer has its devices; no-op for one that is a party, or has none
    of the trainer's."""
    if name in locks.parties or not devices & locks.parties[TRAINER].devices:
        return
    index = int(name.rpartition("-")[2])
    locks.add(
        Party(name=name, stage=GENERATE, devices=devices, order=0),
        recall=lambda: generator.pause_replicas([index]),
        resume=lambda: generator.resume_replicas([index]),
        onload=None if memory is None else memory.of_replica(index, True),
        offload=None if memory is None else memory.of_replica(index, False),
    )


async def join_replica(locks: DeviceLocks, pool: GeneratorPool, memory: RunMemory | None, device: str) -> str:
    """Start a replica on ``device``; where that is the trainer's it pauses at its turns. Returns its name."""
    name = await pool.join(device)
    add_replica(locks, pool, name, parse_device(device).units(), memory)
    return name
