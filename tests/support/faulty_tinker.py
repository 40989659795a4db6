"""`headway serve-tinker` with faults built in: ``python faulty_tinker.py serve-tinker FILE ...``.

A file ``POINT`` in the folder HEADWAY_TROUBLE holds a number N: at the N-th passage of that point the process is ended
by SIGKILL, in the very middle of things, and the file becomes ``struck``, with the time and the point.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headway.generator.service import GeneratorService
from headway.trainer.tenants import state_slots
from headway.trainer.tenants.service import TenantTrainerService

SERVICE = ("before_commit", "after_commit", "before_reply", "after_reply")
TRAINER = ("before_pass", "after_pass", "before_slot", "within_slot", "after_slot", "saved")
GENERATOR = ("registering", "sampling", "sampled")
POINTS = (*SERVICE, *TRAINER, *GENERATOR)


def passed(point: str) -> None:
    """Die, if it is time."""
    folder = Path(os.environ["HEADWAY_TROUBLE"])
    file = folder / point
    try:
        remaining = int(file.read_text()) - 1
    except (FileNotFoundError, ValueError):
        return
    if remaining:
        file.write_text(str(remaining))
        return
    file.write_text(f"{time.time()} {point}")
    file.rename(folder / "struck")
    os.kill(os.getpid(), signal.SIGKILL)


def passing(method: Any, before: str = "", after: str = "") -> Any:
    """The method with points before and after it."""

    def call(*arguments: Any, **named: Any) -> Any:
        if before:
            passed(before)
        returned = method(*arguments, **named)
        if after:
            passed(after)
        return returned

    return call


class FaultyTrainer(TenantTrainerService):
    """Dies around a pass, a checkpoint, and a durable state, of which half may be written."""

    def __init__(self, context: Any, **settings: Any) -> None:
        write = state_slots._write_slot
        copy = state_slots._parts

        def parts(payload_n: Any, tensors: Any) -> Any:
            halves = list(copy(payload_n, tensors))
            for index, part in enumerate(halves):
                if index == len(halves) // 2:
                    passed("within_slot")
                yield part

        state_slots._write_slot = passing(write, "before_slot", "after_slot")
        state_slots._parts = parts  # type: ignore[assignment]
        super().__init__(context, **settings)
        self.forward_backward = passing(self.forward_backward, "before_pass", "after_pass")  # type: ignore[method-assign]
        self.save = passing(self.save, after="saved")  # type: ignore[method-assign]


class FaultyGenerator(GeneratorService):
    """Dies while an adapter is registered, and between the tokens of requests."""

    def __init__(self, context: Any, **settings: Any) -> None:
        super().__init__(context, **settings)
        engine: Any = self._engine
        engine.add_adapter = passing(engine.add_adapter, "registering")
        step = engine.step

        def stepping() -> bool:
            if not engine.open_requests:
                return step()
            passed("sampling")
            worked = step()
            passed("sampled")
            return worked

        engine.step = stepping


def install() -> None:
    """Put the faulty workers and the points of the service in place."""
    from headway.generator.routing import replica
    from headway.services.tinker import serve
    from headway.services.tinker.log import TinkerLog

    serve._TRAINER = "faulty_tinker:FaultyTrainer"
    replica._FACTORY = "faulty_tinker:FaultyGenerator"
    TinkerLog.submit = passing(TinkerLog.submit, "before_commit", "after_commit")  # type: ignore[method-assign]
    TinkerLog.reply = passing(TinkerLog.reply, "before_reply", "after_reply")  # type: ignore[method-assign]


if __name__ == "__main__":
    import faulty_tinker

    from headway.cli.main import main

    faulty_tinker.install()
    sys.exit(main(sys.argv[1:]))
