"""What preflight finds in a process whose surroundings a test has broken: python sandbox_preflight.py FOLDER."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sandbox_backends import SMALL

from headway.config.sandbox import SandboxConfig
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.preflight import findings


async def main(folder: Path) -> list[tuple[bool, str, str]]:
    settings = LocalSettings(spares=1, sandbox_uid=0)  # no other user is known in a namespace of one
    backend = LocalBackend(folder / "state", settings=settings)
    try:
        found = await findings(SandboxConfig(allow_unbounded=True), backend, 2, spec=SMALL)
        return [(one.fatal, one.message, one.fix) for one in found]
    finally:
        await backend.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
