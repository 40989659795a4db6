"""`headway` for a policy in simulators with faults built in: ``python faulty_embodied.py TROUBLE train CONFIG ...``.

A file ``POINT.kill`` or ``POINT.hang`` in the folder TROUBLE holds a number N: at the N-th passage of that point the
process is ended by SIGKILL, or hangs for ever, and the file is removed. A process that hangs writes ``hung`` there,
with its id. ``simulator.arguments.trouble`` of the experiment is the same folder: the workers have it from there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headway.embodied.workers import Learn, Simulate

SIMULATORS = ("step", "put", "delivered")
LEARNER = ("learn", "learned", "publish", "save", "saved")
DRIVER = ("begun", "taken", "commit", "committed")
POINTS = (*SIMULATORS, *LEARNER, *DRIVER)


def passed(folder: Path, point: str) -> None:
    """Die or hang, if it is time."""
    for kind in ("kill", "hang"):
        file = folder / f"{point}.{kind}"
        if not file.exists():
            continue
        remaining = int(file.read_text()) - 1
        file.write_text(str(remaining))
        if remaining:
            continue
        file.unlink()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "hung.new").write_text(str(os.getpid()))
        (folder / "hung.new").rename(folder / "hung")
        time.sleep(3600)


def passing(method: Any, folder: Path, before: str = "", after: str = "") -> Any:
    """The method with points before and after it."""

    def call(*arguments: Any, **named: Any) -> Any:
        if before:
            passed(folder, before)
        returned = method(*arguments, **named)
        if after:
            passed(folder, after)
        return returned

    return call


class _Fragments:
    """A channel whose puts pass points."""

    def __init__(self, channel: Any, folder: Path) -> None:
        self._channel, self._folder = channel, folder

    async def put(self, fragment: Any) -> None:
        passed(self._folder, "put")
        await self._channel.put(fragment)
        passed(self._folder, "delivered")


def trouble_of(experiment: Any) -> Path:
    return Path(experiment.simulator.arguments["trouble"])


class FaultySimulate(Simulate):
    """Faults around the put of a fragment; those in a step are its simulator's (`embodied_runs.Walk`)."""

    def __init__(self, experiment: Any, *arguments: Any) -> None:
        self._trouble = trouble_of(experiment)
        super().__init__(experiment, *arguments)

    async def collect(self, weights: Any, number: int, blocks: Any, fragments: Any) -> None:
        channel: Any = _Fragments(fragments, self._trouble)
        await super().collect(weights, number, blocks, channel)


class FaultyLearn(Learn):
    """Faults around the learner's step, its weights and the files of a checkpoint."""

    def __init__(self, experiment: Any, *arguments: Any) -> None:
        super().__init__(experiment, *arguments)
        learner, folder = self._learner, trouble_of(experiment)
        self._trouble = folder
        learner.step = passing(learner.step, folder, "learn", "learned")  # type: ignore[method-assign]
        learner.weights = passing(learner.weights, folder, "publish")  # type: ignore[method-assign]

    def save(self, version: int, folder: str) -> None:
        passing(super().save, self._trouble, "save", "saved")(version, folder)


def install(folder: Path) -> None:
    """Put the faulty workers and the points of the driver in place."""
    from headway.embodied import driver
    from headway.embodied.rounds import Rounds
    from headway.trainer import checkpoints

    driver.Simulate, driver.Learn = FaultySimulate, FaultyLearn  # type: ignore[misc]
    Rounds.begin = passing(Rounds.begin, folder, after="begun")  # type: ignore[method-assign]
    Rounds.take = passing(Rounds.take, folder, after="taken")  # type: ignore[method-assign]
    checkpoints.commit_folder = passing(checkpoints.commit_folder, folder, "commit", "committed")


if __name__ == "__main__":
    import faulty_embodied

    from headway.cli.main import main

    faulty_embodied.install(Path(sys.argv[1]))  # workers import its classes by this name
    sys.exit(main(sys.argv[2:]))
