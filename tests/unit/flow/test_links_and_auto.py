"""Plans by measurement: edges and loops out of items and messages, memory by items, the plan made of them."""

from __future__ import annotations

from typing import Any

import pytest

from headway.flow.auto import PROFILE, AutoPlanner, memory_line
from headway.flow.links import StageLinks
from headway.flow.worker import StageTimes, Traffic, Turn, _gpu_memory
from headway.records.execution import ExecutionPlan, FlowStep, StageStep
from headway.records.plan import WorkflowLoop

ITEMS, ROUNDS = 8, 20
ORDER = ["act", "simulate", "train"]


def times(
    sent: dict[str, int] | None = None, turns: int = 1, items: int = 0, busy_s: float = 0.1, peak_bytes: int = 0
) -> StageTimes:
    traffic = {stage: Traffic(count=count, size_bytes=1000 * count) for stage, count in (sent or {}).items()}
    each = [Turn(items=items, busy_s=busy_s, start_s=0.0, end_s=0.0, peak_bytes=peak_bytes)] * turns
    device_bytes = 100 if peak_bytes else 0
    return StageTimes(each=each, sent=traffic, transfer_s=0.1, device_bytes=device_bytes)


def test_messages_that_go_back_several_times_a_step_are_a_loop():
    links = StageLinks(items=ITEMS)
    channels = {("simulate", "train"): Traffic(count=16, size_bytes=1600), ("", "act"): Traffic(count=8, size_bytes=0)}
    for _ in range(2):
        loop = {"act": [times({"simulate": ROUNDS})] * 2, "simulate": [times({"act": ROUNDS})] * 2}
        links.add(channels, {**loop, "train": [times({"act": 1, "train": 5, "gone": 1})]})
    edges, loops = links.graph(ORDER)
    assert loops == (WorkflowLoop(name="simulate to act", rounds=ROUNDS),)
    assert [(edge.source, edge.to, edge.loop) for edge in edges] == [
        ("act", "simulate", None),
        ("simulate", "train", None),
        ("simulate", "act", "simulate to act"),
    ]
    assert edges[1].bytes_per_item == 100
    assert edges[0].bytes_per_item == 2 * 1000 / ITEMS  # two workers send 1,000 bytes in each round
    assert links.bytes_per_s == pytest.approx(1600 / 1.0)


def test_links_without_items_have_no_bytes():
    links = StageLinks(items=ITEMS)
    links.add({}, {"act": [times({"train": 3})], "train": [times()]})
    edges, loops = links.graph(ORDER)
    assert [(edge.source, edge.to, edge.bytes_per_item) for edge in edges] == [("act", "train", 0.0)]
    assert (loops, links.bytes_per_s) == ((), None)


def test_memory_is_a_line_through_the_smallest_and_the_largest_turn():
    assert memory_line({2: 30, 8: 90, 4: 10_000}) == (10.0, 10.0)
    assert memory_line({8: 90}) == (90.0, 0.0)
    assert memory_line({2: 90, 8: 30}) == (30.0, 0.0)
    assert memory_line({}) == (0.0, 0.0)


def planned(devices: list[str], stages: dict[str, Any], edges: dict[tuple[str, str], Traffic]) -> ExecutionPlan:
    """The plan after the measured steps. ``stages``: the times of a stage's workers, by the items of a turn."""
    planner, plan, history = AutoPlanner(devices, ITEMS), ExecutionPlan(stages={}, items=ITEMS), list[FlowStep]()
    for stage in stages:
        plan = planner.with_stage(plan, stage, None)
    stage_step = StageStep(
        devices=(), busy_s=0.0, data_wait_s=0.0, device_wait_s=0.0, switch_s=0.0, transfer_s=0.0, items=0, turns=1
    )
    for step in range(PROFILE):
        plan = planner.plan_for(plan, history) or plan
        record = FlowStep(step=10 + step, seconds=1.0, mode="temporal", stages=dict.fromkeys(stages, stage_step))
        history.append(record)
        measured = {name: [at(2 if plan.stages[name].chunk else 8)] for name, at in stages.items()}
        planner.add_step(record, measured, edges, stages)
    better_plan = planner.plan_for(plan, history)
    assert better_plan is not None
    return better_plan


def test_a_plan_of_stages_that_send_each_other_messages():
    plan = planned(
        ["cpu:0"],
        {
            "act": lambda _: times({"simulate": ROUNDS}, turns=ROUNDS),
            "simulate": lambda _: times({"act": ROUNDS}, turns=ROUNDS, busy_s=0.05),
        },
        {},
    )
    assert plan.expected_s == pytest.approx(ROUNDS * 0.15)
    assert plan.stages["act"].expected_s == pytest.approx(ROUNDS * 0.1)


def test_a_plan_holds_no_more_items_than_a_device_has_memory_for():
    """A device has 100 bytes, and turns of 8 items take less time than four of 2."""

    def chunk(item_bytes: int) -> int | None:
        def stage(items: int) -> StageTimes:
            return times(items=items, busy_s=1.0 + items, peak_bytes=10 + item_bytes * items)

        edges = {("generate", "train"): Traffic(count=8)}
        return planned(["cuda:0"], {"generate": stage, "train": stage}, edges).stages["generate"].chunk

    assert chunk(11) is None  # 98 bytes for all
    assert chunk(20) == 4  # 90 bytes


def test_memory_of_a_gpu_is_the_peak_since_the_last_reading(monkeypatch: pytest.MonkeyPatch):
    class Cuda:
        peak = 70

        def is_initialized(self) -> bool:
            return True

        def max_memory_allocated(self) -> int:
            return self.peak

        def reset_peak_memory_stats(self) -> None:
            self.peak = 0

        def current_device(self) -> int:
            return 0

        def get_device_properties(self, device: int) -> Any:
            return type("Properties", (), {"total_memory": 100})

    monkeypatch.setitem(__import__("sys").modules, "torch", type("Torch", (), {"cuda": Cuda()}))
    assert [_gpu_memory(), _gpu_memory()] == [(70, 100), (0, 100)]
    monkeypatch.delitem(__import__("sys").modules, "torch")
    assert _gpu_memory() == (0, 0)
