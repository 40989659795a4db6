"""Devices given as a count: their nodes and indices."""

from __future__ import annotations

import pytest

from headway.config.consistency import require_consistent
from headway.config.load import load_experiment
from headway.config.schema import Experiment
from headway.orchestrator.nodes.machines import needed_nodes
from headway.orchestrator.nodes.placement import DeviceCapacity, place_devices
from headway.records.errors import ConfigurationError

TEXT = """
[run]
directory = "run"
[model]
path = "model"
[tasks.train]
path = "tasks.jsonl"
[verifier]
name = "exact"
[cluster]
address = "10.0.0.1:7400"
nodes = ["a", "b", "c"]
"""


@pytest.fixture
def experiment(tmp_path) -> Experiment:
    (tmp_path / "experiment.toml").write_text(TEXT)
    return load_experiment(str(tmp_path / "experiment.toml"), [])


def with_devices(experiment: Experiment, trainer: list[str], generator: list[str]) -> Experiment:
    raw = experiment.model_dump()
    raw["trainer"]["devices"], raw["generator"]["devices"] = trainer, generator
    return Experiment.model_validate(raw)


def test_count_stands_for_as_many_devices_before_they_are_placed(experiment: Experiment):
    counted = with_devices(experiment, ["2*cuda"], ["3*cuda"])
    assert len(counted.trainer.devices) == 2
    assert len(set(counted.generator.devices)) == 3
    assert needed_nodes(counted) == ["a", "b", "c"]
    assert Experiment.model_validate(counted.model_dump()) == counted  # as a run's record is read again


def test_ranks_share_a_node_and_replicas_take_the_emptiest(experiment: Experiment):
    counted = with_devices(experiment, ["2*cuda"], ["4*cuda"])
    placed = place_devices(
        counted, {"a": DeviceCapacity(cuda=1), "b": DeviceCapacity(cuda=4), "c": DeviceCapacity(cuda=4)}
    )
    assert placed.trainer.devices == ("b/cuda:0", "b/cuda:1")
    assert placed.generator.devices == ("a/cuda:0", "c/cuda:0", "c/cuda:1", "b/cuda:2")


def test_named_devices_keep_their_place_and_are_not_given_twice(experiment: Experiment):
    counted = with_devices(experiment, ["a/cpu:0-1"], ["a/cuda:1", "2*cuda", "1*cpu"])
    placed = place_devices(counted, {"a": DeviceCapacity(cpu=3, cuda=3)})
    assert placed.trainer.devices == ("a/cpu:0-1",)
    assert placed.generator.devices == ("a/cuda:1", "a/cuda:0", "a/cuda:2", "a/cpu:2")


def test_too_few_devices_are_refused_with_what_is_free(experiment: Experiment):
    counted = with_devices(experiment, ["4*cuda"], ["cpu:0"])
    with pytest.raises(
        ConfigurationError, match=r"trainer\.devices: no node has 4 more cuda .*\(in use: a 0 of 2, b 0 of 3\)"
    ):
        place_devices(counted, {"a": DeviceCapacity(cuda=2), "b": DeviceCapacity(cuda=3)})


def test_count_without_nodes_is_refused(experiment: Experiment):
    raw = with_devices(experiment, ["cpu:0"], ["1*cpu"]).model_dump()
    raw["cluster"]["nodes"] = {}
    with pytest.raises(ValueError, match=r"generator\.devices has a count of devices, which needs cluster\.nodes"):
        require_consistent(Experiment.model_validate(raw))
