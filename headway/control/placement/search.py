"""Searches placements: devices, mode and granularity of each stage, for the fastest or cheapest step.

**Plans.** A plan is a sequence of *phases* that run one after another on the same devices. A phase is a pipeline of
levels over disjoint device sets, through which the items go in chunks of m. A level has one part, or several side by
side where no edge connects them. A part is a device set whose stages take turns, once a chunk. A loop counts as one
stage of the enclosing graph and contains such a pipeline, through which its chunks go for the loop variable's number of
rounds. One phase with one part is *temporal*, one phase whose parts have one stage each is *spatial*, the
others are *hybrid*. Each stage runs on one class of devices, and on no more of them than make it faster. Parts that
share devices pay load and offload at every turn, phases at each change; parts pay the transfer of what they receive.

**Source.** RLinf (2025), Algorithm 1: fold cycles; over cuts and device splits the cheaper of sharing (T_s + T_t +
switch) and of separating (T_critical + (M/m - 1) * T_bottleneck); memoised. Different here: cuts are all down-closed
sets of the graph, not prefixes of one order; loops pipeline inside; classes of devices, memory and transfers count;
the formula is the exact completion time of the plan's chunks (`tests/support/plan_timeline.py` runs them), for which a
pipeline is the longest path through the grid of chunks and levels; and the result comes with a proven bound. Two
limits: pipelines nest only through loops, and the levels of a pipeline are crossed in order, so that a level waits
for all parts of the previous one.

**Algorithm.** *Why it is exact.* (1) Devices of a class are equal: an allocation is a vector of counts. Only those
counts matter at which a curve decreases (Pareto frontiers: `options.py`). (2) Phases add up, so the best plan is a
shortest path over down-closed sets, whose edges are phases. (3) A pipeline's time depends on its levels through fill
and slowest alone and grows with both, so dominated partial allocations can be dropped (`pipelines.py`). *Why it is
fast.* An edge starts with a cheap bound: no pipeline's slowest level is faster than its stages' least device-seconds
spread over all devices, or than its slowest stage on all of them; none's fill is shorter than its longest path. Only
edges on the shortest path by bounds are refined: first by the least slowest level that fits into the pool (bisection;
each trial is a shortest path over shares of the pool), then by the exact search, in which a partial allocation is
dropped when even its bound is no better than the best plan known less the bounds of the other phases. When the shortest
path by bounds isn't shorter than the best plan, that plan is proven optimal; when the budget of expansions is spent
earlier, the path by bounds is the proven bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

from headway.control.placement.graph import fold, members, require_valid
from headway.control.placement.options import Option, OptionTable, SearchSettings, Vector, require_memory
from headway.control.placement.pipelines import ROUNDING, BudgetSpentError, Expansions, Label, Pipelines, elapsed_s
from headway.control.placement.plan_records import mode_of, placed_phase, used_devices
from headway.records.errors import ConfigurationError
from headway.records.plan import DevicePool, Objective, PlacedPipeline, PlacementPlan, Workflow


class _Candidate:
    """A phase in chunks of one granularity, with its bound and the bound's refinement."""

    def __init__(self, items: int, lower: float) -> None:
        self.items = items
        self.lower = lower
        self.refined = 0  # 0: cheap bound; 1: least slowest level; 2: exact, or no better than required
        self.least = 0.0  # of the slowest level


class Phase:
    """A set of units as a phase on given devices: bounds of its granularities, and the best pipeline known."""

    def __init__(self, units: int, switch_s: float) -> None:
        self.units = units
        self.switch_s = switch_s  # to start after a phase on the same devices: all its stages move at once
        self.candidates: list[_Candidate] = []
        self.upper = math.inf
        self.items = 0  # of a chunk, of the best pipeline
        self.label: Label | None = None  # None: one part with all devices

    @property
    def lower(self) -> float:
        return min(self.upper, min((c.lower for c in self.candidates), default=math.inf))

    def loosest(self) -> _Candidate | None:
        """Return the candidate of the least bound, where refining it can change the phase's bound."""
        loosest_candidate = min((c for c in self.candidates if c.refined < 2), key=lambda c: c.lower, default=None)
        return loosest_candidate if loosest_candidate is not None and loosest_candidate.lower < self.upper else None

    def offer(self, seconds: float, items: int, label: Label | None) -> None:
        if seconds < self.upper:
            self.upper, self.items, self.label = seconds, items, label


