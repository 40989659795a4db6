"""Actions/s of a token policy: all lanes of a block in one batch of the engine, beside one lane."""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headway.config.load import validate
from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import seed_of
from headway.embodied.policies import open_policy
from headway.embodied.tokens.lanes import open_lanes
from headway.models.initialise import initialise_model
from headway.runtime.devices import parse_device

LANES, CALLS = 16, 50
torch.set_num_threads(1)  # as many as its core


def rates(rounds: int) -> dict[str, float]:
    """Medians over ``rounds``, interleaved, of a model of 0.34 M weights on one core, for HalfCheetah's spaces."""
    with tempfile.TemporaryDirectory() as folder:
        letters = " ".join("abcdefghijklmnopqrstu")
        initialise_model(f"{folder}/model", [f"run {letters}", f"{letters} a b"] * 4, vocabulary_size=330)
        raw: dict[str, Any] = {
            "run": {"directory": f"{folder}/run", "steps": 1},
            "simulator": {"environment": "HalfCheetah-v5", "lanes": LANES, "block_lanes": LANES, "group_lanes": 2},
            "model": {"path": f"{folder}/model"},
            "policy": {"template": "run {inputs}", "inputs": [f"{i} in -5..5" for i in range(17)]},
        }
        experiment = validate(raw, "benchmark", SimulatorExperiment)
        Path(folder, "run").mkdir()
        simulator = open_lanes(experiment, 1, partial(seed_of, 0, 0, 0))
        context = SimpleNamespace(device=parse_device("cpu:0"), log=SimpleNamespace(warning=print))
        policy, rng = open_policy(experiment, simulator, context), np.random.default_rng(0)
        measured: dict[int, list[float]] = {1: [], LANES: []}
        for number in range(rounds + 1):
            for lanes, values in measured.items():
                observations, noise = rng.normal(0, 3, (CALLS, lanes, 17)), rng.normal(0, 1, (CALLS, lanes, 6))
                began_s = time.perf_counter()
                for observations_b, noise_b in zip(observations, noise, strict=True):
                    policy.act(observations_b, noise_b)
                if number:  # the first one compiles the grammar
                    values.append(lanes * CALLS / (time.perf_counter() - began_s))
                policy.take_tokens()
        one, many = (statistics.median(values) for values in measured.values())
        return {"lanes_over_one": many / one, "actions_per_s": many, "actions_per_s_of_one_lane": one}
