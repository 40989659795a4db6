"""What every backend of sandboxes must do."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from sandbox_backends import BACKENDS, SANDBOX_UID, SMALL, nothing_left, opened, run

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.sandbox import Command, SandboxError
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.preflight import findings

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path):
    made = BACKENDS[request.param](tmp_path)
    with nothing_left(tmp_path / "state"):
        yield made


def test_a_command_has_its_exit_code_output_environment_and_directory(backend):
    async def main():
        async with opened(backend) as box:
            script = "pwd; echo $GREETING; env | grep -c SECRET; cat; echo err >&2; exit 3"
            result = await box.exec(
                Command(argv=["sh", "-c", script], environment={"GREETING": "hello"}, stdin=b"given\n")
            )
            assert (result.exit_code, result.signal, result.failure) == (3, None, None)
            assert result.stdout == b"/work\nhello\n0\ngiven\n"
            assert result.stderr == b"err\n"
            assert (await box.exec(Command(argv=["pwd"], workdir="/tmp"))).stdout == b"/tmp\n"

    os.environ["A_SECRET"] = "hidden"
    try:
        run(main)
    finally:
        del os.environ["A_SECRET"]


def test_commands_that_cant_run_say_so(backend):
    async def main():
        async with opened(backend) as box:
            missing = await box.exec(Command(argv=["no-such-program"]))
            assert (missing.exit_code, b"No such file" in missing.stderr) == (127, True)
            assert (await box.exec(Command(argv=["/etc/passwd"]))).exit_code == 126
            assert (await box.exec(Command(argv=["true"], workdir="/nowhere"))).exit_code == 127

    run(main)


def test_a_nul_in_a_command_is_said(backend):
    async def main():
        async with opened(backend) as box:
            for more in ({"argv": ["echo", "a", "b\0c"]}, {"argv": ["echo"], "environment": {"A": "b\0c"}}):
                said = await box.exec(Command(**more))
                assert said.exit_code == 126
                named = b"argv[2]" if len(more["argv"]) > 1 else b"variable"
                assert named in said.stderr
                assert b"can't be passed to a program: embedded null byte" in said.stderr

    run(main)


SEGMENTS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
made = [libc.shmget(0, 20 << 20, 0o1600) for _ in range(3)]  # IPC_PRIVATE, IPC_CREAT
assert min(made) >= 0, ctypes.get_errno()
libc.shmat.restype = ctypes.c_void_p
for one in made:
    ctypes.memset(libc.shmat(one, None, 0), 1, 20 << 20)
    libc.shmdt(0)
print(len(open("/proc/sysvipc/shm").readlines()) - 1)
"""


def test_shared_memory_goes_with_its_maker(backend):
    """Three segments fit into the sandbox's memory, six don't."""

    async def main():
        async with opened(backend) as box:
            for _ in range(3):
                made = await box.exec(Command(argv=["python3", "-c", SEGMENTS]))
                assert (made.stdout, made.failure) == (b"3\n", None), made
            left = await box.exec(Command(argv=["sh", "-c", "cat /proc/sysvipc/shm | wc -l"]))
            assert left.stdout == b"1\n"

    run(main)


def test_one_sandbox_doesnt_take_the_inotify_descriptors_of_all(backend):
    taking = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
