"""A simulated run whose responses become three times as long over 30 steps, and take as much longer to score: with the
re-planner, with the plan it had before, and with fixed plans."""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

from headway.config.load import validate
from headway.planner.scenario import Scenario
from headway.planner.simulate import simulate
from headway.records.ledger import EventRecord, LedgerLine, StepRecord

BEGINS, MEASURED = 80, 100  # step at which the drift begins; steps from there on that rates are measured over
GROUPS_PER_STEP = 8
LOAD: dict[str, Any] = {
    "rollout": {"group_size": 4, "max_response_tokens": 1500},
    "generator": {"slots": 64},
    "queue": {"groups_per_step": GROUPS_PER_STEP, "budget": 4},
    "hardware": {
        "generator": {"decode_fixed_s": 0.006, "decode_request_s": 0.0002, "update_s": 0.005},
        "trainer": {"step_fixed_s": 1.2, "token_s": 1e-4, "publish_s": 0.01},
    },
    "workload": {
        "tasks": 200,
        "prompt_tokens": 2,
        "response_tokens": {"kind": "lognormal", "median": 30, "p99": 60},
        "verify_s": 0.03,
    },
}
DRIFT = [
    {"key": key, "factor": 3.0, "from_step": BEGINS, "over_steps": 30}
    for key in ("workload.response_tokens", "workload.verify_s")
]


class Plan(NamedTuple):
    """Knobs that are fixed for a whole run."""

    open_groups: int | None  # None: all that admission allows
    concurrent_rollouts: int
    verifier_workers: int


class Replayed(NamedTuple):
    """What a simulated run recorded."""

    steps: list[StepRecord]
    actions: list[EventRecord]  # of the controller

    @property
    def drifted_per_s(self) -> float:
        """Useful samples/s from the drift on."""
        kept = self.steps[BEGINS : BEGINS + MEASURED]
        return sum(r.flow.useful_samples for r in kept) / sum(r.step_s for r in kept)

    @property
    def changed_at(self) -> list[int]:
        """Steps at which the plan was changed."""
        return [action.step for action in self.actions if action.data["kind"] in ("set", "rollback")]

    def plan_at(self, step: int) -> Plan:
        flow = self.steps[step].flow
        return Plan(flow.open_groups or None, flow.concurrent_rollouts, flow.verifier_workers)


def replayed(
    seed: int, plan: Plan | None = None, *, steps: int = BEGINS + MEASURED + 10, drift: bool = True
) -> Replayed:
    """Run the load with the re-planner, or with a fixed ``plan``."""
    raw: dict[str, Any] = {name: dict(table) for name, table in LOAD.items()} | {"drift": DRIFT if drift else []}
    if plan is None:
        raw["control"] = {"mode": "act"}
    else:
        raw["queue"]["max_concurrent_rollouts"] = plan.concurrent_rollouts
        if plan.open_groups is not None:
            raw["queue"]["oversampling"] = plan.open_groups / GROUPS_PER_STEP
        raw["hardware"]["verifiers"] = plan.verifier_workers
    lines: list[LedgerLine] = []
    with tempfile.TemporaryDirectory() as folder:
        raw["run"] = {"directory": f"{folder}/run", "steps": steps, "seed": seed}
        simulate(validate(raw, "replayed", Scenario), on_line=lines.append)
    return Replayed(
        [line for line in lines if isinstance(line, StepRecord)],
        [line for line in lines if isinstance(line, EventRecord) and line.event == "control"],
    )
