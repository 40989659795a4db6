"""The hooks on finished rollouts and groups: contracts, defaults, and the boundary to user code.

They are called in this order, in the orchestrator's event loop (milliseconds: slow work belongs in a verifier).

| hook | called with | returns |
| --- | --- | --- |
| reward | group, rollout, response as text | a finite number in the reward's place |
| group_meta | group, all rollouts | {name: finite number} |
| is_valid_group | group, all rollouts | keep, or (keep, why) |
| filter_item | group, one valid rollout | keep, or (keep, why) |
| normalize_group | group, valid rollouts, their rewards [K] | [K] finite numbers |
| pad_group | group, valid rollouts | members to repeat, at most as many as have left |

All are pure: the same arguments give the same result. Records are immutable; `Rollout.reward` stays the verifier's,
independent of what hooks return. A hook that raises or breaks its contract is reported as a `HookFailed` that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.advantages import finite_numbers
from headway.config.hooks import HOOKS, HooksConfig
from headway.records.rollout import Group, Rollout
from headway.runtime.hooks import Hook, finite_number, load_hook, quoted

FloatArray = NDArray[np.float64]
LONGEST_REASON = 60  # characters of a user's reason that are kept
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "reward": ("group", "rollout", "response"),
    "group_meta": ("group", "rollouts"),
    "is_valid_group": ("group", "rollouts"),
    "filter_item": ("group", "rollout"),
    "normalize_group": ("group", "rollouts", "rewards"),
    "pad_group": ("group", "rollouts"),
}


# --- defaults --------------------------------------------------------------------------------------------


def verifier_reward(group: Group, rollout: Rollout, response: str) -> float:
    """The verifier's reward, unchanged."""
    return rollout.reward


