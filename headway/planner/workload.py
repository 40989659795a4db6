"""A scenario's workload: lengths, turns, latencies, verdicts. Every draw is determined by a key, without a state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headway.planner.quantities import Quantity, mix, normal, uniform
from headway.planner.scenario import Scenario
from headway.records.counted import CountedTokens
from headway.records.generation import GenerationRequest
from headway.records.task import Task

_TASK, _PROMPT, _SHARED, _TURNS, _TURN, _REPLY, _TOOL, _SOLVED, _RATE, _KIND = range(10)  # purposes of random numbers


@dataclass(frozen=True, slots=True)
class TurnProfile:
    """A model call, and the environment's reply to it."""

    tokens: int  # sampled tokens
    reply_tokens: int = 0  # tokens of the reply, at least 1; 0 for the last turn, which has no reply
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The turns of a rollout that isn't interrupted."""

    turns: tuple[TurnProfile, ...]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens + turn.reply_tokens for turn in self.turns)


def numbered_tasks(count: int) -> list[Task]:
    """The tasks of a scenario with ``count`` tasks."""
    return [Task(task_id=f"{index:016x}", prompt=str(index)) for index in range(count)]


class WorkloadModel:
    """Draws of one scenario and seed. ``step``: returns the present training step, for drift and learning."""

    def __init__(self, scenario: Scenario, step: Callable[[], int]) -> None:
        self._scenario = scenario
        self._workload = scenario.workload
        self._seed = scenario.run.seed
        self._step = step
        correlation = self._workload.group_correlation
        self._group_weight, self._member_weight = math.sqrt(correlation), math.sqrt(1.0 - correlation)

    def prompt(self, index: int) -> CountedTokens:
        """The prompt of the task with this index."""
        key = mix(self._seed, _PROMPT, index)
        token_count = self._draw(self._workload.prompt_tokens, "workload.prompt_tokens", key)
        return CountedTokens.of(max(1, round(token_count)), seed=mix(self._seed, _TASK, index))

    def plan(self, request: GenerationRequest) -> Plan:
        """The plan of the rollout that ``request`` begins; depends on its seed, its group and the present step."""
        key = mix(self._seed, request.sampling.seed)
        shared_normal = normal(mix(self._seed, _SHARED, request.priority)) if self._group_weight else 0.0
        if not self._workload.multi_turn:
            normal_score = self._score(key, shared_normal)
            tokens = self._at_normal_score(self._workload.response_tokens, "workload.response_tokens", normal_score)
            return Plan(turns=(TurnProfile(tokens=max(1, round(tokens))),))
        normal_score = self._score(mix(key, _TURNS), shared_normal)
        count = max(1, round(self._at_normal_score(self._workload.turns, "workload.turns", normal_score)))
        return Plan(
            turns=tuple(self._turn(mix(key, _TURN, index), shared_normal, index == count - 1) for index in range(count))
        )

    def solved(self, task: Task, seed: int) -> bool:
        """Whether the rollout with this sampling seed solves ``task``, if it is verified now."""
        workload, index, present_step = self._workload, int(task.prompt), self._step()
        trivial_share = self._scenario.drifted("workload.trivial_share", present_step, workload.trivial_share)
        impossible_share = self._scenario.drifted("workload.impossible_share", present_step, workload.impossible_share)
        task_draw = uniform(mix(self._seed, _KIND, index))
        if task_draw < trivial_share:
            return True
        if task_draw < trivial_share + impossible_share:
            return False
        solve_rate = workload.solve_rate.draw(mix(self._seed, _RATE, index))
        if 0.0 < solve_rate < 1.0 and workload.learning:
            log_odds = math.log(solve_rate / (1.0 - solve_rate)) + workload.learning * present_step
            solve_rate = 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, log_odds))))
        return uniform(mix(self._seed, _SOLVED, seed)) < solve_rate

    def verify_s(self, seed: int) -> float:
        return max(0.0, self._draw(self._workload.verify_s, "workload.verify_s", mix(self._seed, seed)))

    def _turn(self, key: int, shared: float, last: bool) -> TurnProfile:
        workload = self._workload
        normal_score = self._score(key, shared)
        token_count = max(1, round(self._at_normal_score(workload.turn_tokens, "workload.turn_tokens", normal_score)))
        if last:
            return TurnProfile(tokens=token_count)
        reply_tokens = self._draw(workload.reply_tokens, "workload.reply_tokens", mix(key, _REPLY))
        tool_s = self._draw(workload.tool_s, "workload.tool_s", mix(key, _TOOL))
        return TurnProfile(tokens=token_count, reply_tokens=max(1, round(reply_tokens)), tool_s=max(0.0, tool_s))

    def _score(self, key: int, shared: float) -> float:
        """A standard normal score; scores of one group have the scenario's correlation (a Gaussian copula)."""

        return self._group_weight * shared + self._member_weight * normal(key)

    def _draw(self, quantity: Quantity, name: str, key: int) -> float:
        return self._at_normal_score(quantity, name, 0.0 if quantity.fixed else normal(key))

    def _at_normal_score(self, quantity: Quantity, name: str, normal_score: float) -> float:
        present_step = self._step()
        drawn_value = quantity.at_normal(normal_score, present_step)
        return drawn_value * self._scenario.drifted(name, present_step) if self._scenario.drift else drawn_value
