"""The controller's process: says what it says in place, gives way to all others, is replaced when it is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from worker_processes import run

from headway.control.tuning.controller import ControllerState, decide
from headway.orchestrator.actors.controller_process import ControllerProcess
from headway.records.control import Knobs
from headway.records.errors import WorkerDied
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from tests.unit.control.test_controller import Situation, limits, record

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_it_decides_as_in_place_at_the_lowest_priority_and_survives_a_kill(tmp_path: Path) -> None:
    knobs, draw = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1), random.Random(1)
    shown = [record(step, knobs, Situation(noise=0.01), draw) for step in range(20)]
    state, bounds = ControllerState(knobs=knobs), limits()
    expected = decide(state, shown, bounds)
    assert expected.state.searched_step == 20  # it asked the model

    async def scenario() -> None:
        looking = ControllerProcess(LocalLauncher(RealClock()), RealClock(), tmp_path)
        assert looking.worker is None  # not before it is needed
        found, cpu_s = await looking(state, shown, bounds)
        assert found == expected
        assert 0.001 < cpu_s < 30
        worker = looking.worker
        assert worker is not None
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 19
        os.kill(worker.pid, signal.SIGSTOP)
        asked = asyncio.create_task(looking(state, shown, bounds))
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"signal 9|SIGKILL"):
            await asked
        assert (await looking(state, shown, bounds))[0] == expected
        second = looking.worker
        assert second is not None
        assert second.pid != worker.pid
        await looking.stop()
        assert not second.alive

    run(scenario)
