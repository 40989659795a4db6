"""What routing costs a request: open-loop Poisson arrivals over fake replicas.

    python benchmarks/router.py [--rate 500] [--seconds 60] [--replicas 4] [--only process|http]
        [--characters 200] [--soak] [--quick]
    python benchmarks/router.py --url http://127.0.0.1:8000/v1/chat/completions --pid SERVER [--requests FILE] [--soak]

The real pool and its router run in this process, over replicas whose engine is the fake one: nothing is sampled, and
nobody computes beside it. Arrivals come from a process of their own, which waits for each by spinning on the other core
and writes its number to a pipe: a timer of the event loop would come up to a millisecond late, and a loop that waits
for answers (closed) would hide every stall. Every time is counted from the *scheduled* arrival. Groups of eight follow
one another with the same prompt, and each eighth request is the next turn of a session.

`in process`: until the request is with a replica, that is submitted to its worker; service time is not in it. CPU is
that of this process, the fake engines' part of it included. The first tenth is warm-up and not counted.

`http`: then the endpoint of `headway serve` in a process of its own (`http_edge.py`), over the same pool and fake
engines that have every answer at once: sessions of four calls each, chat completions with a tool, what was said so far
and `--characters` of new text, an eighth of them streamed. `http_load.py` drives it: until the last byte of the answer
is there.

With `--url` another HTTP server is driven instead, whatever it is. `--soak` watches the memory and the sockets of the
process that works (the endpoint's; with `--only process` this one; or `--pid`): see `soak.py`; 600 seconds unless told
otherwise. It ends with exit code 1 when that leaks.

Last line, one JSON object. In process: `p50_ms`, `p99_ms`, `max_ms`, `cpu_ms_per_request`, `requests`,
`arrivals_per_s` (as they came), `late_p99_ms` (how late the arrivals were written, part of the above), `spills`. Over
HTTP what `http_load.py` prints, every name with `http_` before it; and what `soak.py` does. `bare_p50_ms`,
`bare_p99_ms`, `http_bare_...`: the same arrivals where nothing is done with them but to note the time, or to answer
with fixed bytes: what this machine's wake-ups and stalls come to by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_edge import write_requests
from http_load import drive, pin, quantile
from parts.fakes import FakeLauncher
from soak import watched

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.clock import RealClock

ARRIVAL = struct.Struct("<idd")  # number, scheduled and written: seconds of the machine's monotonic clock
LEAD_S = 1.0  # from the sender's start to its first arrival
SPIN_S = 0.002  # it sleeps until so long before an arrival, and spins from then on
GROUP = 8
PROMPT_TOKENS = 512
RESPONSE_TOKENS = 32
SAMPLES = 100  # of a soak
IN_PROCESS_S = 60.0  # beside a soak of the other
BARE_S = 15.0  # for what the machine takes by itself
HERE = Path(__file__).resolve().parent
PROMPTS = [tuple(range(head, head + PROMPT_TOKENS)) for head in range(64)]  # so prefixes are found, and not always


@dataclass(frozen=True)
class Load:
    """What arrives."""

    rate: float  # requests/s
    seconds: float
    seed: int = 0

    @property
    def requests(self) -> int:
        return max(1, round(self.rate * self.seconds))


# --- arrivals ------------------------------------------------------------------------------------------------


def send_arrivals(load: Load, core: int) -> None:
    """The sender's process: one ARRIVAL on standard output for each, at its time."""
    pin(core)
    draw = random.Random(load.seed)
    at_s = time.monotonic() + LEAD_S
    for number in range(load.requests):
        at_s += draw.expovariate(load.rate)
        if (left_s := at_s - time.monotonic() - SPIN_S) > 0:
            time.sleep(left_s)
        while (now := time.monotonic()) < at_s:
            pass
        os.write(sys.stdout.fileno(), ARRIVAL.pack(number, at_s, now))


def start_sender(load: Load, core: int) -> subprocess.Popen[bytes]:
    options = [f"--{name}={value}" for name, value in dataclasses.asdict(load).items()]
    return subprocess.Popen([sys.executable, __file__, "--send", f"--core={core}", *options], stdout=subprocess.PIPE)


