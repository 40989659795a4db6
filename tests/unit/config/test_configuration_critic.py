"""`[critic]`: what it goes with, and what is refused with it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import make_model

from headway.config.load import require_resumable, validate_experiment
from headway.config.schema import Experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.memory import critic_network, memory_uses, trainer_parts
from headway.records.errors import ConfigurationError

RAW: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}
GAE = {"algorithm": {"advantage": "gae"}}


def experiment(**sections: dict[str, Any]) -> Experiment:
    return validate_experiment({**RAW, **sections}, "test")


def with_gae(**sections: dict[str, Any]) -> dict[str, Any]:
    return sections | {"algorithm": {"advantage": "gae"} | sections.get("algorithm", {})}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"queue": {"min_advantage": 0.1}}, "queue.min_advantage = 0.1"),
        ({"queue": {"groups_per_part": 2}}, "queue.groups_per_part = 2"),
        ({"hooks": {"normalize_group": "numpy:negative"}}, "hooks.normalize_group = 'numpy:negative'"),
        ({"hooks": {"pad_group": "cycle"}}, "hooks.pad_group = 'cycle'"),
        ({"algorithm": {"turn_discount": 0.9}}, "algorithm.turn_discount = 0.9.*critic.gae has the discount"),
        ({"environment": {"name": "agent", "agent": "a:b"}}, "environment.name = 'agent'.*branch"),
        (
            {"algorithm": {"policy_coefficient": 0.0, "teacher": "t"}, "teachers": {"t": {"path": "x"}}},
            "algorithm.policy_coefficient = 0 with",
        ),
        ({"trainer": {"warmup_steps": [100, 101]}}, r"trainer.warmup_steps = \[100, 101\].*run.steps = 100"),
        ({"trainer": {"warmup_steps": [10, 9]}}, r"trainer.warmup_steps = \[10, 9\].*first <= last"),
        ({"critic": {"path": "adapter"}}, r"critic.path = 'adapter'.*\[model.adapter\]"),
        ({"critic": {"path": ""}}, "critic.path"),
        ({"critic": {"gae": [1.5, 1.0]}}, "critic.gae"),
        ({"critic": {"gae": [1.0, "long"]}}, "critic.gae"),
        ({"critic": {"learning_rate": -1.0}}, "critic.learning_rate"),
        (
            {"tasks": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "algorithm": {"advantage": "group_mean"}}]}},
            "'gae' of some sources with group_mean of others",
        ),
    ],
)
def test_what_needs_advantages_earlier_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        experiment(**with_gae(**sections))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"critic": {"gae": [0.5, 1.0]}}, r"\[critic\]"),
        ({"trainer": {"warmup_steps": [3, 5]}}, "trainer.warmup_steps"),
        ({"algorithm": {"overlong": "bootstrap"}}, "algorithm.overlong"),
        ({"algorithm": {"preset": "vapo", "advantage": "group_mean"}}, r"\[critic\]"),
    ],
)
def test_keys_of_a_critic_without_one_are_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}.* is for a critic"):
        experiment(**sections)


def test_presets_have_a_critic_and_groups_of_one() -> None:
    for preset in ("ppo", "vapo"):
        made = experiment(algorithm={"preset": preset}, rollout={"group_size": 1})
        assert made.algorithm.advantage == "gae"
        assert made.critic.head_rate(100) == pytest.approx(3e-3)
    vapo = experiment(algorithm={"preset": "vapo"})
    assert (vapo.critic.gae, vapo.trainer.warmup) == ((1.0, "length"), (50, 50))
    assert experiment(**GAE, critic={"learning_rate": 0.5}).critic.head_rate(100) == 0.5
    folder = experiment(**GAE, critic={"path": "models/x", "learning_rate": 2e-5}).critic
    assert (folder.network_rate, folder.head_rate(100)) == (2e-5, pytest.approx(3e-3))
    assert experiment(**GAE, critic={"path": "models/x"}).critic.network_rate == 1e-5


@pytest.mark.parametrize("critic", [{"path": "models/x"}, {"gae": [0.9, 0.9]}, {"learning_rate": 1e-4}])
def test_a_resumed_run_keeps_its_critic(critic: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"critic.{next(iter(critic))}"):
        require_resumable(experiment(**GAE), experiment(**GAE, critic=critic))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_and_disk_count_the_critic(tmp_path: Path, dtype: str) -> None:
    """A folder of its own takes what the policy of that size takes in training, without its logits."""
    folders = [make_model(tmp_path / name, width=width) for name, width in (("policy", 32), ("critic", 64))]
    base = {"model": {"path": folders[0]}, "trainer": {"dtype": dtype}}
    sizes = [sizes_of(folder) for folder in folders]
    plain = trainer_parts(experiment(**base), sizes[0])[0]
    trunk = trainer_parts(experiment(**base, **GAE), sizes[0])[0]
    assert trunk.pop("critic") > 0
    assert trunk == plain
    own = experiment(**base, **GAE, critic={"path": folders[1]})
    parts = trainer_parts(own, sizes[0])[0]
    bytes_of_weight = 4 if dtype == "float32" else 6
    for name, number in (("weights", bytes_of_weight), ("gradients", 4), ("AdamW", 8)):
        assert parts[name] - plain[name] == number * sizes[1].parameters
    assert critic_network(experiment(**base, **GAE)) is None
    disk = [
        next(use for use in memory_uses(one, sizes[0]) if use.name == "checkpoints").parts["checkpoints"]
        for one in (experiment(**base), own)
    ]
    assert disk[1] - disk[0] == 3 * 12 * sizes[1].parameters


def test_memory_of_saves_is_that_of_the_ranks_that_write(tmp_path: Path) -> None:
    """Beside an adapter each rank of a copy writes its rows of the critic, which has no average of weights."""
    folder = make_model(tmp_path / "m", width=32)
    sizes, adapter = sizes_of(folder), {"adapter": {"rank": 2, "alpha": 4.0}}
    average = {"kl_coefficient": 0.1, "reference_decay": 0.9}

    def saved(**sections: Any) -> list[int]:
        uses = memory_uses(experiment(**with_gae(critic={"path": folder}, **sections)), sizes)
        return [use.parts["checkpoint"] for use in uses if "checkpoint" in use.parts]

    assert saved(model={"path": folder}, algorithm=average) == [(16 + 12) * sizes.parameters]
    halves = {"devices": ["cpu:0", "cpu:1"], "shards": 2}
    first, second = saved(model={"path": folder, **adapter}, trainer=halves)
    assert first == second > 12 * sizes.parameters // 2
