"""Runs of a policy in scripted simulators: experiments, a simulator that dies on demand, digests of weights."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faulty_embodied import passed

from headway.config.load import validate
from headway.config.simulation import SimulatorExperiment
from headway.embodied.records import Array, Box, LaneSteps, Spaces

STEPS = 4


class Walk:
    """Lanes that walk on a line towards 0: an episode ends by termination near it, or is cut after some steps.

    ``trouble``: a folder: each step is the point "step" of `faulty_embodied.passed`, and a file ``crash`` in it is
    removed, and this process ended by SIGSEGV. ``leak``: bytes that each step leaves allocated. ``mortal``: seeds of
    first lanes; lanes with one of them kill this process in step ``dies_at``, so that blocks are lost at the same step
    under any placement."""

    constructions = 1
    seeded_by_reset = True

    def __init__(
        self,
        lanes: int,
        seeds: Sequence[int],
        trouble: str = "",
        length: int = 9,
        leak: int = 0,
        mortal: Sequence[int] = (),
        dies_at: int = 0,
    ) -> None:
        self._leak, self._leaked = leak, list[bytes]()
        self._steps_to_live = dies_at if seeds[0] in mortal else math.inf
        bound = np.full(2, np.inf, np.float32)
        self.spaces = Spaces(Box(-bound, bound), Box(np.full(1, -1, np.float32), np.full(1, 1, np.float32)))
        self.lanes, self._seeds, self._trouble, self._length = lanes, seeds, trouble, length
        self._generators: list[np.random.Generator] = []
        self._at_b = self._steps_b = np.zeros(lanes)

    def reset(self) -> Array:
        self._generators = [np.random.default_rng(seed) for seed in self._seeds]
        self._at_b = np.array([generator.normal() for generator in self._generators])
        self._steps_b = np.zeros(self.lanes)
        return self._observations()

    def step(self, actions_b: Array) -> LaneSteps:
        self._be_troubled()
        self._steps_to_live -= 1
        if not self._steps_to_live:
            os.kill(os.getpid(), signal.SIGKILL)
        self._leaked.append(b"x" * self._leak)
        self._at_b = self._at_b + 0.3 * actions_b[:, 0]
        self._steps_b = self._steps_b + 1
        rewards_b = -np.abs(self._at_b)
        terminated_b = np.abs(self._at_b) < 0.05
        truncated_b = (self._steps_b >= self._length) & ~terminated_b
        ended = self._observations()
        finals = {lane: ended[lane] for lane in np.flatnonzero(terminated_b | truncated_b).tolist()}
        for lane in finals:
            self._at_b[lane], self._steps_b[lane] = self._generators[lane].normal(), 0
        successes = {lane: bool(terminated_b[lane]) for lane in finals}
        counted_b = np.ones(self.lanes, np.bool_)
        return LaneSteps(self._observations(), rewards_b, terminated_b, truncated_b, counted_b, finals, successes)

    def render(self) -> Array:
        shade = int(np.clip(128 + 40 * self._at_b[0], 0, 255))
        return np.full((32, 32, 3), shade, np.uint8)

    def close(self) -> None: ...

    def _observations(self) -> Array:
        return np.stack([self._at_b, self._steps_b / self._length], axis=1).astype(np.float32)

    def _be_troubled(self) -> None:
        if not self._trouble:
            return
        passed(Path(self._trouble), "step")
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(self._trouble, "crash"))
            os.kill(os.getpid(), signal.SIGSEGV)


class Lost(Walk):
    """A walk without a finite reward."""

    def step(self, actions_b: Array) -> LaneSteps:
        return super().step(actions_b)._replace(rewards_b=np.full(self.lanes, np.nan))


def walk_experiment(directory: Path, **sections: dict[str, Any]) -> SimulatorExperiment:
    """A small experiment: two blocks of 4 lanes, 4 steps."""
    raw: dict[str, Any] = {
        "run": {"directory": str(directory), "steps": STEPS, "seed": 3},
        "simulator": {
            "environment": "embodied_runs:Walk",
            "lanes": 8,
            "block_lanes": 4,
            "steps_per_fragment": 24,
        },
        "trainer": {"passes": 2, "minibatch": 64, "learning_rate": 3e-3},
        "policy": {"hidden": [8]},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate(raw, "test", SimulatorExperiment)


def digest(directory: Path, version: int) -> str:
    """A digest of all that a checkpoint has of the learner: parameters, moments, statistics, counters."""
    folder = directory / "checkpoints" / f"step_{version:08d}"
    names = sorted(set(os.listdir(folder)) - {"state.json", "fragments.json"})
    assert names
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()[:16]


def pinned_children(core: int, ancestor: int | None = None) -> list[int]:
    """The process ids of the descendants of ``ancestor`` (default: this process) that are pinned to one core, by its
    number among the usable."""
    cores = sorted(os.sched_getaffinity(0))
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])

    def descends(pid: int) -> bool:
        while pid := parents.get(pid, 0):
            if pid == (ancestor or os.getpid()):
                return True
        return False

    def is_pinned(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return os.sched_getaffinity(pid) == {cores[core]}
        return False

    return [pid for pid in parents if descends(pid) and is_pinned(pid)]
