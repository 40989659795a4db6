"""Everything that is wrong with a machine is found before the run, with its fix; each really made wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sandbox_backends import SANDBOX_UID, SMALL, gone_within, leftovers_of, local, local_without_groups, run
from test_sandbox_kills import end, start_owner, zygote_of

from headway.config.sandbox import SandboxConfig
from headway.records.sandbox import MIB, Command, SandboxError
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.preflight import findings

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
HERE = Path(__file__).parents[1] / "support"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make it wrong")


def found_by(backend: LocalBackend, settings: SandboxConfig | None = None, spec=SMALL) -> list[tuple[bool, str]]:
    async def main() -> list[tuple[bool, str]]:
        try:
            found = await findings(settings or SandboxConfig(), backend, 2, spec=spec)
            return [(one.fatal, str(one)) for one in found]
        finally:
            await backend.close()

    return run(main)


def fatal_of(found: list[tuple[bool, str]]) -> str:
    """The only one."""
    (line,) = [line for fatal, line in found if fatal]
    return line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=2000,mode=0755", "none", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (place / "full").write_bytes(bytes(8 << 20))


def test_nothing_is_wrong_here(tmp_path: Path):
    assert not any(fatal for fatal, _ in found_by(local(tmp_path)))
    assert not any(leftovers_of(tmp_path / "state", os.getpid()).values())


def test_no_user_namespaces(tmp_path: Path):
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
    helper = [sys.executable, str(HERE / "sandbox_preflight.py"), str(tmp_path)]
    done = subprocess.run([*command, *helper], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    fatal = [(what, fix) for is_fatal, what, fix in json.loads(done.stdout) if is_fatal]
    assert len(fatal) == 1, fatal
    assert "sysctl -w user.max_user_namespaces" in " ".join(fatal[0])
    left = gone_within(tmp_path / "state", os.getpid(), 5.0)
    assert not left["processes"]


def test_no_control_groups(tmp_path: Path):
    line = fatal_of(found_by(local_without_groups(tmp_path)))
    assert "untrusted code could take all memory" in line
    assert "sandbox.allow_unbounded = true" in line
    accepted = found_by(local_without_groups(tmp_path), SandboxConfig(allow_unbounded=True))
    assert [fatal for fatal, line in accepted if "can take all memory" in line] == [False]


@ROOT
def test_a_full_disk_under_the_records(small_disk: Path):
    fill(small_disk)
    line = fatal_of(found_by(local(small_disk)))
    assert "No space left" in line
    assert str(small_disk / "state") in line
    assert not leftovers_of(small_disk / "state", os.getpid())["groups"]
    assert list(small_disk.glob("state/owner-*")) == []


@ROOT
def test_a_full_disk_under_the_snapshots(small_disk: Path, tmp_path: Path):
    def backend() -> LocalBackend:
        settings = LocalSettings(spares=1)
        return LocalBackend(tmp_path / "state", snapshots=small_disk / "snapshots", settings=settings)

    line = fatal_of(found_by(backend()))
    assert "snapshots: 4 MiB are free, and 24 MiB are needed: free some" in line or "3 MiB are free" in line
    tiny = msgspec.structs.replace(SMALL, limits=msgspec.structs.replace(SMALL.limits, disk_bytes=2 * MIB))
    assert not any(fatal for fatal, _ in found_by(backend(), spec=tiny))
    for n in range(2000):
        try:
            (small_disk / str(n)).touch()
        except OSError:
            break
    assert "inodes" in fatal_of(found_by(backend(), spec=tiny))


@ROOT
def test_a_disk_that_fills_up_under_the_records_fails_a_start_alone(small_disk: Path):
    async def main():
        async with local(small_disk) as backend:
            box = await backend.create(SMALL)
            fill(small_disk)
            with pytest.raises(SandboxError, match="free space"):
                await backend.create(SMALL)
            assert (await box.exec(Command(argv=["true"]))).ok
            (small_disk / "full").unlink()
            assert (await (await backend.create(SMALL)).exec(Command(argv=["true"]))).ok
            assert len(await backend.list()) == 2

    run(main)


def test_stale_leftovers_are_removed_and_said(tmp_path: Path):
    owner = start_owner(tmp_path)
    for _ in range(4):  # some of its sandboxes have answered
        assert owner.stdout is not None
        owner.stdout.readline()
    os.kill(owner.pid, signal.SIGSTOP)
    os.kill(zygote_of(tmp_path / "state"), signal.SIGKILL)
    end(owner)
    assert leftovers_of(tmp_path / "state", owner.pid)["directories"]
    found = found_by(local(tmp_path))
    assert [line for fatal, line in found if "removed what a dead owner had left" in line and not fatal]
    assert not any(fatal for fatal, _ in found)
    assert not any(leftovers_of(tmp_path / "state", owner.pid).values())


def test_a_bad_image(tmp_path: Path):
    missing = msgspec.structs.replace(SMALL, root=str(tmp_path / "missing"))
    assert "missing can't be made" in fatal_of(found_by(local(tmp_path), spec=missing))
    (tmp_path / "empty").mkdir()
    if os.geteuid() == 0:  # where tests have their files nobody else may look
        unreachable = msgspec.structs.replace(SMALL, root=str(tmp_path / "empty"))
        assert "chmod o+x" in fatal_of(found_by(local(tmp_path), spec=unreachable))
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        os.chown(name, SANDBOX_UID, -1)
        empty = msgspec.structs.replace(SMALL, root=name)
        assert "an image with /bin/sh" in fatal_of(found_by(local(tmp_path), spec=empty))


def test_the_command_says_it_and_ends_with_2(tmp_path: Path):
    command = [sys.executable, "-m", "headway.cli.main", "sandboxes", "check", "--state", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "sandboxes work here" in done.stdout) == (0, True), done.stderr
    script = 'ulimit -n 64; exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "open files, 56 are left: ulimit -n" in done.stderr
    assert "ulimit -n" in done.stderr
