"""Verifiers, hooks and environments that stall a run, each in its own way; a file called ``STALL`` in the working folder
of the test says when: until it is there they do what they should."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

_FIRST, _SECOND = threading.Lock(), threading.Lock()


def due() -> bool:
    return Path(os.environ["STALL_FILE"]).exists()


def holds_lock(prompt: str, response: str, answer: str) -> float:
    """A verifier that blocks in C code without releasing the interpreter's lock."""
    if due():
        ctypes.PyDLL(None).pause()
    return float(len(response) % 2)


def fills_pipe(prompt: str, response: str, answer: str) -> float:
    """A verifier that writes more to a child's standard input than it ever reads."""
    if due():
        child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(bytes(1 << 20))
    return float(len(response) % 2)


def blocks_loop(group: Any, *arguments: Any, **named: Any) -> Any:
    """A hook on finished groups that waits for what never comes."""
    if due():
        threading.Event().wait()
    return None


def first_then_second(group: Any, *arguments: Any, **named: Any) -> Any:
    """A hook that takes two locks; `second_then_first`, in a thread of its own, takes them the other way round."""
    if due():
        barrier = threading.Barrier(2)
        threading.Thread(target=second_then_first, args=(barrier,), daemon=True).start()
        with _FIRST:
            barrier.wait()
            with _SECOND:
                pass
    return None


def second_then_first(barrier: threading.Barrier) -> None:
    with _SECOND:
        barrier.wait()
        with _FIRST:
            pass
