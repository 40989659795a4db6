"""Reading an experiment: errors name key, value and what would be valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from headway.algorithms import advantages, aggregation
from headway.config import schema
from headway.config.load import load_experiment, validate_experiment
from headway.records.errors import ConfigurationError
from headway.trainer import kl, losses


def refusal(**sections: dict[str, Any]) -> str:
    raw: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}
    with pytest.raises(ConfigurationError) as caught:
        validate_experiment({**raw, **sections}, "test")
    return str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    loop = tmp_path / "experiment.toml"
    loop.symlink_to(loop)  # an error that root gets too, unlike a missing permission
    with pytest.raises(ConfigurationError, match=f"{loop} can't be read: Too many levels of symbolic links"):
        load_experiment(loop)


def test_advantages_and_losses_have_names_of_their_own() -> None:
    assert set(schema.ADVANTAGES) == {*advantages.ADVANTAGES, *advantages.BATCH_ADVANTAGES}
    assert not advantages.ADVANTAGES.keys() & advantages.BATCH_ADVANTAGES.keys()
    assert set(schema.LOSSES) == set(losses.LOSSES)
    for names, owner in ((schema.ADVANTAGES, advantages), (schema.LOSSES, losses)):
        assert len(set(names)) == len(names)
        assert all(callable(owner.resolve(name)) for name in names)
    wrong = refusal(algorithm={"advantage": "ppo_clip", "loss": "group_mean"})
    assert f"algorithm.advantage = 'ppo_clip': valid: {', '.join(schema.ADVANTAGES)} or mod" in wrong
    assert f"algorithm.loss = 'group_mean': valid: {', '.join(schema.LOSSES)} or module:function" in wrong


def test_aggregations_and_estimators_are_those_there_are() -> None:
    fields = schema.Algorithm.model_fields
    assert get_args(fields["aggregation"].annotation) == get_args(aggregation.Aggregation)
    assert get_args(fields["kl_estimator"].annotation) == get_args(kl.KlEstimator)


def test_sections_that_contradict_each_other_are_named_with_their_values() -> None:
    assert "rollout.top_p = 0.9 with rollout.top_k = 0 gives" in refusal(rollout={"top_p": 0.9})
    tiny = refusal(rollout={"group_size": 1}, queue={"groups_per_step": 1})
    assert "queue.groups_per_step = 1 times rollout.group_size = 1 must be at least 2" in tiny


@pytest.mark.parametrize(("key", "split"), [("seed", "train"), ("size", "validation"), ("seed", "test")])
def test_a_generators_seed_and_size_are_keys_of_their_own(key: str, split: str) -> None:
    generated = {"source": "reasoning-gym", "name": "chain_sum", "parameters": {key: 7}}
    wrong = refusal(tasks={"train": {"path": "t.jsonl"}, split: generated})
    assert f"tasks.{split}.parameters.{key} = 7 has no effect: set tasks.{split}.{key}" in wrong
