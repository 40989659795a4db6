"""A `headway watch` process, and what it takes of the machine. Used by tests and by benchmarks/watch.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import warm_programs

LIMIT_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """Its JSON; raises ValueError for NaN, which browsers refuse."""
        return json.loads(self.body, parse_constant=_refused)


@dataclass
class WatchServer:
    """A running `headway watch`."""

    process: subprocess.Popen[str]
    port: int
    log: Path  # its output

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def page(self, view: str, **parameters: Any) -> str:
        """The address of a view, as the page's own links write it."""
        return f"{self.address}/#/{view}" + (f"?{urlencode(parameters)}" if parameters else "")

    def get(self, path: str, headers: dict[str, str] | None = None, **parameters: Any) -> Answer:
        """Ask for ``path`` as it is, unlike a browser, which would normalise it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            query = f"?{urlencode(parameters)}" if parameters else ""
            connection.request("GET", path + query, headers=headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def read(self, path: str, **parameters: Any) -> Any:
        """The JSON of a path that must answer with 200."""
        answer = self.get(path, **parameters)
        assert answer.status == 200, f"{path} {parameters}: {answer.status} {answer.body[:500]!r}"
        return answer.json

    def cpu_s(self) -> float:
        """CPU time of the server, its threads and the children it has waited for."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_S

    def memory_mb(self, name: str = "VmHWM") -> float:
        """A line of its status in MB: the most that it ever had resident, pages of mapped files included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024 / 1e6

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()


@contextmanager
def watch(
    *folders: str | Path, cache: Path, options: Sequence[str] = (), limit_s: float = LIMIT_S, warm: bool = False
) -> Iterator[WatchServer]:
    """Start `headway watch FOLDERS` with ``cache`` for its cache, wait until it answers, and end it with the block.
    ``warm``: as of `tiny_run.headway`; its memory is then another's too."""
    port = free_port()
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / f"watch-{port}.log"
    words = ["watch", *map(str, folders), "--port", str(port), "--no-open", *options]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HEADWAY_TRACEBACK": "0"}
    with log.open("w") as output:
        outputs: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
        if warm:
            process = warm_programs.start(warm_programs.HEADWAY, *words, environment=environment, **outputs)
        else:
            command = [sys.executable, "-m", warm_programs.HEADWAY, *words]
            process = subprocess.Popen(command, text=True, env=environment, **outputs)
    server = WatchServer(process, port, log)
    try:
        _wait_until_it_answers(server, limit_s)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                server.kill()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_until_it_answers(server: WatchServer, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.get("/api/health")  # with keys: 401, which is an answer too
            return
        assert server.process.poll() is None, f"headway watch ended:\n{server.log.read_text()}"
        assert time.monotonic() < deadline, f"headway watch doesn't answer:\n{server.log.read_text()}"
        with contextlib.suppress(subprocess.TimeoutExpired):  # a pause
            server.process.wait(0.05)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