async def arrivals(load: Load, core: int, on_arrival: Any) -> float:
    """Call ``on_arrival(number, scheduled_s)`` for each, as they come; returns the p99 of how late they were written,
    seconds."""
    sender = start_sender(load, core)
    assert sender.stdout is not None
    loop, pipe = asyncio.get_running_loop(), sender.stdout.fileno()
    done: asyncio.Future[None] = loop.create_future()
    late = array("d", bytes(8 * load.requests))
    rest = b""

    def readable() -> None:
        nonlocal rest
        data = os.read(pipe, ARRIVAL.size * 256)
        if not data:
            loop.remove_reader(pipe)
            done.set_result(None)
            return
        rest += data
        whole = len(rest) - len(rest) % ARRIVAL.size
        for number, at_s, written_s in ARRIVAL.iter_unpack(rest[:whole]):
            late[number] = written_s - at_s
            on_arrival(number, at_s)
        rest = rest[whole:]

    loop.add_reader(pipe, readable)
    try:
        await done
    finally:
        loop.remove_reader(pipe)
        sender.stdout.close()
        sender.kill()
        sender.wait()
    return quantile(late, 0.99)


def request_of(number: int) -> GenerationRequest:
    """Group after group with a prompt of its own; each eighth request is a later turn of a session."""
    group = number // GROUP
    prompt = group % len(PROMPTS)
    turns = number % GROUP == GROUP - 1
    return GenerationRequest(
        request_id=str(number),
        prompt_ids=PROMPTS[prompt],
        sampling=SamplingParameters(max_tokens=RESPONSE_TOKENS, seed=number),
        priority=group,
        session=f"session-{prompt}" if turns else "",
    )


# --- in process ----------------------------------------------------------------------------------------------


async def in_process(load: Load, replicas: int, core: int) -> dict[str, float]:
    """From the scheduled arrival to the request being with a replica."""
    clock = RealClock()
    scheduled = array("d", bytes(8 * load.requests))
    routed = array("d", bytes(8 * load.requests))

    def submitted(request: GenerationRequest) -> None:
        routed[request.sampling.seed] = clock.now()

    costs = ReplicaCosts(token_s=0.005, slots=256, kv_capacity_tokens=1 << 20)
    launcher = FakeLauncher(clock, costs, length_of=_length, start_s=0.0, on_submit=submitted)
    pool = GeneratorPool(launcher, _experiment(replicas), clock)
    await pool.start()
    jobs: set[asyncio.Task[Any]] = set()
    cpu: list[tuple[int, float]] = []

    def arrive(number: int, at_s: float) -> None:
        scheduled[number] = at_s
        if number == first:
            cpu.append((number, time.process_time()))
        job = asyncio.get_running_loop().create_task(pool.generate(request_of(number)))
        jobs.add(job)
        job.add_done_callback(jobs.discard)

    gc.collect()
    gc.freeze()
    bare_ms = array("d")
    short = dataclasses.replace(load, seconds=min(load.seconds, BARE_S))
    await arrivals(short, core, lambda number, at_s: bare_ms.append(1000 * (clock.now() - at_s)))
    first = load.requests // 10
    late_s = await arrivals(load, core, arrive)
    await asyncio.gather(*jobs)
    used_s = time.process_time() - cpu[0][1]
    counted = load.requests - first
    times_ms = array("d", (1000 * (routed[i] - scheduled[i]) for i in range(first, load.requests)))
    spread_s = scheduled[load.requests - 1] - scheduled[first]
    routing = pool.routing()
    await pool.stop()
    gc.unfreeze()
    if routing.open_requests or routing.used_tokens or routing.routed != load.requests:
        raise RuntimeError(f"requests were lost or given twice: {routing}")
    return {
        "p50_ms": quantile(times_ms, 0.5),
        "p99_ms": quantile(times_ms, 0.99),
        "max_ms": max(times_ms),
        "bare_p50_ms": quantile(bare_ms, 0.5),
        "bare_p99_ms": quantile(bare_ms, 0.99),
        "cpu_ms_per_request": 1000 * used_s / counted,
        "requests": counted,
        "arrivals_per_s": (counted - 1) / spread_s if spread_s else 0.0,
        "late_p99_ms": 1000 * late_s,
        "spills": routing.spills,
    }


def _length(request: GenerationRequest) -> int:
    return 1 + request.sampling.seed * 7 % RESPONSE_TOKENS


