"""Advantages inside one group: G rewards in, G advantages out.

Legend of shape suffixes: ``_g`` one value per member of the group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headway.runtime.imports import import_function

FloatArray = NDArray[np.float64]
Advantage = Callable[[FloatArray], FloatArray]

STD_FLOOR = 1e-6  # added to the standard deviation, in units of reward


def group_mean(rewards_g: FloatArray) -> FloatArray:
    """``r - mean(r)``: GRPO without its division by the deviation (Dr. GRPO, 2025). Shape [G] -> [G]."""
    rewards_g = np.asarray(rewards_g, dtype=np.float64)
    if _uniform(rewards_g):
        return np.zeros_like(rewards_g)
    return rewards_g - rewards_g.mean()


def group_mean_std(rewards_g: FloatArray) -> FloatArray:
    """``(r - mean(r)) / (std(r) + 1e-6)``, population deviation (GRPO, 2024, Eq. 3). Shape [G] -> [G]."""
    rewards_g = np.asarray(rewards_g, dtype=np.float64)
    if _uniform(rewards_g):
        return np.zeros_like(rewards_g)
    return (rewards_g - rewards_g.mean()) / (rewards_g.std() + STD_FLOOR)


def leave_one_out(rewards_g: FloatArray) -> FloatArray:
    """``r_i - mean of the others``: an unbiased baseline (RLOO, 2024). Shape [G] -> [G]."""
    rewards_g = np.asarray(rewards_g, dtype=np.float64)
    if _uniform(rewards_g):
        return np.zeros_like(rewards_g)
    members = rewards_g.size
    return (rewards_g - rewards_g.mean()) * (members / (members - 1))


def _uniform(rewards_g: FloatArray) -> bool:
    """No member differs: no signal. Exactly zero then, not the rounding error of the mean."""
    return rewards_g.size < 2 or bool(np.all(rewards_g == rewards_g[0]))


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}


def resolve(name: str) -> Advantage:
    """The advantage named ``name``, or the user's own ``module:function`` (``rewards [G] -> advantages [G]``).

    Raises ConfigurationError when there is no such name, module or function.
    """
    known = ADVANTAGES.get(name)
    return known if known is not None else import_function(name, "algorithm.advantage", ADVANTAGES)


def advantages_of(function: Advantage, rewards: list[float]) -> list[float]:
    """Apply ``function`` to one group and hold it to its contract.

    Raises ValueError when it returns another shape or a non-finite value: a user's function is a boundary.
    """
    rewards_g = np.asarray(rewards, dtype=np.float64)
    advantages_g = np.asarray(function(rewards_g), dtype=np.float64)
    if advantages_g.shape != rewards_g.shape:
        raise ValueError(f"advantage function returned shape {advantages_g.shape} for {rewards_g.shape} rewards")
    if not np.all(np.isfinite(advantages_g)):
        raise ValueError(f"advantage function returned non-finite values for rewards {rewards}")
    return advantages_g.tolist()
