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
