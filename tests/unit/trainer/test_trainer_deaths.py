"""A rank's death is what ended a step, though another rank's broken connection is known first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from headway.records.errors import RemoteError, WorkerDied
from headway.runtime.clock import RealClock
from headway.runtime.process_worker import Death
from headway.runtime.workers import LocalLauncher
from headway.trainer import rank_workers
from headway.trainer.client import TrainerClient


class Rank:
    """A rank whose calls fail as gloo's do, and which dies after a while, or never."""

    def __init__(self, dies_after_s: float | None, endless: tuple[str, ...] = ()) -> None:
        self.died, self.endless = Death(), endless
        if dies_after_s is not None:
            error = WorkerDied("trainer-1", "killed by SIGKILL")
            asyncio.get_running_loop().call_later(dies_after_s, self.died.set, error)

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if method in self.endless:
            await asyncio.Event().wait()
        raise RemoteError("trainer-0", method, "RuntimeError: Connection reset by peer", "")


def ended(folder: Path, dies_after_s: float | None) -> None:
    async def main() -> None:
        experiment = tiny_run.experiment_of(tiny_run.write_experiment(folder))
        trainer = TrainerClient(LocalLauncher(RealClock()), experiment, "run")
        trainer.workers = (Rank(None), Rank(dies_after_s))  # type: ignore[assignment]
        await trainer.load_weights("somewhere")

    asyncio.run(main())


def test_a_death_that_is_noticed_later_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="trainer-1 died: killed by SIGKILL"):
        ended(tmp_path, 0.2)


def test_without_a_death_the_error_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_workers, "_DEATH_S", 0.2)
    with pytest.raises(RemoteError, match="Connection reset by peer"):
        ended(tmp_path, None)


@pytest.mark.parametrize("method", ["checkpoint_written", "commit_checkpoint"])
def test_a_save_beside_a_step_ends_with_a_death_in_the_step(tmp_path: Path, method: str) -> None:
    """Where another rank waits for the dead one in a collective of the step, and takes no other call."""

    async def main() -> None:
        experiment = tiny_run.experiment_of(tiny_run.write_experiment(tmp_path))
        trainer = TrainerClient(LocalLauncher(RealClock()), experiment, "run")
        trainer.workers = (Rank(None, endless=(method,)), Rank(0.2, endless=(method,)))  # type: ignore[assignment]
        if method == "checkpoint_written":
            await trainer.call_all_to_end(method)
        else:
            await trainer.until_death(trainer.workers[0].call(method, {}))

    with pytest.raises(WorkerDied, match="trainer-1 died: killed by SIGKILL"):
        asyncio.run(asyncio.wait_for(main(), 20.0))
