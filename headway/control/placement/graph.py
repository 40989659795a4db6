"""Folds a workflow's cycles: a loop becomes one unit of the enclosing graph and contains a graph of its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from headway.records.errors import ConfigurationError
from headway.records.plan import DevicePool, Workflow, WorkflowStage

# Down-closed subsets, smaller first, each with its down-closed supersets and their differences.
Cuts = list[tuple[int, list[tuple[int, int]]]]


@dataclass(frozen=True)
class Unit:
    """A stage, or a loop folded into one node of the graph around it."""

    name: str
    stages: tuple[WorkflowStage, ...]
    loop: UnitGraph | None = None  # None: a stage

    @cached_property
    def switch_s(self) -> float:
        """Seconds to switch to this unit: all stages of a loop move at once."""
        return max(stage.switch_s for stage in self.stages)


@dataclass(frozen=True)
class UnitGraph:
    """An acyclic graph of units, of the whole workflow or inside a loop. Sets of units are bit masks."""

    rounds: int
    units: tuple[Unit, ...]
    predecessors: tuple[int, ...]  # set of direct predecessors of each unit
    bytes_between: Mapping[tuple[int, int], float]  # per item and round, the loop's back edge included
    _steps: dict[int, Cuts] = field(default_factory=dict[int, Cuts])

    @property
    def all_units(self) -> int:
        return (1 << len(self.units)) - 1

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """Direct predecessors and successors of each unit, as a set."""
        masks = list(self.predecessors)
        for unit, mask in enumerate(self.predecessors):
            for predecessor in members(mask):
                masks[predecessor] |= 1 << unit
        return tuple(masks)

    def ordered(self, within: int) -> list[int]:
        """Return the units of ``within`` in topological order."""
        done, ordered_units = 0, list[int]()
        while done != within:
            ready = next(unit for unit in members(within & ~done) if not self.predecessors[unit] & within & ~done)
            done |= 1 << ready
            ordered_units.append(ready)
        return ordered_units

    def received_bytes(self, part: int) -> float:
        """Return the bytes per item that ``part`` receives from units outside it."""
        return sum(
            nbytes for (source, to), nbytes in self.bytes_between.items() if part >> to & 1 and not part >> source & 1
        )

    def steps(self, within: int) -> Cuts:
        """Return the cuts of the set ``within``, itself the difference of two down-closed sets.

        A cut is a down-closed subset, smaller ones first, with (superset, difference) for every down-closed subset that
        contains it."""
        if within not in self._steps:
            closed_sets = [0]
            for unit in self.ordered(within):
                needed_mask = self.predecessors[unit] & within
                closed_sets += [lower | 1 << unit for lower in closed_sets if not needed_mask & ~lower]
            closed_sets.sort(key=lambda mask: (mask.bit_count(), mask))
            self._steps[within] = [
                (lower, [(upper, upper ^ lower) for upper in closed_sets if upper != lower and not lower & ~upper])
                for lower in closed_sets
            ]
        return self._steps[within]

    def components(self, within: int) -> list[int]:
        """Return the connected components of ``within``."""
        components: list[int] = []
        remaining_mask = within
        while remaining_mask:
            previous_mask, reached_mask = 0, remaining_mask & -remaining_mask
            while reached_mask != previous_mask:
                previous_mask = reached_mask
                for unit in members(previous_mask):
                    reached_mask |= self.neighbours[unit] & within
            components.append(reached_mask)
            remaining_mask &= ~reached_mask
        return components


class _Loop(NamedTuple):
    name: str
    rounds: int
    stages: frozenset[int]


def members(mask: int) -> Iterator[int]:
    """Yield the indices of the bits of ``mask``, ascending."""
    while mask:
        lowest_bit = mask & -mask
        yield lowest_bit.bit_length() - 1
        mask ^= lowest_bit


def fold(workflow: Workflow) -> UnitGraph:
    """Fold the loops of a workflow, outermost first.

    Raises ConfigurationError for a cycle without a loop variable, a loop variable without a cycle, and loops that
    overlap without one inside the other.
    """
    names = [stage.name for stage in workflow.stages]
    number_of = {name: index for index, name in enumerate(names)}
    forward_edges = [(number_of[edge.source], number_of[edge.to]) for edge in workflow.edges if edge.loop is None]
    for component in _cycles(len(names), forward_edges):
        stages = ", ".join(names[stage] for stage in sorted(component))
        raise ConfigurationError(
            f"stages {stages} form a cycle without a loop variable: name the loop on the edge that goes back "
            '("loop": "NAME") and give its rounds under "loops"'
        )
    loops: list[_Loop] = []
    for loop in workflow.loops:
        back_edges = [(number_of[edge.source], number_of[edge.to]) for edge in workflow.edges if edge.loop == loop.name]
        loop_stages = frozenset[int]().union(*_cycles(len(names), forward_edges + back_edges))
        if not back_edges or not all(source in loop_stages and to in loop_stages for source, to in back_edges):
            raise ConfigurationError(f"loop {loop.name!r}: no cycle goes through its edges; one must go back")
        if len(_cycles(len(names), forward_edges + back_edges)) > 1:
            raise ConfigurationError(f"loop {loop.name!r} has two separate cycles: each needs a loop of its own")
        loops.append(_Loop(loop.name, loop.rounds, loop_stages))
    for loop_index, (name, _, stages) in enumerate(loops):
        for other_name, _, other_stages in loops[:loop_index]:
            if stages & other_stages and not stages <= other_stages and not other_stages <= stages:
                raise ConfigurationError(f"loops {other_name!r} and {name!r} overlap, and neither contains the other")
    loops.sort(key=lambda inner: -len(inner.stages))  # stable: of two with the same stages the first is the outer one
    return _body(workflow, _Loop("", 1, frozenset(range(len(names)))), loops)


def _body(workflow: Workflow, enclosing: _Loop, loops: Sequence[_Loop]) -> UnitGraph:
    units: list[Unit] = []
    unit_of: dict[int, int] = {}
    for loop_index, loop in enumerate(loops):
        if loop.stages <= enclosing.stages and loop.stages.isdisjoint(unit_of):
            unit_of.update(dict.fromkeys(loop.stages, len(units)))
            loop_stages = tuple(workflow.stages[stage] for stage in sorted(loop.stages))
            units.append(Unit(loop.name, loop_stages, _body(workflow, loop, loops[loop_index + 1 :])))
    for stage in sorted(enclosing.stages - unit_of.keys()):
        unit_of[stage] = len(units)
        units.append(Unit(workflow.stages[stage].name, (workflow.stages[stage],)))
    number_by_name = {stage.name: index for index, stage in enumerate(workflow.stages)}
    predecessors = [0] * len(units)
    bytes_by_edge: dict[tuple[int, int], float] = {}
    for edge in workflow.edges:
        source, to = unit_of.get(number_by_name[edge.source]), unit_of.get(number_by_name[edge.to])
        if source is None or to is None or source == to or edge.loop not in (None, enclosing.name):
            continue
        bytes_by_edge[source, to] = bytes_by_edge.get((source, to), 0.0) + edge.bytes_per_item
        if edge.loop is None:
            predecessors[to] |= 1 << source
    cycles = _cycles(len(units), [(source, to) for to, mask in enumerate(predecessors) for source in members(mask)])
    if cycles:
        raise ConfigurationError(f"loops {', '.join(units[unit].name for unit in sorted(cycles[0]))} feed one another")
    return UnitGraph(enclosing.rounds, tuple(units), tuple(predecessors), bytes_by_edge)


def _cycles(count: int, edges: Iterable[tuple[int, int]]) -> list[frozenset[int]]:
    """Return strongly connected components with a cycle, from the transitive closure (graphs of tens of nodes)."""
    reach_masks = [0] * count
    for source, to in edges:
        reach_masks[source] |= 1 << to
    for middle_node in range(count):
        for node in range(count):
            if reach_masks[node] >> middle_node & 1:
                reach_masks[node] |= reach_masks[middle_node]
    components: set[frozenset[int]] = set()
    for node in range(count):
        if reach_masks[node] >> node & 1:
            components.add(frozenset(other for other in members(reach_masks[node]) if reach_masks[other] >> node & 1))
    return sorted(components, key=sorted)


def require_valid(workflow: Workflow, pool: DevicePool) -> None:
    """Raise ConfigurationError, with the key, for unknown or duplicate names and chunks that don't divide the items."""
    stage_names = [stage.name for stage in workflow.stages]
    class_names = [device_class.device for device_class in pool.classes]
    loop_names = [loop.name for loop in workflow.loops]
    for key, declared in (("stages", stage_names), ("pool.classes", class_names), ("loops", loop_names)):
        if len(set(declared)) != len(declared) or (not declared and key != "loops"):
            raise ConfigurationError(f"{key}: {', '.join(declared) or 'empty'}; valid: at least one, each name once")
    for chunk in workflow.granularities:
        if workflow.items % chunk:
            raise ConfigurationError(f"granularities: {chunk} doesn't divide items = {workflow.items}")
    for stage in workflow.stages:
        for time_point in stage.times:
            _require_name(f"stage {stage.name}: times: device", time_point.device, class_names)
    for edge in workflow.edges:
        _require_name("edges: from", edge.source, stage_names)
        _require_name("edges: to", edge.to, stage_names)
        if edge.loop is not None:
            _require_name(f"edge {edge.source} -> {edge.to}: loop", edge.loop, loop_names)
    if pool.link_bytes_per_s is None and any(edge.bytes_per_item for edge in workflow.edges):
        raise ConfigurationError("pool.link_bytes_per_s: missing; edges have bytes_per_item, which it must carry")


def _require_name(key: str, name: str, valid: Sequence[str]) -> None:
    """Raise ConfigurationError where ``name`` isn't among ``valid``, with the nearest valid name."""
    if name in valid:
        return
    near_names = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near_names[0]!r}?" if near_names else f"valid: {', '.join(valid) or 'none is declared'}"
    raise ConfigurationError(f"{key} = {name!r}: unknown; {hint}")
