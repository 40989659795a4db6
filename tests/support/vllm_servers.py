"""A real `vllm serve` for tests, which ends with them whatever ends them, and engines that ask it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scratch_folders import scratch_folder
from torch import Tensor
from vllm_engines import CONTEXT_TOKENS, SLOTS, model_of, publisher

from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.reference import PublishedModel
from headway.generator.engines.vllm.server_client import KEY_VARIABLE, VllmServer
from headway.generator.engines.vllm.server_engine import VllmServerEngine
from headway.generator.engines.vllm.server_info import connect
from headway.models.loading import save_model, weights_of
from headway.records.generation import AppliedWeights, UpdateMode
from headway.runtime.devices import ALLOCATOR_ENVIRONMENT, THREAD_VARIABLES

KEY = "a key for tests"
START_S = 500.0  # on a machine that does much else, too
LONGEST_TOKENS = 320  # of a request; most tests ask for less
# Ends the server's whole process group when its standard input closes: a killed test closes it as well.
_GUARD = """
import os, signal, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
print(server.pid, flush=True)
sys.stdin.read()
os.killpg(server.pid, signal.SIGKILL)
server.wait()
"""


class Served:
    """A running server. ``kill`` ends it as a crash does; its address stays its own for ``served`` again."""

    def __init__(self, guard: subprocess.Popen[bytes], address: str) -> None:
        self.address = address
        self._guard = guard
        assert guard.stdout is not None
        self.pid = int(guard.stdout.readline())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(30)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def served(folder: Path, log: Path, *, port: int = 0, options: tuple[str, ...] = ()) -> Iterator[Served]:
    """`vllm serve folder`, ready for requests."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--api-key", KEY, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--scheduling-policy", "priority", "--no-enable-chunked-prefill", "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", str(SLOTS + 1)]
    command += ["--max-model-len", str(LONGEST_TOKENS), "--max-num-batched-tokens", "8192"]
    command += ["--kv-cache-memory-bytes", str(1 << 24), "--logits-processors", "slow_sampling:SlowSampling", *options]
    with log.open("ab") as file:
        guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=_environment(log.parent),
        )
        found = Served(guard, f"http://127.0.0.1:{port}")
        try:
            _wait(found, log)
            yield found
        finally:
            found.close()


def _environment(scratch: Path) -> dict[str, str]:
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: the model beside the scheduler, in one process
        "TORCH_COMPILE_DISABLE": "1",  # else the first request compiles for 16 s, eager or not
    }
    environment = os.environ | ALLOCATOR_ENVIRONMENT | dict.fromkeys(THREAD_VARIABLES, "1") | own
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    try:
        importlib.metadata.version("vllm")
    except (
        importlib.metadata.PackageNotFoundError
    ):  # it is called vllm-cpu here, and the command asks for vllm's version
        metadata = scratch / "metadata" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        paths.insert(0, str(metadata.parents[1]))
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _wait(found: Served, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{found.address}/health", timeout=5.0).close()
        except (urllib.error.URLError, OSError):
            alive = Path(f"/proc/{found.pid}").exists() and time.monotonic() < until
            if not alive:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}") from None
            time.sleep(0.2)
        else:
            return


def model_folder(tied: bool, version: int = 0) -> Path:
    folder = scratch_folder("served") / "model"
    save_model(model_of(version, tied), folder)
    return folder


class PublishedServerEngine(VllmServerEngine):
    """Takes tensors, as the conformance suite gives them, by way of shared memory."""

    def update_weights(self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode) -> AppliedWeights:
        return self.apply(publisher().publish(version, tensors), mode)


def engine_of(
    address: str,
    *,
    slots: int = 4,
    max_context_tokens: int = CONTEXT_TOKENS,
    tied: bool = True,
    tokenizer: Any = None,
    **settings: Any,
) -> PublishedServerEngine:
    """With ``model_of(0)``'s weights, whatever the server had before."""
    os.environ[KEY_VARIABLE] = KEY
    server = VllmServer(address)
    model = model_of(0, tied)
    published = PublishedModel(model.config)
    published.take(weights_of(model))
    return PublishedServerEngine(
        server,
        connect(server, slots=slots, context_tokens=max_context_tokens),
        published,
        EngineSettings(model_path="", dtype="float32", slots=slots, max_context_tokens=max_context_tokens, **settings),
        tokenizer,
    )
