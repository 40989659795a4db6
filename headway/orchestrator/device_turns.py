"""The parties of a run's device lock: the trainer, and every replica on one of its devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headway.config.schema import Experiment
from headway.flow.device_locks import DeviceLocks
from headway.generator.client import GeneratorPool
from headway.records.clients import Generator
from headway.records.device_lock import Party
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.stalls.waits import Waits

TRAINER = "trainer"
GENERATE, TRAIN = "generate", "train"  # stages, in the workflow's order


def open_locks(
    experiment: Experiment, generator: Generator, clock: Clock, waits: Waits, shared: Collection[int] | None = None
) -> DeviceLocks:
    """Make the device lock of a run. ``shared``: replicas on devices of the trainer, by default as
    ``experiment`` places both."""
    if shared is None:
        replicas = {f"generator-{index}": device for index, device in enumerate(experiment.generator.devices)}
        return placed_locks(replicas, experiment.trainer.devices, generator, clock, waits)
    locks = DeviceLocks(clock, waits)  # of actors whose devices are only described
    devices = {f"generator-{index}": frozenset({f"device-{index}"}) for index in shared}
    mine = frozenset({TRAINER}).union(*devices.values())
    locks.add(Party(name=TRAINER, stage=TRAIN, devices=mine, order=1))
    for name, units in devices.items():
        add_replica(locks, generator, name, units)
    return locks


def placed_locks(
    replicas: Mapping[str, str], ranks: Sequence[str], generator: Generator, clock: Clock, waits: Waits
) -> DeviceLocks:
    """Make the device lock of the ``replicas``, by name on their devices, and of a trainer with ``ranks`` on theirs."""
    locks = DeviceLocks(clock, waits)
    mine = frozenset[str]().union(*(parse_device(rank).units() for rank in ranks))
    locks.add(Party(name=TRAINER, stage=TRAIN, devices=mine, order=1))
    for name, device in replicas.items():
        add_replica(locks, generator, name, parse_device(device).units())
    return locks


def add_replica(locks: DeviceLocks, generator: Generator, name: str, devices: frozenset[str]) -> None:
    """Make a replica a party that pauses while the trainer has its devices; no-op for one that is a party, or has none
    of the trainer's."""
    if name in locks.parties or not devices & locks.parties[TRAINER].devices:
        return
    index = int(name.rpartition("-")[2])
    locks.add(
        Party(name=name, stage=GENERATE, devices=devices, order=0),
        recall=lambda: generator.pause_replicas([index]),
        resume=lambda: generator.resume_replicas([index]),
    )


async def join_replica(locks: DeviceLocks, pool: GeneratorPool, device: str) -> str:
    """Start a replica on ``device``; where that is the trainer's it pauses at its turns. Returns its name."""
    name = await pool.join(device)
    add_replica(locks, pool, name, parse_device(device).units())
    return name
