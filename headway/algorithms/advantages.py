"""Advantages from rewards, inside each group or over the whole batch.

Legend of shape suffixes: ``_g`` one value per member of the group, ``_s`` per sample of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.runtime.hooks import Hook, load_hook, shown

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Advantage = Callable[[FloatArray], FloatArray]
BatchAdvantage = Callable[[FloatArray, IntArray], FloatArray]  # rewards [S], groups [S] -> advantages [S]

KEY = "algorithm.advantage"
STD_FLOOR = 1e-6  # added to the standard deviation, in units of reward


def group_mean(rewards_g: FloatArray) -> FloatArray:
    """``r - mean(r)``: GRPO without its division by the deviation (Dr. GRPO, 2025). Shape [G] -> [G]. Of equal rewards
    exactly 0, not the rounding error of the mean."""
    rewards_g = np.asarray(rewards_g, dtype=np.float64)
    if rewards_g.size < 2 or np.all(rewards_g == rewards_g[0]):
        return np.zeros_like(rewards_g)
    return rewards_g - rewards_g.mean()


def group_mean_std(rewards_g: FloatArray) -> FloatArray:
    """``(r - mean(r)) / (std(r) + 1e-6)``, population deviation (GRPO, 2024, Eq. 3). Shape [G] -> [G]."""
    centred_g = group_mean(rewards_g)
    return centred_g / (np.std(rewards_g, dtype=np.float64) + STD_FLOOR) if centred_g.any() else centred_g


def leave_one_out(rewards_g: FloatArray) -> FloatArray:
    """``r_i - mean of the others``: an unbiased baseline (RLOO, 2024). Shape [G] -> [G]."""
    members = len(rewards_g)
    return group_mean(rewards_g) * (members / max(1, members - 1))


def batch_mean_std(rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    """``(r - mean) / (std + 1e-6)`` over all samples of the batch, whatever their group, so groups of one member carry
    signal too (REINFORCE++, 2025). Shapes [S], [S] -> [S]."""
    return group_mean_std(rewards_s)


def group_mean_batch_std(rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    """``r - mean of its group``, divided by (the batch's deviation of these differences + 1e-6): REINFORCE++ with
    baseline, 2025. Groups of one member get 0. Shapes [S], [S] -> [S]."""
    centred_s = _by_group(group_mean, rewards_s, groups_s)
    return centred_s / (centred_s.std() + STD_FLOOR) if centred_s.any() else centred_s


def _by_group(rule: Advantage, rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    advantages_s = np.zeros(len(rewards_s))
    for group in np.unique(groups_s):
        members = groups_s == group
        advantages_s[members] = rule(rewards_s[members])
    return advantages_s


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
BATCH_ADVANTAGES: dict[str, BatchAdvantage] = {
    "batch_mean_std": batch_mean_std,
    "group_mean_batch_std": group_mean_batch_std,
}


def resolve(name: str) -> BatchAdvantage:
    """The advantage named ``name``, or the user's own ``module:function`` (``rewards [G] -> advantages [G]``), as a
    function of a whole batch. Raises ConfigurationError when there is no such name, module or function.
    """
    over_batch = BATCH_ADVANTAGES.get(name)
    if over_batch is not None:
        return over_batch
    rule = load_hook(KEY, name, ADVANTAGES, ("rewards_g",))
    return partial(_by_group, partial(advantages_of, rule))


def advantages_of(rule: Hook, rewards_g: FloatArray) -> FloatArray:
    """Apply ``rule`` to one group, [G] -> [G], and check its result against the contract.

    Raises HookFailed when the rule raises, or returns another shape or a value that isn't finite. That ends the run:
    without advantages there is no batch.
    """
    return finite_numbers(rule, rule(rewards_g.copy()), rewards_g)


def finite_numbers(rule: Hook, result: object, rewards_g: FloatArray) -> FloatArray:
    """The result of a hook on ``rewards_g`` [G] as numbers [G]. Raises HookFailed unless it is one finite number for
    each."""
    try:
        found_g = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError):
        raise rule.failed(f"returned {shown(result)}: {len(rewards_g)} numbers are needed") from None
    if found_g.shape != rewards_g.shape:
        shape = list(found_g.shape)
        raise rule.failed(f"returned shape {shape} for {len(rewards_g)} rewards: one number each is needed")
    if not np.isfinite(found_g).all():
        raise rule.failed(f"returned {shown(found_g.tolist())} for {shown(rewards_g.tolist())}: not all finite")
    return found_g
