"""Random workflows and pools: small ones for proofs against brute force, large ones for measuring the search."""

from __future__ import annotations

import random

from headway.control.placement.graph import fold
from headway.records.errors import ConfigurationError
from headway.records.plan import (
    DevicePool,
    PoolDevices,
    TimePoint,
    Workflow,
    WorkflowEdge,
    WorkflowLoop,
    WorkflowStage,
)

GIB = float(1 << 30)


def small_case(seed: int, most_stages: int = 6, most_devices: int = 8) -> tuple[Workflow, DevicePool]:
    """At most six stages on at most eight devices of one or two classes: uneven curves, memory limits, switch costs,
    transfers, loops inside loops. One in some dozens has no plan."""
    draw = random.Random(seed)
    count = draw.randint(1, most_stages)
    devices = draw.randint(1, most_devices)
    second = draw.randint(0, devices - 1) if draw.random() < 0.6 else 0
    classes = [("h", devices - second)] + ([("l", second)] if second else [])
    items = draw.choice((4, 8, 12, 24))
    chunks = tuple(sorted(draw.sample([c for c in range(1, items + 1) if items % c == 0], 2)))
    stages = tuple(_small_stage(draw, f"s{number}", classes, items, chunks) for number in range(count))
    edges = [
        WorkflowEdge(source=f"s{a}", to=f"s{b}", bytes_per_item=draw.choice((0.0, 0.0, 1.0, 3.0)))
        for a in range(count)
        for b in range(a + 1, count)
        if draw.random() < (0.8 if b == a + 1 else 0.2)
    ]
    workflow = Workflow(items=items, granularities=chunks, stages=stages, edges=tuple(edges))
    for number in range(draw.choice((0, 1, 1, 2, 3))):
        workflow = _with_loop(workflow, f"loop{number}", draw)
    pool = DevicePool(
        classes=tuple(
            PoolDevices(
                device=name,
                devices=most,
                memory_bytes=draw.choice((6.0, 8.0, 12.0)),
                usd_per_hour=draw.choice((1.0, 2.5, 4.0)),
            )
            for name, most in classes
        ),
        link_bytes_per_s=draw.choice((2.0, 10.0)),
    )
    return workflow, pool


def _small_stage(
    draw: random.Random, name: str, classes: list[tuple[str, int]], items: int, chunks: tuple[int, ...]
) -> WorkflowStage:
    points: list[TimePoint] = []
    scale, fixed = draw.uniform(0.5, 4.0), draw.choice((0.0, 0.1, 0.5))
    for device, most in classes:
        speed = draw.uniform(0.4, 1.5)
        for devices in {1, *draw.sample(range(1, most + 1), min(most, draw.randint(1, 3)))}:
            noise = draw.uniform(0.7, 1.3)
            for chunk in {1, items, *chunks} - ({draw.choice(chunks)} if draw.random() < 0.2 else set[int]()):
                seconds = speed * (fixed + scale * noise * chunk / devices ** draw.uniform(0.0, 1.0))
                points.append(TimePoint(device=device, devices=devices, items=chunk, seconds=seconds))
    return WorkflowStage(
        name=name,
        times=tuple(points),
        switch_s=draw.choice((0.0, 0.5, 5.0)),
        fixed_bytes=draw.uniform(0.0, 5.0),
        bytes_per_item=draw.choice((0.0, 0.0, 0.5, 1.5)),
    )


def _with_loop(workflow: Workflow, name: str, draw: random.Random) -> Workflow:
    """The workflow with one more loop, where an edge back between two of its stages makes a valid one."""
    first, last = sorted(draw.choices(range(len(workflow.stages)), k=2))
    edge = WorkflowEdge(source=f"s{last}", to=f"s{first}", bytes_per_item=draw.choice((0.0, 1.0)), loop=name)
    loop = WorkflowLoop(name=name, rounds=draw.randint(1, 4))
    grown = Workflow(
        items=workflow.items,
        granularities=workflow.granularities,
        stages=workflow.stages,
        edges=(*workflow.edges, edge),
        loops=(*workflow.loops, loop),
    )
    try:
        fold(grown)
    except ConfigurationError:
        return workflow
    return grown


def large_case(
    devices: int, stages: int, *, classes: int = 1, every_count: bool = False, seed: int = 0
) -> tuple[Workflow, DevicePool]:
    """A step of generate, side branches that score, and train, grown to ``stages`` stages, with one loop of two stages.

    Counts of devices are those that parallelism allows, from one device to all of them: multiples of nodes, three sizes
    between two powers of two; with ``every_count`` every number. Times fall by Amdahl's law with a serial share, and a
    chunk of few items leaves devices idle, so that no mode and granularity is best for all.
    """
    draw = random.Random(seed)
    items = 4096
    chunks = (64, 128, 256, 512, 1024, 2048, 4096)
    sizes = [devices] if classes == 1 else [devices - devices // 4, devices // 4]
    counts = sorted(
        {c for power in range(11) for c in (2**power, 5 * 2**power // 4, 3 * 2**power // 2, 7 * 2**power // 4)}
    )
    placed: list[WorkflowStage] = []
    for number in range(stages):
        work, serial = 10 ** draw.uniform(-0.5, 0.5) / (4 if number < 2 else 1), 10 ** draw.uniform(-4.5, -3.0)
        start_s, fill = draw.uniform(0.02, 0.2), draw.choice((1, 2, 4))
        points = [
            TimePoint(
                device=f"class{kind}",
                devices=count,
                items=chunk,
                seconds=(1.0, 2.2)[kind] * (start_s + work * (max(chunk / count, fill) + serial * chunk)),
            )
            for kind, most in enumerate(sizes)
            for count in (range(1, most + 1) if every_count else [c for c in counts if c <= most] + [most])
            for chunk in (64, 512, 4096)
        ]
        placed.append(
            WorkflowStage(
                name=f"stage{number}",
                times=tuple(points),
                switch_s=draw.uniform(1.0, 15.0),
                fixed_bytes=draw.uniform(4, 40) * GIB,
                bytes_per_item=draw.choice((0.0, 0.1, 0.5)) * GIB,
            )
        )
    edges = [("stage0", "stage1", None), ("stage1", "stage0", "turns")]
    for number in range(2, stages):  # every third stage begins a branch beside the one before, which the next one joins
        beside = number % 3 == 0
        edges.append((f"stage{number - (2 if beside else 1)}", f"stage{number}", None))
        if number % 3 == 1 and number > 3:
            edges.append((f"stage{number - 2}", f"stage{number}", None))
    workflow = Workflow(
        items=items,
        granularities=chunks,
        stages=tuple(placed),
        edges=tuple(WorkflowEdge(source=source, to=to, bytes_per_item=1e6, loop=loop) for source, to, loop in edges),
        loops=(WorkflowLoop(name="turns", rounds=4),),
    )
    pool = DevicePool(
        classes=tuple(
            PoolDevices(device=f"class{kind}", devices=most, memory_bytes=80 * GIB, usd_per_hour=(3.0, 1.2)[kind])
            for kind, most in enumerate(sizes)
        ),
        link_bytes_per_s=50e9,
    )
    return workflow, pool
