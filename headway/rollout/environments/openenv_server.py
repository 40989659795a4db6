"""An OpenEnv server on this machine, which ends with the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from headway.records.errors import InfrastructureError
from headway.runtime.addresses import machine_certificates

# Its stdin is a pipe of ours: when that closes, as at our death, its process group is killed.
_GUARD = '"$@" </dev/null & cat >/dev/null; kill -9 0'
_POLL_S = 0.1


class LocalServer:
    """A local server: *down* -> *up* and back. All calls block."""

    def __init__(self, command: Sequence[str], port: int, start_timeout_s: float) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._argv = [part.replace("{port}", str(port)) for part in command]
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, or restart it. Raises InfrastructureError when it isn't up in time."""
        self.stop()
        environment = {**os.environ, "PORT": self.address.rpartition(":")[2]}
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", *self._argv],
            stdin=subprocess.PIPE,
            stdout=2,  # the worker's log
            env=environment,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                fetch_json(f"{self.address}/health", 5.0)
                return
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline_s:
                    self.stop()
                    limit_s = self._start_timeout_s
                    reason = f"{self._argv[0]} was not up within start_timeout_s = {limit_s:g} s: {error}"
                    raise InfrastructureError(reason) from None
            time.sleep(_POLL_S)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fetch_json(url: str, timeout_s: float) -> Any:
    """Fetch a URL and parse its JSON. Raises OSError or ValueError."""
    import httpx  # here: processes without a server don't wait for the import

    try:
        reply = httpx.get(url, timeout=timeout_s, follow_redirects=True, verify=machine_certificates())
        return reply.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
