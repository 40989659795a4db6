"""Combinations of keys that the schema refuses, naming keys and values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.load import validate_experiment
from headway.config.schema import Experiment, TrainerConfig
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


# Keys of the trainer beside four ranks -> ranks that divide weights, tokens and experts, or the refusal.
LAYOUTS: list[tuple[dict[str, Any], tuple[int, int, int] | str]] = [
    ({}, (1, 1, 1)),
    ({"shards": 2}, (2, 1, 1)),
    ({"shards": "all"}, (4, 1, 1)),
    ({"context_parallel": 2}, (2, 2, 1)),
    ({"context_parallel": 2, "shards": 2}, (4, 2, 1)),
    ({"expert_parallel": 2}, (2, 1, 2)),
    ({"expert_parallel": 4, "context_parallel": 2}, (4, 2, 4)),
    ({"shards": 3}, "shards = 3 doesn't divide the 4 ranks of trainer.devices; valid: 1, 2, 4, all, auto"),
    ({"context_parallel": 3}, "context_parallel = 3 doesn't divide the 4 ranks of trainer.devices; valid: 1, 2, 4"),
    (
        {"shards": 4, "context_parallel": 2},
        "shards = 4 doesn't divide 4 / 2, the ranks of trainer.devices by trainer.context_parallel; valid: 1, 2, all",
    ),
    ({"expert_parallel": 3}, "expert_parallel = 3 doesn't divide the 4 ranks of trainer.devices; valid: 1, 2, 4"),
    (
        {"expert_parallel": 4, "shards": 2},
        r"expert_parallel = 4 doesn't divide the 2 ranks of a copy \(trainer.shards = 2\); valid: 1, 2",
    ),
]


@pytest.mark.parametrize(("keys", "outcome"), LAYOUTS)
def test_ranks_are_divided_evenly_or_refused(keys: dict[str, Any], outcome: tuple[int, int, int] | str) -> None:
    trainer = {"devices": [f"cpu:{core}" for core in range(4)], **keys}
    if isinstance(outcome, str):
        with pytest.raises(ConfigurationError, match=outcome):
            experiment(trainer=trainer)
    else:
        assert experiment(trainer=trainer).trainer.layout_of(4) == outcome


@pytest.mark.parametrize("key", ["shards", "context_parallel", "expert_parallel"])
def test_a_quantised_base_cannot_be_divided(key: str) -> None:
    sections = {
        "model": {"adapter": {"rank": 2, "alpha": 4.0}, "quantization": "4bit"},
        "trainer": {"devices": ["cpu:0", "cpu:1"]},
    }
    experiment(**sections)
    sections["trainer"] |= {key: 2}
    with pytest.raises(ConfigurationError, match=rf"matrices of codes .*; valid: trainer\.{key} = 1, or no quant"):
        experiment(**sections)


@given(ranks=st.integers(1, 12), shards=st.integers(1, 12), context=st.integers(1, 6), experts=st.integers(1, 6))
def test_a_layout_exists_for_any_number_of_ranks(ranks: int, shards: int, context: int, experts: int) -> None:
    """Ranks change with a plan; a layout that they can't have becomes the nearest that they can."""
    trainer = TrainerConfig(shards=shards, context_parallel=context, expert_parallel=experts)
    of_copy, of_tokens, of_experts = trainer.layout_of(ranks)
    assert (ranks % of_copy, of_copy % of_tokens, of_copy % of_experts) == (0, 0, 0)
    assert of_tokens <= context
    assert of_experts <= experts
    assert of_copy >= min(shards, ranks)
