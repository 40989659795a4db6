"""Experiments with ``[simulator]``: their sections, and combinations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.load import load_file, validate
from headway.config.simulation import SimulatorExperiment
from headway.records.errors import ConfigurationError


def experiment(**sections: dict[str, Any]) -> SimulatorExperiment:
    minimal: dict[str, Any] = {"run": {"directory": "runs/x"}, "simulator": {"environment": "CartPole-v1"}}
    raw = {name: minimal.get(name, {}) | sections.get(name, {}) for name in {*minimal, *sections}}
    return validate(raw, "test.toml", SimulatorExperiment)


def test_minimal_experiment_is_synchronous_and_has_two_blocks():
    minimal = experiment()
    assert (minimal.simulator.blocks, minimal.queue.budget, minimal.devices) == (2, 0, ("cpu:0", "cpu:1"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"simulator": {"lanes": 12}}, "lanes = 12; valid: a multiple of simulator.block_lanes = 8"),
        ({"simulator": {"lanes": 8, "devices": ["cpu:0", "cpu:1"]}}, "has 2 for 1 blocks"),
        ({"queue": {"budget": 1}}, 'queue.budget = 1 with algorithm.correction = "none"'),
        ({"rollout": {"top_k": 1}}, r"\[rollout\] belongs to language models; .* valid sections are: run, simul"),
        ({"policy": {"chunk": 2}}, r"policy.chunk = 2 has no effect without \[model\]"),
        ({"evaluation": {"temperature": 0.5}}, r"evaluation.temperature = 0.5 has no effect without \[model\]"),
        ({"critic": {"path": "x"}}, r"critic.path = 'x' has no effect without \[model\]"),
        (
            {"model": {"path": "x"}, "simulator": {"group_lanes": 4}, "critic": {"path": "adapter"}},
            "critic.path = 'adapter' has no effect with groups",
        ),
        ({"model": {"path": "x"}, "policy": {"squash": True}}, r"policy.squash = True has no effect with \[model\]"),
        ({"simulator": {"block_lanes": 4, "group_lanes": 3}}, "block_lanes = 4; valid: a multiple of simulator.group"),
        (
            {
                "model": {"path": "x"},
                "simulator": {"group_lanes": 4},
                "algorithm": {"correction": "vtrace"},
            },
            r'correction = "vtrace" with \[model\]',
        ),
        (
            {"model": {"path": "x"}, "simulator": {"group_lanes": 4}, "policy": {"template": "go"}},
            "policy.template = 'go'; valid: a text with {inputs}",
        ),
        ({"run": {"offload": True}}, "run.offload = True has no effect"),
        ({"ledger": {"rollouts": "none"}}, "ledger.rollouts = 'none' has no effect"),
        ({"control": {"mode": "advise"}}, "control.mode = 'advise'"),
        (
            {
                "control": {"mode": "act", "devices": "move"},
                "queue": {"budget": 1},
                "algorithm": {"correction": "vtrace"},
            },
            "queue.budget = 1 with --plan auto",
        ),
        ({"algorithm": {"correction": "v-trace"}}, "algorithm.correction = 'v-trace'"),
        ({"simulator": {"lane": 3}}, "did you mean 'lanes'"),
        ({"trainer": {"devices": ["cpu:0", "cpu:1"]}}, "trainer.devices"),
    ],
)
def test_invalid_experiments_are_refused_by_key(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        experiment(**sections)


def test_stale_fragments_are_accepted_with_a_correction():
    assert experiment(queue={"budget": 2}, algorithm={"correction": "vtrace"}).queue.budget == 2


def test_overrides_reach_every_section(tmp_path: Path):
    file = tmp_path / "experiment.toml"
    file.write_text('[run]\ndirectory = "x"\n[simulator]\nenvironment = "CartPole-v1"\n')
    loaded = load_file(file, ["--simulator.block-lanes=4", "--policy.hidden=[8]"], SimulatorExperiment)
    assert (loaded.simulator.blocks, loaded.policy.hidden) == (4, (8,))
