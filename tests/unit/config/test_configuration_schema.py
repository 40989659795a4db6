"""Combinations of keys that the schema refuses, naming keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError


def experiment(**sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate_experiment(raw, "test")


def test_bits_must_not_depend_on_who_waits_for_kv_tokens() -> None:
    lengths = {"max_prompt_tokens": 10, "max_response_tokens": 30}
    run = {"deterministic": True}
    with pytest.raises(ConfigurationError, match=r"kv_capacity_tokens = 159 .*run.deterministic = true.* = 160"):
        experiment(run=run, rollout=lengths, generator={"slots": 4, "kv_capacity_tokens": 159})
    for generator in ({"slots": 4, "kv_capacity_tokens": 160}, {"slots": 4}):
        assert experiment(run=run, rollout=lengths, generator=generator).run.deterministic
    assert experiment(rollout=lengths, generator={"slots": 4, "kv_capacity_tokens": 40}).generator.slots == 4


def test_a_curriculums_groups_enclose_the_group_size_and_can_differ() -> None:
    adaptive = {"mode": "adaptive"}
    with pytest.raises(ConfigurationError, match=r"min_group_size = 9 and max_group_size = 8 must enclose .* = 8"):
        experiment(curriculum=adaptive | {"min_group_size": 9})
    with pytest.raises(ConfigurationError, match=r"max_group_size = 6 must enclose rollout.group_size = 8"):
        experiment(curriculum=adaptive | {"max_group_size": 6})
    with pytest.raises(ConfigurationError, match=r"'adaptive' selects .* 2 or more, not 1"):
        experiment(curriculum=adaptive, rollout={"group_size": 1})
    with pytest.raises(ConfigurationError, match=r"'curriculum.min_signals'; did you mean 'min_signal'"):
        experiment(curriculum={"min_signals": 0.5})


def test_the_largest_group_is_what_concurrency_has_room_for() -> None:
    sizes = {"mode": "adaptive", "min_group_size": 4, "max_group_size": 24}
    given = experiment(curriculum=sizes, queue={"max_concurrent_rollouts": 16})
    assert (given.smallest_group, given.largest_group, given.concurrent_rollouts) == (4, 24, 24)
    uniform = experiment(curriculum=sizes | {"mode": "uniform"}, queue={"max_concurrent_rollouts": 16})
    assert (uniform.smallest_group, uniform.largest_group, uniform.concurrent_rollouts) == (8, 8, 16)


def test_a_task_of_the_band_rests_at_least_while_a_group_of_it_may_be_open() -> None:
    queue = {"groups_per_step": 4, "budget": 3}
    assert experiment(queue=queue).task_cooldown_groups == (16, 64)