class TimeSearch:
    """Searches the fastest sequence of phases on given devices. Bounds are seconds of the whole workflow's step."""

    def __init__(self, pipelines: Pipelines, items: int, devices: Vector) -> None:
        self.pipelines = pipelines
        self.body = pipelines.body
        self.items = items
        self.devices = devices
        self.share = pipelines.choices.share(devices)
        self.phases: dict[int, Phase] = {}
        self.lower = 0.0
        self.upper = math.inf
        self.best: list[Phase] = []
        unit_times = {
            chunk: {
                unit: (option.seconds, min(s * -w for s, w in zip(options.seconds, options.shares, strict=True)))
                for unit, options in pipelines.units(chunk).items()
                if (option := options.fastest_on(devices)) is not None
            }
            for chunk in pipelines.chunks
        }
        for _, steps_above in self.body.steps(self.body.all_units):
            for _, units in steps_above:
                one_phase = pipelines.choices.settings.mode == "spatial"
                if units not in self.phases and (units == self.body.all_units or not one_phase):
                    self.phases[units] = self._make_phase(units, unit_times)

    def _make_phase(self, units: int, work: Mapping[int, Mapping[int, tuple[float, float]]]) -> Phase:
        settings = self.pipelines.choices.settings
        unit_names = frozenset(self.body.units[unit].name for unit in members(units))
        switch_times = [self.pipelines.choices.switch_s(self.body, unit) for unit in members(units)]
        phase = Phase(units, 0.0 if units == self.body.all_units else max(switch_times))
        unit_ids = self.body.ordered(units)
        turns_s = sum(switch_times) if len(unit_ids) > 1 else 0.0
        received_bytes = self.body.received_bytes(units)
        link_bytes_per_s = self.pipelines.choices.pool.link_bytes_per_s
        for chunk, of in work.items():
            if any(unit not in of for unit in unit_ids) or (unit_names, chunk) in settings.without:
                continue
            chunk_count = self.items // chunk
            receive_s = received_bytes * chunk / link_bytes_per_s if received_bytes and link_bytes_per_s else 0.0
            if len(unit_ids) == 1 or settings.mode != "spatial":
                phase.offer(chunk_count * (receive_s + turns_s + sum(of[unit][0] for unit in unit_ids)), chunk, None)
            path: dict[int, float] = {}
            for unit in unit_ids:
                path[unit] = of[unit][0] + max([0.0, *(path[o] for o in members(self.body.predecessors[unit] & units))])
            slowest_s = max(*(of[unit][0] for unit in unit_ids), sum(of[unit][1] for unit in unit_ids) / self.share)
            lower_s = elapsed_s(max(slowest_s, *path.values()), slowest_s, chunk_count) * (1 - ROUNDING)
            phase.candidates.append(_Candidate(chunk, lower_s))
        return phase

    def run(self, limit: float) -> None:
        """Refine bounds until the best plan is proven within the tolerance.

        The search also ends when no plan is faster than ``limit`` seconds, or when the budget is spent."""
        tolerance = max(0.0, self.pipelines.choices.settings.tolerance - 1e-9)  # so that the gap isn't above it
        while True:
            self.upper, self.best = self._shortest(lower=False)
            self.lower, bound_phases = self._shortest(lower=True)
            target_s = min(self.upper, limit) * (1 - tolerance)
            open_phases = [phase for phase in bound_phases if phase.loosest() is not None]
            if self.lower >= target_s * (1 - ROUNDING) or not open_phases or self.pipelines.expansions.spent:
                self.lower = min(self.lower, self.upper)
                return
            phase = max(open_phases, key=lambda p: (min(p.upper, target_s) - p.lower, p.units))
            candidate = phase.loosest()
            if candidate is not None:
                self.pipelines.expansions.done += len(self.phases)
                try:
                    self._refine(phase, candidate, target_s - (self.lower - phase.lower))
                except BudgetSpentError:
                    continue  # bounds stay as they were; the next evaluation of the paths is the last

    def _refine(self, phase: Phase, candidate: _Candidate, threshold: float) -> None:
        """Raise the candidate's bound; from ``threshold`` seconds on the phase can't improve the plan."""
        pipelines, units, items = self.pipelines, phase.units, candidate.items
        further_chunks = self.items // items - 1
        if candidate.refined == 0:
            candidate.least = pipelines.least_slowest(units, items, self.share * (1 + ROUNDING))
            candidate.refined = 1
            candidate.lower = max(candidate.lower, (further_chunks + 1) * candidate.least * (1 - ROUNDING))
            return
        threshold = min(threshold, phase.upper)
        caps_s = [candidate.least]
        if further_chunks:
            caps_s.append(max(candidate.least, (threshold - candidate.least) / further_chunks))
        else:
            caps_s = [threshold]
        for cap_s in caps_s:
            limits = pipelines.limits(units, items, self.devices, further_chunks, cap_s, candidate.least)
            bound_s = limits.fill[0] + further_chunks * candidate.least
            candidate.lower = max(candidate.lower, bound_s * (1 - ROUNDING)) if cap_s == caps_s[-1] else candidate.lower
            if bound_s >= threshold:
                continue
            for label in pipelines.allocations(units, items, limits, threshold):
                seconds = elapsed_s(label.fill, label.slowest, further_chunks + 1)
                threshold = min(threshold, seconds)
                phase.offer(seconds, items, label)
        candidate.refined = 2
        candidate.lower = max(candidate.lower, threshold)

    def _shortest(self, lower: bool) -> tuple[float, list[Phase]]:
        """Return seconds and phases of the shortest path, by lower bounds or by the best pipelines known."""
        all_units = self.body.all_units
        best_paths: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        phase_seconds: dict[int, float] = {}
        for units, phase in self.phases.items():
            phase_seconds[units] = (phase.lower if lower else phase.upper) + phase.switch_s
        for lower_set, steps_above in self.body.steps(all_units)[:-1]:
            seconds = best_paths[lower_set][0]
            for larger_set, units in steps_above:
                path_s = seconds + phase_seconds.get(units, math.inf)
                if larger_set not in best_paths or path_s < best_paths[larger_set][0]:
                    best_paths[larger_set] = (path_s, lower_set)
        phases: list[Phase] = []
        remaining_units = all_units
        while remaining_units:
            if remaining_units ^ best_paths[remaining_units][1] not in self.phases:
                return math.inf, []
            phases.append(self.phases[remaining_units ^ best_paths[remaining_units][1]])
            remaining_units = best_paths[remaining_units][1]
        return best_paths[all_units][0], phases[::-1]


