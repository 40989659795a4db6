"""Alerts of whole runs: each rule raises one on its planted case, and none does on healthy runs, real or simulated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from kept_ledgers import HEALTHY, kept_ledger
from simulated_run import experiment_of, simulate
from step_records import changed

from headway.config.alerts import AlertsConfig
from headway.control.alerts import RULES
from headway.orchestrator.context import RunContext
from headway.orchestrator.stalls.alert_watch import AlertSettings, AlertWatch
from headway.planner.scenario import load_scenario
from headway.planner.simulate import simulate as simulate_scenario
from headway.records.errors import HeadwayError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.records.node import NodeConditions

SCENARIOS = Path(__file__).resolve().parents[3] / "examples" / "scenarios"
GIB = 1 << 30
NEVER = 10**9


class Replay:
    """A run whose ledger is replayed into its alert watch, with its clock and its disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, rules: Any = None, **limits: float) -> None:
        self.now_s, self._look_s = 0.0, 15.0
        self.full_from_s, self.full_until_s = NEVER, NEVER
        self.recorded: list[EventRecord] = []
        self.state = SimpleNamespace(draining=False)
        self.fails = False
        self.nodes: list[NodeConditions] = []
        run = SimpleNamespace(
            experiment=SimpleNamespace(alerts=AlertsConfig() if rules is None else AlertsConfig(rules=rules)),
            time_s=lambda: self.now_s,
            state=self.state,
            nodes=lambda: self.nodes,
            event=self.event,
        )
        self.watch = AlertWatch(cast("RunContext", run), folder, AlertSettings(), **limits)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self._free_bytes()))

    def _free_bytes(self) -> int:
        return GIB // 8 if self.full_from_s <= self.now_s < self.full_until_s else 50 * GIB

    def event(self, name: str, detail: str, **data: Any) -> None:
        if self.fails:
            raise HeadwayError("no space left")
        event = EventRecord(event=name, detail=detail, time_s=self.now_s, data=data)
        self.recorded.append(event)
        self.watch.take(event)  # as a subscriber of the ledger

    def play(self, lines: Iterable[LedgerLine]) -> list[str]:
        """Names of the rules that raised an alert, in order."""
        for line in lines:
            self.until(line.time_s)
            self.now_s = max(self.now_s, line.time_s)
            self.watch.take(line)
        return self.raised

    def until(self, time_s: float) -> None:
        while self._look_s <= time_s:
            self.now_s = max(self.now_s, self._look_s)
            self.watch.check()
            self._look_s += 15.0

    @property
    def raised(self) -> list[str]:
        return [str(event.data["rule"]) for event in self.recorded if event.event == "alert"]


# --- healthy ---------------------------------------------------------------------------------------------


def scenario_of(name: str, seed: int) -> Callable[[Path], list[LedgerLine]]:
    def lines(folder: Path) -> list[LedgerLine]:
        found: list[LedgerLine] = []
        overrides = [f"run.seed={seed}", f"run.directory={folder / 'simulated'}", "run.steps=24"]
        simulate_scenario(load_scenario(SCENARIOS / f"{name}.toml", overrides), on_line=found.append)
        return found

    return lines


def small_run(seed: int, **sections: dict[str, Any]) -> Callable[[Path], list[LedgerLine]]:
    def lines(folder: Path) -> list[LedgerLine]:
        base = {"run": {"steps": 60}, "rollout": {"group_size": 4, "max_response_tokens": 200}}
        queue = {"groups_per_step": 4, "budget": 2, **sections.pop("queue", {})}
        return simulate(experiment_of(folder, queue=queue, **base, **sections), seed=seed).lines

    return lines


