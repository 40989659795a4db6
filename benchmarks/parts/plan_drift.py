"""A real run whose responses become three times as long in its middle: it changes its placement, without a stop.

    python benchmarks/parts/plan_drift.py [--directory DIR] [--steps N]

Two cores, of which each side has one at first, and one slot, so that generation takes longer than training and the
trainer waits half of the time. The lengths triple before the run has seen enough to decide; with the keys of
``--plan auto`` it notes the drift, finds that generating on both cores pays, and changes to that. Then the same load is
measured in runs that start in the new placement, and in one that stays in the old. The last line is one JSON object:
``live_over_afresh`` is the throughput after the change divided by that of the new placement started afresh.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headway.buffer.audit import audit_run
from headway.config.load import changed_experiment
from headway.config.schema import Experiment
from headway.orchestrator.train import wire
from headway.records.clients import Watch
from headway.records.generation import GenerationRequest, GenerationResult
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.rollout.makers.turn_sampler import Generate
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, Ledger
from parts.pipeline_load import Shape, apart, experiment, prepare

SHAPE = Shape(
    layers=3, width=128, heads=4, intermediate=384, prompt_tokens=144, median_tokens=64, spread=0.4, longest_tokens=512
)
SLOTS = 1
FACTOR = 3
DRIFT_AT = 8  # step
SETTLED = 8  # steps after the start, or after a change, that aren't measured
MOST_STEPS = 300  # after the drift, within which the plan must have changed
# Learning would change the share of groups that can be trained: another drift, which is not what is measured.
STILL = {"trainer.learning_rate": "0.0"}
AUTO = {"control.mode": '"act"', "control.devices": '"move"'}


class DriftRun(NamedTuple):
    """What a run recorded."""

    steps: list[StepRecord]
    events: list[EventRecord]
    problems: list[str]  # of its books, as the audit finds them

    def changes(self) -> list[EventRecord]:
        return [event for event in self.events if event.event == EVENT_PLAN_CHANGED]

    def per_s(self, first: int, last: int) -> float:
        """Trained samples/s of the steps from ``first`` on, before ``last``."""
        kept = [step for step in self.steps if first <= step.step < last]
        return sum(step.samples for step in kept) / sum(step.step_s for step in kept)


class Load:
    """Forces the lengths of responses, and changes them when told to."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def force(self, generate: Generate) -> Generate:
        def forced(request: GenerationRequest, watch: Watch | None = None, /) -> Awaitable[GenerationResult]:
            length = min(SHAPE.longest_tokens, self.factor * SHAPE.length(request.sampling.seed))
            sampling = msgspec.structs.replace(request.sampling, max_tokens=length, stop_token_ids=(), stop=())
            return generate(msgspec.structs.replace(request, sampling=sampling), watch)

        return forced


async def run(settings: Experiment, *, steps: int, drift_at: int | None) -> DriftRun:
    """Run until ``steps`` steps are measured: after a change of plan that follows the drift, or, without a drift, after
    the start, with the long responses."""
    load, clock = Load(1 if drift_at else FACTOR), RealClock()
    found, done = DriftRun([], [], []), asyncio.Event()
    directory = RunDirectory(settings.run.directory)
    directory.begin(settings, resume=False)

    def observe(line: LedgerLine) -> None:
        if isinstance(line, EventRecord):
            found.events.append(line)
            if line.event in (EVENT_PLAN_CHANGED, "control", "plan_outcome", "plan_kept"):
                print(f"  step {line.step}: {line.event}: {line.detail}", flush=True)
        if isinstance(line, StepRecord):
            found.steps.append(line)
            if drift_at and line.step >= drift_at:
                load.factor = FACTOR
            changes = [event.step for event in found.changes() if not drift_at or event.step > drift_at]
            since = changes[-1] if changes else 0 if not drift_at else None
            if since is not None and line.step >= since + settled(settings) + steps:
                done.set()
            if line.step >= (drift_at or 0) + MOST_STEPS:
                done.set()

    try:
        async with AsyncExitStack() as stack:
            ledger = stack.enter_context(Ledger(directory.path, clock))
            ledger.subscribe(observe)
            running = await wire(settings, directory, ledger, clock, stack, load.force)
            await running.begin()

            async def end_when_done() -> None:
                await done.wait()
                running.interrupt()

            ending = asyncio.create_task(end_when_done())
            await running.train()
            await ending
            await running.conclude()
    finally:
        directory.release()
    return found._replace(problems=list(audit_run(directory.path).violations))


def settled(settings: Experiment) -> int:
    return settings.queue.budget + SETTLED


def measured(settings: Experiment, folder: Path, steps: int) -> DriftRun:
    shutil.rmtree(folder, ignore_errors=True)
    placed = changed_experiment(settings, {"run.directory": json.dumps(str(folder))})
    return asyncio.run(run(placed, steps=steps, drift_at=None))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--steps", type=int, default=24, help="measured, of each run")
    parser.add_argument("--rounds", type=int, default=3, help="of the runs that start in a placement")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headway-drift-") as scratch:
        folder = options.directory or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, SHAPE)
        settings = experiment(folder, "auto", SHAPE, placement=apart(SLOTS), budget=2, steps=100_000)
        settings = changed_experiment(settings, STILL)
        shutil.rmtree(settings.run.directory, ignore_errors=True)
        print("auto:", flush=True)
        auto = asyncio.run(run(changed_experiment(settings, AUTO), steps=options.steps, drift_at=DRIFT_AT))
        changes = [event for event in auto.changes() if event.step > DRIFT_AT]
        if not changes:
            print(json.dumps({"changed": 0, "problems": auto.problems}))
            return 1
        last = changes[-1]
        first = last.step + settled(settings)
        live = auto.per_s(first, first + options.steps)
        placement = placements_of(auto)[-1]
        afresh, before = list[float](), list[float]()
        for number in range(options.rounds):
            for name, devices, rates in (("afresh", placement, afresh), ("before", {}, before)):
                if rates is before and number:
                    continue
                one = measured(changed_experiment(settings, devices), folder / f"{name}-{number}", options.steps)
                rates.append(one.per_s(settled(settings), settled(settings) + options.steps))
                print(f"{name}: {rates[-1]:.1f} samples/s", flush=True)
        result = {
            "live_over_afresh": round(live / median(afresh), 3),
            "live_samples_per_s": round(live, 1),
            "afresh_samples_per_s": [round(rate, 1) for rate in afresh],
            "before_samples_per_s": [round(rate, 1) for rate in before],
            "drift_at": DRIFT_AT,
            "changed_at": [event.step for event in changes],
            "cost_s": [event.data["cost_s"] for event in changes],
            "expected_cost_s": [event.data["expected_cost_s"] for event in changes],
            "placement": last.data["after"],
            "problems": auto.problems,
        }
        print(json.dumps(result))
    return 0


def placements_of(found: DriftRun) -> list[dict[str, str]]:
    """The settings of each placement to which a run has moved."""
    decided = [event for event in found.events if event.event == "control" and event.data.get("kind") == "move"]
    return [{key: str(event.data[key]) for key in ("generator.devices", "trainer.devices")} for event in decided]


if __name__ == "__main__":
    sys.exit(main())
