"""Agents that a run starts: restarts, backoff, and what ends them, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.nodes.launchers.agents import AgentEnd, LaunchedAgents
from headway.runtime.nodes.launchers.choose import srun_prefixes, ssh_prefixes
from headway.runtime.nodes.launchers.commands import CommandLauncher, agent_arguments
from headway.runtime.nodes.launchers.ray import bundle


class FakeLauncher:
    """Agents that run for ``lives_s`` each, the last one until it is cancelled."""

    def __init__(self, clock: VirtualClock, *lives_s: float) -> None:
        self._clock, self._lives_s = clock, list(lives_s)
        self.starts_s: list[float] = []
        self.cancelled = 0
        self.closed = False

    async def open(self) -> None:
        pass

    async def run(self, name: str, address: str, key: str) -> AgentEnd:
        self.starts_s.append(self._clock.now())
        try:
            await self._clock.sleep(self._lives_s.pop(0) if self._lives_s else 1e6)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return AgentEnd(code=3, output="refused")

    async def close(self) -> None:
        self.closed = True


def launched(launcher: FakeLauncher, clock: VirtualClock, events: list[str], joined=lambda name: False):
    return LaunchedAgents(
        launcher, ["b"], "k" * 32, clock, joined=joined, on_event=lambda name, detail, /, **_: events.append(detail)
    )


def test_agent_is_restarted_with_backoff_that_a_steady_one_resets():
    async def main(clock: VirtualClock) -> None:
        events: list[str] = []
        launcher = FakeLauncher(clock, 1, 1, 1, 100)
        agents = launched(launcher, clock, events)
        start_s = clock.now()
        await agents.start("a:1")
        await clock.sleep(200)
        assert [at - start_s for at in launcher.starts_s] == [0, 2, 5, 10, 111]
        assert events[0] == "b: its agent ended with exit code 3: refused; started again in 1 s"
        agents.run_is_over()
        await agents.stop()
        assert (launcher.cancelled, launcher.closed) == (1, True)

    run_virtual(main)


def test_agent_is_not_restarted_when_the_run_is_over():
    async def main(clock: VirtualClock) -> None:
        events: list[str] = []
        launcher = FakeLauncher(clock, 5)
        agents = launched(launcher, clock, events)
        await agents.start("a:1")
        await clock.sleep(1)
        agents.run_is_over()
        await clock.sleep(100)
        await agents.stop()
        assert (len(launcher.starts_s), events, launcher.cancelled) == (1, [], 0)

    run_virtual(main)


def test_nobody_waits_for_an_agent_that_has_ended():
    async def main(clock: VirtualClock) -> None:
        agents = launched(FakeLauncher(clock, 1, 1, 1, 1, 1), clock, [])
        await agents.start("a:1")
        await clock.sleep(16)  # it has ended four times: the next pause takes 8 s
        over_s = clock.now()
        agents.run_is_over()
        await agents.stop()
        assert clock.now() == over_s

    run_virtual(main)


def test_no_second_agent_while_the_node_is_there():
    async def main(clock: VirtualClock) -> None:
        start_s = clock.now()
        launcher = FakeLauncher(clock, 1)
        agents = launched(launcher, clock, [], joined=lambda name: clock.now() - start_s < 50)
        await agents.start("a:1")
        await clock.sleep(100)
        assert len(launcher.starts_s) == 2
        assert launcher.starts_s[1] - start_s >= 50
        await agents.stop()

    run_virtual(main)


def test_command_lines_name_the_place_and_not_the_key():
    assert ssh_prefixes({"b": "-p 22 u@h"})["b"][-3:] == ["-p", "22", "u@h"]
    assert ssh_prefixes({"b": ""})["b"][-1] == "b"
    assert srun_prefixes({"b": "1"})["b"][-1] == "--relative=1"
    assert srun_prefixes({"b": "gpu-7"})["b"][-1] == "--nodelist=gpu-7"
    assert "--key-stdin" in agent_arguments("b", "h:1")


def test_bundle_has_cores_gpus_and_the_machines_resource():
    assert bundle(0, 0, "") == {"CPU": 1.0}
    assert bundle(2, 4, "node:10.0.0.2") == {"CPU": 2.0, "GPU": 4.0, "node:10.0.0.2": 0.001}


def test_agent_that_can_not_be_started_is_reported_and_started_again():
    class NoProcesses(FakeLauncher):
        async def run(self, name: str, address: str, key: str) -> AgentEnd:
            if not self.starts_s:
                self.starts_s.append(0.0)
                raise OSError(24, "Too many open files")
            return await super().run(name, address, key)

    async def main(clock: VirtualClock) -> None:
        events: list[str] = []
        launcher = NoProcesses(clock)
        agents = launched(launcher, clock, events)
        await agents.start("a:1")
        await clock.sleep(10)
        assert events == ["b: its agent could not be run: Too many open files; started again in 1 s"]
        assert len(launcher.starts_s) == 2
        await agents.stop()

    run_virtual(main)


def test_full_disk_under_an_agents_log_does_not_end_the_agent(tmp_path: Path):
    (tmp_path / "node-b.log").symlink_to("/dev/full")

    async def main() -> None:
        launcher = CommandLauncher({"b": []}, "sh -c 'echo said; exit 7'", quoted=False, logs=tmp_path)
        assert await launcher.run("b", "a:1", "k" * 32) == AgentEnd(code=7, output="said")

    asyncio.run(main())
