"""The verifier pool on real processes: hangs, raises, deaths, and what a group costs the orchestrator."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from node_processes import joined_nodes
from worker_processes import exists, run, until

from headway.config import schema
from headway.config.sources import TaskSource, VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.client import VerifierPool
from headway.runtime.clock import RealClock
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher, WorkerHandle, WorkerSpec
from headway.tasks.sources import load_tasks

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

TASK = Task(task_id="t", prompt="p", answer="good")
TIMEOUT_S = 1.0


@asynccontextmanager
async def pool(
    folder: Path,
    workers: int = 1,
    timeout_s: float = TIMEOUT_S,
    launcher: Launcher | None = None,
    named: dict[str, VerifierSettings] | None = None,
    on_event: EventCallback = lambda name, detail, /, **data: None,
    **verifier: Any,
) -> AsyncIterator[Any]:
    fields = {"name": "verifier_functions:score", "parameters": {"folder": str(folder)}, **verifier}
    configured = schema.VerifierConfig(workers=workers, timeout_s=timeout_s, **fields)
    clock = RealClock()
    launcher = launcher or LocalLauncher(clock)
    made = VerifierPool(launcher, configured, clock, named=named, log_folder=folder, on_event=on_event)
    await made.start()
    pids = made.pids
    try:
        yield made
    finally:
        pids += made.pids
        await made.stop()
        assert not any(exists(pid) for pid in pids)


def failed(verdicts: list[Verdict]) -> list[bool]:
    return [verdict.failure is not None for verdict in verdicts]


def announced(folder: Path) -> list[int]:
    """Processes that have begun an "announce:a"."""
    return [int(file.suffix[1:]) for file in folder.glob("a.*")]


@pytest.mark.slow
@pytest.mark.parametrize("guilty", ["sleep", "regex", "swallow"])
def test_a_hang_is_killed_at_the_limit_and_siblings_are_scored(tmp_path: Path, guilty: str):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            before = verifiers.pids
            started = time.monotonic()
            verdicts = await verifiers.verify(TASK, ["good", guilty, "bad"])
            took_s = time.monotonic() - started
            assert failed(verdicts) == [False, True, False]
            assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
            failure = verdicts[1].failure
            assert failure.cause == "timed out after 1 s; job killed"
            assert (failure.boundary, failure.infrastructure) == ("reward", False)
            assert "verifier_functions.py" in failure.detail  # where it hung
            assert 2 * TIMEOUT_S <= took_s < 2 * TIMEOUT_S + 8  # twice the limit and two starts
            assert not any(exists(pid) for pid in before)
            assert [v.reward for v in await verifiers.verify(TASK, ["good", "bad"])] == [1.0, 0.0]

    run(main)


def test_a_hang_that_holds_the_interpreter_is_the_responses_own_fault_however_long_its_limit(tmp_path: Path):
    """Such a worker answers no health check either: they must leave its watchdog the time."""

    async def main() -> None:
        impatient = LocalLauncher(RealClock(), heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5)
        async with pool(tmp_path, launcher=impatient) as verifiers:
            verdicts = await verifiers.verify(TASK, ["good", "regex"])
            assert failed(verdicts) == [False, True]
            assert verdicts[1].failure.cause == "timed out after 1 s; job killed"
            assert not verdicts[1].failure.infrastructure

    run(main)


def test_what_a_verifier_started_is_killed_with_it(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            [verdict] = await verifiers.verify(TASK, ["child"])
            assert verdict.failure.cause == "timed out after 1 s; job killed"
            child = int((tmp_path / "child").read_text())
            await until(lambda: not exists(child))

    run(main)


def test_a_raise_a_nan_and_output_cost_only_their_response(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            before = verifiers.pids
            verdicts = await verifiers.verify(TASK, ["good", "raise", "nan", "chatter", "bad"])
            assert failed(verdicts) == [False, True, True, False, False]
            assert verdicts[1].failure.cause == "the verifier raised RuntimeError: the checker broke"
            assert "verifier_functions.py" in verdicts[1].failure.detail
            assert verdicts[2].failure.cause == "the reward is nan, not a finite number"
            assert verifiers.pids == before
            assert verifiers.restarts == 0

    run(main)


@pytest.mark.parametrize("guilty", ["segfault", "exit"])
def test_a_response_that_ends_its_process_fails_as_infrastructure(tmp_path: Path, guilty: str):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            verdicts = await verifiers.verify(TASK, ["good", guilty])
            assert failed(verdicts) == [False, True]
            failure = verdicts[1].failure
            assert failure.infrastructure
            assert failure.cause == "the verifier's process died during it; attempts: 3"
            assert ("SIGSEGV" if guilty == "segfault" else "exited with code 0") in failure.detail
            assert [v.reward for v in await verifiers.verify(TASK, ["good"])] == [1.0]

    run(main)


def test_a_service_that_is_down_for_a_moment_costs_nothing(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            before = verifiers.pids
            verdicts = await verifiers.verify(TASK, ["good", "refused", "bad"])
            assert failed(verdicts) == [False, False, False]
            assert len((tmp_path / "refusals").read_text()) == 2
            assert verifiers.pids == before

    run(main)


def test_kill_9_in_mid_job_is_retried(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path, workers=2, timeout_s=30.0) as verifiers:
            group = asyncio.create_task(verifiers.verify(TASK, ["good", "announce:a", "bad"]))
            await until(lambda: len(announced(tmp_path)) == 1)
            [victim] = announced(tmp_path)
            os.kill(victim, signal.SIGKILL)
            (tmp_path / "go").touch()
            verdicts = await group
            assert failed(verdicts) == [False, False, False]
            assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
            assert len(announced(tmp_path)) == 2
            assert victim not in verifiers.pids

    run(main)


@pytest.mark.slow
def test_a_stopped_process_is_noticed_and_its_group_scored(tmp_path: Path):
    async def main() -> None:
        launcher = LocalLauncher(RealClock(), heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
        async with pool(tmp_path, launcher=launcher, timeout_s=30.0) as verifiers:
            group = asyncio.create_task(verifiers.verify(TASK, ["good", "announce:a"]))
            await until(lambda: len(announced(tmp_path)) == 1)
            os.kill(announced(tmp_path)[0], signal.SIGSTOP)
            (tmp_path / "go").touch()
            assert failed(await group) == [False, False]

    run(main)


def test_a_process_that_dies_between_jobs_is_replaced(tmp_path: Path):
    events: list[dict[str, Any]] = []

    async def main() -> None:
        async with pool(tmp_path, on_event=lambda name, _, **data: events.append({"event": name, **data})) as verifiers:
            [pid] = verifiers.pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda: verifiers.pids == [])
            assert [v.reward for v in await verifiers.verify(TASK, ["good"])] == [1.0]
            assert verifiers.restarts == 1

    run(main)
    died, restarted = events
    away_s = restarted["lost_s"]
    common = {"worker": "verifier-0", "cause": "killed by SIGKILL (9)", "found_by": "exit", "lost_samples": 0}
    assert died == {"event": "verifier_died", "restarts": 0, **common}
    assert restarted == {"event": "verifier_restarted", "lost_s": away_s, "restarts": 1, **common}
    assert 0 < away_s < 30


def test_a_process_killed_before_its_death_is_noticed(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path) as verifiers:
            os.kill(verifiers.pids[0], signal.SIGKILL)
            assert [v.reward for v in await verifiers.verify(TASK, ["good", "bad"])] == [1.0, 0.0]

    run(main)


def test_a_verifier_that_cannot_be_imported_is_a_configuration_error(tmp_path: Path):
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="no_such_module can't be imported"):
            async with pool(tmp_path, workers=2, name="no_such_module:f"):
                pass

    run(main)


def test_stop_in_mid_job_leaves_no_process(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path, workers=2, timeout_s=30.0) as verifiers:
            groups = [asyncio.create_task(verifiers.verify(TASK, ["announce:a"])) for _ in range(6)]
            await until(lambda: len(announced(tmp_path)) == 2)
            started = time.monotonic()
            await verifiers.stop()
            assert time.monotonic() - started < 2.0
            assert all(await asyncio.gather(*groups, return_exceptions=True))

    run(main)


def test_reasoning_gym_through_the_pool(tmp_path: Path):
    async def main() -> None:
        source = {"source": "reasoning-gym", "name": "rearc", "parameters": {"size": 2, "seed": 1}}
        async with pool(tmp_path, timeout_s=20.0, name="reasoning-gym", parameters={}) as verifiers:
            for task in load_tasks(TaskSource.model_validate(source)):
                right, wrong = await verifiers.verify(task, [task.answer, "no board"])
                assert (right.reward, right.solved, wrong.solved) == (1.0, True, False)

    run(main)


def test_tasks_choose_their_verifier_and_mathematics_without_end_costs_its_response_alone(tmp_path: Path):
    async def main() -> None:
        named = {"maths": VerifierSettings(name="math", timeout_s=TIMEOUT_S)}
        sum_, power = (Task(task_id="t", prompt="p", answer="1/2", verifier=name) for name in ("", "maths"))
        async with pool(tmp_path, timeout_s=20.0, name="exact", parameters={}, named=named) as verifiers:
            assert [v.solved for v in await verifiers.verify(sum_, ["1/2", "0.5"])] == [True, False]
            right, endless, wrong = await verifiers.verify(power, ["\\boxed{0.5}", "$9^{9^{9^{9}}}$", "\\boxed{0.6}"])
            assert (right.solved, wrong.solved, wrong.failure) == (True, False, None)
            assert endless.failure is not None
            assert endless.failure.cause == "timed out after 1 s; job killed"
            assert not endless.failure.infrastructure

    run(main)


def test_what_a_group_costs_the_orchestrator(tmp_path: Path):
    """Processor time of this process per group of 8; the target is 0.3 ms. The bound leaves room for a busy machine."""

    async def main() -> None:
        async with pool(tmp_path, timeout_s=20.0, name="numeric", parameters={}) as verifiers:
            task = Task(task_id="t", prompt="8+3+5=", answer="16", metadata={"n": 3})
            responses = ["11+5=16\n" * 4] * 8
            await verifiers.verify(task, responses)
            groups = 300
            costs_ms = []
            for _ in range(3):
                before = time.process_time()
                for _ in range(groups // 10):
                    await asyncio.gather(*(verifiers.verify(task, responses) for _ in range(10)))
                costs_ms.append((time.process_time() - before) * 1e3 / groups)
            print(f"orchestrator CPU per group: {min(costs_ms):.3f} ms (of {[f'{c:.3f}' for c in costs_ms]})")
            assert min(costs_ms) < 1.0

    run(main)


def test_groups_of_a_worker_whose_node_is_lost_are_scored_by_another(tmp_path: Path):
    async def main() -> None:
        async with (
            joined_nodes(tmp_path, "b") as (nodes, events, agents),
            pool(tmp_path, workers=2, nodes=("", "b"), launcher=nodes) as verifier,
        ):
            agents["b"].kill()
            await until(lambda: bool(events.of("node_lost")))
            async with asyncio.timeout(30.0):  # long before the node is given up
                verdicts = await asyncio.gather(*(verifier.verify(TASK, ["good", "bad"]) for _ in range(8)))
            assert [[verdict.reward for verdict in group] for group in verdicts] == [[1.0, 0.0]] * 8

    run(main)


def test_workers_are_added_and_leave_while_groups_are_scored_and_none_is_lost(tmp_path: Path):
    """One dies while it starts, one with a group in its hands, and one leaves with a group."""
    events: list[str] = []

    class KillsFirstNewcomer(LocalLauncher):
        newcomers = 0

        async def start(self, spec: WorkerSpec) -> WorkerHandle:
            worker = await super().start(spec)
            KillsFirstNewcomer.newcomers += spec.name != "verifier-0"
            if KillsFirstNewcomer.newcomers == 1:
                os.kill(worker.pid, signal.SIGKILL)  # it has started, and its slot is about to serve
                await worker.died
                raise RuntimeError("killed while it started")
            return worker

    async def main() -> None:
        launcher = KillsFirstNewcomer(RealClock())
        note = lambda name, _, **data: events.append(name)  # noqa: E731
        async with pool(tmp_path, launcher=launcher, timeout_s=30.0, on_event=note) as verifiers:
            groups = [asyncio.create_task(verifiers.verify(TASK, ["good", "announce:a"])) for _ in range(8)]
            await until(lambda: len(announced(tmp_path)) == 1)
            verifiers.set_workers(3)
            assert len(verifiers.worker_states) == 3
            await until(lambda: len(announced(tmp_path)) == 3)  # each has taken a group
            assert verifiers.start_s > 0
            os.kill(announced(tmp_path)[-1], signal.SIGKILL)
            verifiers.set_workers(1)
            assert len(verifiers.worker_states) == 1
            assert len(verifiers.pids) >= 2  # they leave with what they have
            (tmp_path / "go").touch()
            verdicts = await asyncio.gather(*groups)
            assert [[verdict.reward for verdict in group] for group in verdicts] == [[1.0, 0.0]] * 8
            assert not any(any(failed(group)) for group in verdicts)
            await until(lambda: len(verifiers.pids) == 1)
            verifiers.set_workers(2)  # and idle ones leave at once
            await until(lambda: len(verifiers.pids) == 2)
            verifiers.set_workers(1)
            await until(lambda: len(verifiers.pids) == 1)
            assert [v.reward for v in await verifiers.verify(TASK, ["good"])] == [1.0]

    run(main)
    assert events.count("verifier_restart_failed") == 1
    assert "verifier_died" in events


def test_a_pool_is_stopped_while_it_grows_and_shrinks(tmp_path: Path):
    async def main() -> None:
        async with pool(tmp_path, timeout_s=30.0) as verifiers:
            groups = [asyncio.create_task(verifiers.verify(TASK, ["announce:a"])) for _ in range(4)]
            verifiers.set_workers(3)
            await until(lambda: len(announced(tmp_path)) >= 2)
            verifiers.set_workers(1)
            verifiers.set_workers(2)
            await verifiers.stop()
            assert all(await asyncio.gather(*groups, return_exceptions=True))
            verifiers.set_workers(4)
            assert len(verifiers.worker_states) == 2  # nothing is started any more

    run(main)


def test_there_is_room_for_a_worker_a_core_as_far_as_memory_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def verifiers(**verifier: Any) -> VerifierPool:
        configured = schema.VerifierConfig(name="exact", workers=2, **verifier)
        return VerifierPool(LocalLauncher(RealClock()), configured, RealClock())

    module = "headway.rollout.verification.client"
    monkeypatch.setattr(f"{module}.machine_cores", lambda: tuple(range(6)))
    for free, room in ((64 << 30, 6), (600 << 20, 4), (100 << 20, 2)):
        monkeypatch.setattr(f"{module}.machine_memory", lambda free=free: (64 << 30, free))
        assert verifiers().max_workers() == room
    assert verifiers(nodes=("a",)).max_workers() > 1000