made = 0
while made < 200 and libc.inotify_init1(0) >= 0: made += 1
print(made, flush=True)
time.sleep(float(sys.argv[1]))
"""

    async def main():
        async with backend:
            first, second = await backend.create(SMALL), await backend.create(SMALL)
            held = asyncio.create_task(first.exec(Command(argv=["python3", "-c", taking, "4"])))
            await asyncio.sleep(2.0)
            other = await second.exec(Command(argv=["python3", "-c", taking, "0"]))
            took = int((await held).stdout)
            assert took == 16 or backend.name == "docker"  # whose containers have a user each, with a limit of its own
            assert int(other.stdout) == took

    run(main)


def test_commands_run_side_by_side_and_large_data_goes_both_ways(backend):
    async def main():
        async with opened(backend) as box:
            data = os.urandom(3 << 20)
            many = [box.exec(Command(argv=["sh", "-c", f"sleep 0.1; echo {n}"])) for n in range(8)]
            *echoes, piped = await asyncio.gather(
                *many, box.exec(Command(argv=["cat"], stdin=data, max_output_bytes=4 << 20))
            )
            assert [result.stdout for result in echoes] == [f"{n}\n".encode() for n in range(8)]
            assert piped.stdout == data
            await box.write("in/a.bin", data)
            assert await box.read("/work/in/a.bin") == data

    run(main)


def test_a_command_beyond_its_time_ends_with_everything_it_started(backend):
    async def main():
        async with opened(backend) as box:
            await box.exec(Command(argv=["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"]))  # of an earlier command: goes on
            hidden = "(setsid sh -c 'trap \"\" TERM HUP; sleep 2000' &) ; sleep 3000"
            result = await box.exec(Command(argv=["sh", "-c", hidden], timeout_s=0.5))
            assert result.timed_out
            assert result.failure is not None
            assert (result.failure.cause, result.failure.reward_valid) == ("model_code", True)
            left = (await box.exec(Command(argv=["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]))).stdout
            assert b"sleep 1000" in left
            assert b"2000" not in left
            assert b"3000" not in left

    run(main)


def test_alone_means_that_nothing_else_runs(backend):
    async def main():
        async with opened(backend) as box:
            await box.exec(Command(argv=["sh", "-c", "(setsid sleep 1000 >/dev/null 2>&1 &)"]))
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "1000"])))
            await asyncio.sleep(0.1)
            result = await box.exec(
                Command(argv=["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], exclusive=True)
            )
            assert b"sleep" not in result.stdout
            assert (await running).signal == 9

    run(main)


def test_a_directory_of_many_long_names_is_listed(backend):
    """In more bytes than an answer's head may have."""
    script = "for n in range(2900): open(chr(1) * 230 + str(n), 'w')"

    async def main():
        async with opened(backend) as box:
            assert (await box.exec(Command(argv=["python3", "-c", script], workdir="/tmp"))).ok
            assert {entry.name for entry in await box.list("/tmp")} >= {"\1" * 230 + str(n) for n in range(2900)}
            with pytest.raises(SandboxError) as raised:
                await box.list("/tmp", max_entries=2000)
            assert raised.value.failure.cause == "model_code"

    run(main)


