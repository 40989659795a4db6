"""What the case studies have in common: figures with their labels, simulations of a scenario file with overrides."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headway.planner.outcome import SimulationOutcome
from headway.planner.scenario import Scenario, load_scenario
from headway.planner.simulate import simulate
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger

SCENARIOS = Path(__file__).parents[2] / "examples" / "case_studies"
WITHIN = 0.15  # of a published figure: as near as a predicted one should be

Label = Literal["given", "fitted", "identity", "predicted", "contradictory"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure and what the simulation, or arithmetic, says of it."""

    name: str
    published: float
    computed: float
    label: Label
    unit: str = ""
    note: str = ""

    @property
    def error(self) -> float:
        return self.computed / self.published - 1.0

    @property
    def within(self) -> bool:
        return abs(self.error) <= WITHIN


class CaseRun:
    """One simulation, seen over the steps in which it is stationary: without its first one, which begins with an empty
    pipeline, and without its last ones, for which fewer groups are left to open than the policy would have in flight.
    """

    def __init__(self, scenario: Scenario, outcome: SimulationOutcome, steps: Sequence[StepRecord], last: int) -> None:
        """``last``: the last step that counts."""
        self.outcome = outcome
        self.steps = [step for step in steps if 0 < step.step <= last]
        self._scenario = scenario

    def mean_step_s(self, which: Callable[[int], bool] = lambda step: True) -> float:
        """Of the steps chosen."""
        times = [step.step_s for step in self.steps if which(step.step)]
        return sum(times) / len(times)

    @property
    def seconds(self) -> float:
        return sum(step.step_s for step in self.steps)

    @property
    def samples(self) -> int:
        return sum(step.samples for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def trainer_wait(self) -> float:
        return sum(step.trainer_wait_s for step in self.steps) / self.seconds

    @property
    def consumption_per_s(self) -> float:
        return self.samples / (self.seconds - sum(step.trainer_wait_s for step in self.steps))

    @property
    def mfu_compute(self) -> float:
        compute_s = sum(step.trainer_compute_s for step in self.steps)
        return sum(step.mfu_compute * step.trainer_compute_s for step in self.steps) / compute_s

    @property
    def wasted_share(self) -> float:
        """Of the response tokens of rollouts that ended: of those that were not trained."""
        trained = sum(step.tokens.ended.get("trained", 0) for step in self.steps)
        return 1.0 - trained / sum(sum(step.tokens.ended.values()) for step in self.steps)

    @property
    def staleness(self) -> tuple[float, int]:
        """(mean, largest) of trained trajectories."""
        mean = sum(step.trajectory_staleness.mean * step.samples for step in self.steps) / self.samples
        return mean, int(max(step.trajectory_staleness.max for step in self.steps))

    @property
    def length_bias(self) -> float:
        """The largest of the causes."""
        last = self.steps[-1]
        return max(last.length_bias.scheduling_ks, last.length_bias.filter_ks, last.length_bias.pruning_ks)

    @property
    def dollars_per_1000(self) -> float:
        hours = self._scenario.devices * self.seconds / 3600
        return 1000 * hours * self._scenario.hardware.dollars_per_device_hour / self.samples

    @property
    def trained_length(self) -> float:
        """Mean sampled tokens of a trained sample."""
        return sum(step.tokens.trained_per_s * step.step_s for step in self.steps) / self.samples


def run_case(name: str, overrides: Sequence[str], *, steps: int) -> CaseRun:
    """Simulate ``examples/case_studies/NAME.toml`` with these keys until ``steps`` steps are stationary."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"run.directory={folder}/run", *overrides]
        scenario = load_scenario(SCENARIOS / f"{name}.toml", keys)
        in_flight = scenario.queue.oversampling or min(
            scenario.queue.budget + 1,
            scenario.concurrent_rollouts / (scenario.queue.groups_per_step * scenario.rollout.group_size),
        )
        scenario = load_scenario(SCENARIOS / f"{name}.toml", [*keys, f"run.steps={steps + math.ceil(in_flight)}"])
        outcome = simulate(scenario, name=name)
        lines = read_ledger(f"{folder}/run")
        return CaseRun(scenario, outcome, [line for line in lines if isinstance(line, StepRecord)], steps)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a table of policies."""

    name: str
    run: CaseRun


def figures_table(figures: Sequence[Figure]) -> str:
    """Markdown."""
    lines = ["| figure | published | here | label | difference |", "| --- | --- | --- | --- | --- |"]
    for figure in figures:
        verdict = f"{figure.error:+.1%}"
        if figure.label == "predicted":
            verdict += "" if figure.within else " (outside)"
        note = f"; {figure.note}" if figure.note else ""
        unit = f" {figure.unit}" if figure.unit else ""
        lines.append(
            f"| {figure.name} | {_number(figure.published)}{unit} | {_number(figure.computed)}{unit} | "
            f"*{figure.label}*{note} | {verdict} |"
        )
    return "\n".join(lines)


def policies_table(policies: Sequence[Policy]) -> str:
    """Markdown; the first row is what was published."""
    base = policies[0].run.samples_per_s
    lines = [
        "| policy | samples/s | against the first | trainer waits | tokens not trained | staleness mean (max) | "
        "length bias (KS) | $ per 1,000 samples |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for policy in policies:
        found, (mean, worst) = policy.run, policy.run.staleness
        lines.append(
            f"| {policy.name} | {found.samples_per_s:.3f} | × {found.samples_per_s / base:.2f} | "
            f"{found.trainer_wait:.0%} | {found.wasted_share:.0%} | {mean:.1f} ({worst}) | "
            f"{found.length_bias:.3f} | {f'{found.dollars_per_1000:,.0f}' if found.dollars_per_1000 else '–'} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
