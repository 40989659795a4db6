"""Whatever is killed, at whatever moment: nothing of its sandboxes is left."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import sandbox_docker
import warm_programs
from sandbox_backends import (
    BACKENDS,
    SMALL,
    bubblewrap,
    gone_within,
    leftovers_of,
    local,
    local_without_groups,
    opened,
    processes_of,
    run,
)
from sandbox_owner import under_way

from headway.config.sandbox import SandboxConfig
from headway.orchestrator.actors.sandboxes import open_sandboxes
from headway.records.sandbox import Command, SandboxError
from headway.runtime.clock import RealClock
from headway.sandbox import leftovers
from headway.sandbox.docker.backend import DockerBackend, DockerSettings
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings

ROUNDS = int(os.environ.get("HEADWAY_SANDBOX_KILLS", "6"))
pytestmark = [pytest.mark.real, pytest.mark.timeout(120 + 15 * ROUNDS)]
WITHIN_S = 5.0
UID = 54_322  # an ordinary user who has nothing else


def start_owner(folder: Path, uid: int | None = None, backend: str = "local") -> subprocess.Popen[str]:
    BACKENDS[backend](folder)  # skips where there is none
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "sandbox_owner.py"), str(folder), backend]
    command += [] if uid is None else [str(uid)]
    owner = subprocess.Popen(command, env=sandbox_docker.environment(), stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    return owner


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def zygote_of(state: Path) -> int:
    (folder,) = state.glob("owner-*")
    record = leftovers.msgspec.json.decode((folder / "owner.json").read_bytes(), type=leftovers.OwnerRecord)
    return record.zygote_pid


def first_processes(folder: Path) -> list[int]:
    found = processes_of(folder / "state")
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text() == "sandbox-init\n"]


def require_whole_snapshots(folder: Path) -> int:
    """What has a snapshot's name is whole: its files are there, and as they were. Returns how many."""
    found = list(folder.glob("*.tar"))
    for path in found:
        assert path.read_bytes()[-1024:] == bytes(1024), "two empty blocks end a tar"
        with tarfile.open(path) as archive:
            kept = {name: archive.extractfile(f"work/{name}") for name in ("data", "sum")}
            data, told = (file.read() for file in kept.values() if file is not None)
        assert hashlib.sha256(data).hexdigest() == told.decode().split()[0]
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "bubblewrap"])
def test_an_owner_killed_at_any_moment_leaves_nothing(tmp_path: Path, name: str):
    moments, hit, snapshots = random.Random(7), Counter[str](), 0
    rounds = ROUNDS if name == "local" else max(2, ROUNDS // 2)
    for round_ in range(rounds):
        folder = tmp_path / str(round_)
        folder.mkdir()
        owner = start_owner(folder, backend=name)
        time.sleep(moments.uniform(0.0, 0.8))
        assert any(leftovers_of(folder / "state", owner.pid).values()), "the looks from outside see them"
        end(owner)
        hit.update(kind for kind, count in under_way(folder).items() if count)
        left = gone_within(folder / "state", owner.pid, WITHIN_S)
        assert not any(left.values()), left
        snapshots += require_whole_snapshots(folder / "snapshots")
        shutil.rmtree(folder)
    if name == "local":
        _require_moments(hit, snapshots, rounds)


@pytest.mark.slow
def test_a_killed_owners_containers_end_and_the_next_start_removes_what_never_started(tmp_path: Path):
    moments = random.Random(5)
    for round_ in range(max(2, ROUNDS // 3)):
        owner = start_owner(tmp_path, backend="docker")
        assert owner.stdout is not None
        owner.stdout.readline()
        time.sleep(moments.uniform(0.0, 1.0))
        assert any("containers" in one for one in sandbox_docker.left_by(owner.pid)), "the looks from outside see them"
        end(owner)
        deadline = time.monotonic() + 2 * WITHIN_S
        while sandbox_docker.left_by(owner.pid, running=True) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sandbox_docker.left_by(owner.pid, running=True) == [], "these need no reaper"
        left = sandbox_docker.left_by(owner.pid)
        assert any(one.startswith("volumes") for one in left)
        deadline = time.monotonic() + 2 * WITHIN_S
        while sandbox_docker.left_by(owner.pid) and time.monotonic() < deadline:  # it may still make what was asked for
            _next_start(tmp_path, "docker", by_command=round_ == 0)
        assert sandbox_docker.left_by(owner.pid) == []


@pytest.mark.slow
def test_a_daemon_that_goes_away_is_a_failure_of_the_infrastructure(tmp_path: Path):
    if not sandbox_docker.reached()[0]:
        pytest.skip(sandbox_docker.reached()[1])
    url, stop = sandbox_docker.start()
    settings = DockerSettings(image=sandbox_docker.IMAGE, url=url)

    async def main():
        async with DockerBackend(settings=settings) as backend:
            box = await backend.create(SMALL)
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "100"])))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(stop)
            with pytest.raises(SandboxError) as raised:
                await running
            assert (raised.value.failure.cause, raised.value.failure.reward_valid) == ("infrastructure", False)
            with pytest.raises(SandboxError, match="no Docker daemon answers"):
                await backend.create(SMALL)

    try:
        run(main)
    finally:
        stop()


