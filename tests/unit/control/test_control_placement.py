"""`control/placement`: optimal against brute force, the plan's time against a run of its chunks, and what must not
matter."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_brute_force import BruteForce, pipeline_s
from placement_cases import large_case, small_case
from plan_timeline import run_plan

from headway.control.placement.explanation import busy_shares, explain
from headway.control.placement.graph import fold
from headway.control.placement.options import OptionTable, SearchSettings
from headway.control.placement.pipelines import Expansions, Label, Pipelines, elapsed_s, undominated
from headway.control.placement.plan_records import pipelines_of, used_devices
from headway.control.placement.search import place
from headway.records.errors import ConfigurationError
from headway.records.plan import (
    Alternative,
    DevicePool,
    Objective,
    PlacementPlan,
    PoolDevices,
    TimePoint,
    Workflow,
    WorkflowEdge,
    WorkflowLoop,
    WorkflowStage,
)

SEEDS = st.integers(0, 10**6)
replace = msgspec.structs.replace


def value(workflow: Workflow, pool: DevicePool, objective: Objective = "time") -> float:
    """Seconds or US dollars of the best plan; infinite where there is none."""
    try:
        plan = place(workflow, pool, objective)
    except ConfigurationError:
        return math.inf
    assert plan.gap == 0
    found = plan.seconds if objective == "time" else plan.cost_usd
    assert found is not None
    return found


def stage(name: str, seconds: dict[int, float], items: int = 4, **more: float) -> WorkflowStage:
    """A stage whose time is proportional to the items; ``seconds`` of all of them by number of devices."""
    times = tuple(
        TimePoint(device="h", devices=devices, items=chunk, seconds=whole * chunk / items)
        for devices, whole in seconds.items()
        for chunk in (1, items)
    )
    return WorkflowStage(name=name, times=times, **more)


def workflow_of(*stages: WorkflowStage, edges: str = "", **more: object) -> Workflow:
    """A workflow of 4 items in chunks of 1 or 4; ``edges`` as "a>b b>c"."""
    pairs = [edge.split(">") for edge in edges.split()]
    given_edges = tuple(WorkflowEdge(source=source, to=to) for source, to in pairs)
    return replace(Workflow(items=4, granularities=(1, 4), stages=stages, edges=given_edges), **more)


def pool_of(devices: int, memory_bytes: float = 100.0) -> DevicePool:
    return DevicePool(
        classes=(PoolDevices(device="h", devices=devices, memory_bytes=memory_bytes, usd_per_hour=3600.0),)
    )


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(("time", "cost")))
def test_plan_is_as_good_as_the_best_of_all_plans(seed: int, objective: Objective):
    workflow, pool = small_case(seed, most_stages=4, most_devices=5)
    best = BruteForce(workflow, pool).best(objective)
    assert value(workflow, pool, objective) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_seconds_are_those_of_a_run_of_the_chunks(seed: int):
    workflow, pool = small_case(seed)
    try:
        plan = place(workflow, pool)
    except ConfigurationError:
        return
    assert run_plan(plan, spans=False).end_s == pytest.approx(plan.seconds, rel=1e-9)
    timeline = run_plan(plan)
    assert timeline.end_s == pytest.approx(plan.seconds, rel=1e-9)
    busy = dict.fromkeys((span.stage for span in timeline.spans), 0.0)
    for span in timeline.spans:
        busy[span.stage] += (span.end_s - span.start_s) / timeline.end_s if timeline.end_s else 0.0
    assert busy_shares(plan) == pytest.approx(busy, abs=1e-8)
    assert_devices_are_never_shared_at_once(plan, pool)
    rounds = {loop.name: loop.rounds for loop in workflow.loops}
    assert {p.name: p.rounds for p in pipelines_of(plan.phases) if p not in plan.phases} == rounds


def assert_devices_are_never_shared_at_once(plan: PlacementPlan, pool: DevicePool) -> None:
    """No two turns of different parts overlap on a device, and no device is outside the pool."""
    loops = {pipeline.name for pipeline in pipelines_of(plan.phases) if pipeline not in plan.phases}
    leaves = [span for span in run_plan(plan).spans if span.stage not in loops]
    busy: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in leaves:
        for device, (first, count) in span.part.devices.items():
            for number in range(first, first + count):
                busy.setdefault((device, number), []).append((span.start_s, span.end_s))
    most = {kind.device: kind.devices for kind in pool.classes}
    for (device, number), spans in busy.items():
        assert number < most[device]
        ascending = sorted(spans)
        for (_, end_s), (start_s, _) in pairwise(ascending):
            assert start_s >= end_s - 1e-9 * max(1.0, end_s)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from(("time", "cost")))
def test_more_devices_never_make_the_best_plan_worse(seed: int, objective: Objective):
    workflow, pool = small_case(seed, most_stages=5, most_devices=7)
    grown = replace(pool, classes=(replace(pool.classes[0], devices=pool.classes[0].devices + 1), *pool.classes[1:]))
    assert value(workflow, grown, objective) <= value(workflow, pool, objective) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.floats(0.01, 100.0))
def test_seconds_grow_with_all_times_alike(seed: int, factor: float):
    workflow, pool = small_case(seed, most_stages=5)
    stages = tuple(
        replace(
            each,
            times=tuple(replace(point, seconds=point.seconds * factor) for point in each.times),
            switch_s=each.switch_s * factor,
        )
        for each in workflow.stages
    )
    assert pool.link_bytes_per_s is not None
    slower = replace(pool, link_bytes_per_s=pool.link_bytes_per_s / factor)
    scaled = value(replace(workflow, stages=stages), slower)
    assert scaled == pytest.approx(value(workflow, pool) * factor, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_names_and_order_of_stages_do_not_matter(seed: int):
    workflow, pool = small_case(seed, most_stages=5)
    names = [each.name for each in workflow.stages]
    random.Random(seed).shuffle(names)
    renamed = {each.name: f"n{position}" for each, position in zip(workflow.stages, names, strict=True)}
    shuffled = replace(
        workflow,
        stages=tuple(sorted((replace(s, name=renamed[s.name]) for s in workflow.stages), key=lambda s: s.name)),
        edges=tuple(replace(e, source=renamed[e.source], to=renamed[e.to]) for e in workflow.edges[::-1]),
    )
    assert value(shuffled, replace(pool, classes=pool.classes[::-1])) == pytest.approx(value(workflow, pool), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.one_of(st.just(0), st.integers(0, 300)), st.sampled_from(("time", "cost")))
def test_bound_holds_when_the_budget_ends_the_search(seed: int, expansions: int, objective: Objective):
    workflow, pool = small_case(seed, most_stages=5)
    best = value(workflow, pool, objective)
    if best == math.inf:
        return
    plan = place(workflow, pool, objective, SearchSettings(expansions=expansions))
    found = plan.seconds if objective == "time" else plan.cost_usd
    assert found is not None
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert found >= best * (1 - 1e-9)
    assert plan.gap == pytest.approx(1 - plan.lower_bound / found, abs=1e-9)
    assert run_plan(plan).end_s == pytest.approx(plan.seconds, rel=1e-9)


@pytest.mark.slow
def test_search_that_stops_early_reports_its_gap_and_one_that_does_not_reports_none():
    workflow, pool = large_case(64, 6, seed=1)
    best = place(workflow, pool)
    assert best.gap == 0
    early = place(workflow, pool, settings=SearchSettings(expansions=0))
    assert 0 < early.gap < 1
    assert early.lower_bound <= best.seconds <= early.seconds
    near = place(workflow, pool, settings=SearchSettings(tolerance=0.05))
    assert near.gap <= 0.05
    assert near.seconds <= best.seconds / (1 - 0.05)
    assert near.expansions < best.expansions


@pytest.mark.parametrize("seed", range(6))
def test_bounds_leave_no_better_plan_out(seed: int):
    """On pools too large for brute force: the shortest path over phases of which each is computed without any bound."""
    workflow, pool = large_case(24, 5, seed=seed)
    chunks = sorted(workflow.granularities)
    pipelines = Pipelines(fold(workflow), OptionTable(workflow, pool, SearchSettings()), chunks, Expansions(10**9))
    best = {0: 0.0}
    whole = pipelines.body.all_units
    for below, above in pipelines.body.steps(whole)[:-1]:
        for larger, units in above:
            switch_s = max(unit.switch_s for n, unit in enumerate(pipelines.body.units) if units >> n & 1)
            seconds = min(
                elapsed_s(label.fill, label.slowest, workflow.items // chunk)
                for chunk in chunks
                for label in pipelines.allocations(units, chunk, None, math.inf)
            )
            reached = best[below] + seconds + (0.0 if units == whole else switch_s)
            best[larger] = min(reached, best.get(larger, math.inf))
    assert place(workflow, pool).seconds == pytest.approx(best[whole], rel=1e-12)


def test_budget_ends_the_search_of_a_graph_of_many_branches():
    workflow, pool = large_case(32, 7, seed=1)
    workflow = replace(workflow, edges=(), loops=())
    early, best = place(workflow, pool, settings=SearchSettings(expansions=5_000)), place(workflow, pool)
    assert 0 < early.gap < 1
    assert early.expansions < 10_000 < best.expansions
    assert early.lower_bound <= best.seconds <= early.seconds


def test_search_is_deterministic():
    workflow, pool = large_case(64, 6, seed=2)
    assert place(workflow, pool) == place(workflow, pool)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 5))
def test_pipeline_formula_is_the_longest_path_through_chunks_and_levels(levels: list[float], chunks: int, rounds: int):
    assert elapsed_s(sum(levels), max(levels), chunks, rounds) == pytest.approx(
        pipeline_s(tuple(levels), chunks, rounds)
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_dropped_labels_are_matched_by_kept_ones(numbers: list[tuple[int, int, int, int]]):
    for size in (1, 2):
        labels = [Label(float(a), float(b), (c, d)[:size], None, None) for a, b, c, d in numbers]
        kept = undominated(labels)

        def beats(one: Label, other: Label) -> bool:
            used = all(a <= b for a, b in zip(one.used, other.used, strict=True))
            return one.fill <= other.fill and one.slowest <= other.slowest and used

        assert all(any(beats(one, label) for one in kept) for label in labels)
        assert not any(beats(a, b) for a in kept for b in kept if a is not b)


def test_sharing_wins_where_stages_scale_and_switches_are_cheap():
    workflow = workflow_of(
        stage("a", {1: 8.0, 2: 4.0}, switch_s=0.5), stage("b", {1: 8.0, 2: 4.0}, switch_s=0.5), edges="a>b"
    )
    plan = place(workflow, pool_of(2))
    assert plan.mode == "temporal"
    assert plan.seconds == 4 + 4 + 1
    assert plan.cost_usd == 2 * 9


def test_separating_wins_where_stages_do_not_scale():
    workflow = workflow_of(stage("a", {1: 8.0}), stage("b", {1: 6.0}), edges="a>b")
    plan = place(workflow, pool_of(2))
    assert plan.mode == "spatial"
    assert plan.phases[0].items_per_chunk == 1
    assert plan.seconds == 2 + 1.5 + 3 * 2  # four chunks: the way of one, then the slower stage


def test_hybrid_wins_where_one_stage_scales_and_two_do_not():
    workflow = workflow_of(
        stage("a", {1: 8.0}), stage("b", {1: 8.0}), stage("c", {1: 8.0, 2: 4.0}, switch_s=0.25), edges="a>b b>c"
    )
    plan = place(workflow, pool_of(2))
    assert plan.mode == "hybrid"
    assert [phase.name for phase in plan.phases] == ["a, b", "c"]
    assert plan.seconds == (2 + 2 + 3 * 2) + 4 + 0.25


def test_cuts_are_not_prefixes_of_one_order():
    """a and b feed c and d; sharing pays for {a, c} before {b, d} alone, which no order a, b, c, d has as a prefix."""
    slow = {1: 8.0}
    workflow = workflow_of(
        stage("a", slow, switch_s=1.0), stage("b", slow, switch_s=9.0), stage("c", slow, switch_s=1.0),
        stage("d", slow, switch_s=9.0), edges="a>c b>d",
    )  # fmt: skip
    plan = place(workflow, pool_of(2))
    assert {frozenset(phase.name.split(", ")) for phase in plan.phases} == {frozenset("ac"), frozenset("bd")}
    assert plan.seconds == 2 * (2 + 2 + 3 * 2) + 1 + 9


def test_branches_run_side_by_side():
    slow = {1: 8.0}
    workflow = workflow_of(stage("a", slow), stage("b", slow), stage("c", slow), edges="a>b a>c")
    plan = place(workflow, pool_of(3))
    assert len(plan.phases[0].levels) == 2
    assert plan.seconds == 2 + 2 + 3 * 2


def test_loop_keeps_its_pipelining():
    """Two halves of the items go around policy and simulator in turn, so that both work all the time."""
    stages = (stage("policy", {1: 4.0}), stage("simulate", {1: 4.0}))
    edges = (
        WorkflowEdge(source="policy", to="simulate"),
        WorkflowEdge(source="simulate", to="policy", loop="steps"),
    )
    workflow = Workflow(
        items=4, granularities=(2, 4), stages=stages, edges=edges, loops=(WorkflowLoop(name="steps", rounds=10),)
    )
    plan = place(workflow, pool_of(2))
    assert plan.seconds == 2 + 10 * 2 * 2  # a chunk of two takes 2 s a stage: 20 visits of a stage, one of the other
    assert place(workflow, pool_of(1)).seconds == 10 * (4 + 4)


def test_memory_lowers_the_chunk_of_a_simulator():
    workflow = workflow_of(stage("simulate", {1: 8.0}, fixed_bytes=10.0, bytes_per_item=20.0))
    plan = place(workflow, pool_of(1, memory_bytes=35.0))
    assert plan.phases[0].items_per_chunk == 1
    assert place(workflow, pool_of(1, memory_bytes=90.0)).seconds == 8.0
    three = replace(workflow, items=3, granularities=(3,), stages=(replace(workflow.stages[0], times=(
        TimePoint(device="h", devices=2, items=3, seconds=1.0),)),))  # fmt: skip
    assert place(three, pool_of(2, memory_bytes=50.0)).seconds == 1  # two of the three on one device
    with pytest.raises(ConfigurationError, match="9 missing"):
        place(three, pool_of(2, memory_bytes=41.0))


def test_transfers_are_paid_between_parts_and_not_inside_one():
    workflow = workflow_of(stage("a", {1: 8.0}), stage("b", {1: 8.0}))
    edge = WorkflowEdge(source="a", to="b", bytes_per_item=10.0)
    workflow = replace(workflow, edges=(edge,))
    fast, slow = (replace(pool_of(2), link_bytes_per_s=rate) for rate in (20.0, 1.0))
    assert place(workflow, fast).seconds == 2 + 2.5 + 3 * 2.5
    assert place(workflow, slow).mode == "temporal"
    assert place(workflow, slow).seconds == 16


def test_cheapest_plan_uses_no_more_devices_than_it_pays_for():
    workflow = workflow_of(stage("a", {1: 8.0, 2: 5.0}))
    plan = place(workflow, pool_of(2), "cost")
    assert used_devices(plan.phases) == {"h": 1}
    assert plan.cost_usd == 8.0


def test_reasons_name_the_second_best_the_limits_and_the_next_device():
    workflow = workflow_of(stage("a", {1: 8.0}, switch_s=1.0), stage("b", {1: 8.0}, switch_s=1.0), edges="a>b")
    report = explain(workflow, pool_of(1))
    assert report.plan.seconds == 18
    assert report.binds[0] == "switch costs: 11.1% less without"
    assert [(other.name, other.value) for other in report.one_more] == [("one more h", 10.0)]
    assert report.second_best is not None
    assert report.second_best.value == 18  # the same turns as two phases
    two = explain(workflow, pool_of(2))
    assert two.second_best is not None
    assert two.second_best == Alternative(name="spatial: a, b in chunks of 4", value=16)
    assert two.one_more[0].value == 10


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_second_best_is_no_better_and_of_another_structure(seed: int):
    workflow, pool = small_case(seed, most_stages=4, most_devices=5)
    try:
        report = explain(workflow, pool)
    except ConfigurationError:
        return
    if report.second_best is not None and report.second_best.value is not None:
        assert report.second_best.value >= report.plan.seconds * (1 - 1e-12)
    for other in (*report.relaxations, *report.one_more):
        assert other.value is not None
        assert other.value <= report.plan.seconds * (1 + 1e-12)
    for mode in ("temporal", "spatial"):
        if report.plan.mode == mode:
            assert place(workflow, pool, settings=SearchSettings(mode=mode)).seconds == report.plan.seconds


def test_pool_without_memory_is_refused_with_what_is_missing_and_what_would_do():
    times = tuple(
        TimePoint(device="h", devices=devices, items=4, seconds=1.0, fixed_bytes=120.0 / devices)
        for devices in (1, 2, 4)
    )
    workflow = Workflow(items=4, granularities=(4,), stages=(WorkflowStage(name="train", times=times),))
    with pytest.raises(ConfigurationError) as refused:
        place(workflow, pool_of(2, memory_bytes=40.0))
    assert str(refused.value) == (
        "no plan fits into the pool's memory: stage train needs 60 bytes on each of 2 h for 4 items and has 40: "
        "20 missing; the smallest pool that would suffice has 4 h"
    )
    assert place(workflow, pool_of(4, memory_bytes=40.0)).seconds == 1
    with pytest.raises(ConfigurationError, match="no number of devices with given times would suffice"):
        place(workflow, pool_of(4, memory_bytes=20.0))


def loops(workflow: Workflow, *back: tuple[str, str, str]) -> Workflow:
    edges = tuple(WorkflowEdge(source=source, to=to, loop=name) for source, to, name in back)
    names = dict.fromkeys(name for _, _, name in back)
    return replace(
        workflow,
        edges=workflow.edges + edges,
        loops=tuple(WorkflowLoop(name=name, rounds=2) for name in names),
    )


def test_loops_are_folded_inside_each_other():
    chain = workflow_of(*(stage(name, {1: 1.0}) for name in "abcd"), edges="a>b b>c c>d")
    body = fold(loops(chain, ("c", "b", "inner"), ("d", "a", "outer")))
    assert [unit.name for unit in body.units] == ["outer"]
    outer = body.units[0].loop
    assert outer is not None
    assert [unit.name for unit in outer.units] == ["inner", "a", "d"]
    inner = outer.units[0].loop
    assert inner is not None
    assert [unit.name for unit in inner.units] == ["b", "c"]


@pytest.mark.parametrize(
    ("back", "message"),
    [
        ([("c", "a", "")], "stages a, b, c form a cycle without a loop variable"),
        ([("b", "a", "x"), ("c", "b", "y")], "loops 'x' and 'y' overlap"),
        ([("a", "c", "x")], "loop 'x': no cycle goes through its edges"),
        ([("b", "a", "x"), ("d", "c", "x")], "loop 'x' has two separate cycles"),
    ],
)
def test_loops_that_mean_nothing_are_refused(back: list[tuple[str, str, str]], message: str):
    chain = workflow_of(*(stage(name, {1: 1.0}) for name in "abcd"), edges="a>b b>c c>d")
    looped = loops(chain, *back)
    if not back[0][2]:
        looped = replace(looped, loops=(), edges=tuple(replace(edge, loop=None) for edge in looped.edges))
    with pytest.raises(ConfigurationError, match=message):
        place(looped, pool_of(1))
