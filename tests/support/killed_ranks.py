"""A trainer's rank that dies amid a call, where ``RUN/kill.json`` says: a rank, a call, the number of a collective in
it, and whether it is stopped first."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from headway.runtime.stalls.collectives import COLLECTIVES
from headway.trainer.service import TrainerService

SAVING = ("begin_checkpoint", "checkpoint_checksums", "commit_checkpoint")
CALLS = ("compare_with_one_rank", "train_step", "complete_publish", *SAVING, "save_weights", "load_checkpoint",
         "offload", "onload")  # fmt: skip


class KilledRank(TrainerService):
    """Counts the collectives of each call in ``collectives``. The plan is removed before the kill, so that it happens
    once; its process id is beside it."""

    def __init__(self, context: Any, **arguments: Any) -> None:
        run = Path(arguments["experiment"]["run"]["directory"])
        self._plan, self._dying_rank = run / "kill.json", arguments.get("rank", 0)
        self._call, self._passed = "load", 0
        self.collectives: dict[str, int] = {}
        inside = COLLECTIVES.inside

        def counted(name: str) -> Any:
            self._pass()
            return inside(name)

        mock.patch.object(COLLECTIVES, "inside", counted).start()
        self._pass()
        super().__init__(context, **arguments)
        self._end()

    def counted(self) -> dict[str, int]:
        """The number of points at which each call can die."""
        return self.collectives

    def _pass(self) -> None:
        plan = json.loads(self._plan.read_text()) if self._plan.exists() else {}
        if plan.get("rank") == self._dying_rank and plan["call"] == self._call and plan["point"] == self._passed:
            self._plan.with_suffix(".pid").write_text(str(os.getpid()))
            self._plan.rename(self._plan.with_suffix(".done"))
            if plan["stops"]:
                os.kill(os.getpid(), signal.SIGSTOP)  # the test kills it
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
        self._passed += 1

    def _end(self) -> None:
        self.collectives[self._call] = self._passed
        self._call, self._passed = "", 0


def _counted(name: str) -> Any:
    def call(self: KilledRank, *arguments: Any) -> Any:
        self._call, self._passed = name, 0
        self._pass()
        try:
            return getattr(super(KilledRank, self), name)(*arguments)
        finally:
            self._end()

    return call


for _name in CALLS:
    setattr(KilledRank, _name, _counted(_name))
