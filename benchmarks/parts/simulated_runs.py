"""Runs of the planner's simulation for benchmarks: a scenario as a dict, fixed knobs as its keys, steps as records."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config.load import validate
from headway.planner.scenario import Scenario
from headway.planner.simulate import simulate
from headway.records.control import Knobs
from headway.records.ledger import EventRecord, LedgerLine, StepRecord

Raw = Mapping[str, Any]


@dataclass
class Result:
    """What one run left behind."""

    steps: list[StepRecord]
    actions: list[EventRecord] = field(default_factory=list)  # of the controller

    def rate(self, first: int, count: int) -> float:
        """Useful samples/s (advantage not 0) over ``count`` steps from ``first`` on."""
        kept = self.steps[first : first + count]
        return sum(r.flow.useful_samples for r in kept) / sum(r.step_s for r in kept)

    def staleness(self, first: int, count: int) -> float:
        """Mean of the trained trajectories, in versions."""
        kept = self.steps[first : first + count]
        return sum(r.trajectory_staleness.mean * r.samples for r in kept) / sum(r.samples for r in kept)

    def knobs_at(self, step: int) -> Knobs:
        flow = self.steps[step].flow
        return Knobs(
            open_groups=flow.open_groups or None,
            concurrent_rollouts=flow.concurrent_rollouts,
            steps_per_publish=flow.steps_per_publish,
        )


def merged(*parts: Raw) -> dict[str, Any]:
    """Scenarios' tables laid over each other, the later over the earlier."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if both else value
    return found


def held(knobs: Knobs, groups_per_step: int) -> dict[str, Any]:
    """Fixed knobs as keys of the experiment, as a user would set them."""
    queue: dict[str, Any] = {"max_concurrent_rollouts": knobs.concurrent_rollouts}
    if knobs.open_groups is not None:
        queue["oversampling"] = knobs.open_groups / groups_per_step
    return {"queue": queue, "weights": {"steps_per_publish": knobs.steps_per_publish}}


def run(*parts: Raw, steps: int, seed: int) -> Result:
    """One simulated run to its end."""
    lines: list[LedgerLine] = []
    with tempfile.TemporaryDirectory() as folder:
        raw = merged(*parts, {"run": {"directory": f"{folder}/run", "steps": steps, "seed": seed}})
        simulate(validate(raw, "benchmark", Scenario), on_line=lines.append)
    return Result(
        [line for line in lines if isinstance(line, StepRecord)],
        [line for line in lines if isinstance(line, EventRecord) and line.event == "control"],
    )