@pytest.mark.slow
def test_an_owner_and_its_zygote_killed_together_leave_what_the_next_start_removes(tmp_path: Path):
    moments, hit, snapshots = random.Random(8), Counter[str](), 0
    rounds = max(2, ROUNDS // 2)
    for round_ in range(rounds):
        folder = tmp_path / str(round_)
        folder.mkdir()
        state = folder / "state"
        owner = start_owner(folder)
        time.sleep(moments.uniform(0.05, 0.8))
        zygote = zygote_of(state)
        os.kill(owner.pid, signal.SIGSTOP)
        os.kill(zygote, signal.SIGKILL)
        end(owner)
        hit.update(kind for kind, count in under_way(folder).items() if count)
        deadline = time.monotonic() + WITHIN_S
        while processes_of(state) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = leftovers_of(state, owner.pid)
        assert (left["processes"], left["mounts"]) == ([], []), "these need no reaper"
        assert len(left["directories"]) == 1
        recorded = list(leftovers.records(state))
        assert recorded
        assert not any(alive for _, alive in recorded)
        _next_start(folder, "local", by_command=round_ == 0)
        assert not any(leftovers_of(state, owner.pid).values())
        snapshots += require_whole_snapshots(folder / "snapshots")
        shutil.rmtree(folder)
    _require_moments(hit, snapshots, rounds)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="becomes another user")
