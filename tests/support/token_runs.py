"""Token policies in a scripted simulator: a small model, an experiment, digests of its checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from headway.config.load import validate
from headway.config.simulation import SimulatorExperiment
from headway.models.initialise import initialise_model

LENGTH = 12
EDGE = np.ones(2, np.float32)


class Line(gymnasium.Env[Any, Any]):
    """A point on a line, which succeeds within 0.2 of its goal, and is cut after `LENGTH` steps."""

    observation_space = gymnasium.spaces.Box(-EDGE, EDGE)
    action_space = gymnasium.spaces.Box(-EDGE[:1], EDGE[:1])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.at, self.goal = np.random.default_rng(seed).uniform(-1, 1, 2)
        self.steps = 0
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at = float(np.clip(self.at + 0.15 * action[0], -1, 1))
        self.steps += 1
        reached = abs(self.at - self.goal) < 0.2
        return self.seen(), float(reached), False, self.steps >= LENGTH, {"success": reached}

    def seen(self) -> np.ndarray:
        return np.array([self.at, self.goal], np.float32)


def token_model(folder: Path) -> str:
    """Write a small random model, whose tokenizer has a token for each letter behind a blank."""
    letters = " ".join("abcdefghijklmnopqrstu")
    texts = [f"go {letters}", f"{letters} a b c d e"] * 4
    initialise_model(folder, texts, vocabulary_size=330, layers=1, width=32, heads=2, kv_heads=1, intermediate=64)
    return str(folder)


def token_experiment(directory: Path, model: str, /, **sections: dict[str, Any]) -> SimulatorExperiment:
    """Two blocks of 8 lanes, in groups of 4; 4 decisions of 3 steps."""
    raw: dict[str, Any] = {
        "run": {"directory": str(directory), "steps": 3, "seed": 3},
        "simulator": {
            "environment": "token_runs:Line",
            "lanes": 16,
            "block_lanes": 8,
            "group_lanes": 4,
            "steps_per_fragment": 4,
        },
        "model": {"path": model, "template": "chat"},
        "policy": {"template": "go {inputs}", "inputs": ["1-0 in -2..2"], "action_bins": 5, "repeat": 3},
        "trainer": {"passes": 1, "minibatch": 64, "learning_rate": 3e-3},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate(raw, "test", SimulatorExperiment)


def digest(directory: Path, version: int) -> str:
    """A digest of the weights and of the optimiser's state of a checkpoint."""
    folder = directory / "checkpoints" / f"step_{version:08d}" / "trainer"
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
