"""`[hooks]`: the keys for user functions in the life of a rollout and a group."""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator

from headway.config.section import Section, require_named

# key -> built-in names, the default first; a user's own is module:function
HOOKS: dict[str, tuple[str, ...]] = {
    "rollout": ("single_turn",),
    "reward": ("verifier",),
    "group_meta": ("rewards",),
    "is_valid_group": ("all",),
    "filter_item": ("all",),
    "normalize_group": ("identity",),
    "pad_group": ("none", "repeat"),
    "logging": ("none",),
}


class HooksConfig(Section):
    """Functions of your own, `module:function`, in the life of a rollout and a group: docs/hooks.md. Functions of the
    objective are set by `algorithm.advantage` and `algorithm.loss`, that of a verifier by `verifier.name`."""

    rollout: str = "single_turn"  # makes an attempt: a response to a prompt
    reward: str = "verifier"  # replaces a verified rollout's reward by another number to learn from
    group_meta: str = "rewards"  # statistics of a finished group, for the ledger
    is_valid_group: str = "all"  # whether a group may be trained
    filter_item: str = "all"  # whether a rollout stays in its group
    normalize_group: str = "identity"  # maps the rewards of the remaining rollouts before advantages are computed
    pad_group: str = "none"  # none | repeat | module:function: chooses rollouts that replace the removed ones
    logging: str = "none"  # called with every line of the ledger

    @field_validator(*HOOKS)
    @classmethod
    def _require_known_name(cls, value: str, info: ValidationInfo) -> str:
        return require_named(value, HOOKS[str(info.field_name)])