def test_an_ordinary_users_owner_killed_at_any_moment_leaves_nothing():
    """There are no control groups then; and every process of this user is the owner's or a sandbox's."""
    moments, hit = random.Random(9), Counter[str]()
    for round_ in range(max(2, ROUNDS // 2)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.chown(folder, UID, UID)
            owner = start_owner(folder, UID)
            time.sleep(moments.uniform(0.05, 0.8))
            assert len(processes_of_user(UID)) >= 2, "the looks from outside see them"
            with_zygote = round_ % 3 == 2
            zygote = zygote_of(folder / "state")
            if with_zygote:
                os.kill(owner.pid, signal.SIGSTOP)
                os.kill(zygote, signal.SIGKILL)
            end(owner)
            hit.update(kind for kind, count in under_way(folder).items() if count)
            deadline = time.monotonic() + WITHIN_S
            while processes_of_user(UID) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert processes_of_user(UID) == []
            if with_zygote:
                assert len(leftovers.reap(folder / "state")) == 1
            left = gone_within(folder / "state", owner.pid, WITHIN_S)
            assert not any(left.values()), left
            require_whole_snapshots(folder / "snapshots")
    assert {"create", "exec"} <= hit.keys() or ROUNDS < 20, hit


def processes_of_user(uid: int) -> list[int]:
    """By what they say: the files of those that can't be looked into belong to root."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or leftovers.started(int(entry.name)) is None:
                continue
            if f"\nUid:\t{uid}\t" in (entry / "status").read_text():
                found.append(int(entry.name))
    return found


def _require_moments(hit: Counter[str], snapshots: int, rounds: int) -> None:
    """That the moments really were in the middle of everything, often enough to mean something."""
    print(f"{rounds} kills, calls under way in: {dict(hit)}; {snapshots} whole snapshots")
    if rounds >= 20:
        assert min(hit[kind] for kind in ("create", "exec")) >= rounds // 2, hit
        assert min(hit[kind] for kind in ("pause", "snapshot", "restore", "terminate")) >= 1, hit
        assert snapshots


def _next_start(folder: Path, name: str, *, by_command: bool) -> None:
    if by_command:
        for what in ("list", "reap"):
            assert "dead" in said_of_sandboxes(what, folder / "state")
        return

    async def start() -> None:
        async with BACKENDS[name](folder):
            pass

    run(start)


def said_of_sandboxes(what: str, state: Path) -> str:
    """What `headway sandboxes` prints of those below ``state``."""
    words, outputs = ("sandboxes", what, "--state", str(state)), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = dict(sandbox_docker.environment())
    with warm_programs.start(warm_programs.HEADWAY, *words, environment=environment, **outputs) as process:
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    return said


def test_a_living_owner_is_not_reaped(tmp_path: Path):
    async def main():
        async with opened(local(tmp_path)) as box:
            async with local(tmp_path):
                pass
            assert (await box.exec(Command(argv=["true"]))).ok

    run(main)
    assert not any(leftovers_of(tmp_path / "state", os.getpid()).values())


@pytest.mark.parametrize("name", ["local", "bubblewrap", "docker"])
def test_a_living_owners_sandboxes_are_listed_whatever_made_them(tmp_path: Path, name: str):
    def said(what: str) -> str:
        return said_of_sandboxes(what, tmp_path / "state")

    async def main():
        async with BACKENDS[name](tmp_path) as backend:
            box = await backend.create(SMALL, labels={"rollout": "7"})
            listed = [line for line in (await asyncio.to_thread(said, "list")).splitlines() if line.startswith(box.id)]
            assert len(listed) == 1
            assert listed[0].startswith(f"{box.id}  {name}  owner {os.getpid()} (alive)")
            assert listed[0].endswith("rollout=7")
            await asyncio.to_thread(said, "reap")
            assert (await box.exec(Command(argv=["true"]))).ok
            await box.terminate()
            assert box.id not in await asyncio.to_thread(said, "list")

    run(main)


def test_a_long_run_cleans_up_after_owners_that_die_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.orchestrator.actors.sandboxes._REAP_EVERY_S", 0.1)

    async def main():
        async with opened(local(tmp_path)) as box:
            owner = await asyncio.to_thread(start_owner, tmp_path)
            await asyncio.sleep(0.3)
            (folder,) = (tmp_path / "state").glob(f"owner-{owner.pid}-*")
            os.kill(owner.pid, signal.SIGSTOP)
            os.kill(msgspec.json.decode((folder / "owner.json").read_bytes())["zygote_pid"], signal.SIGKILL)
            end(owner)
            async with open_sandboxes(SandboxConfig(), RealClock(), backend=local(tmp_path)) as run_:
                for _ in range(600):
                    await asyncio.sleep(0.05)
                    if run_.reaped().owners:
                        break
                assert (run_.reaped().owners, run_.reaped().stuck, run_.reaped().failed) == (1, 0, "")
                assert run_.reaped().sandboxes
                async with run_.pool.lease(SMALL) as leased:
                    assert (await leased.exec(Command(argv=["true"]))).ok
            assert (await box.exec(Command(argv=["true"]))).ok, "a living owner's isn't touched"
            left = leftovers_of(tmp_path / "state", owner.pid)
            assert (left["groups"], left["directories"]) == ([], [])

    run(main)
    assert not any(leftovers_of(tmp_path / "state", os.getpid()).values())


@pytest.mark.parametrize("make", [local, local_without_groups, bubblewrap])
def test_a_killed_zygote_ends_its_sandboxes_and_another_takes_its_place(tmp_path: Path, make):
    async def main():
        async with make(tmp_path) as backend:
            box = await backend.create(SMALL)
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "100"])))
            await asyncio.sleep(0.2)
            os.kill(zygote_of(tmp_path / "state"), signal.SIGKILL)
            with pytest.raises(SandboxError) as raised:
                await running
            assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", True)
            again = await backend.create(SMALL)
            assert (await again.exec(Command(argv=["true"]))).ok

    run(main)
    left = gone_within(tmp_path / "state", os.getpid(), WITHIN_S)
    assert not any(left.values()), left


@pytest.mark.parametrize("name", ["local", "bubblewrap", "docker"])
def test_a_killed_first_process_is_a_failure_of_the_infrastructure(tmp_path: Path, name: str):
    async def main():
        async with BACKENDS[name](tmp_path) as backend:
            box = await backend.create(SMALL)
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "100"])))
            await asyncio.sleep(0.2)
            for pid in [sandbox_docker.first_process(box.id)] if name == "docker" else first_processes(tmp_path):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SandboxError) as raised:
                await running
            failure = raised.value.failure
            assert (failure.cause, failure.retry, failure.reward_valid) == ("infrastructure", True, False)
            assert (await (await backend.create(SMALL)).exec(Command(argv=["true"]))).ok

    run(main)


def test_a_pause_longer_than_a_commands_time_is_no_silence(tmp_path: Path):
    async def main():
        settings = LocalSettings(spares=1, answer_grace_s=0.5)
        async with LocalBackend(tmp_path / "state", settings=settings) as backend:
            box = await backend.create(SMALL)
            running = asyncio.create_task(box.exec(Command(argv=["sleep", "0.6"], timeout_s=1)))
            await asyncio.sleep(0.2)
            await box.pause()
            await asyncio.sleep(2.5)
            await box.resume()
            assert (await running).exit_code == 0

    run(main)


def test_one_that_doesnt_answer_is_ended(tmp_path: Path):
    async def main():
        settings = LocalSettings(spares=1, answer_grace_s=0.5)
        async with LocalBackend(tmp_path / "state", settings=settings) as backend:
            box = await backend.create(SMALL)
            for pid in first_processes(tmp_path):
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(SandboxError, match="no answer") as raised:
                await box.list("/")
            assert raised.value.failure.cause == "infrastructure"
            assert await backend.list() == []

    run(main)


CANCELLED = [("local", 20, 0.012), ("bubblewrap", 10, 0.1), ("docker", 6, 0.5)]


@pytest.mark.parametrize(("name", "count", "longest_s"), CANCELLED)
def test_cancelled_calls_leave_nothing_behind(tmp_path: Path, name: str, count: int, longest_s: float):
    async def main():
        async with BACKENDS[name](tmp_path) as backend:
            moments = random.Random(3)
            for _ in range(count):
                making = asyncio.create_task(backend.create(SMALL))
                await asyncio.sleep(moments.uniform(0, longest_s))
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                if not making.cancelled():
                    await making.result().terminate()
            assert await backend.list() == []

    run(main)
    assert not any(leftovers_of(tmp_path / "state", os.getpid()).values())


def test_a_number_used_again_is_not_taken_for_the_owner(tmp_path: Path):
    state = tmp_path / "state"
    (state / f"owner-{os.getpid()}-1-1" / "records").mkdir(parents=True)
    mine = state / leftovers.owner_name(os.getpid(), 2)
    mine.mkdir()
    assert len(leftovers.reap(state)) == 1
    assert list(state.iterdir()) == [mine]


def test_the_reaper_of_another_process_namespace_leaves_a_live_owner_alone(tmp_path: Path):
    reaper = """
import sys; from pathlib import Path; from headway.sandbox import leftovers
print(leftovers.reap(Path(sys.argv[1])))
"""
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    apart = ["unshare", *rights, "--mount", "--pid", "--fork", "--mount-proc"]
    apart += [sys.executable, "-c", reaper, str(tmp_path / "state")]

    async def main():
        async with BACKENDS["local"](tmp_path) as backend:
            box = await backend.create(SMALL)
            looking = await asyncio.create_subprocess_exec(*apart, stdout=subprocess.PIPE)
            assert (await looking.communicate())[0] == b"[]\n"
            assert (await box.exec(Command(argv=["echo", "alive"]))).stdout == b"alive\n"
            assert (await (await backend.create(SMALL)).exec(Command(argv=["true"]))).ok

    run(main)
