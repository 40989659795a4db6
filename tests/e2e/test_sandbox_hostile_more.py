"""More code that means harm: at what an owner trusts, at the first process, at several limits at once."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from sandbox_backends import SMALL, run
from test_sandbox_hostile import attempt, backend, blames_the_code, machine  # noqa: F401  fixtures among them

from headway.records.sandbox import SandboxError

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_a_reward_planted_and_tests_edited_before_they_run_are_the_owners_again(backend):
    """What the owner writes last is what a command alone sees, whoever watches the place."""
    script = """
import os, time
os.symlink('/tmp/elsewhere', 'reward'); os.mkdir('tests'); open('tests/check.py', 'w').write('print(1)')
if os.fork() == 0:
    os.setsid()
    while True:
        try: open('tests/check.py', 'w').write('print(1)'); open('reward', 'w').write('1')
        except OSError: pass
"""

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await box.exec(["python3", "-c", script], timeout_s=10)
            await box.exec(["true"], alone=True)
            await box.write("tests/check.py", b"open('reward', 'x').write('0'); print('checked')\n")
            result = await box.exec(["sh", "-c", "rm -f reward; python3 tests/check.py"], alone=True)
            assert (result.stdout, await box.read("reward")) == (b"checked\n", b"0")

    run(main)


def test_all_places_filled_at_once_end_as_no_space_or_no_memory(backend):
    script = """
files = [open(f'{place}/full', 'wb') for place in ('/work', '/tmp', '/var/tmp', '/home/user', '/dev/shm')]
for file in files:
    try:
        while True: file.write(bytes(1 << 20)); file.flush()
    except OSError as error: print(error.strerror)
"""

    async def main():
        async with backend:
            neighbour, box = await asyncio.gather(backend.create(SMALL), backend.create(SMALL))
            result = await box.exec(["python3", "-c", script], timeout_s=20)
            assert set(result.stdout.splitlines()) <= {b"No space left on device", b"File too large"}
            assert result.ok or (result.oom and blames_the_code(result))
            assert (await neighbour.exec(["echo", "well"])).stdout == b"well\n"
            with contextlib.suppress(SandboxError):  # full of files that count as memory it may have ended
                await box.exec(["rm", "-f", "/work/full", "/tmp/full", "/dev/shm/full"])

    run(main)


def test_what_the_first_process_runs_on_cant_be_changed_or_reached(backend):
    script = """
import glob, os
for path in (*glob.glob('/.headway'), *glob.glob('/.headway/**', recursive=True), *glob.glob('/sys/fs/cgroup/*')):
    for tried in (lambda: open(path, 'r+b'), lambda: os.mkdir(path + 'x'), lambda: os.rename(path, path + 'y'),
                  lambda: os.chmod(path, 0o777)):
        try: tried(); print('changed', path)
        except OSError: pass
for folder in ('/proc/1/map_files', '/proc/1/fd', '/proc/1/task/1/fd'):
    try: print('listed', os.listdir(folder))
    except OSError: pass
for number in range(3, 1024):
    try: os.fstat(number); print('handed on', number, os.readlink(f'/proc/self/fd/{number}'))
    except OSError: pass
"""
    assert run(lambda: attempt(backend, script)).stdout == b""


def test_signals_from_real_time_to_stop_dont_reach_the_first_process(backend):
    script = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for number in range(1, 65):
    libc.kill(1, number); libc.tgkill(1, 1, number) if hasattr(libc, 'tgkill') else None
    try: signal.pidfd_send_signal(os.pidfd_open(1), number)
    except OSError: pass
print('sent')
"""
    assert run(lambda: attempt(backend, script)).stdout == b"sent\n"


def test_output_of_both_kinds_without_end_from_many_processes(backend):
    script = "for i in $(seq 20); do (yes out & yes err >&2 &) ; done; sleep 1"
    result = run(lambda: attempt(backend, script, program="sh", timeout_s=5.0))
    assert result.truncated
    assert (len(result.stdout), len(result.stderr)) == (1 << 20, 1 << 20)


