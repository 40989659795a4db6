"""A verifier whose reward is the weighted sum of other verifiers' rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.scorers import Scorer, longest_s, score_each
from headway.rollout.verification.verdicts import failed_verdict


@dataclass(frozen=True, kw_only=True)
class Part:
    """A verifier in the sum, with its weight."""

    label: str
    scorer: Scorer
    weight: float


@dataclass(frozen=True, kw_only=True)
class WeightedScorer:
    """Scores with every part: the reward is the sum of weight x the part's reward; the part ``solved_by`` sets solved.

    The failure of a part, infrastructure failures included, fails the response: there is no sum without it. Rewards by
    turn are summed turn by turn, and must then come from every part.
    """

    parts: tuple[Part, ...]
    solved_by: str
    concurrency: int = 1  # a lower bound: parts may score more responses at once

    @property
    def longest_s(self) -> float:
        return sum(longest_s(part.scorer) for part in self.parts)

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.score_all(task, (response,))[0]

    def score_all(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict per response, in order; parts that can score several responses at once do so."""
        verdicts_by_part = [score_each(part.scorer, task, responses) for part in self.parts]
        return [self._sum([verdicts[i] for verdicts in verdicts_by_part]) for i in range(len(responses))]

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        costs: dict[str, Any] = {
            "judge_tokens": sum(verdict.judge_tokens for verdict in verdicts),
            "judge_cost": sum(verdict.judge_cost for verdict in verdicts),
        }
        pairs = list(zip(self.parts, verdicts, strict=True))
        for part, verdict in pairs:
            if verdict.failure is not None:
                failure = msgspec.structs.replace(verdict.failure, cause=f"{part.label}: {verdict.failure.cause}")
                return Verdict(reward=0.0, solved=False, failure=failure, **costs)
        counts = {len(verdict.turn_rewards) for verdict in verdicts}
        if len(counts) > 1:
            counts_text = ", ".join(f"{part.label} {len(verdict.turn_rewards)}" for part, verdict in pairs)
            return failed_verdict(f"rewards by turn can't be added: {counts_text}")
        return Verdict(
            reward=sum(part.weight * verdict.reward for part, verdict in pairs),
            solved=next(verdict.solved for part, verdict in pairs if part.label == self.solved_by),
            turn_rewards=tuple(
                sum(part.weight * verdict.turn_rewards[turn] for part, verdict in pairs) for turn in range(counts.pop())
            ),
            detail={part.label: {**verdict.detail, "reward": verdict.reward} for part, verdict in pairs},
            **costs,
        )
