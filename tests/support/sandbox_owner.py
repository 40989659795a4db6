"""A process that owns sandboxes and is killed by its test: makes them, runs commands in them, without an end.

python sandbox_owner.py FOLDER [BACKEND [UID]]: prints a line when its backend is up, then one for each sandbox that has
answered. UID: becomes that user first. FOLDER/under-way tells, after its death too, how many calls of each kind were
under way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  what asyncio would import later, when it can't be read any more
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox_backends import BACKENDS, SMALL

from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings

DAEMON = "(setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 &); echo x > f; sleep 0.02"
FILL = "head -c 6000000 /dev/urandom > data && sha256sum data > sum"
KINDS = ("create", "exec", "pause", "snapshot", "restore", "terminate")


class UnderWay:
    """Counts in a file that every look sees at once, and that a kill leaves as they were."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4 * len(KINDS)))
        with open(path, "r+b") as file:
            self._counts = mmap.mmap(file.fileno(), 0)

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        self._add(kind, 1)
        try:
            yield
        finally:
            self._add(kind, -1)

    def _add(self, kind: str, more: int) -> None:
        at = 4 * KINDS.index(kind)
        struct.pack_into("i", self._counts, at, struct.unpack_from("i", self._counts, at)[0] + more)


def under_way(folder: Path) -> dict[str, int]:
    counts = struct.unpack(f"{len(KINDS)}i", (folder / "under-way").read_bytes())
    return dict(zip(KINDS, counts, strict=True))


async def main(folder: Path, name: str, python: str) -> None:
    counts = UnderWay(folder / "under-way")
    settings = LocalSettings(spares=1, python=python)
    local = LocalBackend(folder / "state", snapshots=folder / "snapshots", settings=settings)
    async with local if name == "local" else BACKENDS[name](folder) as backend:
        print("up", flush=True)

        async def one() -> None:
            while True:
                with counts.doing("create"):
                    box = await backend.create(SMALL, labels={"rollout": "r"})
                with counts.doing("exec"):
                    await box.exec(["sh", "-c", DAEMON])
                print(box.id, flush=True)
                with counts.doing("pause"):
                    await box.pause()
                with counts.doing("terminate"):
                    await box.terminate()

        async def made() -> None:
            while True:
                with counts.doing("create"):
                    box = await backend.create(SMALL)
                await box.terminate()

        async def parked() -> None:
            box = await backend.create(SMALL)
            await box.exec(["sh", "-c", FILL])
            for n in range(1_000_000):
                with counts.doing("snapshot"):
                    taken = await box.snapshot(f"parked-{n % 3}")
                with counts.doing("restore"):
                    again = await backend.create(SMALL, snapshot=taken)
                await again.terminate()

        async def paused() -> None:
            box = await backend.create(SMALL)
            await box.exec(["sh", "-c", DAEMON])
            await box.pause()

        async def busy() -> None:
            box = await backend.create(SMALL)
            await box.exec(["sh", "-c", "while :; do :; done"], timeout_s=1000.0)

        await asyncio.gather(
            *(one() for _ in range(3)), made(), made(), parked(), paused(), busy(), backend.create(SMALL)
        )


if __name__ == "__main__":
    place, interpreter = Path(sys.argv[1]), sys.executable
    if len(sys.argv) > 3:
        uid, interpreter = int(sys.argv[3]), "/usr/bin/python3"
        subprocess.run(["true"], check=True)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    asyncio.run(main(place, sys.argv[2] if len(sys.argv) > 2 else "local", interpreter))
