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
            for other in members(mask):
                masks[other] |= 1 << unit
        return tuple(masks)

    def ordered(self, within: int) -> list[int]:
        """Return the units of ``within`` in topological order."""
        placed, order = 0, list[int]()
        while placed != within:
            ready = next(unit for unit in members(within & ~placed) if not self.predecessors[unit] & within & ~placed)
            placed |= 1 << ready
            order.append(ready)
        return order

    def received_bytes(self, part: int) -> float:
        """Return the bytes per item that ``part`` receives from units outside it."""
        return sum(
            size for (source, to), size in self.bytes_between.items() if part >> to & 1 and not part >> source & 1
        )

    def steps(self, within: int) -> Cuts:
        """Return the cuts of the set ``within``, itself the difference of two down-closed sets.

        A cut is a down-closed subset, smaller ones first, with (superset, difference) for every down-closed subset that
        contains it."""
        if within not in self._steps:
            closed = [0]
            for position in self.ordered(within):
                needs = self.predecessors[position] & within
                closed += [below | 1 << position for below in closed if not needs & ~below]
            closed.sort(key=lambda mask: (mask.bit_count(), mask))
            self._steps[within] = [
                (below, [(above, above ^ below) for above in closed if above != below and not below & ~above])
                for below in closed
            ]
        return self._steps[within]

    def components(self, within: int) -> list[int]:
        """Return the connected components of ``within``."""
        components: list[int] = []
        remaining = within
        while remaining:
            grown, reached = 0, remaining & -remaining
            while reached != grown:
                grown = reached
                for unit in members(grown):
                    reached |= self.neighbours[unit] & within
            components.append(reached)
            remaining &= ~reached
        return components


class _Loop(NamedTuple):
    name: str
    rounds: int
    stages: frozenset[int]