def test_a_sandbox_cant_find_its_neighbours(backend):
    script = "import os; print([p for p in os.listdir('/proc') if p.isdigit()], open('/proc/self/cgroup').read())"

    async def main():
        async with backend:
            neighbour, box = await asyncio.gather(backend.create(SMALL), backend.create(SMALL))
            hiding = asyncio.create_task(neighbour.exec(["sleep", "60"]))
            await neighbour.exec(["sh", "-c", "echo secret > /dev/shm/kept; echo secret > /tmp/kept"])
            said = (await box.exec(["python3", "-c", script])).stdout
            assert len(eval(said.split(b"]")[0] + b"]")) <= 2
            assert b"kept" not in (await box.exec(["sh", "-c", "ls /tmp /dev/shm /work"])).stdout
            await box.exec(["sh", "-c", "kill -9 -1"])
            hiding.cancel()
            assert (await neighbour.exec(["cat", "/tmp/kept"])).stdout == b"secret\n"

    run(main)


def test_shared_memory_and_queues_of_the_old_kind_end_with_the_sandbox(backend):
    before = Path("/proc/sysvipc/shm").read_text()
    script = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(4242, 1 << 20, 0o1666) >= 0, libc.msgget(4242, 0o1666) >= 0)
"""
    assert run(lambda: attempt(backend, script)).stdout == b"True True\n"
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_terminal_input_cant_be_planted(backend):
    script = """
import fcntl, pty
_, terminal = pty.openpty()
try: fcntl.ioctl(terminal, 0x5412, b'x'); print('planted')
except OSError: print('refused')
"""
    assert run(lambda: attempt(backend, script)).stdout == b"refused\n"


STARVED = """
import ctypes, os, resource, struct
libc = ctypes.CDLL(None, use_errno=True)
number = {name: at[os.uname().machine != 'x86_64'] for name, at in
    dict(affinity=(203, 122), setattr=(314, 274), param=(142, 118), ioprio=(251, 30), priority=(141, 140)).items()}
def tried(name, call):
    try: call()
    except OSError as error: print(name, error) if error.errno != 1 else None
    else: print('done', name)
def raw(name, *arguments):
    if libc.syscall(number[name], *arguments) < 0: raise OSError(ctypes.get_errno(), name)
ones = (1, 1 | 1 << 32)  # the kernel looks at 32 bits of a process's number
for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CPU):
    tried('limit', lambda: resource.prlimit(1, limit, (0, 0)))
for one in ones:
    tried('scheduler', lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
    tried('affinity', lambda: raw('affinity', ctypes.c_long(one), 8, struct.pack('=Q', 1)))
    tried('parameter', lambda: raw('param', ctypes.c_long(one), bytes(4)))
    tried('attribute', lambda: raw('setattr', ctypes.c_long(one), struct.pack('=IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0))
    for which in (0, 1): tried('priority', lambda: raw('priority', which, ctypes.c_long(one), 19))
    for which in (1, 2): tried('disk', lambda: raw('ioprio', which, ctypes.c_long(one), 0x6000))
for user in (0, os.getuid()):
    tried('priority of the user', lambda: raw('priority', 2, user, 19))
    tried('disk of the user', lambda: raw('ioprio', 3, user, 0x6000))
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        while True: pass
print('spinning')
"""


def test_the_first_process_cant_be_starved_or_limited(backend):
    """It is of the same user as the commands, who could change its limits and turns but for the filter."""
    assert run(lambda: attempt(backend, STARVED)).stdout == b"spinning\n"


def test_what_is_left_running_cant_keep_the_next_command_from_starting(backend):
    """Limits of a process that is still being made ready, before it is a command, are nobody else's to change."""
    script = """
import os, resource, time
if os.fork() == 0:
    os.setsid(); os.closerange(0, 3)
    while True:
        for pid in range(2, 60):
            try: resource.prlimit(os.getpid() + pid, resource.RLIMIT_NOFILE, (0, 0))
            except OSError: pass
"""

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            assert (await box.exec(["python3", "-c", script])).ok
            for _ in range(20):
                assert (await box.exec(["echo", "here"])).stdout == b"here\n"

    run(main)
