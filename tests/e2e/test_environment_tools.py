"""Tools that raise or hang, in real workers: what the policy is told, what isn't its doing, who is replaced."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from environment_player import TASK, call

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.orchestrator.actors.environments import SANDBOXES
from headway.rollout.environment import Environment
from headway.rollout.hosting.client import EnvironmentPool, WorkerLease
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
TIMEOUT_S = 2.0


class Tools(Environment):
    def tools(self) -> Any:
        return (self.hang, self.pid, self.read, self.connect, self.names)

    def hang(self) -> str:
        """Hang."""
        threading.Event().wait()
        return ""

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def read(self, path: str) -> str:
        """A file."""
        return Path(path).read_text()

    async def connect(self) -> str:
        """Connect."""
        raise ConnectionRefusedError("nobody there")

    def names(self, folder: str) -> list[str]:
        """What is in a folder."""
        return os.listdir(folder)


def pool_of(events: list[tuple[str, str, dict[str, Any]]], **settings: Any) -> EnvironmentPool:
    clock = RealClock()
    section = EnvironmentConfig.model_validate(
        {"name": "test_environment_tools:Tools", "timeout_s": TIMEOUT_S, "max_turns": 20, **settings}
    )
    return EnvironmentPool(
        LocalLauncher(clock),
        section,
        SandboxConfig(),
        clock,
        sandboxes=SANDBOXES,
        on_event=lambda name, detail, /, **data: events.append((name, detail, data)),
    )


async def said(lease: WorkerLease, *calls: tuple[str, str]) -> list[str]:
    """What the policy is told of each call, or the failure's cause."""
    await lease.begin(TASK, 0)
    told: list[str] = []
    for one in calls:
        reply = await lease.reply(call(*one), "", False)
        told += [reply.failure.cause if reply.asked is None else reply.asked.messages[-1]["content"]]  # type: ignore[union-attr]
    return told


@pytest.mark.slow
def test_calls_that_hang_are_given_up_and_their_worker_is_replaced() -> None:
    events: list[tuple[str, str, dict[str, Any]]] = []

    async def main() -> None:
        pool = pool_of(events)
        await pool.start()
        try:

            async def one(name: str, tool: str) -> tuple[list[str], float]:
                started_s = time.monotonic()
                async with pool.lease(name) as lease:
                    told = await said(lease, (tool, "{}"), ("pid", "{}"))
                return told, time.monotonic() - started_s

            asked = asyncio.Event()

            async def stays() -> list[str]:
                async with pool.lease("6-0") as lease:
                    await asked.wait()
                    return await said(lease, ("pid", "{}"))

            staying = asyncio.create_task(stays())
            async with asyncio.TaskGroup() as tasks:
                hanging = [tasks.create_task(one(f"7-{number}", "hang")) for number in range(10)]
                await asyncio.sleep(TIMEOUT_S / 2)  # with ten threads that hang
                other = await one("8-0", "pid")
            assert {task.result()[0][0] for task in hanging} == {"error: hang gave no answer in 2 s"}
            [pid] = {told for task in hanging for told in task.result()[0][1:]}
            assert other[0] == [pid, pid]
            assert other[1] < TIMEOUT_S, "nobody waited for them"
            assert len([name for name, *_ in events if name == "tool_stuck"]) == 10
            assert events[9][2] == {"worker": "environment-0", "tool": "hang", "stuck": 10}
            (later, _) = await one("9-0", "pid")
            assert later[0] != pid
            assert staying.done() is False
            asked.set()
            assert await staying == [pid], "it goes on where it was"
            for _ in range(200):
                if not os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC240
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("the worker with the stuck threads is still there")
            assert [state.up for state in pool.worker_states] == [True]
        finally:
            await pool.stop()

    asyncio.run(main())
    assert {name for name, *_ in events} == {"tool_stuck"}


def test_what_tools_raise_is_told_and_only_infrastructure_fails_a_rollout(tmp_path: Path) -> None:
    events: list[tuple[str, str, dict[str, Any]]] = []
    (tmp_path / "there").write_text("found")
    (tmp_path / "folder").mkdir()
    with open(os.fsencode(tmp_path / "folder") + b"/na\xffme", "wb"):
        pass

    async def main() -> None:
        pool = pool_of(events)
        await pool.start()
        try:
            async with pool.lease("7-0") as lease:
                wrong = [("read", f'{{"path": "{tmp_path}/{name}"}}') for name in "abcd"]
                there, names = (
                    ("read", f'{{"path": "{tmp_path}/there"}}'),
                    ("names", f'{{"folder": "{tmp_path}/folder"}}'),
                )
                told = await said(lease, *wrong, there, names, ("connect", "{}"))
                assert all("error: FileNotFoundError: [Errno 2] No such file" in one for one in told[:4])
                assert told[4:6] == ["found", '["na\ufffdme"]']
                assert told[6].startswith("ConnectionRefusedError: nobody there (test_environment_tools.py:")
        finally:
            await pool.stop()

    asyncio.run(main())
    [(name, detail, data)] = events
    assert name == "tool_raises"
    assert "4 of 4 calls of the tool read raised, the last FileNotFoundError" in detail
    assert "(test_environment_tools.py:" in detail
    assert data == {"worker": "environment-0", "tool": "read", "calls": 4, "raised": 4}
