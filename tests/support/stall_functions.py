"""Verifiers, hooks and environments that stall a run, each in its own way.

The file that STALL_FILE names says when: until it is there they do what they should.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from headway.records.task import Task
from headway.rollout.environment import Answer, Environment, Episode

_FIRST, _SECOND = threading.Lock(), threading.Lock()


def due() -> bool:
    return Path(os.environ["STALL_FILE"]).exists()


def holds_lock(task: Task, response: str) -> float:
    """A verifier whose expression backtracks for ever, without releasing the interpreter's lock."""
    if due():
        re.match(r"(a+)+$", "a" * 60 + "b")
    return float(len(response) % 2)


def fills_pipe(task: Task, response: str) -> float:
    """A verifier that writes more to a child's standard input than it ever reads."""
    if due():
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(bytes(1 << 20))
    return float(len(response) % 2)


def sleeps(task: Task, response: str) -> float:
    """A healthy verifier with a long tail: 0.2 s as a median, 2 s once in a hundred scores, 15 s at most."""
    time.sleep(min(15.0, random.lognormvariate(math.log(0.2), 1.0)))
    return float(len(response) % 2)


class NeverReplies(Environment):
    """An environment whose replies stop coming."""

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if due():
            await asyncio.Event().wait()
        episode.reward(float(len(answer.text) % 2))
        episode.end("played")


class UsesSandbox(Environment):
    """An environment that runs a command in a sandbox of each rollout's own."""

    uses_sandbox = True

    async def reply(self, episode: Episode, answer: Answer) -> None:
        written = await episode.sandbox.exec(["true"])
        assert written.ok, written
        episode.reward(float(len(answer.text) % 2))
        episode.end("played")


def blocks_loop(group: Any, rollouts: Any) -> bool:
    """A hook on finished groups that waits for what never comes."""
    if due():
        threading.Event().wait()
    return True


def first_then_second(group: Any, rollouts: Any) -> bool:
    """A hook that takes two locks; `second_then_first`, in a thread of its own, takes them the other way round."""
    if due():
        barrier = threading.Barrier(2)
        threading.Thread(target=second_then_first, args=(barrier,), daemon=True).start()
        with _FIRST:
            barrier.wait()
            with _SECOND:
                pass
    return True


def second_then_first(barrier: threading.Barrier) -> None:
    with _SECOND:
        barrier.wait()
        with _FIRST:
            pass
