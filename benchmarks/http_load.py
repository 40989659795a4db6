"""Open-loop load on an HTTP address: Poisson arrivals out of this process, over raw sockets.

    python benchmarks/http_load.py http://127.0.0.1:8000/v1/chat/completions --rate 500 --seconds 60 \
        [--requests FILE] [--header "Authorization: Bearer KEY"] [--pid SERVER] [--core 1]

Requests are bytes made beforehand: the lines of ``--requests`` in turn, each a JSON object with ``body`` (JSON) and, if
need be, ``headers``, in which ``{pass}`` is how often all lines had been sent before; without it one small chat
completion. Each goes out at its time over a connection that is idle, or
over a new one, whatever has become of those before it (open loop: a stall delays everything that arrives meanwhile, and
is seen). The process spins on its core: a sleep would come late. Times count from the *scheduled* arrival to the last
byte of the answer; ``first`` is its first byte, which differs for streams. The first tenth is warm-up and not counted.

Last line, one JSON object: ``http_p50_ms``, ``http_p99_ms``, ``http_max_ms``, ``http_first_p50_ms``,
``http_first_p99_ms`` (of answers with status 2xx), ``answers`` (status, or what went wrong, to count), ``requests``,
``arrivals_per_s`` (as they went), ``connections``, ``late_p99_ms`` (how late requests went out, part of the above), and
with ``--pid`` ``cpu_ms_per_request`` of that process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LEAD_S = 0.5  # from the start to the first arrival
REST_S = 30.0  # for the answers that are still missing after the last arrival
READ_BYTES = 1 << 16
PASS = "{pass}"
BODY = {"model": "default", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}


# --- answers -------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What has come of one answer (RFC 9112: a length, chunks, or all until the connection closes)."""

    data: bytearray = field(default_factory=bytearray)
    body_at: int = 0  # where the body, or the next chunk, begins; 0: the head isn't whole
    status: int = 0
    length: int = -1  # of the body; -1: chunks, or until the close
    chunked: bool = False
    keep: bool = True  # the connection serves another request

    def take(self, data: bytes) -> bool:
        """Whether it is whole with ``data``. Raises ValueError for what isn't HTTP/1.1."""
        self.data += data
        if not self.body_at:
            end = self.data.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._read_head(bytes(self.data[:end]))
            self.body_at = end + 4
        if self.chunked:
            return self._take_chunks()
        return self.length >= 0 and len(self.data) >= self.body_at + self.length

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status = first.split(" ")[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP/1 answer: {first[:40]!r}")
        self.status = int(status)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self.length = int(headers.get("content-length", -1))
        self.keep = headers.get("connection", "").lower() != "close" and (self.chunked or self.length >= 0)

    def _take_chunks(self) -> bool:
        while (end := self.data.find(b"\r\n", self.body_at)) >= 0:
            size = int(self.data[self.body_at : end].split(b";")[0], 16)
            after = end + 2 + size + 2
            if len(self.data) < after:
                return False
            if size == 0:
                return True
            self.body_at = after
        return False


# --- the loop ------------------------------------------------------------------------------------------------


class Connection:
    """A socket; *idle* or with one request under way."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)
        self.number = number  # of its request
        self.unsent = b""
        self.answer = Answer()
        self.used = False  # has served a request


class Driver:
    """Sends ``requests`` in turn, each at its time, and notes when its answer came."""

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes], rate: float, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self._address = address
        self._requests = requests
        self._gaps_s = array("d", (draw.expovariate(rate) for _ in range(count)))
        self.scheduled = array("d", bytes(8 * count))
        self.sent = array("d", bytes(8 * count))
        self.first = array("d", bytes(8 * count))
        self.done = array("d", bytes(8 * count))  # 0: no answer with status 2xx
        self.answers: Counter[str] = Counter()
        self.connections = 0
        self._idle: list[Connection] = []
        self._open: dict[int, Connection] = {}  # by descriptor
        self._poll = select.epoll()
        self._under_way = 0

    def run(self, on_counted: Any = lambda: None) -> None:
        """All of it. ``on_counted()`` is called when the warm-up is over."""
        count, number = len(self._gaps_s), 0
        at_s = time.monotonic() + LEAD_S
        while number < count:
            at_s += self._gaps_s[number]
            while time.monotonic() < at_s:
                self._listen(0.0)
            if number == count // 10:
                on_counted()
            self.scheduled[number] = at_s
            self._send(number)
            number += 1
        until_s = time.monotonic() + REST_S
        while self._under_way and (left_s := until_s - time.monotonic()) > 0:
            self._listen(left_s)
        self.answers["unanswered"] += self._under_way
        for connection in self._open.values():
            connection.socket.close()
        self._poll.close()

    def _send(self, number: int) -> None:
        connection = self._idle.pop() if self._idle else self._connect(number)
        connection.number, connection.answer = number, Answer()
        connection.unsent = self._request(number)
        self._under_way += 1
        self._write(connection)
        self.sent[number] = time.monotonic()

    def _request(self, number: int) -> bytes:
        passes, line = divmod(number, len(self._requests))
        head, end, body = self._requests[line].partition(b"\r\n\r\n")
        return head.replace(PASS.encode(), b"%d" % passes) + end + body

    def _connect(self, number: int) -> Connection:
        connection = Connection(self._address, number)
        descriptor = connection.socket.fileno()
        self._open[descriptor] = connection
        self._poll.register(descriptor, select.EPOLLIN)
        self.connections += 1
        return connection

    def _write(self, connection: Connection) -> None:
        """As much as the socket takes; the rest when it is writable."""
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(connection, type(error).__name__)
            return
        connection.unsent = connection.unsent[sent:]
        events = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
        self._poll.modify(connection.socket.fileno(), events)

    def _listen(self, timeout_s: float) -> None:
        for descriptor, events in self._poll.poll(timeout_s):
            connection = self._open[descriptor]
            if events & select.EPOLLOUT and connection.unsent:
                self._write(connection)
            if events & ~select.EPOLLOUT and descriptor in self._open:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, type(error).__name__)
            return
        now, answer, number = time.monotonic(), connection.answer, connection.number
        if not data:
            whole = answer.body_at > 0 and not answer.chunked and answer.length < 0
            self._finish(connection, now) if whole else self._lose(connection, "closed")
            return
        if not answer.data:
            self.first[number] = now
        try:
            whole = answer.take(data)
        except ValueError:
            self._lose(connection, "no HTTP")
            return
        if whole:
            self._finish(connection, now)

    def _finish(self, connection: Connection, now: float) -> None:
        answer = connection.answer
        self._under_way -= 1
        self.answers[str(answer.status)] += 1
        if 200 <= answer.status < 300:
            self.done[connection.number] = now
        connection.used, connection.answer = True, Answer()
        if answer.keep:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _lose(self, connection: Connection, why: str) -> None:
        """It broke: while idle that costs nothing, and an old one may have been closed just as its next request went
        out, which then goes out again."""
        if connection in self._idle:
            self._idle.remove(connection)
            self._drop(connection)
            return
        self._drop(connection)
        self._under_way -= 1
        if connection.used and not connection.answer.data:
            self.answers["sent again"] += 1
            fresh = self._connect(connection.number)
            fresh.unsent = self._request(connection.number)
            self._under_way += 1
            self._write(fresh)
            return
        self.answers[why] += 1

    def _drop(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        self._poll.unregister(descriptor)
        del self._open[descriptor]
        connection.socket.close()


# --- numbers -------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of them don't exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def pin(core: int | None) -> None:
    """Run this process on ``core`` alone, whatever its parent was bound to; anywhere when there is no such core."""
    if core is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used, its threads included. Raises OSError when there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(driver: Driver) -> dict[str, Any]:
    """What is printed, of all after the warm-up."""
    count = len(driver.scheduled)
    counted = range(count // 10, count)
    answered = [i for i in counted if driver.done[i]]
    times = sorted(1000 * (driver.done[i] - driver.scheduled[i]) for i in answered)
    firsts = sorted(1000 * (driver.first[i] - driver.scheduled[i]) for i in answered)
    late = [1000 * (driver.sent[i] - driver.scheduled[i]) for i in counted]
    spread_s = driver.scheduled[-1] - driver.scheduled[counted[0]]
    return {
        "http_p50_ms": quantile(times, 0.5),
        "http_p99_ms": quantile(times, 0.99),
        "http_max_ms": quantile(times, 1.0),
        "http_first_p50_ms": quantile(firsts, 0.5),
        "http_first_p99_ms": quantile(firsts, 0.99),
        "answers": {why: n for why, n in sorted(driver.answers.items()) if n},
        "requests": len(counted),
        "arrivals_per_s": (len(counted) - 1) / spread_s if spread_s else 0.0,
        "connections": driver.connections,
        "late_p99_ms": quantile(late, 0.99),
    }


def prepared(url: str, lines: Sequence[dict[str, Any]], headers: dict[str, str]) -> list[bytes]:
    """Requests as they go over the wire. ``lines``: {"body": ..., "headers": {...}} each."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    found: list[bytes] = []
    for line in lines:
        body = json.dumps(line["body"]).encode()
        fields = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": str(len(body))}
        fields |= headers | line.get("headers", {})
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        found.append(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
    return found


async def drive(
    url: str, *, rate: float, seconds: float, seed: int, core: int, pid: int, lines: Path | None = None
) -> dict[str, Any]:
    """Run this file as a process of its own, on ``core``; its numbers. Raises RuntimeError when it fails."""
    options = [f"--rate={rate}", f"--seconds={seconds}", f"--seed={seed}", f"--core={core}", f"--pid={pid}"]
    options += [f"--requests={lines}"] if lines is not None else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, url, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"http_load.py ended with {process.returncode}: {errors.decode()[-2000:]}")
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="http://HOST:PORT/PATH")
    parser.add_argument("--rate", type=float, default=500.0, help="requests/s")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=Path, help='a file of lines {"body": ..., "headers": {...}}, sent in turn')
    parser.add_argument("--header", action="append", default=[], metavar="NAME: VALUE", help="of every request")
    parser.add_argument("--pid", type=int, help="of the server, whose CPU time is measured")
    parser.add_argument("--core", type=int, help="to run on")
    options = parser.parse_args()
    pin(options.core)
    parts = urlsplit(options.url)
    if parts.scheme != "http" or parts.hostname is None:
        parser.error(f"url = {options.url!r}: valid: http://HOST:PORT/PATH")
    lines = [{"body": BODY}]
    if options.requests is not None:
        lines = [json.loads(line) for line in options.requests.read_text().splitlines()]
    headers = {name.strip(): value.strip() for name, _, value in (one.partition(":") for one in options.header)}
    address = (socket.gethostbyname(parts.hostname), parts.port or 80)
    count = max(10, round(options.rate * options.seconds))
    driver = Driver(address, prepared(options.url, lines, headers), options.rate, count, options.seed)
    used: list[float] = []
    driver.run(lambda: used.append(cpu_s(options.pid)) if options.pid else None)
    found = figures(driver)
    if options.pid:
        found["cpu_ms_per_request"] = 1000 * (cpu_s(options.pid) - used[0]) / found["requests"]
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
