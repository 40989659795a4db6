"""Placement of devices given as a count (``"4*cuda"``): a node and an index for each.

A pure rule. The trainer's ranks are placed first, all on one node: their gradients cross no network. The generator's
replicas follow, each on the node that has the fewest devices in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from headway.config.schema import Experiment
from headway.config.section import ANY_NODE
from headway.records.errors import ConfigurationError
from headway.runtime.devices import Device, parse_device


@dataclass(frozen=True, kw_only=True)
class Room:
    """The devices of a node."""

    cpu: float = math.inf  # cores
    cuda: float = math.inf  # GPUs


def place_devices(experiment: Experiment, rooms: Mapping[str, Room]) -> Experiment:
    """The experiment with a node and an index for every device that had only a count. ``rooms``: of the nodes, in the
    order in which they are filled. Raises ConfigurationError where they have too little."""
    taken = [parse_device(name) for name in (*experiment.trainer.devices, *experiment.generator.devices)]
    taken = [device for device in taken if not device.node.startswith(ANY_NODE)]
    ranks = [parse_device(name) for name in experiment.trainer.devices]
    replicas = [parse_device(name) for name in experiment.generator.devices]
    placed_ranks = _placed("trainer.devices", ranks, rooms, taken, together=True)
    placed_replicas = _placed("generator.devices", replicas, rooms, taken, together=False)
    return experiment.model_copy(
        update={
            "trainer": experiment.trainer.model_copy(update={"devices": tuple(map(str, placed_ranks))}),
            "generator": experiment.generator.model_copy(update={"devices": tuple(map(str, placed_replicas))}),
        }
    )


def _placed(
    key: str, devices: list[Device], rooms: Mapping[str, Room], taken: list[Device], *, together: bool
) -> list[Device]:
    """The devices, those without a node placed; adds these to ``taken``. ``together``: all of them on one node."""
    open_ones = [device for device in devices if device.node.startswith(ANY_NODE)]
    placed: list[Device] = []
    for device in devices:
        if device not in open_ones:
            placed.append(device)
            continue
        share = len(open_ones) if together else 1
        chosen = placed[-1].node if together and placed else _node_with_room(key, device.kind, share, rooms, taken)
        own = (Device(kind=device.kind, first=index, last=index, node=chosen) for index in count())
        placed.append(next(each for each in own if not any(each.shares_with(other) for other in taken)))
        taken.append(placed[-1])
    return placed


def _node_with_room(key: str, kind: str, least: int, rooms: Mapping[str, Room], taken: list[Device]) -> str:
    """The node with the fewest devices in use that has ``least`` more; the first of several. Raises
    ConfigurationError."""
    used = {
        name: sum(device.last - device.first + 1 for device in taken if (device.node, device.kind) == (name, kind))
        for name in rooms
    }
    fitting = [name for name, room in rooms.items() if getattr(room, kind) - used[name] >= least]
    if not fitting:
        all_of_them = ", ".join(f"{name} {used[name]} of {getattr(room, kind):g}" for name, room in rooms.items())
        raise ConfigurationError(
            f"{key}: no node has {least} more {kind} device(s) free (in use: {all_of_them or 'no nodes'})"
        )
    return min(fitting, key=lambda name: used[name])
