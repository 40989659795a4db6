"""Objectives by name: ``algorithm.preset`` sets the keys below; keys that the experiment sets override them.

Each preset is the published form of a method, with its paper's numbers. Where the paper leaves one open, a common value
is used, marked "ours". Keys that only concern a run's size (groups, lengths, learning rate) are left to the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "reinforce++",
    "reinforce++-baseline",
    "rloo",
    "gpg",
    "gspo",
    "gmpo",
    "sapo",
    "cispo",
    "areal",
    "ppo",
    "vapo",
]
Sections = dict[str, dict[str, Any]]  # section -> key -> value


def _method(
    advantage: str,
    loss: str,
    aggregation: str,
    *,
    clip: tuple[float, float] | None = None,
    filter_zero_variance: bool | None = None,
    sections: Sections | None = None,
    **algorithm: Any,
) -> Sections:
    """Make the preset of a published method: these keys of the experiment, those of ``sections``, and no others."""
    settings = {"advantage": advantage, "loss": loss, "aggregation": aggregation, **algorithm}
    if clip is not None:
        settings["clip_low"], settings["clip_high"] = clip
    preset = {"algorithm": settings} | (sections or {})
    queue = {} if filter_zero_variance is None else {"queue": {"filter_zero_variance": filter_zero_variance}}
    return preset | queue


def _plain_ppo(advantage: str, aggregation: str, **algorithm: Any) -> Sections:
    """Make the preset of a method that clips at 0.2 both ways and keeps groups whose rewards are all equal."""
    return _method(advantage, "ppo_clip", aggregation, clip=(0.2, 0.2), filter_zero_variance=False, **algorithm)


PRESETS: dict[str, Sections] = {
    # DeepSeekMath, 2024: group-normalised advantages, clip 0.2 both ways, a k3 penalty, each response's mean
    "grpo": _plain_ppo("group_mean_std", "seq_mean_token_mean", kl_coefficient=0.04, kl_estimator="k3"),
    # Understanding R1-Zero-Like Training, 2025: no division by deviation or length
    "dr_grpo": _plain_ppo("group_mean", "fixed"),
    # DAPO, 2025: clip-higher, dynamic sampling, token-level loss, soft overlong punishment
    "dapo": _method(
        "group_mean_std", "ppo_clip", "token_mean", clip=(0.2, 0.28), overlong="penalty", filter_zero_variance=True
    ),
    # REINFORCE++, 2025: no group baseline; rewards normalised over the batch, k1 penalty inside the reward, whose
    # coefficient is ours
    "reinforce++": _plain_ppo("batch_mean_std", "token_mean", kl_coefficient=0.01, kl_estimator="k1", kl_in="reward"),
    # the same paper's variant for reasoning: group mean subtracted, normalised over the batch, k2 penalty as a loss,
    # whose coefficient is ours
    "reinforce++-baseline": _plain_ppo("group_mean_batch_std", "token_mean", kl_coefficient=0.01, kl_estimator="k2"),
    # Back to Basics, 2024: leave-one-out baseline, plain policy gradient
    "rloo": _method("leave_one_out", "reinforce", "seq_mean_token_sum", filter_zero_variance=False),
    # GPG, 2025 (arXiv:2504.02546): group mean subtracted, plain policy gradient, groups without signal left out of the
    # mean over tokens
    "gpg": _method("group_mean", "reinforce", "token_mean", filter_zero_variance=True),
    # GSPO, 2025: sequence-level ratio, its narrow clip range
    "gspo": _method("group_mean_std", "gspo", "seq_mean_token_mean", clip=(3e-4, 4e-4)),
    # GMPO, 2025: log ratios clipped token by token inside the response's geometric mean
    "gmpo": _method("group_mean_std", "gmpo", "seq_mean_token_mean", clip=(0.4, 0.4)),
    # SAPO, 2025: a soft gate in place of the clip, whose defaults are the paper's temperatures
    "sapo": _method("group_mean_std", "sapo", "seq_mean_token_mean"),
    # MiniMax-M1, 2025: clipped importance weights, no token's gradient is removed; the bound, clip_high's default: ours
    "cispo": _method("group_mean_std", "cispo", "token_mean"),
    # AReaL, 2025: decoupled PPO
    "areal": _method("group_mean_std", "decoupled_ppo", "token_mean", clip=(0.2, 0.2), proximal="recompute"),
    # PPO, 2017, with a critic: its clip both ways; discount 1 and decay 0.95, as InstructGPT, 2022
    "ppo": _method("gae", "ppo_clip", "token_mean", clip=(0.2, 0.2), sections={"critic": {"gae": (1.0, 0.95)}}),
    # VAPO, 2025 (arXiv:2504.05118): decay by length, values towards returns, trained alone for 50 steps, clip-higher;
    # without its cross-entropy on solved samples
    "vapo": _method(
        *("gae", "ppo_clip", "token_mean"),
        clip=(0.2, 0.28),
        sections={"critic": {"gae": (1.0, "length")}, "trainer": {"warmup_steps": (50, 50)}},
    ),
}


def apply_preset(raw: Any) -> Any:
    """Return the mapping ``raw`` of an experiment file with the missing keys of its ``algorithm.preset``. Invalid parts
    are returned as they are, for validation to report."""
    if not isinstance(raw, Mapping):
        return raw
    sections = dict(cast("Mapping[str, Any]", raw))
    algorithm = sections.get("algorithm")
    preset_name = cast("Mapping[str, Any]", algorithm).get("preset") if isinstance(algorithm, Mapping) else None
    for section, keys in PRESETS.get(preset_name, {}).items() if isinstance(preset_name, str) else ():
        explicit_keys = sections.get(section, {})
        if isinstance(explicit_keys, Mapping):
            sections[section] = {**keys, **cast("Mapping[str, Any]", explicit_keys)}
    return sections
