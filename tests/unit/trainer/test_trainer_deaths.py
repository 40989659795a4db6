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

    def __init__(self, dies_after_s: float | None) -> None:
        self.died = Death()
        if dies_after_s is not None:
            error = WorkerDied("trainer-1", "killed by SIGKILL")
            asyncio.get_running_loop().call_later(dies_after_s, self.died.set, error)

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
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