def place(
    workflow: Workflow, pool: DevicePool, objective: Objective = "time", settings: SearchSettings = SearchSettings()
) -> PlacementPlan:
    """Return the fastest or cheapest plan. A plan costs the devices that it uses, for the time of the step.

    Raises ConfigurationError for invalid input and for a pool without the memory for any plan.
    """
    require_valid(workflow, pool)
    for kind in pool.classes:
        if objective == "cost" and kind.usd_per_hour is None:
            raise ConfigurationError(f"pool: {kind.device}: usd_per_hour: missing; a plan by cost needs each price")
    body = fold(workflow)
    if settings.memory_limits:
        require_memory(workflow, pool)
    chunks = sorted({*workflow.granularities, workflow.items})
    pipelines = Pipelines(body, OptionTable(workflow, pool, settings), chunks, Expansions(settings.expansions))
    if objective == "cost":
        return _cheapest(workflow, pipelines)
    search = TimeSearch(pipelines, workflow.items, pipelines.choices.total)
    search.run(math.inf)
    return _plan(workflow, search, objective, search.lower)


def _cheapest(workflow: Workflow, pipelines: Pipelines) -> PlacementPlan:
    """Return the cheapest plan: search the fastest one of each choice of devices, by ascending cost bounds."""
    pool = pipelines.choices.pool
    bounded_choices: list[tuple[float, Vector]] = []
    work_usd = _least_cost(pipelines, workflow.items)
    for devices in product(*(range(count + 1) for count in pipelines.choices.total)):
        alone_times = [_alone_s(pipelines, unit, workflow.items, devices) for unit in range(len(pipelines.body.units))]
        if max(alone_times) < math.inf:
            lower_usd = max(work_usd, max(alone_times) * usd_per_s(pool, devices)) * (1 - ROUNDING)
            bounded_choices.append((lower_usd, devices))
    best_search, best_usd, bound = TimeSearch(pipelines, workflow.items, pipelines.choices.total), math.inf, math.inf
    for lower_usd, devices in sorted(bounded_choices):
        if lower_usd >= best_usd * (1 - pipelines.choices.settings.tolerance) or pipelines.expansions.spent:
            bound = min(bound, lower_usd)
            break
        price_per_s = usd_per_s(pool, devices)
        search = TimeSearch(pipelines, workflow.items, devices)
        search.run(best_usd / price_per_s if price_per_s else math.inf)
        bound = min(bound, max(lower_usd, search.lower * price_per_s))
        if search.upper * price_per_s < best_usd:
            best_search, best_usd = search, search.upper * price_per_s
    if best_usd == math.inf:  # the budget was spent before the first choice
        best_search.run(math.inf)
    return _plan(workflow, best_search, "cost", bound)


