"""Builds training batches from finished groups: samples with shaped rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headway.algorithms.advantages import resolve
from headway.algorithms.groups.rewards import credits_of, overlong_penalty, rewards_of_turns
from headway.config.objective.rules import Rules
from headway.config.schema import GAE, AlgorithmConfig, Experiment
from headway.records.counted import sampled_tokens
from headway.records.rollout import Branch, FinishedGroup, Rollout, Sample
from headway.records.tokens import TokenMask
from headway.records.training import DrawnDemonstration, TrainBatch

_OVERLONG_PENALTY = 1.0  # reward taken from a response at the limit, over whose last fifth it rises (DAPO, 2025)

_Sequence = TypeVar("_Sequence", Rollout, Branch)


def build_batch(
    step: int,
    groups: Sequence[FinishedGroup],
    experiment: Experiment,
    demonstrations: Sequence[DrawnDemonstration] = (),
) -> TrainBatch:
    """Build the batch of ``step``: samples of the valid members, in admission order, with the rule of their source and
    its advantages, which are compared with those of samples under the same rule; with a critic their rewards.

    Responses cut at the length limit are scored as they are, masked (they count for their group's advantages and carry
    no loss) or penalised, according to ``algorithm.overlong``. The copies of a member of a padded group are adjacent
    and share its weight. Pure: the decisions of filters and hooks are stored in the rollouts, so a replay after a crash
    builds the identical batch.
    """
    rules, rollouts = experiment.rules, [rollout for group in groups for rollout in group.valid]
    numbers = [rules.number(group.group.task.source) for group in groups for _ in group.valid]
    advantages_s: list[tuple[float, ...]] = [()] * len(rollouts)
    for number in dict.fromkeys(numbers):
        positions = [position for position, other in enumerate(numbers) if other == number]
        of_rule = advantages_of_turns([rollouts[i] for i in positions], experiment, rules.algorithms[number])
        for position, advantages in zip(positions, of_rule, strict=True):
            advantages_s[position] = advantages
    overlong, has_critic = experiment.algorithm.overlong, experiment.algorithm.advantage == GAE
    samples: list[Sample] = []
    for rollout, number, advantages in zip(rollouts, numbers, advantages_s, strict=True):
        is_masked = overlong == "mask" and rollout.truncated
        rewards = rewards_of_turns(rollout, shaped_reward(rollout, experiment)) if has_critic else ()
        sample = Sample(
            rollout=_masked_rollout(rollout) if is_masked else rollout,
            advantage=advantages[0] if len(advantages) == 1 else _mean(advantages, rollout.turn_ends),
            turn_advantages=advantages if len(advantages) > 1 else (),
            weight=1.0 / rollout.copies,
            rule=number,
            imitates=rules.algorithms[number].environment_coefficient > 0 and not is_masked,
            rewards=tuple(rewards),
            bootstraps=overlong == "bootstrap" and rollout.truncated,
        )
        samples += [sample] * rollout.copies
    return TrainBatch(step=step, samples=tuple(samples), demonstrations=tuple(demonstrations))


def useful_samples(samples: Sequence[Sample], rules: Rules[AlgorithmConfig]) -> int:
    """Count the ``samples`` that can have a gradient: with a loss token and an advantage that isn't 0, or trained by
    more than their reward.

    The copies of a padded member count once."""
    useful = (s for s in samples if _has_signal(s, rules.algorithms[s.rule]))
    return round(sum(sample.weight for sample in useful))


def _has_signal(sample: Sample, rule: AlgorithmConfig) -> bool:
    if sample.imitates and _has_observations(sample.rollout):
        return True
    has_advantage = bool(sample.rewards) or any(sample.turn_advantages or (sample.advantage,))
    by_reward = rule.policy_coefficient > 0 and has_advantage
    return (by_reward or bool(rule.teacher)) and _loss_tokens(sample.rollout) > 0


def trains_without_reward(rollouts: Sequence[Rollout], rule: AlgorithmConfig) -> bool:
    """Whether ``rollouts`` of equal rewards are of use all the same: a critic compares them with its values, a teacher
    with its distribution, or what a tool answered trains one of them."""
    return (
        rule.advantage == GAE
        or bool(rule.teacher)
        or (rule.environment_coefficient > 0 and any(map(_has_observations, rollouts)))
    )


def _has_observations(rollout: Rollout) -> bool:
    return any(sequence.observations for sequence in rollout.sequences)


def advantages_of_turns(
    rollouts: Sequence[Rollout], experiment: Experiment, algorithm: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Compute the advantages of each rollout by the rule ``algorithm``: one for all its tokens, or one for each turn.

    There is one for each turn if `algorithm.turn_discount` is set and the rollout has turn rewards. Its returns are
    then compared with those of all turns of its group."""
    credits_s = [credits_of(r, shaped_reward(r, experiment), algorithm.turn_discount) for r in rollouts]
    groups_c = np.array([r.group for r, turns in zip(rollouts, credits_s, strict=True) for _ in turns], dtype=np.int64)
    credits_c = np.array([credit for turns in credits_s for credit in turns], dtype=np.float64)
    tokens_c = np.array(
        [_loss_tokens(r) for r, turns in zip(rollouts, credits_s, strict=True) for _ in turns], dtype=np.int64
    )
    rule = resolve(algorithm.advantage, algorithm.parameters.k, tokens_c)
    advantages_c = iter(rule(credits_c, groups_c).tolist())
    return [tuple(next(advantages_c) for _ in turns) for turns in credits_s]


def shaped_reward(rollout: Rollout, experiment: Experiment) -> float:
    """Return the reward for advantages: the hooks' result, or the verifier's reward plus `length_cost`."""
    if rollout.trained_reward is not None:
        return rollout.trained_reward
    return rollout.reward + length_cost(rollout, experiment)


def length_cost(rollout: Rollout, experiment: Experiment) -> float:
    """Return the penalty added to a reward for its response's length: 0 or negative, in units of reward."""
    algorithm, limit = experiment.algorithm, experiment.rollout.max_response_tokens
    if algorithm.overlong != "penalty":
        return 0.0
    return _OVERLONG_PENALTY * overlong_penalty(len(rollout.response_ids), limit, max(1, limit // 5))


def _mean(advantages_t: Sequence[float], ends_t: Sequence[int]) -> float:
    """Average advantages per turn over tokens."""
    tokens_t = np.diff(ends_t, prepend=0)
    return float(np.dot(advantages_t, tokens_t) / max(1, tokens_t.sum()))


def _loss_tokens(rollout: Rollout) -> int:
    """Count the tokens of the rollout that carry loss."""
    return sum(sampled_tokens(sequence.response_mask) for sequence in rollout.sequences)


def _masked_rollout(rollout: Rollout) -> Rollout:
    """Mask all loss tokens of a truncated rollout, its branches' too: the cut is at its last call."""
    branches = tuple(_masked(branch) for branch in rollout.branches)
    return msgspec.structs.replace(_masked(rollout), branches=branches)


def _masked(sequence: _Sequence) -> _Sequence:
    return msgspec.structs.replace(sequence, response_mask=TokenMask.filled(False, len(sequence.response_ids)))