def test_files(backend):
    async def main():
        async with opened(backend) as box:
            await box.write("deep/er/script.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
            assert (await box.exec(Command(argv=["deep/er/script.sh"]))).stdout == b"ran\n"
            await box.exec(
                Command(argv=["sh", "-c", "ln -s /etc/passwd link; mkfifo pipe; mkdir folder; echo 12345 > file"])
            )
            kinds = {entry.name: (entry.kind, entry.size_bytes) for entry in await box.list(".")}
            assert kinds == {
                "deep": ("directory", 0),
                "file": ("file", 6),
                "folder": ("directory", 0),
                "link": ("link", 0),
                "pipe": ("other", 0),
            }
            for path, why in [("link", "ELOOP"), ("pipe", "EINVAL"), ("/dev/zero", "EINVAL"), ("none", "ENOENT")]:
                with pytest.raises(SandboxError) as raised:
                    await box.read(path)
                assert raised.value.failure.evidence["errno"] == why
            with pytest.raises(SandboxError, match="more than 5"):
                await box.read("file", max_bytes=5)
            await box.write("link", b"replaced")
            assert await box.read("link") == b"replaced"
            assert b"replaced" not in await box.read("/etc/passwd")

    run(main)


def test_list_knows_the_labels_of_those_that_live(backend):
    async def main():
        async with backend:
            await backend.create(SMALL, labels={"rollout": "r1"})
            other = await backend.create(SMALL, labels={"rollout": "r2"})
            assert [info.id for info in await backend.list({"rollout": "r2"})] == [other.id]
            assert len(await backend.list()) == 2
            await other.terminate()
            await other.terminate()
            assert await backend.list({"rollout": "r2"}) == []
            with pytest.raises(SandboxError):
                await other.exec(Command(argv=["true"]))

    run(main)


def test_its_time_to_live_ends_it_and_can_be_renewed(backend):
    async def main():
        async with backend:
            box = await backend.create(msgspec.structs.replace(SMALL, ttl_s=0.5))
            await box.renew(1.5)
            started = time.monotonic()
            with pytest.raises(SandboxError, match="time to live") as raised:
                await box.exec(Command(argv=["sleep", "100"]))
            assert time.monotonic() - started > 1.0
            assert not raised.value.failure.reward_valid

    run(main)


def test_paused_it_stands_still_and_its_clock_too(backend):
    async def main():
        async with opened(backend) as box:
            counting = "i=0; while [ $i -lt 12 ]; do i=$((i+1)); echo $i > /tmp/count; sleep 0.1; done"
            running = asyncio.create_task(box.exec(Command(argv=["sh", "-c", counting], timeout_s=3.0)))
            await asyncio.sleep(0.3)
            await box.pause()
            before = await box.read("/tmp/count")
            await asyncio.sleep(3.0)
            assert await box.read("/tmp/count") == before
            with pytest.raises(SandboxError, match="paused"):
                await box.exec(Command(argv=["true"]))
            await box.resume()
            assert (await running).exit_code == 0
            assert await box.read("/tmp/count") == b"12\n"

    run(main)


def test_names_that_cant_be_names_are_refused_and_nothing_breaks(backend):
    async def main():
        async with opened(backend) as box:
            for path in ("a\0b", "x" * 5000, "\ud800"):
                for call in (box.read(path), box.write(path, b""), box.list(path)):
                    with pytest.raises(SandboxError):
                        await call
            assert (await box.exec(Command(argv=["echo", "a\0b"]))).exit_code == 126
            assert (await box.exec(Command(argv=["echo", "x" * 3_000_000]))).exit_code == 126
            assert (await box.exec(Command(argv=["echo", "x" * 500_000]))).exit_code == 126
            assert (await box.exec(Command(argv=["echo", "well"]))).stdout == b"well\n"

    run(main)


def test_a_snapshot_brings_the_files_back_as_they_were(backend):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            script = """
                mkdir -p a/b && echo one > a/b/one && ln a/b/one a/two && ln -s /etc/passwd a/link && mkfifo a/pipe
                printf '\\377 name' | xargs -0 touch; chmod 000 a/b
                chmod 4755 a/two; yes | head -c 300000 > big; echo shared > /dev/shm/kept; touch -d @1000 big
            """
            if (await backend.capabilities()).writable_root:
                script += "rm /etc/hostname; rm -r /etc/ssl && mkdir /etc/ssl"
            assert (await box.exec(Command(argv=["sh", "-ec", script]))).ok
            marks = """import os
for place in ("big", "a", "/dev/shm/kept"): os.setxattr(place, "user.mark", b"\\0\\xff" + place.encode())"""
            marked = await box.exec(Command(argv=["python3", "-c", marks]))
            taken = await box.snapshot("turn-3")
            assert os.stat(taken.path).st_size == taken.bytes
            look = ["sh", "-c", "chmod 755 a/b; ls -lRgo --time-style=+ . /etc/ssl /etc/hostname /dev/shm; cat a/b/one"]
            before = await box.exec(Command(argv=look))
            await box.terminate()
            again = await backend.create(SMALL, snapshot=taken)
            after = await again.exec(Command(argv=look))
            assert after.stdout == before.stdout
            read = 'import os\nfor place in ("big", "a", "/dev/shm/kept"): print(os.getxattr(place, "user.mark"))'
            found = await again.exec(Command(argv=["python3", "-c", read]))
            assert found.ok == marked.ok  # a kernel may have none in memory
            assert found.stdout.count(b"\\xff") == 3 * marked.ok
            assert (
                await again.exec(Command(argv=["sh", "-c", "[ a/b/one -ef a/two ] && stat -c %Y big"]))
            ).stdout == b"1000\n"

    run(main)


def test_a_snapshot_that_was_damaged_is_refused(backend):
    """... also where what is left of it could be read: a part of the files isn't what was there."""

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await box.exec(Command(argv=["sh", "-c", "echo a >a; echo b >b; echo c >c"]))
            taken = await box.snapshot("good")
            for size in (taken.bytes - 2048, 100):
                os.truncate(taken.path, size)
                with pytest.raises(SandboxError, match="has changed since it was taken") as raised:
                    await backend.create(SMALL, snapshot=taken)
                assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", False)

    run(main)


def test_files_with_holes_fit_into_what_they_came_from(backend):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            assert (
                await box.exec(
                    Command(argv=["sh", "-ec", "for f in a b; do echo $f >$f; dd of=$f bs=1 count=0 seek=20M; done"])
                )
            ).ok
            taken = await box.snapshot("holes")
            assert taken.bytes > SMALL.limits.disk_bytes
            again = await backend.create(SMALL, snapshot=taken)
            look = ["sh", "-c", "head -c 2 a b; stat -c %s a b; head -c 1000000 /dev/zero > more && echo room"]
            assert (await again.exec(Command(argv=look))).stdout == (await box.exec(Command(argv=look))).stdout
            assert (await again.exec(Command(argv=["cat", "more"]))).stdout.strip(b"\0") == b""

    run(main)


@pytest.mark.parametrize("call", ["snapshot", "pause"])
def test_one_whose_snapshot_or_pause_is_cancelled_goes_on(backend, call: str):
    async def main():
        async with opened(backend) as box:
            await box.exec(Command(argv=["sh", "-c", "head -c 20000000 /dev/urandom > f"]))
            for turn in range(8):
                asked = asyncio.create_task(box.snapshot("cut-off") if call == "snapshot" else box.pause())
                await asyncio.sleep(0.004 * turn)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                if asked.cancelled():
                    assert (await box.exec(Command(argv=["echo", "on"]))).stdout == b"on\n"
                elif call == "pause":
                    await box.resume()

    run(main)


@pytest.fixture
def open_folder():
    """A folder that the user of sandboxes can look into, which pytest's own isn't."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_an_image_is_its_root_and_stays_as_it_was(backend, open_folder: Path):
    image = open_folder / "an:image, with=signs"
    (image / "bin").mkdir(parents=True)
    (image / "greeting").write_text("from the image")
    for needed in ("/bin/sh", *re.findall(r"(/\S+) \(", subprocess.check_output(["ldd", "/bin/sh"], text=True))):
        (image / needed[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(needed, image / needed[1:])
    for folder, _, files in os.walk(open_folder):
        for name in (".", *files):  # what isn't its own it may read, but not change
            os.chown(os.path.join(folder, name), SANDBOX_UID, SANDBOX_UID)

    async def main():
        async with opened(backend, msgspec.structs.replace(SMALL, root=str(image))) as box:
            assert await box.read("/greeting") == b"from the image"
            assert "usr" not in {entry.name for entry in await box.list("/")}
            assert (await box.exec(Command(argv=["/usr/bin/id"]))).exit_code == 127
            place = "/bin" if (await backend.capabilities()).writable_root else "/work"
            script = f"read line < /greeting; echo $line > {place}/new; echo $line; pwd; echo x > /dev/null; echo /*"
            said = (await box.exec(Command(argv=["sh", "-c", script]))).stdout.decode()
            assert said.startswith("from the image\n/work\n/bin /dev ")
            assert " /greeting /" in said
            assert await box.read(f"{place}/new") == b"from the image\n"
            if place == "/bin":
                await box.write("/greeting", b"changed")
                assert await box.read("/greeting") == b"changed"
            else:
                with pytest.raises(SandboxError) as refused:
                    await box.write("/greeting", b"changed")
                assert refused.value.failure.evidence["errno"] == "EROFS"
            with pytest.raises(SandboxError) as raised:
                await backend.create(msgspec.structs.replace(SMALL, root=str(open_folder / "missing")))
            assert raised.value.failure.cause == "environment"
        assert (image / "greeting").read_text() == "from the image"
        assert not (image / "bin" / "new").exists()

    run(main)


def test_preflight_passes_here_and_names_what_is_wrong(backend, tmp_path: Path):
    async def main():
        async with backend:
            can = await backend.capabilities()
            assert await backend.preflight(SMALL) == []
            found = await findings(SandboxConfig(), backend, 2, spec=SMALL)
            assert any(finding.fatal for finding in found) != can.fit_for_untrusted, found
            bad = msgspec.structs.replace(SMALL, root=str(tmp_path / "missing"))
            found = await findings(SandboxConfig(allow_unbounded=True), backend, 2, spec=bad)
            assert any(finding.fatal and "missing can't be made" in str(finding) for finding in found), found
            assert await backend.list() == []

    run(main)


def zygote_that_first_runs(code: str, folder: Path) -> str:
    """A program to give as the zygote's Python."""
    program = folder / "python"
    wrapper = program.with_suffix(".py")
    wrapper.write_text(f"""import os, sys
os.execv(sys.executable, [sys.executable, *sys.argv[1:-1], {code!r} + sys.argv[-1]])
""")
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{wrapper}' \"$@\"\n")  # its path may have blanks
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("walls", ["", shutil.which("bwrap")])
def test_commands_of_a_run_that_is_nice_run_and_are_nicer_still(tmp_path: Path, walls: str | None):
    if walls is None:
        pytest.skip("bubblewrap isn't installed: apt-get install bubblewrap")
    python = zygote_that_first_runs("import os; os.nice(12 - os.nice(0)); ", tmp_path)
    settings = LocalSettings(spares=1, python=python, bubblewrap=walls)

    async def main():
        async with opened(LocalBackend(tmp_path / "state", settings=settings)) as box:
            assert (await box.exec(Command(argv=["nice"]))).stdout == b"17\n"

    run(main)


def test_a_command_that_cant_be_made_ready_has_no_result(tmp_path: Path):
    """It never ran: its exit code would be held against whoever wrote it."""
    broken = """import os
def refuse(*_): raise OSError(24, "too many open files")
os.nice = os.setpriority = refuse
"""
    settings = LocalSettings(spares=1, python=zygote_that_first_runs(broken, tmp_path))

    async def main():
        async with opened(LocalBackend(tmp_path / "state", settings=settings)) as box:
            with pytest.raises(SandboxError) as raised:
                await box.exec(Command(argv=["true"]))
            assert raised.value.failure.cause == "infrastructure"
            assert raised.value.failure.evidence == {"errno": "EMFILE"}

    run(main)


def test_a_path_that_is_too_long_is_refused_and_harms_no_other_sandbox(tmp_path: Path):
    """What a sandbox is made of goes to the zygote as one packet: the rest of it would be cut off."""
    longest = "/" + "\1" * 4094  # which JSON takes six bytes each for

    async def main():
        async with LocalBackend(tmp_path / "state", settings=LocalSettings(spares=1)) as backend:
            box = await backend.create(SMALL)
            for changed in ({"workdir": "/" + "a/" * 40_000}, {"root": "/" + "\u00fc" * 2048}):
                with pytest.raises(ConfigurationError, match="less than 4096 bytes"):
                    await backend.create(msgspec.structs.replace(SMALL, **changed))
            with pytest.raises(SandboxError, match="name too long"):
                await backend.create(msgspec.structs.replace(SMALL, workdir=longest, root=longest))
            assert backend._maker is not None
            with pytest.raises(ConfigurationError, match="65536"):
                backend._maker.request({"do": "terminate", "id": "x" * 65536})
            assert (await box.exec(Command(argv=["echo", "alive"]))).stdout == b"alive\n"

    run(main)
