"""Computes advantages from rewards, inside each group or over the whole batch.

Legend of shape suffixes: ``_g`` one value per member of the group, ``_s`` per sample of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.config.schema import GAE
from headway.runtime.hooks import Hook, load_hook, quoted

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Advantage = Callable[[FloatArray], FloatArray]
BatchAdvantage = Callable[[FloatArray, IntArray], FloatArray]  # rewards [S], groups [S] -> advantages [S]

KEY = "algorithm.advantage"
STD_FLOOR = 1e-6  # added to the standard deviation, in units of reward


def group_mean(rewards_g: FloatArray) -> FloatArray:
    """``r - mean(r)``: GRPO without its division by the deviation (Dr. GRPO, 2025). Shape [G] -> [G].

    Equal rewards give exactly 0, not the rounding error of the mean."""
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


def length_weighted(rewards_g: FloatArray, tokens_g: IntArray) -> FloatArray:
    """``r - sum(l r) / sum(l)`` with l the sampled tokens of each response. Shapes [G], [G] -> [G].

    It is the baseline of least variance if the squared gradient of a response grows with its length (OPO, 2025,
    arXiv:2505.23585)."""
    centred_g = group_mean(rewards_g)
    if not centred_g.any() or not tokens_g.any():
        return centred_g
    return rewards_g - np.average(rewards_g, weights=tokens_g)


def pass_at_k(rewards_g: FloatArray, k: int) -> FloatArray:
    """Analytic Pass@k advantages (Pass@k training, 2025, arXiv:2508.10751, section 2.4, for rewards of 0 and 1).

    A member's advantage is the mean of ``(best reward of the subset - mean) / (std + 1e-6)`` over all subsets of k
    members that contain it, with mean and std over all subsets of k. Shape [G] -> [G]; zeros where all subsets have the
    same best, as they do with k >= G.

    Example, one of four solved, k = 2: half the pairs contain it, so mean and std are 0.5. The solved one gets
    (1 - 0.5) / 0.5 = 1, the others, in such a pair one time in three, (1 / 3 - 0.5) / 0.5 = -1 / 3.
    """
    rewards_g = np.asarray(rewards_g, dtype=np.float64)
    members, ascending_g = rewards_g.size, np.sort(rewards_g)
    if k >= members or ascending_g[k - 1] == ascending_g[-1]:
        return np.zeros_like(rewards_g)
    if k == 1:
        return group_mean_std(rewards_g)
    # Chance of each, in ascending order, to be the best of a subset.
    chance_g = np.array([math.comb(below, k - 1) / math.comb(members, k) for below in range(members)])
    mean = chance_g @ ascending_g
    std = math.sqrt(chance_g @ (ascending_g - mean) ** 2)
    # The same chance for each of the others, in subsets that contain the member.
    chance_o = [math.comb(below, k - 2) / math.comb(members - 1, k - 1) for below in range(members - 1)]
    places_g = np.searchsorted(ascending_g, rewards_g)
    others_go = np.stack([np.delete(ascending_g, position) for position in places_g])
    best_g = np.maximum(others_go, rewards_g[:, None]) @ np.array(chance_o)
    return (best_g - mean) / (std + STD_FLOOR)


def batch_mean_std(rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    """``(r - mean) / (std + 1e-6)`` over all samples of the batch (REINFORCE++, 2025). Shapes [S], [S] -> [S].

    Groups are ignored, so groups of one member carry signal too."""
    return group_mean_std(rewards_s)


def group_mean_batch_std(rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    """``r - mean of its group``, divided by (batch deviation of these differences + 1e-6). Shapes [S], [S] -> [S].

    This is REINFORCE++ with baseline (2025). Groups of one member get 0."""
    centred_s = _by_group(group_mean, groups_s, rewards_s)
    return centred_s / (centred_s.std() + STD_FLOOR) if centred_s.any() else centred_s


def left_to_critic(rewards_s: FloatArray, groups_s: IntArray) -> FloatArray:
    """Zeros [S]: with a critic the trainer computes advantages (`returns.gae`), when it has the tokens' values."""
    return np.zeros_like(rewards_s)


def _by_group(rule: Callable[..., FloatArray], groups_s: IntArray, *values_s: FloatArray | IntArray) -> FloatArray:
    """Apply ``rule`` to each group's part of ``values_s``, arrays [S]. Shape [S]."""
    advantages_s = np.zeros(len(groups_s))
    for group in np.unique(groups_s):
        is_member_s = groups_s == group
        advantages_s[is_member_s] = rule(*(values[is_member_s] for values in values_s))
    return advantages_s


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
CONTEXT_ADVANTAGES = ("length_weighted", "pass_at_k")  # also inside a group; they receive more than its rewards
BATCH_ADVANTAGES: dict[str, BatchAdvantage] = {
    "batch_mean_std": batch_mean_std,
    "group_mean_batch_std": group_mean_batch_std,
    GAE: left_to_critic,
}


def resolve(name: str, k: int = 2, tokens_s: IntArray | None = None) -> BatchAdvantage:
    """Return the advantage ``name``, or the user's ``module:function``, as a function of a whole batch.

    The user's function maps ``rewards [G]`` to ``advantages [G]``. ``k``: of `pass_at_k`. ``tokens_s``: sampled tokens
    [S], of `length_weighted`. Raises ConfigurationError when there is no such name, module or function.
    """
    batch_rule = BATCH_ADVANTAGES.get(name)
    if batch_rule is not None:
        return batch_rule
    if name == "pass_at_k":
        return lambda rewards_s, groups_s: _by_group(partial(pass_at_k, k=k), groups_s, rewards_s)
    if name == "length_weighted":
        return lambda rewards_s, groups_s: _by_group(
            length_weighted, groups_s, rewards_s, np.ones_like(groups_s) if tokens_s is None else tokens_s
        )
    rule = load_hook(KEY, name, ADVANTAGES, ("rewards_g",))
    return lambda rewards_s, groups_s: _by_group(partial(advantages_of, rule), groups_s, rewards_s)


def advantages_of(rule: Hook, rewards_g: FloatArray) -> FloatArray:
    """Apply ``rule`` to one group, [G] -> [G], and check its result against the contract.

    Raises HookFailed when the rule raises, or returns another shape or a value that isn't finite. That ends the run:
    without advantages there is no batch.
    """
    return finite_numbers(rule, rule(rewards_g.copy()), rewards_g)


def finite_numbers(rule: Hook, result: object, rewards_g: FloatArray) -> FloatArray:
    """Convert a hook's result on ``rewards_g`` [G] to numbers [G]. Raises HookFailed unless it is one finite
    number for each."""
    try:
        numbers_g = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError):
        raise rule.failed(f"returned {quoted(result)}: {len(rewards_g)} numbers are required") from None
    if numbers_g.shape != rewards_g.shape:
        shape = list(numbers_g.shape)
        raise rule.failed(f"returned shape {shape} for {len(rewards_g)} rewards: one number for each is required")
    if not np.isfinite(numbers_g).all():
        raise rule.failed(f"returned {quoted(numbers_g.tolist())} for {quoted(rewards_g.tolist())}: not all finite")
    return numbers_g
