"""Records of waiting: who waits for whom, what a worker is doing, and a wait that has become a stall."""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerCondition = Literal["answers", "silent", "stopped"]


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Something awaited in the orchestrator."""

    kind: str  # "trainer.train_step": waits of one kind have one expected time
    owner: str  # the worker that is to end it, or a part of the orchestrator
    waiter: str  # what waits: a loop, a rollout, a group
    since_s: float  # clock when it began


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The Python stack of a thread or an asyncio task."""

    of: str  # "main", a thread's name, "task NAME"
    frames: tuple[str, ...]  # "headway/trainer/learner.py:118 update", innermost last


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a worker: what it is doing now.

    Reported by the worker's second thread, which needs the interpreter's lock; where that doesn't answer, by its
    machine: ``condition`` is then "silent" or "stopped", and a signal handler that needs no lock wrote the stacks.
    """

    worker: str = ""
    condition: WorkerCondition = "answers"
    call: str = ""  # what its main thread runs, "tick" between calls; "": it waits for a call
    call_s: float = 0.0  # how long it has
    collective: str = ""  # the last collective operation that it entered: "all_reduce"; "": none so far
    collectives: int = 0  # number of collectives entered so far
    in_collective_s: float | None = None  # how long it has waited in the last one; None: it isn't in one
    blocked_events: bool = False  # its events are not read here: it waits for that
    trouble: str = ""  # what keeps it from working, by its own account: that no sandbox can be started; "": nothing
    stacks: tuple[Stack, ...] = ()


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A wait that is longer than it should be, and its cause."""

    owner: str  # the worker, or part of the orchestrator, that everything else waits for
    kind: str  # of the wait
    since_s: float  # clock when the wait began
    cause: str  # "trainer-1 waits in all_reduce 42 for trainer-0, which is in headway/trainer/learner.py:118 update"
    expected_s: float  # the longest time that the wait should take
    hard: bool  # a fact, not an expectation: stopped, lock held, rank missing
    stacks: tuple[tuple[str, Stack], ...] = ()  # (worker, stack) of both sides

    def sentence(self, now_s: float) -> str:
        """Name the stall in one line."""
        return f"stalled {now_s - self.since_s:.0f} s: {self.cause}"


class WaitGraph(msgspec.Struct, frozen=True, kw_only=True):
    """``RUN/waits.json``: who waits for whom, written every few seconds while a run lives."""

    written_s: float  # seconds since 1970
    pid: int  # of the orchestrator
    now_s: float  # its clock
    waits: tuple[Wait, ...] = ()  # oldest first, the oldest few hundred
    expected_s: dict[str, float] = {}  # kind -> longest time that it should take
    workers: tuple[WorkerStatus, ...] = ()  # those that something has long waited for
    stalls: tuple[Stall, ...] = ()