def members(mask: int) -> Iterator[int]:
    """Yield the indices of the bits of ``mask``, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def fold(workflow: Workflow) -> UnitGraph:
    """Fold the loops of a workflow, outermost first.

    Raises ConfigurationError for a cycle without a loop variable, a loop variable without a cycle, and loops that
    overlap without one inside the other.
    """
    names = [stage.name for stage in workflow.stages]
    index = {name: number for number, name in enumerate(names)}
    forward = [(index[edge.source], index[edge.to]) for edge in workflow.edges if edge.loop is None]
    for component in _cycles(len(names), forward):
        stages = ", ".join(names[stage] for stage in sorted(component))
        raise ConfigurationError(
            f"stages {stages} form a cycle without a loop variable: name the loop on the edge that goes back "
            '("loop": "NAME") and give its rounds under "loops"'
        )
    loops: list[_Loop] = []
    for loop in workflow.loops:
        back = [(index[edge.source], index[edge.to]) for edge in workflow.edges if edge.loop == loop.name]
        reached = frozenset[int]().union(*_cycles(len(names), forward + back))
        if not back or not all(source in reached and to in reached for source, to in back):
            raise ConfigurationError(f"loop {loop.name!r}: no cycle goes through its edges; one must go back")
        if len(_cycles(len(names), forward + back)) > 1:
            raise ConfigurationError(f"loop {loop.name!r} has two separate cycles: each needs a loop of its own")
        loops.append(_Loop(loop.name, loop.rounds, reached))
    for first, (name, _, stages) in enumerate(loops):
        for other, _, others in loops[:first]:
            if stages & others and not stages <= others and not others <= stages:
                raise ConfigurationError(f"loops {other!r} and {name!r} overlap, and neither contains the other")
    loops.sort(key=lambda inner: -len(inner.stages))  # stable: of two with the same stages the first is the outer one
    return _body(workflow, _Loop("", 1, frozenset(range(len(names)))), loops)


def _body(workflow: Workflow, enclosing: _Loop, loops: Sequence[_Loop]) -> UnitGraph:
    units: list[Unit] = []
    unit_of: dict[int, int] = {}
    for position, loop in enumerate(loops):
        if loop.stages <= enclosing.stages and loop.stages.isdisjoint(unit_of):
            unit_of.update(dict.fromkeys(loop.stages, len(units)))
            inside = tuple(workflow.stages[stage] for stage in sorted(loop.stages))
            units.append(Unit(loop.name, inside, _body(workflow, loop, loops[position + 1 :])))
    for stage in sorted(enclosing.stages - unit_of.keys()):
        unit_of[stage] = len(units)
        units.append(Unit(workflow.stages[stage].name, (workflow.stages[stage],)))
    index = {stage.name: number for number, stage in enumerate(workflow.stages)}
    predecessors = [0] * len(units)
    sizes: dict[tuple[int, int], float] = {}
    for edge in workflow.edges:
        source, to = unit_of.get(index[edge.source]), unit_of.get(index[edge.to])
        if source is None or to is None or source == to or edge.loop not in (None, enclosing.name):
            continue
        sizes[source, to] = sizes.get((source, to), 0.0) + edge.bytes_per_item
        if edge.loop is None:
            predecessors[to] |= 1 << source
    crossed = _cycles(len(units), [(source, to) for to, mask in enumerate(predecessors) for source in members(mask)])
    if crossed:
        raise ConfigurationError(f"loops {', '.join(units[unit].name for unit in sorted(crossed[0]))} feed one another")
    return UnitGraph(enclosing.rounds, tuple(units), tuple(predecessors), sizes)


def _cycles(count: int, edges: Iterable[tuple[int, int]]) -> list[frozenset[int]]:
    """Return strongly connected components with a cycle, from the transitive closure (graphs of tens of nodes)."""
    reach = [0] * count
    for source, to in edges:
        reach[source] |= 1 << to
    for middle in range(count):
        for node in range(count):
            if reach[node] >> middle & 1:
                reach[node] |= reach[middle]
    components: set[frozenset[int]] = set()
    for node in range(count):
        if reach[node] >> node & 1:
            components.add(frozenset(other for other in members(reach[node]) if reach[other] >> node & 1))
    return sorted(components, key=sorted)


def require_valid(workflow: Workflow, pool: DevicePool) -> None:
    """Raise ConfigurationError, with the key, for unknown or duplicate names and chunks that don't divide the items."""
    names = [stage.name for stage in workflow.stages]
    classes = [kind.device for kind in pool.classes]
    loops = [loop.name for loop in workflow.loops]
    for key, declared in (("stages", names), ("pool.classes", classes), ("loops", loops)):
        if len(set(declared)) != len(declared) or (not declared and key != "loops"):
            raise ConfigurationError(f"{key}: {', '.join(declared) or 'empty'}; valid: at least one, each name once")
    for chunk in workflow.granularities:
        if workflow.items % chunk:
            raise ConfigurationError(f"granularities: {chunk} doesn't divide items = {workflow.items}")
    for stage in workflow.stages:
        for point in stage.times:
            _require_name(f"stage {stage.name}: times: device", point.device, classes)
    for edge in workflow.edges:
        _require_name("edges: from", edge.source, names)
        _require_name("edges: to", edge.to, names)
        if edge.loop is not None:
            _require_name(f"edge {edge.source} -> {edge.to}: loop", edge.loop, loops)
    if pool.link_bytes_per_s is None and any(edge.bytes_per_item for edge in workflow.edges):
        raise ConfigurationError("pool.link_bytes_per_s: missing; edges have bytes_per_item, which it must carry")


def _require_name(key: str, name: str, valid: Sequence[str]) -> None:
    """Raise ConfigurationError where ``name`` isn't among ``valid``, with the nearest valid name."""
    if name in valid:
        return
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(valid) or 'none is declared'}"
    raise ConfigurationError(f"{key} = {name!r}: unknown; {hint}")
