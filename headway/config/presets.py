"""Objectives by name: ``algorithm.preset`` stands for the keys below; keys the experiment sets itself win.

Each is the published form of a method, with its paper's numbers. Where the paper leaves one open, a common value stands
in, marked "ours". Keys that only concern a run's size (groups, lengths, learning rate) are left to the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

Preset = dict[str, dict[str, Any]]  # section -> key -> value

PRESETS: dict[str, Preset] = {
    # DeepSeekMath, 2024: group-normalised advantages, clip 0.2 both ways, a k3 penalty, each response's mean
    "grpo": {
        "algorithm": {
            "advantage": "group_mean_std",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "seq_mean_token_mean",
            "kl_coefficient": 0.04,
            "kl_estimator": "k3",
        },
        "queue": {"filter_zero_variance": False},
    },
    # Understanding R1-Zero-Like Training, 2025: no division by deviation or length
    "dr_grpo": {
        "algorithm": {
            "advantage": "group_mean",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "fixed",
        },
        "queue": {"filter_zero_variance": False},
    },
    # DAPO, 2025: clip-higher, dynamic sampling, token-level loss, soft overlong punishment
    "dapo": {
        "algorithm": {
            "advantage": "group_mean_std",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "overlong": "penalty",
        },
        "queue": {"filter_zero_variance": True},
    },
    # REINFORCE++, 2025: no group baseline; rewards normalised over the batch, k1 penalty inside the reward
    "reinforce++": {
        "algorithm": {
            "advantage": "batch_mean_std",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "token_mean",
            "kl_coefficient": 0.01,  # ours
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
        "queue": {"filter_zero_variance": False},
    },
    # the same paper's variant for reasoning: group mean subtracted, normalised over the batch, k2 penalty as a loss
    "reinforce++-baseline": {
        "algorithm": {
            "advantage": "group_mean_batch_std",
            "loss": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "token_mean",
            "kl_coefficient": 0.01,  # ours
            "kl_estimator": "k2",
        },
        "queue": {"filter_zero_variance": False},
    },
    # Back to Basics, 2024: leave-one-out baseline, plain policy gradient
    "rloo": {
        "algorithm": {"advantage": "leave_one_out", "loss": "reinforce", "aggregation": "seq_mean_token_sum"},
        "queue": {"filter_zero_variance": False},
    },
    # GSPO, 2025: sequence-level ratio, its narrow clip range
    "gspo": {
        "algorithm": {
            "advantage": "group_mean_std",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "seq_mean_token_mean",
        },
    },
    # MiniMax-M1, 2025: clipped importance weights, no token's gradient is removed; the bound, clip_high's default: ours
    "cispo": {
        "algorithm": {"advantage": "group_mean_std", "loss": "cispo", "aggregation": "token_mean"},
    },
    # AReaL, 2025: decoupled PPO
    "areal": {
        "algorithm": {
            "advantage": "group_mean_std",
            "loss": "decoupled_ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "token_mean",
            "proximal": "recompute",
        },
    },
}


def apply_preset(raw: Any) -> Any:
    """The mapping ``raw`` of an experiment file, with the missing keys of its ``algorithm.preset`` filled in. Invalid
    parts are returned as they are, for validation to report."""
    if not isinstance(raw, Mapping):
        return raw
    sections = dict(cast("Mapping[str, Any]", raw))
    algorithm = sections.get("algorithm")
    name = cast("Mapping[str, Any]", algorithm).get("preset") if isinstance(algorithm, Mapping) else None
    for section, keys in PRESETS.get(name, {}).items() if isinstance(name, str) else ():
        given = sections.get(section, {})
        if isinstance(given, Mapping):
            sections[section] = {**keys, **cast("Mapping[str, Any]", given)}
    return sections