def _alone_s(pipelines: Pipelines, unit: int, items: int, devices: Vector) -> float:
    """Return a lower bound of any step's seconds on ``devices``: those of one unit alone."""
    timed = ((chunk, pipelines.units(chunk)[unit].fastest_on(devices)) for chunk in pipelines.chunks)
    return min((option.seconds * (items // chunk) for chunk, option in timed if option is not None), default=math.inf)


def _least_cost(pipelines: Pipelines, items: int) -> float:
    """Return a lower bound of any plan's cost: each unit on its cheapest devices, for its own time."""
    pool = pipelines.choices.pool
    total_usd = 0.0
    for unit in range(len(pipelines.body.units)):
        options = ((chunk, option) for chunk in pipelines.chunks for option in pipelines.units(chunk)[unit].options)
        unit_costs = (o.seconds * (items // chunk) * usd_per_s(pool, o.devices) for chunk, o in options)
        total_usd += min(unit_costs, default=math.inf)
    return total_usd


def usd_per_s(pool: DevicePool, devices: Vector) -> float:
    """Return the price of ``devices`` for a second; a class without a price, which `place` refuses, is free."""
    return sum((kind.usd_per_hour or 0.0) * count for kind, count in zip(pool.classes, devices, strict=True)) / 3600


def _plan(workflow: Workflow, search: TimeSearch, objective: Objective, lower: float) -> PlacementPlan:
    pipelines, pool = search.pipelines, search.pipelines.choices.pool
    if not search.best or search.upper == math.inf:
        unplaced_names = [
            unit.name
            for index, unit in enumerate(search.body.units)
            if not any(pipelines.units(chunk)[index].options for chunk in pipelines.chunks)
        ]
        raise ConfigurationError(
            f"{', '.join(unplaced_names) or 'the workflow'}: no plan; every stage of a loop needs a time, and memory, "
            "on the pool's devices at one common granularity"
        )
    phases: list[PlacedPipeline] = []
    for phase in search.best:
        label = phase.label
        alone_option = pipelines.part(phase.units, phase.items).fastest_on(search.devices) if label is None else None
        levels = label.levels() if label is not None else [Option(0.0, search.devices, ((phase.units, alone_option),))]
        phases.append(
            placed_phase(pipelines, levels, workflow.items, phase.items, phase.switch_s, phase.upper, search.devices)
        )
    seconds = sum(phase.seconds for phase in phases)
    used = used_devices(phases)
    priced = all(kind.usd_per_hour is not None for kind in pool.classes)
    cost_usd = seconds * usd_per_s(pool, tuple(used.get(kind.device, 0) for kind in pool.classes)) if priced else None
    plan_value = seconds if objective == "time" or cost_usd is None else cost_usd
    if lower >= plan_value * (1 - 100 * ROUNDING):
        lower = plan_value
    return PlacementPlan(
        objective=objective,
        mode=mode_of(phases),
        seconds=seconds,
        cost_usd=cost_usd,
        phases=tuple(phases),
        lower_bound=lower,
        gap=1 - lower / plan_value if plan_value else 0.0,
        expansions=pipelines.expansions.done,
    )
