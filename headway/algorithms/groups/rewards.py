"""Reward arithmetic: overlong penalty, returns from turn rewards, and a KL penalty inside the reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.records.rollout import Rollout, Sample


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, 2025, Eq. 13).

    It is 0 up to ``limit - buffer`` response tokens, then falls linearly to -1 at ``limit``.

    Example, limit 100 and buffer 20: 80 tokens cost 0, 90 cost -0.5, 100 cost -1.
    """
    excess_tokens = tokens - (limit - buffer)
    return -min(1.0, excess_tokens / buffer) if excess_tokens > 0 else 0.0


def reward_to_go(penalties_m: NDArray[np.float64], sequence_m: NDArray[np.int64]) -> NDArray[np.float64]:
    """[M] sum of the penalties of a token and of all later tokens of its sample.

    It is subtracted from the token's advantage (a penalty inside the reward: REINFORCE++, 2025). ``sequence_m``: the
    token's sample, ascending."""
    total_s = np.bincount(sequence_m, weights=penalties_m)
    before_m = np.cumsum(penalties_m) - penalties_m  # sum over all earlier tokens, earlier samples' included
    before_s = np.cumsum(total_s) - total_s
    return total_s[sequence_m] - (before_m - before_s[sequence_m])


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Discounted returns of a rollout's T turns, [T] -> [T]: ``R_t = r_t + discount x R_(t+1)``.

    Example, discount 0.5: rewards 1, 0, 4 give 1 + 0.5 x 2 = 2, 0 + 0.5 x 4 = 2 and 4.
    """
    reversed_returns: list[float] = []
    to_go = 0.0
    for reward in reversed(rewards):
        to_go = reward + discount * to_go
        reversed_returns.append(to_go)
    return reversed_returns[::-1]


def rewards_of_turns(rollout: Rollout, reward: float) -> list[float]:
    """Return the reward of each turn, or ``reward`` alone if the rollout has no turn rewards.

    ``reward``: the rollout's shaped reward; its difference from the verifier's is added to the last turn's reward.
    """
    if not rollout.turn_rewards:
        return [reward]
    *earlier_rewards, last_reward = rollout.turn_rewards
    return [*earlier_rewards, last_reward + reward - rollout.reward]


def credits_of(rollout: Rollout, reward: float, discount: float | None) -> list[float]:
    """Return the values from which a rollout's advantages are computed: one return to go per turn, or ``reward``, the
    shaped one, for all tokens if the rollout has no turn rewards or ``discount`` is None."""
    return [reward] if discount is None else returns_to_go(rewards_of_turns(rollout, reward), discount)


def reward_runs(sample: Sample) -> list[tuple[float, int]]:
    """Runs of (reward, response tokens) of a sample with rewards: each stands at the last loss token of its turn, or at
    the one before if the turn has none, and all other tokens have 0. A reward before the first loss token is dropped:
    nothing that the policy did led to it.

    Raises ValueError for a rollout with branches, whose tokens have no order, or with another number of turns."""
    rollout, tokens = sample.rollout, len(sample.rollout.response_ids)
    ends_t = rollout.turn_ends if len(sample.rewards) > 1 else (tokens,)
    if rollout.branches or len(ends_t) != len(sample.rewards):
        raise ValueError(
            f"rollout {rollout.rollout_id}: {len(sample.rewards)} rewards, {len(ends_t)} turns and "
            f"{len(rollout.branches)} branches; a critic takes one reward, or one for each turn, and no branches"
        )
    loss_indices = np.flatnonzero(np.array(rollout.response_mask, np.bool_))
    rewards_r = np.zeros(tokens)
    for reward, loss_tokens in zip(sample.rewards, np.searchsorted(loss_indices, ends_t).tolist(), strict=True):
        if loss_tokens:
            rewards_r[loss_indices[loss_tokens - 1]] += reward
    starts = [0, *(np.flatnonzero(np.diff(rewards_r)) + 1).tolist()] if tokens else []
    return list(zip(rewards_r[starts].tolist(), np.diff([*starts, tokens]).tolist(), strict=True))