RUNS: dict[str, Callable[[Path], list[LedgerLine]]] = {
    **{name: (lambda folder, name=name: kept_ledger(name)) for name in HEALTHY},
    "long tail": scenario_of("long_tail", 0),
    "tools": scenario_of("tools", 1),
    "synchronous": small_run(3, queue={"budget": 0}),
    "very stale": small_run(4, queue={"budget": 8}),
    "dropping": small_run(5, queue={"overdue": "drop", "oversampling": 2.0}),
    "few slots": small_run(6, generator={"slots": 4}),
    "rare checkpoints": small_run(7, checkpoint={"every_steps": 30}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_healthy_run_raises_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = RUNS[name](tmp_path)
    assert sum(isinstance(line, StepRecord) for line in lines) >= 20
    assert Replay(tmp_path, monkeypatch).play(lines) == []


# --- planted ---------------------------------------------------------------------------------------------

Plant = Callable[[list[LedgerLine], int], list[LedgerLine]]


def steps_changed(change: Callable[[StepRecord], dict[str, Any]], last: int | None = None) -> Plant:
    """A fault from a step on, until 40 steps later or to the end."""

    def plant(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
        end = NEVER if last is None else at + last
        return [
            changed(line, **change(line)) if isinstance(line, StepRecord) and at <= line.step < end else line
            for line in lines
        ]

    return plant


def metric(name: str, value: float) -> Callable[[StepRecord], dict[str, Any]]:
    return lambda step: {"metrics": {**step.metrics, name: value}}


def stalled(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    cause = EventRecord(event="stalled", detail="stalled 40 s: verifier-0 holds", worker="verifier-0")
    over = EventRecord(event="stall_ended", detail="verifier-0: over", worker="verifier-0")
    return inserted(inserted(lines, at, cause), at + 4, over)


def inserted(lines: list[LedgerLine], at: int, event: EventRecord) -> list[LedgerLine]:
    place = next(n for n, line in enumerate(lines) if isinstance(line, StepRecord) and line.step == at)
    return [*lines[:place], msgspec.structs.replace(event, time_s=lines[place].time_s, step=at), *lines[place:]]


def paused(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    place = next(n for n, line in enumerate(lines) if isinstance(line, StepRecord) and line.step == at)
    later = [msgspec.structs.replace(line, time_s=line.time_s + 3600.0) for line in lines[place:]]
    return [*lines[:place], *later]


def hacked(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    """The reward climbs; what is solved on validation tasks stays where it was."""
    rate = next(line.solve_rate for line in lines if isinstance(line, EvaluationRecord) and line.step >= at)
    lines = steps_changed(lambda step: {"rewards__mean": step.rewards.mean + 0.01 * (step.step - at)})(lines, at)
    return [
        msgspec.structs.replace(line, solve_rate=rate)
        if isinstance(line, EvaluationRecord) and line.step >= at
        else line
        for line in lines
    ]


PLANTED: dict[str, Plant] = {
    "stall": stalled,
    "no_step": paused,
    "skipped": steps_changed(lambda step: {"skipped": True, "version": step.step}, 6),
    "kl": steps_changed(metric("kl", 0.4), 40),
    "entropy": steps_changed(metric("entropy", 0.002)),
    "reward_hacking": hacked,
    "length": steps_changed(lambda step: {"lengths__mean": 2 * step.lengths.mean, "lengths__truncated_share": 0.6}),
}


@pytest.mark.parametrize("rule", PLANTED)
@pytest.mark.parametrize("name", ["arithmetic-0", "arithmetic-1"])
def test_planted_fault_raises_its_alert_once(name: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replay = Replay(tmp_path, monkeypatch)
    assert replay.play(PLANTED[rule](kept_ledger(name), 60)) == [rule]
    (alert,) = [event for event in replay.recorded if event.event == "alert"]
    assert alert.detail.startswith(f"{rule}: ")
    assert alert.data["host"]


@pytest.mark.parametrize("rule", PLANTED)
def test_rule_that_is_not_asked_for_raises_nothing(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    others = tuple(name for name in RULES if name != rule)
    assert Replay(tmp_path, monkeypatch, rules=others).play(PLANTED[rule](kept_ledger("arithmetic-0"), 60)) == []


def test_every_rule_has_a_planted_case():
    assert {*PLANTED, "disk"} == set(RULES)


def test_real_run_that_collapsed_raises_divergence_and_length_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert Replay(tmp_path, monkeypatch).play(kept_ledger("collapsed")) == ["kl", "length"]


def test_disk_nearly_full_is_raised_once_and_cleared_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replay = Replay(tmp_path, monkeypatch)
    replay.full_from_s, replay.full_until_s = 100.0, 300.0
    assert replay.play(kept_ledger("arithmetic-0")) == ["disk"]
    assert [event.event for event in replay.recorded] == ["alert", "alert_cleared"]
    assert "0.12 GiB left; the run may need 0.25" in replay.recorded[0].detail


def test_disk_needs_room_for_two_checkpoints_and_nodes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replay = Replay(tmp_path, monkeypatch, min_interval_s=0)
    checkpoint = tmp_path / "checkpoints" / "step_00000050"
    checkpoint.mkdir(parents=True)
    with (checkpoint / "state-1-of-1.safetensors").open("wb") as file:
        file.truncate(30 * GIB)  # sparse
    replay.until(60.0)
    assert replay.raised == []
    replay.watch.take(EventRecord(event="checkpoint"))
    replay.until(90.0)
    assert replay.raised == ["disk"]
    shutil.rmtree(checkpoint)
    replay.watch.take(EventRecord(event="checkpoint"))
    replay.until(180.0)
    node = NodeConditions(
        name="b7", cpu_ratio=0.1, memory_free_bytes=GIB, shared_memory_free_bytes=GIB, disk_free_bytes=1 << 20
    )
    replay.nodes = [node]
    replay.until(210.0)
    assert replay.raised == ["disk", "disk"]
    assert "TMPDIR of the node 'b7'" in replay.recorded[-1].detail


def test_fault_that_returns_is_raised_again_after_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    twice = PLANTED["kl"](PLANTED["kl"](kept_ledger("arithmetic-0"), 40), 140)
    assert Replay(tmp_path, monkeypatch, min_interval_s=60).play(twice) == ["kl", "kl"]
    assert Replay(tmp_path, monkeypatch, min_interval_s=NEVER).play(twice) == ["kl"]


def test_no_step_is_not_raised_where_a_stall_says_why_or_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = kept_ledger("arithmetic-0")[:100]
    stall = EventRecord(event="stalled", detail="stalled 40 s", worker="trainer-0", time_s=lines[-1].time_s)
    replay = Replay(tmp_path, monkeypatch)
    replay.play([*lines, stall])
    replay.until(7200.0)
    assert replay.raised == ["stall"]
    ending = Replay(tmp_path, monkeypatch)
    ending.play(lines)
    ending.state.draining = True
    ending.until(7200.0)
    assert ending.raised == []


def test_resumed_run_does_not_repeat_what_was_raised_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = PLANTED["length"](kept_ledger("arithmetic-0"), 60)
    first = Replay(tmp_path, monkeypatch)
    assert first.play(lines[:150]) == ["length"]
    resumed = Replay(tmp_path, monkeypatch)
    resumed.watch.restore([*lines[:150], *first.recorded])
    assert resumed.play(lines[150:]) == []
    fresh = Replay(tmp_path, monkeypatch)
    fresh.watch.restore(lines[:150])  # of a release without alerts
    assert fresh.play(lines[150:]) == ["length"]


def test_ledger_that_can_not_be_written_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replay = Replay(tmp_path, monkeypatch)
    replay.full_from_s, replay.fails = 0.0, True
    replay.until(120.0)
    assert replay.recorded == []
