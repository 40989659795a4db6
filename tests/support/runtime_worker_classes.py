"""Worker classes that the tests start in processes of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from headway.records.errors import CheckpointCorrupt, WorkerDied
from headway.records.generation import TokenDelta
from headway.runtime.child import WorkerContext
from headway.runtime.nodes.files import FilesService

IMPORTED_ON = sorted(os.sched_getaffinity(0))  # the device must have been applied before this import


class Echo:
    """Calls without ticks."""

    def __init__(self, context: WorkerContext, greeting: str = "") -> None:
        self.context = context
        self.greeting = greeting
        self.order: list[int] = []

    def echo(self, value: Any) -> Any:
        return value

    def seen(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "EXTRA")
        return {
            "imported_on": IMPORTED_ON,
            "device": str(self.context.device),
            "greeting": self.greeting,
            "environment": {name: os.environ.get(name) for name in names},
            "group": os.getpgid(0),
            "torch": "torch" in sys.modules,
            "started_as": sys.orig_argv[2],
            "parent": os.getppid(),
            "folder": str(Path.cwd()),
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }

    def draw(self) -> list[float]:
        import torch

        return [float(np.random.random()), torch.rand(1).item()]

    def add(self, number: int) -> int:
        self.order.append(number)
        return threading.get_native_id() - os.getpid()  # 0 on the main thread

    def ordered(self) -> list[int]:
        return self.order

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def make(self, size: int) -> np.ndarray:
        return np.arange(size, dtype=np.uint8)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_typed(self) -> None:
        raise CheckpointCorrupt("model.safetensors: wrong checksum")

    def fail_unpicklable(self) -> None:
        raise WorkerDied("inner", "exited with code 1")  # its constructor takes two arguments: does not unpickle

    def give_unpicklable(self) -> Any:
        return lambda: None

    def emit_unreadable(self) -> None:
        self.context.emit(Unreadable())

    def give_unreadable(self) -> Any:
        return Unreadable()

    def hang(self, path: str = "") -> None:
        if path:
            Path(path).touch()
        threading.Event().wait()

    def hold_interpreter(self) -> None:
        """Block with the interpreter lock held: no thread of this process can run."""
        ctypes.PyDLL(None).pause()

    def exit(self, code: int) -> None:
        sys.stderr.write("about to leave\n")
        os._exit(code)

    def raise_signal(self, number: int) -> None:
        signal.raise_signal(signal.Signals(number))

    def leave_system_exit(self) -> None:
        raise SystemExit(3)

    def spawn_sleeper(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def emit(self, messages: int, records: int) -> None:
        for index in range(messages):
            self.context.emit(
                [
                    TokenDelta.of(f"{record}", (1, 2, record), (-0.1, -0.2, -0.3), version=index)
                    for record in range(records)
                ]
            )

    def emit_then_die(self, messages: int, size: int) -> None:
        for index in range(messages):
            self.context.emit((index, bytes(size)))
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, text: str) -> None:
        print(text)
        self.context.log.info("logged %s", text)


class Unreadable:
    """Pickles; unpickling raises."""

    def __reduce__(self) -> Any:
        return (int, ("not a number",))


class Broken:
    def __init__(self, context: WorkerContext) -> None:
        raise ValueError("the model folder is empty")


class DiesWhileBuilt:
    def __init__(self, context: WorkerContext) -> None:
        sys.stderr.write("half built\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class SlowToBuild:
    def __init__(self, context: WorkerContext) -> None:
        threading.Event().wait()


class Engine:
    """Decodes in ``tick`` while it has requests: the shape of a generator's service."""

    def __init__(self, context: WorkerContext, fail_at: int = -1) -> None:
        self.context = context
        self.fail_at = fail_at
        self.open: dict[int, int] = {}
        self.ticks = 0

    def submit(self, request: int, tokens: int) -> int:
        self.open[request] = tokens
        return len(self.open)

    def count(self) -> int:
        return self.ticks

    def tick(self) -> bool:
        if not self.open:
            return False
        self.ticks += 1
        if self.ticks == self.fail_at:
            raise RuntimeError("decode failed")
        for request in list(self.open):
            self.open[request] -= 1
            if self.open[request] == 0:
                del self.open[request]
                self.context.emit(request)
        time.sleep(0.001)  # a model call: leaves the interpreter to the other thread
        return True


class Closing:
    """Writes down that it was closed."""

    def __init__(self, context: WorkerContext, path: str) -> None:
        self.path = Path(path)

    def close(self) -> None:
        self.path.write_text("closed")


class ElsewhereFiles(FilesService):
    """A node's files, with another folder in the place of each."""

    def digests(self, folder: str, deep: bool = False) -> dict[str, str] | None:
        return super().digests(os.environ["HEADWAY_TEST_ELSEWHERE"], deep)


class Deferring:
    """Answers a call later than the next one."""

    def __init__(self, context: WorkerContext) -> None:
        self._later: Future[str] = Future()

    def wait_for_release(self) -> Future[str]:
        return self._later

    def release(self, message: str) -> str:
        self._later.set_result(message)
        return "released"

    def fail(self) -> None:
        self._later.set_exception(CheckpointCorrupt("later"))
