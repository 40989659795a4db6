"""Converts a search result to a plan's records: every part with its devices, every loop with its pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headway.control.placement.options import Option, Vector
from headway.control.placement.pipelines import Pipelines, elapsed_s
from headway.records.plan import Mode, PlacedPart, PlacedPipeline, PlacedTurn

Ranges = Mapping[str, tuple[int, int]]  # class -> first index in the pool, number


def placed_phase(
    pipelines: Pipelines,
    levels: Sequence[Option],
    items: int,
    chunk: int,
    switch_s: float,
    seconds: float,
    devices: Vector,
) -> PlacedPipeline:
    """Make the record of a phase that starts ``switch_s`` after the previous one and then takes ``seconds``."""
    class_names = [device_class.device for device_class in pipelines.choices.pool.classes]
    device_ranges = {device: (0, count) for device, count in zip(class_names, devices, strict=True)}
    placed_levels = _levels(pipelines, levels, chunk, device_ranges)
    name = ", ".join(turn.name for level in placed_levels for part in level for turn in part.turns)
    return PlacedPipeline(
        name=name,
        items=items,
        items_per_chunk=chunk,
        rounds=1,
        switch_s=switch_s,
        seconds=switch_s + seconds,
        levels=placed_levels,
    )


def _levels(
    pipelines: Pipelines, levels: Sequence[Option], chunk: int, ranges: Ranges
) -> tuple[tuple[PlacedPart, ...], ...]:
    """Assign adjacent devices to every part, the largest first, so that powers of two stay within nodes."""
    class_names = [device_class.device for device_class in pipelines.choices.pool.classes]
    parts: list[tuple[int, Option]] = [(number, part) for number, level in enumerate(levels) for _, part in level.plan]
    first_free = {device: start for device, (start, _) in ranges.items()}
    part_by_position: dict[int, PlacedPart] = {}
    for position in sorted(range(len(parts)), key=lambda index: (-sum(parts[index][1].devices), index)):
        part = parts[position][1]
        spans: dict[str, tuple[int, int]] = {}
        for device, count in zip(class_names, part.devices, strict=True):
            if count:
                spans[device] = (first_free[device], count)
                first_free[device] += count
        units, options, switch_s, receive_s = part.plan
        part_by_position[position] = PlacedPart(
            devices=spans,
            turns=tuple(_turn(pipelines, *turn, chunk, spans) for turn in zip(units, options, switch_s, strict=True)),
            receive_s=receive_s,
            seconds=part.seconds,
        )
    return tuple(
        tuple(part_by_position[position] for position, (number, _) in enumerate(parts) if number == level)
        for level in range(len(levels))
    )


def _turn(pipelines: Pipelines, unit: int, option: Option, switch_s: float, items: int, ranges: Ranges) -> PlacedTurn:
    name = pipelines.body.units[unit].name
    if unit not in pipelines.inner:
        device, devices = option.plan
        return PlacedTurn(name=name, seconds=option.seconds, switch_s=switch_s, device=device, devices=devices)
    inner_pipelines = pipelines.inner[unit]
    chunk, label = option.plan
    inner_pipeline = PlacedPipeline(
        name=name,
        items=items,
        items_per_chunk=chunk,
        rounds=inner_pipelines.body.rounds,
        switch_s=0.0,
        seconds=elapsed_s(label.fill, label.slowest, items // chunk, inner_pipelines.body.rounds),
        levels=_levels(inner_pipelines, label.levels(), chunk, ranges),
    )
    return PlacedTurn(name=name, seconds=option.seconds, switch_s=switch_s, inside=inner_pipeline)


def pipelines_of(phases: Iterable[PlacedPipeline]) -> Iterable[PlacedPipeline]:
    """Yield the phases, each followed by the pipelines of the loops inside it."""
    for phase in phases:
        yield phase
        inner_pipelines = (turn.inside for level in phase.levels for part in level for turn in part.turns)
        yield from pipelines_of(pipeline for pipeline in inner_pipelines if pipeline is not None)


def mode_of(phases: Sequence[PlacedPipeline]) -> Mode:
    """Return temporal (one part in each pipeline), spatial (no two stages share devices), or else hybrid."""
    parts = [[part for level in pipeline.levels for part in level] for pipeline in pipelines_of(phases)]
    if all(len(of) == 1 for of in parts):
        return "temporal"
    return "spatial" if len(phases) == 1 and all(len(part.turns) == 1 for of in parts for part in of) else "hybrid"


def used_devices(phases: Iterable[PlacedPipeline]) -> dict[str, int]:
    """Return the devices of each class that a plan needs: the maximum over its phases."""
    used_counts: dict[str, int] = {}
    for phase in phases:
        phase_counts: dict[str, int] = {}
        for level in phase.levels:
            for part in level:
                for device, (_, count) in part.devices.items():
                    phase_counts[device] = phase_counts.get(device, 0) + count
        used_counts |= {device: max(count, used_counts.get(device, 0)) for device, count in phase_counts.items()}
    return used_counts
