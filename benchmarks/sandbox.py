"""What a sandbox costs: start, command, rate, memory; of every backend that this machine has, one after the other.

    python benchmarks/sandbox.py [--samples 50] [--live 256] [--queued 960] [--quick] [--backends local,docker]

`cold_start_ms`: from the call of `create` until the sandbox answers, one after the other, each ended before the next;
between them 50 ms for the processes that are made ahead of need. `exec_ms`: `true` in one that lives, in and out.
`creates_per_s`: creations, eight at once, each ended at once: more than the spares can wait for. `mib_per_live`:
with `--live` of them at once, idle after a command: the larger of what their control groups count (the kernel's share
included) and of the processes' proportional share (PSS); Docker's helper process for each container is added.
`queued_*`: that many leases asked for at once through the pool, with `--live` as its limit, each runs `true`; `lost`
are those that got none. Docker is asked for an eighth of all these.

`bwrap_*`: bubblewrap alone with the same namespaces, mounts and `true` as its command: one process start is all that it
can be asked for, so `bwrap_start_and_exec_ms_p50` compares with the sum of cold start and command; it limits neither
memory nor processes nor the disk.

The daemon and the image are those of the tests (`tests/support/sandbox_docker.py`): DOCKER_HOST, the machine's own, or
one that is started for this.

Last line: one JSON object, the local backend's numbers at its top, the others' below their names; null: not measured
here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.records.sandbox import MIB, ResourceLimits, SandboxSpec
from headway.runtime.clock import RealClock
from headway.sandbox.docker.backend import DockerBackend, DockerSettings
from headway.sandbox.linux import cgroups
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.pool import PoolSettings, SandboxPool

SPEC = SandboxSpec(limits=ResourceLimits(memory_bytes=256 * MIB, disk_bytes=64 * MIB))
BWRAP = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
BWRAP_FILES = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
BWRAP_REST = [
    "--symlink",
    "usr/lib64",
    "/lib64",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--tmpfs",
    "/tmp",
    "--tmpfs",
    "/work",
]


async def one_by_one(backend: LocalBackend, samples: int) -> dict[str, float]:
    starts, commands, ends = [], [], []
    for _ in range(samples):
        began = time.perf_counter()
        box = await backend.create(SPEC)
        starts.append(time.perf_counter() - began)
        for _ in range(3):
            began = time.perf_counter()
            result = await box.exec(["true"])
            commands.append(time.perf_counter() - began)
            assert result.ok, result
        began = time.perf_counter()
        await box.terminate()
        ends.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)
    return {
        "cold_start_ms_p50": _ms(starts, 0.5),
        "cold_start_ms_p99": _ms(starts, 0.99),
        "exec_ms_p50": _ms(commands, 0.5),
        "exec_ms_p99": _ms(commands, 0.99),
        "end_ms_p50": _ms(ends, 0.5),
    }


async def rate(backend: LocalBackend, count: int) -> float:
    left = iter(range(count))

    async def creator() -> None:
        ending = []
        for _ in left:
            ending.append(asyncio.create_task((await backend.create(SPEC)).terminate()))
        await asyncio.gather(*ending)

    began = time.perf_counter()
    await asyncio.gather(*(creator() for _ in range(8)))
    return count / (time.perf_counter() - began)


async def memory(backend: LocalBackend, live: int) -> dict[str, float | None]:
    limit = asyncio.Semaphore(8)

    async def one() -> Any:
        async with limit:
            box = await backend.create(SPEC)
            await box.exec(["true"])
            return box

    boxes = await asyncio.gather(*(one() for _ in range(live)))
    await asyncio.sleep(0.5)
    counted, shared = await asyncio.to_thread(_memory_of, backend)
    await asyncio.gather(*(box.terminate() for box in boxes))
    both = [value for value in (counted, shared) if value is not None]
    return {
        "mib_per_live": round(max(both) / live / MIB, 2),
        "mib_per_live_groups": counted and round(counted / live / MIB, 2),
        "mib_per_live_pss": shared and round(shared / live / MIB, 2),
    }


def _memory_of(backend: LocalBackend) -> tuple[float | None, float | None]:
    docker = isinstance(backend, DockerBackend)
    own = cgroups.mounted().get("memory", Path("/nowhere"))
    groups = Path("/sys/fs/cgroup/memory/docker") if docker else own / cgroups.SHARED
    files = list(groups.glob(f"{'' if docker else f'owner-{os.getpid()}-*/'}*/memory.usage_in_bytes"))
    counted = float(sum(int(file.read_text()) for file in files)) if files else None
    helpers = _shared("containerd-shim") if docker else 0.0
    # Bubblewrap's own process, around each of its sandboxes, is in their groups.
    return counted and counted + helpers, _shared("sandbox-init") + _shared("bwrap") + helpers


def _shared(program: str) -> float:
    found = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text().startswith(program):
                    line = next(x for x in (entry / "smaps_rollup").read_text().splitlines() if x.startswith("Pss:"))
                    found += int(line.split()[1]) * 1024
            except OSError:
                continue
    return found


async def queued(backend: LocalBackend, count: int, live: int) -> dict[str, float]:
    pool = SandboxPool(backend, PoolSettings(live=live, starts=8), RealClock())
    waits: list[float] = []

    async def one() -> None:
        began = time.perf_counter()
        async with pool.lease(SPEC) as box:
            waits.append(time.perf_counter() - began)
            await box.exec(["true"])

    began = time.perf_counter()
    results = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    return {
        "queued": count,
        "queued_lost": sum(isinstance(result, BaseException) for result in results),
        "queued_s": round(time.perf_counter() - began, 2),
        "queued_wait_ms_p99": _ms(waits, 0.99),
        "queued_start_ms_p99": round(pool.statistics().start.quantile_s(0.99) * 1000, 2),
    }


async def bubblewrap_alone(samples: int) -> dict[str, float | None]:
    program = shutil.which("bwrap")
    if program is None:
        return {"bwrap_start_and_exec_ms_p50": None, "bwrap_creates_per_s": None}

    async def one() -> float:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(program, *BWRAP, *BWRAP_FILES, *BWRAP_REST, "true")
        assert await process.wait() == 0
        return time.perf_counter() - began

    times = [await one() for _ in range(samples)]
    left = iter(range(samples * 4))

    async def creator() -> None:
        for _ in left:
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(creator() for _ in range(8)))
    return {
        "bwrap_start_and_exec_ms_p50": _ms(times, 0.5),
        "bwrap_creates_per_s": round(samples * 4 / (time.perf_counter() - began), 1),
    }


def _ms(times: list[float], share: float) -> float:
    return round(sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1000, 2)


def made(name: str, folder: str) -> LocalBackend | None:
    """A backend, or None: there is none here."""
    if name == "docker":
        sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
        from sandbox_docker import IMAGE, reached

        url, why = reached()
        if not url:
            print(f"docker: {why}", file=sys.stderr)
            return None
        return DockerBackend(settings=DockerSettings(image=IMAGE, url=url))
    program = shutil.which("bwrap") if name == "bubblewrap" else ""
    if program is None:
        print("bubblewrap: not installed", file=sys.stderr)
        return None
    return LocalBackend(Path(folder, "state"), settings=LocalSettings(bubblewrap=program))


async def measure(name: str, samples: int, live: int, count: int) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        backend = made(name, folder)
        if backend is None:
            return None
        async with backend:
            can = await backend.capabilities()
            await (await backend.create(SPEC)).terminate()  # what the first alone pays for: Docker's volume
            await asyncio.sleep(0.3)
            found: dict[str, Any] = await one_by_one(backend, samples)
            rates = [await rate(backend, samples * 4) for _ in range(3)]
            found["creates_per_s"] = round(statistics.median(rates), 1)
            found |= await memory(backend, live)
            found |= await queued(backend, count, live)
    return {**found, "live": live, "memory_limited": can.memory_limit}


async def measure_all(asked: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in asked.backends.split(","):
        share = 8 if name == "docker" else 1
        size = [max(2, value // share) for value in (asked.samples, asked.live, asked.queued)]
        measured = await measure(name, *size)
        print(name, json.dumps(measured), flush=True)
        found |= (measured or {}) if name == "local" else {name: measured}
    return {**found, **await bubblewrap_alone(asked.samples), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--queued", type=int, default=960)
    parser.add_argument("--backends", default="local,bubblewrap,docker")
    parser.add_argument("--quick", action="store_true", help="a few of each: that it works")
    asked = parser.parse_args()
    if asked.quick:
        asked.samples, asked.live, asked.queued = 5, 8, 24
    print(json.dumps(asyncio.run(measure_all(asked))))


if __name__ == "__main__":
    main()
