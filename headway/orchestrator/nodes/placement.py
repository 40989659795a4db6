"""Places devices given as a count (``"4*cuda"``): chooses a node and an index for each.

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
class DeviceCapacity:
    """Numbers of a node's devices."""

    cpu: float = math.inf  # cores
    cuda: float = math.inf  # GPUs


def place_devices(experiment: Experiment, capacities: Mapping[str, DeviceCapacity]) -> Experiment:
    """Return the experiment with a node and an index for every device that had only a count. ``capacities``: of the
    nodes, in the order in which they are filled. Raises ConfigurationError where they have too few devices."""
    taken_devices = [parse_device(name) for name in (*experiment.trainer.devices, *experiment.generator.devices)]
    taken_devices = [device for device in taken_devices if not device.node.startswith(ANY_NODE)]
    ranks = [parse_device(name) for name in experiment.trainer.devices]
    replicas = [parse_device(name) for name in experiment.generator.devices]
    placed_ranks = _place("trainer.devices", ranks, capacities, taken_devices, together=True)
    placed_replicas = _place("generator.devices", replicas, capacities, taken_devices, together=False)
    return experiment.model_copy(
        update={
            "trainer": experiment.trainer.model_copy(update={"devices": tuple(map(str, placed_ranks))}),
            "generator": experiment.generator.model_copy(update={"devices": tuple(map(str, placed_replicas))}),
        }
    )


def _place(
    key: str, devices: list[Device], capacities: Mapping[str, DeviceCapacity], taken: list[Device], *, together: bool
) -> list[Device]:
    """Return the devices, those without a node placed, and add these to ``taken``. ``together``: all of them on one
    node."""
    unplaced = [device for device in devices if device.node.startswith(ANY_NODE)]
    placed: list[Device] = []
    for device in devices:
        if device not in unplaced:
            placed.append(device)
            continue
        share = len(unplaced) if together else 1
        node_name = placed[-1].node if together and placed else _choose_node(key, device.kind, share, capacities, taken)
        candidates = (Device(kind=device.kind, first=index, last=index, node=node_name) for index in count())
        placed.append(next(option for option in candidates if not any(option.shares_with(other) for other in taken)))
        taken.append(placed[-1])
    return placed


def _choose_node(key: str, kind: str, least: int, nodes: Mapping[str, DeviceCapacity], taken: list[Device]) -> str:
    """The node with the fewest devices in use that has ``least`` more; the first of several. Raises
    ConfigurationError."""
    used = {
        node: sum(device.last - device.first + 1 for device in taken if (device.node, device.kind) == (node, kind))
        for node in nodes
    }
    fitting_nodes = [node for node, capacity in nodes.items() if getattr(capacity, kind) - used[node] >= least]
    if not fitting_nodes:
        usage_text = ", ".join(f"{node} {used[node]} of {getattr(devices, kind):g}" for node, devices in nodes.items())
        raise ConfigurationError(
            f"{key}: no node has {least} more {kind} device(s) free (in use: {usage_text or 'no nodes'})"
        )
    return min(fitting_nodes, key=lambda name: used[name])
