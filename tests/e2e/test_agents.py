"""Agents in real processes: the endpoint over HTTP, the host that starts them, and nothing left of them afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import served, until

from headway.records.errors import ConfigurationError, WorkerDied
from headway.rollout.hosting.agents.processes import AgentProcesses, Exit

pytestmark = pytest.mark.real


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def run(folder: Path, test: Any, function: str = "", settings: Any = None, **options: Any) -> Any:
    async def main() -> Any:
        processes = AgentProcesses(function, settings, logs=folder / "logs", grace_s=0.3, **options)
        try:
            return await test(processes)
        finally:
            await processes.stop()

    return asyncio.run(main())


def command(*argv: str, env: dict[str, str] | None = None) -> Any:
    async def test(processes: AgentProcesses) -> Exit:
        return await processes.run("7-0", argv, {}, env or {}, processes.scratch("7-0"))

    return test


def test_a_start_that_is_cancelled_leaves_no_host_nobody_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_agents.py").write_text("import time\ntime.sleep(1)\ndef solve(task):\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def test(processes: AgentProcesses) -> Exit:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await processes.start()
        async with asyncio.timeout(30):
            return await processes.run("7-0", (), {}, {}, processes.scratch("7-0"))

    assert run(tmp_path, test, "slow_agents:solve").well


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module on the path of the host."""
    (tmp_path / "my_agents.py").write_text(
        "import asyncio, os, sys, time\n"
        "from openai import OpenAI, AsyncOpenAI\n"
        "def solve(task):\n"
        "    print('solving', task['prompt'])\n"
        "    with OpenAI() as client:\n"
        "        messages = [{'role': 'user', 'content': task['prompt']}]\n"
        "        for _ in range(3):\n"
        "            answer = client.chat.completions.create(model='headway', messages=messages)\n"
        "            messages += [answer.choices[0].message, {'role': 'user', 'content': 'go on'}]\n"
        "    return {'reward': 0.25, 'solved': True}\n"
        "async def solve_async(task):\n"
        "    async with AsyncOpenAI() as client:\n"
        "        calls = [client.completions.create(model='headway', prompt=p) for p in 'abc']\n"
        "        await asyncio.gather(*calls)\n"
        "    return 1\n"
        "def broken(task):\n"
        "    raise ValueError('no idea')\n"
        "def leaves(task):\n"
        "    sys.exit(75)\n"
        "def raises(task):\n"
        "    raise {'gone': ConnectionError('gone'), 'none': FileNotFoundError(2, 'none')}[task['prompt']]\n"
        "def made_of(settings):\n"
        "    return lambda task: print(settings, task)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "turns", "reward", "solved", "causes"),
    [
        ("solve", 3, 0.25, True, {"start": 1, "continued": 2}),
        ("solve_async", 3, 1.0, True, None),
    ],
)
def test_a_function_with_the_openai_client(
    name: str, turns: int, reward: float, solved: bool, causes: Any, agents: Path
) -> None:
    async def test(processes: AgentProcesses) -> None:
        async with served("hello") as server:
            env = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": server.session.key}
            rewarding = f"{server.base_url}/rollouts/7-0/reward", server.session.reward_key
            exit = await processes.run("7-0", [], {"prompt": "1+2?"}, env, processes.scratch("7-0"), rewarding)
            assert exit.well, exit.tail
            recorded = server.session.seal()
            assert (recorded.turns, recorded.reward, recorded.solved) == (turns, reward, solved)
            if causes is not None:
                assert recorded.causes == causes
                assert len(recorded.branches) == 1
                assert "solving 1+2?" in exit.tail

    run(agents, test, f"my_agents:{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "code"), [("gone", 75), ("none", 1)])
def test_what_an_agents_function_raises_goes_by_the_rule(prompt: str, code: int, agents: Path) -> None:
    async def test(processes: AgentProcesses) -> Exit:
        return await processes.run("7-0", [], {"prompt": prompt}, {}, processes.scratch("7-0"))

    assert run(agents, test, "my_agents:raises").code == code


def test_a_log_has_the_beginning_and_the_end_of_what_was_printed(tmp_path: Path) -> None:
    """However it was printed: by the agent, or by what it started; and nobody waits for the log."""
    script = (
        "import os, subprocess, sys\n"
        "print('first', flush=True)\n"
        "for _ in range(3000): print('x' * 999)\n"
        "sys.stdout.flush()\n"
        "subprocess.run(['sh', '-c', 'for i in 1 2 3; do head -c 300000 /dev/zero; done; echo last >&2'])\n"
        "sys.exit(3)\n"
    )
    exit = run(tmp_path, command(sys.executable, "-c", script), log_bytes=100_000)
    assert (exit.code, exit.tail.endswith("\0last\n")) == (3, True)
    log = (tmp_path / "logs" / "7-0.log").read_bytes()
    assert log.startswith(b"first\nxxx")
    assert 100_000 + 65_536 < len(log) < 100_000 + 65_536 + 100
    left_out = 6 + 3_000_000 + 900_000 + 5 - 100_000 - 65_536
    assert b"\n[%d bytes left out]\n" % left_out in log


def test_a_resumed_run_keeps_no_more_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.agents.processes._MAX_LOGS", 3)
    (tmp_path / "logs").mkdir()
    for number in range(5):
        (tmp_path / "logs" / f"{number}-0.log").write_text("")
        os.utime(tmp_path / "logs" / f"{number}-0.log", (number, number))
    run(tmp_path, command("true"))
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {"host.log", "3-0.log", "4-0.log", "7-0.log"}


def test_hosts_leave_no_descriptor_open(tmp_path: Path) -> None:
    counts: list[int] = []

    async def test(processes: AgentProcesses) -> None:
        for _ in range(3):
            assert (await processes.run("7-0", ["true"], {}, {}, processes.scratch("7-0"))).well
            counts.append(len(os.listdir("/proc/self/fd")))
            assert processes._host is not None
            processes._host.kill()
            await until(lambda: processes._writer is None)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        run(tmp_path, test)
    assert (len(set(counts)), [str(one.message) for one in told]) == (1, [])


def test_the_death_of_a_host_and_its_restart_are_events(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    async def test(processes: AgentProcesses) -> None:
        await processes.start()
        assert processes._host is not None
        processes._host.kill()
        await until(lambda: len(events) == 1)
        await processes.start()

    run(tmp_path, test, on_event=lambda name, detail, **data: events.append((name, data)))
    (died, death), (restarted, outage) = events  # and none of the host that is stopped in order
    assert (died, restarted) == ("agents_died", "agents_restarted")
    assert death == {
        "worker": "agents",
        "cause": "the host of agents ended with -9",
        "found_by": "exit",
        "lost_samples": 0,
        "restarts": 0,
    }
    assert outage == {**death, "lost_s": outage["lost_s"], "restarts": 1}
    assert 0 < outage["lost_s"] < 60


def test_what_a_killed_run_leaves_behind_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = (
        "import sys, time; from headway.rollout.hosting.agents.processes import AgentProcesses\n"
        "print(AgentProcesses()._scratch, flush=True); time.sleep(60)"
    )
    others = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, alive = (Path(other.stdout.readline().strip()) for other in others if other.stdout is not None)
    (killed / "task.json").write_text("{}")
    os.kill(others[0].pid, signal.SIGKILL)
    others[0].communicate()
    mine = AgentProcesses()._folder
    try:
        assert not killed.exists()
        assert alive.exists()
    finally:
        others[1].kill()
        others[1].communicate()
        mine.remove()
    assert not mine.path.exists()


@pytest.mark.slow
def test_functions_that_end_badly(agents: Path) -> None:
    async def test(processes: AgentProcesses) -> Exit:
        return await processes.run("7-0", [], {}, {}, processes.scratch("7-0"))

    exit = run(agents, test, "my_agents:broken")
    assert (exit.code, exit.signal) == (1, 0)
    assert exit.tail.strip().endswith("ValueError: no idea")
    assert run(agents, test, "my_agents:leaves").code == 75
    assert run(agents, test, "my_agents:made_of", {"a": 1}).tail.endswith("\n{'a': 1} {}\n")
    with pytest.raises(ConfigurationError, match="my_agents has no 'brokn'"):
        run(agents, test, "my_agents:brokn")


def test_a_command_its_environment_and_its_end(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['MINE'], sys.argv[1]); sys.exit(3)"
    exit = run(tmp_path, command(sys.executable, "-c", code, "a b", env={"MINE": "1"}))
    assert (exit.code, exit.signal, exit.tail) == (3, 0, "1 a b\n")
    assert run(tmp_path, command("sh", "-c", "kill -9 $$")).signal == signal.SIGKILL
    missing = run(tmp_path, command("no-such-program"))
    assert (missing.code, missing.tail.endswith("no-such-program: No such file or directory\n")) == (127, True)


FORKS = (
    "import os, subprocess, sys, time\n"
    "kids = [subprocess.Popen(['sleep', '1000']), subprocess.Popen(['sleep', '1000'], start_new_session=True)]\n"
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').write(' '.join(str(k.pid) for k in kids))\n"
    "time.sleep(float(sys.argv[2]))\n"
)


def test_nothing_outlives_an_agent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert run(tmp_path, command(sys.executable, "-c", FORKS, str(pids), "0")).well
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    time.sleep(0.05)
    assert not any(map(alive, found))


@pytest.mark.parametrize("how", ["cancel", "stop", "kill"])
def test_nothing_outlives_one_that_is_stopped(how: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def test(processes: AgentProcesses) -> None:
        argv = [sys.executable, "-c", FORKS, str(pids), "1000"]
        scratch = processes.scratch("7-0")
        agent = asyncio.create_task(processes.run("7-0", argv, {}, {}, scratch))
        await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        found = [int(pid) for pid in pids.read_text().split()]
        assert all(map(alive, found))
        started = time.monotonic()
        if how == "cancel":
            agent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await agent
            assert 0.25 < time.monotonic() - started < 5  # it ignores SIGTERM
            assert not scratch.exists()
        elif how == "stop":
            await processes.stop()
            with pytest.raises(WorkerDied):
                await agent
        else:
            host = processes._host
            assert host is not None
            host.kill()
            with pytest.raises(WorkerDied, match="host of agents ended with -9"):
                await agent
            assert (await processes.run("8-0", ["true"], {}, {}, processes.scratch("8-0"))).well  # another host
        await until(lambda: not any(map(alive, found)))

    run(tmp_path, test)


def test_many_agents_at_once(tmp_path: Path) -> None:
    async def test(processes: AgentProcesses) -> None:
        code = "import time, sys; time.sleep(0.05); sys.exit(int(sys.argv[1]))"
        exits = await asyncio.gather(
            *(
                processes.run(f"{n}-0", [sys.executable, "-c", code, str(n)], {}, {}, processes.scratch(f"{n}-0"))
                for n in range(12)
            )
        )
        assert [exit.code for exit in exits] == list(range(12))
        assert len(list((tmp_path / "logs").iterdir())) == 13  # and the host's

    run(tmp_path, test)
