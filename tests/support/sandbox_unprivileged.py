"""Sandboxes of an ordinary user: imports as root, becomes nobody in particular, then makes some.

python sandbox_unprivileged.py STATE UID [BUBBLEWRAP]: prints one JSON object. The zygote runs the system's Python, for
the one that runs this may lie where only root can look.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  what asyncio would import later, when it can't be read any more
import json
import os
import subprocess
import sys
from pathlib import Path

from sandbox_backends import SMALL, processes_of

from headway.config.sandbox import SandboxConfig
from headway.sandbox import preflight
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings


async def main(folder: Path) -> dict[str, object]:
    settings = LocalSettings(spares=1, python="/usr/bin/python3", bubblewrap="".join(sys.argv[3:]))
    async with LocalBackend(folder / "state", snapshots=folder / "snapshots", settings=settings) as backend:
        can = await backend.capabilities()
        box = await backend.create(SMALL)
        result = await box.exec(["sh", "-c", "id -u; echo kept > file; cat /proc/self/uid_map; ulimit -v"])
        taken = await box.snapshot("one")
        again = await backend.create(SMALL, snapshot=taken)
        return {
            "uid": os.getuid(),
            "memory_limit": can.memory_limit,
            "missing": can.missing,
            "said": result.stdout.decode().split(),
            "kept": (await again.read("file")).decode(),
            "refused": await told(SandboxConfig(), backend),
            "allowed": await told(SandboxConfig(allow_unbounded=True), backend),
            "seen": len(processes_of(folder / "state")),
        }


async def told(settings: SandboxConfig, backend: LocalBackend) -> list[tuple[bool, str]]:
    return [(one.fatal, str(one)) for one in await preflight.findings(settings, backend, 2, spec=SMALL)]


if __name__ == "__main__":
    place, uid = Path(sys.argv[1]), int(sys.argv[2])
    subprocess.run(["true"], check=True)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    print(json.dumps(asyncio.run(main(place))))
