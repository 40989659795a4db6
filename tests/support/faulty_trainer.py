"""A trainer that dies by SIGKILL where faulty_headway.py told it to."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headway.trainer.checkpoints as checkpoints
import headway.trainer.saving as saving
from headway.trainer.service import TrainerService


class FaultyTrainer(TrainerService):
    """Reads JOURNAL.trainer (beside the run folder), the journal and a "POINT:N" for each life: dies at the first
    of them, at its N-th passage, and takes it off the list."""

    def __init__(self, context: Any, **arguments: Any) -> None:
        super().__init__(context, **arguments)
        run = Path(self.experiment.run.directory)
        self._plan = run.with_name(run.name + ".trainer")
        self._passages = 0
        point = self._next()[0].removeprefix("all-")
        if point == "checkpoint-files":  # half of the files are written
            self._before(saving, "write_state")
        elif point == "checkpoint-rename":  # the new folder is complete, the old one is still in its place
            self._before(checkpoints.Path, "rename")
        elif point == "checkpoint-pruning":  # an old checkpoint is half removed
            self._before(shutil, "rmtree", 3)
        elif point == "training":
            self._before(self.learner, "update")
        elif point == "accumulating":  # the gradients of a part are half there
            self._before(self.learner, "backward")
        elif point in ("valuing", "committing"):  # before an update of the critic; before its returns count
            self._before(self.policy.critic, {"valuing": "update", "committing": "commit"}[point])
        elif point == "publishing":
            self._before(self.learner, "weights")

    def _next(self) -> tuple[str, int]:
        """The next point and passage; ("none", 0) when all have struck."""
        plan = self._plan.read_text().split() if self._plan.exists() else []
        point, _, count = plan[1].partition(":") if len(plan) > 1 else ("none", "", "0")
        return point, int(count)

    def _before(self, owner: Any, name: str, extra: int = 0) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            self._passed(extra)
            return original(*args, **named)

        setattr(owner, name, wrapped)

    def _passed(self, extra: int) -> None:
        point, count = self._next()
        self._passages += 1
        if self._passages != count + extra:
            return
        journal, done, *rest = self._plan.read_text().split()
        self._plan.write_text("\n".join([journal, *rest]))
        with open(journal, "a") as file:
            file.write(f"fault {done}\n")
        if point.startswith("all-"):
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
