"""An evaluator for tests, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
from headway.records.sandbox import SandboxError

QUICK = EvaluatorSettings(concurrent=3)


def run_with(
    folder: Path,
    use: Callable[[KernelEvaluator], Coroutine[Any, Any, Any]],
    settings: EvaluatorSettings = QUICK,
    **more: Any,
) -> Any:
    """Run ``use`` with an evaluator; skip where this machine can't isolate."""

    async def main() -> Any:
        evaluator = KernelEvaluator(settings, state=folder / "state", **more)
        try:
            await evaluator.start()
        except SandboxError as error:
            await evaluator.close()
            pytest.skip(f"no sandboxes here: {error}")
        try:
            return await use(evaluator)
        finally:
            await evaluator.close()

    return asyncio.run(main())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
