"""Reward arithmetic: overlong penalty, returns from turn rewards, and a KL penalty inside the reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.records.rollout import Rollout


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


def credits_of(rollout: Rollout, reward: float, discount: float | None) -> list[float]:
    """Return the values from which a rollout's advantages are computed: one return to go per turn, or ``reward``.

    It is ``reward`` alone, for all tokens, if the rollout has no turn rewards or ``discount`` is None.

    ``reward``: the rollout's shaped reward; its difference from the verifier's is added to the last turn's reward.
    """
    if discount is None or not rollout.turn_rewards:
        return [reward]
    *earlier_rewards, last_reward = rollout.turn_rewards
    return returns_to_go([*earlier_rewards, last_reward + reward - rollout.reward], discount)
