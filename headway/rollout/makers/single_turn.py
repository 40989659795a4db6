"""Rollouts of one prompt and one response."""

from __future__ import annotations

from headway.records.clients import Stop
from headway.records.environment import PartialRollout
from headway.records.rollout import Group, Rollout
from headway.rollout.makers.turn_sampler import ModelCall, TurnSampler


class SingleTurn:
    """Makes rollouts whose response is a single model call (`RolloutMaker`).

    Example: ``rollout = await single_turn.generate_member(group, 0)``, then
    ``[verdict] = await verifier.verify(group.task, [sampler.text(rollout)])`` unless ``rollout.failure`` is set,
    then ``apply_verdict(rollout, verdict, clock.now())``.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self._sampler = sampler

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> SingleTurn:
        return SingleTurn(self._sampler.for_evaluation(request_prefix, temperature))

    def stop(self, group: int, member: int, why: Stop) -> None:
        self._sampler.stop(group, member, why)

    def reached(self, group: int, member: int) -> int:
        return self._sampler.reached(group, member)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        model_call = ModelCall.first(group, member, parked)
        return self._sampler.refused(model_call) or await self._sampler.sample(model_call)