def reward_statistics(group: Group, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of valid members, and minimum, mean and maximum of their rewards; only the share if none is valid."""
    rewards = [r.reward for r in rollouts if r.valid]
    share_statistics = {"valid_share": len(rewards) / len(rollouts) if rollouts else 0.0}
    if not rewards:
        return share_statistics
    return share_statistics | {
        "reward_min": min(rewards),
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_max": max(rewards),
    }


def every_group(group: Group, rollouts: Sequence[Rollout]) -> bool:
    """Keep every group with enough members (`queue.min_valid_group_ratio` is checked before)."""
    return True


def every_item(group: Group, rollout: Rollout) -> bool:
    """Keep every member regardless of its reward: rewards above 1 and negative ones are valid."""
    return True


def identity(group: Group, rollouts: Sequence[Rollout], rewards: FloatArray) -> FloatArray:
    """Return rewards unchanged: advantages are differences, and the default divides by their deviation."""
    return rewards


def no_padding(group: Group, rollouts: Sequence[Rollout]) -> tuple[int, ...]:
    """Pad with no copies: groups keep their size."""
    return ()


def repeat_members(group: Group, rollouts: Sequence[Rollout]) -> list[int]:
    """Repeat the valid members in order, cyclically, up to the group's size.

    Example, size 6 of which members 1, 4 and 5 are valid: pads with 1, 4 and 5; each copy has weight 1/2."""
    members = [rollout.member for rollout in rollouts]
    return [members[i % len(members)] for i in range(group.size - len(members))] if members else []


DEFAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "reward": {"verifier": verifier_reward},
    "group_meta": {"rewards": reward_statistics},
    "is_valid_group": {"all": every_group},
    "filter_item": {"all": every_item},
    "normalize_group": {"identity": identity},
    "pad_group": {"none": no_padding, "repeat": repeat_members},
}


# --- the boundary ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupHooks:
    """The hooks of an experiment, as functions that keep their contracts or raise HookFailed."""

    reward: Hook
    group_meta: Hook
    is_valid_group: Hook
    filter_item: Hook
    normalize_group: Hook
    pad_group: Hook

    def default(self, short: str) -> bool:
        """Return whether the hook is the default, which changes nothing and needs no call."""
        return getattr(self, short).name == HOOKS[short][0]

    def reward_of(self, group: Group, rollout: Rollout, response: str) -> float:
        """Return the reward to train on instead of ``rollout.reward``, a finite number."""
        returned = self.reward(group, rollout, response)
        reward = finite_number(returned)
        if reward is None:
            rollout_text = f"for rollout {rollout.rollout_id}"
            raise self.reward.failed(f"returned {quoted(returned)} {rollout_text}: a finite number is needed")
        return reward

    def meta_of(self, group: Group, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return statistics of a group by name. ``rollouts``: all its members."""
        returned = self.group_meta(group, tuple(rollouts))
        if not isinstance(returned, Mapping):
            raise self.group_meta.failed(f"returned {quoted(returned)}: a dictionary of numbers is needed")
        number_by_name: dict[str, float] = {}
        for name, value in cast("Mapping[object, object]", returned).items():
            number = finite_number(value)
            if not isinstance(name, str) or number is None:
                rule = "names are text, values finite numbers"
                raise self.group_meta.failed(f"returned {quoted(name)}: {quoted(value)} in its dictionary: {rule}")
            number_by_name[name] = number
        return number_by_name

    def group_refusal(self, group: Group, rollouts: Sequence[Rollout]) -> str:
        """Return the reason why a group may not be trained, or "" when it may. ``rollouts``: all its members."""
        return _refusal(self.is_valid_group, self.is_valid_group(group, tuple(rollouts)))

    def item_refusal(self, group: Group, rollout: Rollout) -> str:
        """Return the reason why a rollout leaves its group, or "" when it stays."""
        return _refusal(self.filter_item, self.filter_item(group, rollout))

    def normalized(self, group: Group, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        """Return the rewards to compute advantages from, one for each of ``rollouts``, the valid members."""
        rewards_g = np.array(rewards, dtype=np.float64)
        returned = self.normalize_group(group, tuple(rollouts), rewards_g.copy())
        return finite_numbers(self.normalize_group, returned, rewards_g).tolist()

    def copies(self, group: Group, rollouts: Sequence[Rollout]) -> dict[int, int]:
        """Return the copies of each valid member in the batch, by member: 1, and 1 more for each slot it pads.

        Sample weights are divided by this, so that the loss of a member counts once."""
        hook, member_numbers = self.pad_group, [rollout.member for rollout in rollouts]
        returned = hook(group, tuple(rollouts))
        copies_by_member = dict.fromkeys(member_numbers, 1)
        if not isinstance(returned, Sequence) or isinstance(returned, str):
            raise hook.failed(f"returned {quoted(returned)}: a list of members is needed")
        padding = cast("Sequence[object]", returned)
        free_slots = group.size - len(member_numbers)
        if len(padding) > free_slots:
            raise hook.failed(f"returned {len(padding)} members to fill {free_slots} slots of a group of {group.size}")
        for member in padding:
            if isinstance(member, bool) or not isinstance(member, Integral) or int(member) not in copies_by_member:
                raise hook.failed(f"returned member {quoted(member)}: valid: {member_numbers}")
            copies_by_member[int(member)] += 1
        return copies_by_member


def resolve_hooks(hooks: HooksConfig) -> GroupHooks:
    """Load the hooks that ``hooks`` names. Raises ConfigurationError for one that can't be imported or called so."""
    return GroupHooks(**{short: resolve_hook(short, getattr(hooks, short)) for short in ARGUMENTS})


def resolve_hook(short: str, name: str) -> Hook:
    """Load the hook ``hooks.<short>``, a default or the user's ``module:function``. Raises ConfigurationError."""
    return load_hook(f"hooks.{short}", name, DEFAULTS[short], ARGUMENTS[short])


def _refusal(hook: Hook, result: object) -> str:
    keeps: object = result
    reason: object = ""
    if isinstance(result, tuple):
        pair = cast("tuple[object, ...]", result)
        keeps, reason = pair if len(pair) == 2 else (None, "")
    if not isinstance(keeps, (bool, np.bool_)) or not isinstance(reason, str):
        raise hook.failed(f"returned {quoted(cast('object', result))}: valid: True, False or (True or False, reason)")
    if keeps:
        return ""
    return "user:" + (" ".join(reason.split())[:LONGEST_REASON] or hook.key.removeprefix("hooks."))
