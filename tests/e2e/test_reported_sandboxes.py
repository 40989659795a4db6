"""What sandboxes leave to each other: watches of files, memory of System V; and arguments that no program can have."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import BACKENDS, SMALL, opened, run

from headway.records.errors import ConfigurationError
from headway.records.sandbox import Command, SandboxError

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def backend(tmp_path: Path) -> Any:
    return BACKENDS["local"](tmp_path)


TAKES = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
made = 0
for _ in range(12):
    if os.fork() == 0:
        count = 0
        while libc.inotify_init() >= 0: count += 1
        time.sleep(20)
        os._exit(0)
time.sleep(1)
print('taken', flush=True)
time.sleep(15)
"""
ONE = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
WATCHES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init()
print(fd >= 0 and libc.inotify_add_watch(fd, b'/tmp', 2) >= 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [ONE, WATCHES, "import os; r, w = os.pipe(); " + ONE], ids=["one", "watches", "pipes"]
)
def test_one_sandbox_takes_no_watches_of_others(backend: Any, script: str) -> None:
    async def main() -> None:
        async with backend:
            greedy, neighbour = await asyncio.gather(backend.create(SMALL), backend.create(SMALL))
            taking = asyncio.create_task(greedy.exec(Command(argv=["python3", "-c", TAKES], timeout_s=8)))
            await asyncio.sleep(3)
            result = await neighbour.exec(Command(argv=["python3", "-c", script]))
            here = ctypes.CDLL(None).inotify_init()
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            assert result.stdout == b"True\n"
            assert here >= 0
            os.close(here)

    run(main)


MAKES = {
    "memory": ("print(libc.shmget(0, 1 << 20, 0o1666) >= 0)", "shm"),
    "much memory": ("print(all(libc.shmget(0, 1 << 20, 0o1666) >= 0 for _ in range(8)))", "shm"),
    "memory with a key": ("print(libc.shmget(77, 4096, 0o1666) >= 0)", "shm"),
    "memory of a child": (
        "os.fork() or os._exit(libc.shmget(0, 1 << 20, 0o1666) < 0); print(os.wait()[1] == 0)",
        "shm",
    ),
    "a queue": ("print(libc.msgget(78, 0o1666) >= 0)", "msg"),
    "semaphores": ("print(libc.semget(79, 4, 0o1666) >= 0)", "sem"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "table"), MAKES.values(), ids=MAKES)
def test_memory_of_system_v_is_gone_when_what_made_it_is(backend: Any, script: str, table: str) -> None:
    async def main() -> None:
        async with opened(backend) as box:
            whole = f"import ctypes, os; libc = ctypes.CDLL(None); {script}"
            made = await box.exec(Command(argv=["python3", "-c", whole]))
            assert made.stdout == b"True\n", made
            left = await box.exec(Command(argv=["cat", f"/proc/sysvipc/{table}"], exclusive=True))
            assert len(left.stdout.splitlines()) == 1, left.stdout

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": ["echo", "a\0b"]},
        {"argv": ["ec\0ho"]},
        {"argv": ["sh", "-c", "echo a; echo \0"]},
        {"argv": ["env"], "environment": {"A": "b\0c"}},
        {"argv": ["env"], "environment": {"A\0B": "c"}},
        {"argv": ["pwd"], "workdir": "/tmp\0"},
    ],
    ids=["an argument", "the program", "a script", "a variable", "a variable's name", "the folder"],
)
def test_a_null_in_a_command_is_said(backend: Any, wrong: dict[str, Any]) -> None:
    async def main() -> str:
        async with opened(backend) as box:
            try:
                result = await box.exec(Command(**wrong))
            except (ConfigurationError, SandboxError, ValueError) as error:
                return str(error)
            assert result.exit_code != 0
            return result.stderr.decode() + str(result.failure or "")

    said = run(main).lower()
    assert any(word in said for word in ("nul", "null", "\\0", "\\x00", "zero byte")), said


def test_a_null_in_what_a_command_reads_is_fine(backend: Any) -> None:
    async def main() -> None:
        async with opened(backend) as box:
            assert (await box.exec(Command(argv=["cat"], stdin=b"a\0b"))).stdout == b"a\0b"

    run(main)