def _experiment(replicas: int) -> Any:
    raw = {
        "run": {"directory": "unused"},
        "model": {"path": "unused"},
        "tasks": {"train": {"path": "unused"}},
        "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": RESPONSE_TOKENS},
        "generator": {"devices": [f"cpu:{index}" for index in range(replicas)], "slots": 256},
    }
    return validate_experiment(raw, "benchmark")


# --- over HTTP -----------------------------------------------------------------------------------------------


async def over_http(load: Load, options: argparse.Namespace, core: int | None) -> dict[str, Any]:
    """From the scheduled arrival to the last byte of the endpoint's answer; it runs on ``core``. Then the same of a
    server that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "requests.jsonl"
        async with edge(folder, core, f"--replicas={options.replicas}") as (address, pid):
            await asyncio.to_thread(write_requests, address, lines, options.characters)
            found = await driven(f"{address}/v1/chat/completions", load, options, pid, lines)
        async with edge(folder, core, "--bare") as (address, pid):
            short = dataclasses.replace(load, seconds=min(load.seconds, BARE_S))
            bare = await drive(address, **dataclasses.asdict(short), core=options.core, pid=pid, lines=lines)
    return found | {f"http_bare_{name}": bare[f"http_{name}"] for name in ("p50_ms", "p99_ms", "max_ms")}


@contextlib.asynccontextmanager
async def edge(folder: str, core: int | None, *options: str) -> AsyncIterator[tuple[str, int]]:
    """`http_edge.py` inside the block: its address, its process id."""
    command = [sys.executable, str(HERE / "http_edge.py"), folder, *options]
    command += [] if core is None else [f"--core={core}"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = (await server.stdout.readline()).decode().strip()
        if not address:
            raise RuntimeError(f"http_edge.py ended with {await server.wait()}")
        yield address, server.pid
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), 30)


async def driven(url: str, load: Load, options: argparse.Namespace, pid: int, lines: Path | None) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        numbers = await drive(url, **dataclasses.asdict(load), core=options.core, pid=pid, lines=lines)
        return {f"http_{name.removeprefix('http_')}": value for name, value in numbers.items()}

    return await (soaked(work(), load, pid) if options.soak else work())


async def soaked(work: Awaitable[dict[str, Any]], load: Load, pid: int) -> dict[str, Any]:
    """``work``, watched: its numbers and those of ``soak.py``."""
    seconds = load.seconds + LEAD_S
    numbers, found = await asyncio.gather(work, watched(pid, seconds, every_s=seconds / SAMPLES))
    return numbers | found


async def measure(load: Load, options: argparse.Namespace, core: int | None) -> dict[str, Any]:
    """What was asked for. ``core``: of the process that works."""
    if options.url:
        return await driven(options.url, load, options, options.pid or 0, options.requests)
    found: dict[str, Any] = {}
    if options.only != "http":
        soak = options.soak and options.only == "process"
        short = dataclasses.replace(load, seconds=load.seconds if soak or not options.soak else IN_PROCESS_S)
        work = in_process(short, options.replicas, options.core)
        found |= await (soaked(work, load, os.getpid()) if soak else work)
    if options.only != "process":
        found |= await over_http(load, options, core)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=500.0, help="requests/s")
    parser.add_argument("--seconds", type=float, help="60; with --soak 600")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, default=1, help="of the arrivals' process; this one takes the others")
    parser.add_argument("--characters", type=int, default=200, help="of a turn, over HTTP")
    parser.add_argument("--only", choices=("process", "http"), help="of the two measurements")
    parser.add_argument("--url", help="drive this HTTP server, with POST requests")
    parser.add_argument("--pid", type=int, help="of that server")
    parser.add_argument("--requests", type=Path, help='a file of lines {"body": ..., "headers": {...}}, sent in turn')
    parser.add_argument("--soak", action="store_true", help="watch memory and sockets")
    parser.add_argument("--quick", action="store_true", help="two seconds: does it run at all")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = options.seconds or (600.0 if options.soak else 60.0)
    load = Load(options.rate, 2.0 if options.quick else seconds, options.seed)
    if options.soak and options.url and not options.pid:
        parser.error("--soak with --url needs --pid: the process that serves it")
    if options.send:
        send_arrivals(load, options.core)
        return
    mine = os.sched_getaffinity(0) - {options.core}
    if mine:
        os.sched_setaffinity(0, mine)
    found = asyncio.run(measure(load, options, min(mine, default=None)))
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}))
    sys.exit(bool(found.get("leaks")))


if __name__ == "__main__":
    main()
