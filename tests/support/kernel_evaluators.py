"""An evaluator for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.records.sandbox import SandboxError

Use = Callable[[KernelEvaluator], Coroutine[Any, Any, Any]]


@contextmanager
def opened(folder: Path, settings: EvaluatorSettings, **more: Any) -> Iterator[Callable[[Use], Any]]:
    """A started evaluator for the block, which gets a function that runs others with it. Skips the test where this
    machine can't isolate."""
    with asyncio.Runner() as runner:

        async def make() -> KernelEvaluator:
            return KernelEvaluator(settings, state=folder / "state", **more)

        evaluator = runner.run(make())
        try:
            runner.run(evaluator.start())
        except SandboxError as error:
            pytest.skip(f"no sandboxes here: {error}")
        try:
            yield lambda use: runner.run(use(evaluator))
        finally:
            runner.run(evaluator.close())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
