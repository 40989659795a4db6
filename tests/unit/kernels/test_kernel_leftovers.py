"""Evaluations with candidates that die leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
from kernel_evaluators import open_files, opened
from kernel_sources import CPP, model, submission
from sandbox_backends import gone_within

from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator

KILLERS = (
    model("os.kill(os.getpid(), 9)", top="import os"),
    CPP.replace("y[i] =", "((volatile int*)8)[i] = 1, y[i] ="),
)


@pytest.mark.slow
@pytest.mark.parametrize("count", [16, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_evaluations_with_killers_leave_nothing(tmp_path, count):
    before = open_files()

    async def use(evaluator: KernelEvaluator) -> None:
        killer = max(len(KILLERS), count // 20)
        sources = [model(f"return self.right(x) + 0  # {n}") for n in range(count - killer)]
        sources += [KILLERS[n % len(KILLERS)] + f"# {n}" for n in range(killer)]
        found = await asyncio.gather(*(evaluator.evaluate(submission(source)) for source in sources))
        assert sum(one.correct for one in found) == count - killer
        assert all(one.fault for one in found[count - killer :])
        assert not evaluator._running
        assert [device["state"] for device in evaluator._devices.describe()] == ["free"]

    with opened(tmp_path, EvaluatorSettings(concurrent=3)) as run:
        run(use)
    assert not any(gone_within(tmp_path / "state", os.getpid(), 5.0).values())
    gc.collect()  # memory that an exception's frames held
    assert open_files() <= before + 2
