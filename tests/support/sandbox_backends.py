"""The backends that sandboxes are tested with, and looks at the machine from outside of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sandbox_docker

from headway.records.sandbox import MIB, ResourceLimits, SandboxSpec
from headway.sandbox.docker.backend import DockerBackend, DockerSettings
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.machine_backend import MachineBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.protocol import Sandbox

SANDBOX_UID = LocalSettings().sandbox_uid if os.geteuid() == 0 else os.geteuid()
SMALL = SandboxSpec(
    limits=ResourceLimits(memory_bytes=96 * MIB, disk_bytes=24 * MIB, inodes=3000, processes=48, open_files=256),
    ttl_s=120.0,
)


def local(folder: Path) -> LocalBackend:
    return LocalBackend(folder / "state", snapshots=folder / "snapshots", settings=LocalSettings(spares=1))


def local_without_groups(folder: Path) -> LocalBackend:
    settings = LocalSettings(spares=1, cgroups=False)
    return LocalBackend(folder / "state", snapshots=folder / "snapshots", settings=settings)


def bubblewrap(folder: Path) -> LocalBackend:
    program = shutil.which("bwrap")
    if program is None:
        pytest.skip("bubblewrap isn't installed: apt-get install bubblewrap")
    settings = LocalSettings(spares=1, bubblewrap=program)
    return LocalBackend(folder / "state", snapshots=folder / "snapshots", settings=settings)


def docker(folder: Path) -> DockerBackend:
    url, why = sandbox_docker.reached()
    if not url:
        pytest.skip(why)
    settings = DockerSettings(image=sandbox_docker.IMAGE, url=url)
    return DockerBackend(snapshots=folder / "snapshots", settings=settings)


BACKENDS: dict[str, Callable[[Path], MachineBackend[Any]]] = {
    "local": local,
    "local-without-groups": local_without_groups,
    "bubblewrap": bubblewrap,
    "docker": docker,
}
# Code that means harm is tried on all of them with HEADWAY_ALL_BACKENDS=1; a container takes long to start.
HARMED = [name for name in BACKENDS if name != "docker" or os.environ.get("HEADWAY_ALL_BACKENDS")]


def run(main: Callable[[], Coroutine[Any, Any, Any]], limit_s: float = 90.0) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(limit_s):
            return await main()

    return asyncio.run(limited())


@asynccontextmanager
async def opened(backend: MachineBackend[Any], spec: SandboxSpec = SMALL) -> AsyncIterator[Sandbox]:
    async with backend:
        box = await backend.create(spec)
        try:
            yield box
        finally:
            await box.terminate()


def processes_of(state: Path) -> list[int]:
    """Zygotes and first processes whose owners are recorded below ``state``, and what else is in their groups."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                if (b"headway.sandbox." in words or b"bwrap" in words) and _works_in(entry, state):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _works_in(entry: Path, state: Path) -> bool:
    """Told by its log, which all copies of a zygote hold open: their current directories differ."""
    return any(str(state) in os.readlink(link) for link in (entry / "fd").iterdir())


def groups_of(owner: str) -> list[Path]:
    """Control groups of an owner, by name, in any hierarchy."""
    found: list[Path] = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):  # which forgives what goes meanwhile
        if f"/headway-sandboxes/{owner}" in folder + "/":
            found.append(Path(folder))
        elif "/headway-sandboxes/" in folder:
            names.clear()
    return found


def leftovers_of(state: Path, owner_pid: int) -> dict[str, list[Any]]:
    """Everything that is left of an owner's sandboxes; all empty: nothing."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    return {
        "processes": processes_of(state),
        "groups": groups_of(f"owner-{owner_pid}-"),
        "mounts": mounts,
        "directories": list(state.glob(f"owner-{owner_pid}-*")),
        "docker": sandbox_docker.left_by(owner_pid),
    }


@contextmanager
def nothing_left(state: Path) -> Iterator[None]:
    """Inside the block nothing is left behind by this process's sandboxes. What was there before is another test's."""
    before = leftovers_of(state, os.getpid())
    yield
    assert leftovers_of(state, os.getpid()) == before


def gone_within(state: Path, owner_pid: int, seconds: float) -> dict[str, list[Any]]:
    """What is still left after that time; returns as soon as nothing is."""
    deadline = time.monotonic() + seconds
    while True:
        left = leftovers_of(state, owner_pid)
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
