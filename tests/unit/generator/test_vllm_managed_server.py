"""A server that a replica starts: its flags and environment, and its process, played by a few lines of HTTP."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.engines import SERVER_START_S
from headway.config.load import validate_experiment
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm import core, managed_server
from headway.generator.engines.vllm.core import engine_arguments, process_environment, require_version
from headway.generator.engines.vllm.managed_server import (
    ManagedServer,
    flags_of,
    serve_environment,
    serve_options,
    start_server,
)
from headway.generator.engines.vllm.server_client import KEY_VARIABLE
from headway.generator.engines.vllm.server_info import connect
from headway.orchestrator.nodes.machines import _start_limit_s
from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.devices import parse_device
from tests.conformance.reference import random_model

MODEL = random_model(0).config
CPU, GPU = parse_device("cpu:0"), parse_device("cuda:2")
# Plays a server, with a child of its own in its group; "fail" ends before it listens.
SERVER = """
import http.server, subprocess, sys
print("one line of what it does", flush=True)
if "fail" in sys.argv:
    sys.exit(f"ValueError: {sys.argv[-3:]} is no model")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(f"child {child.pid}", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def settings(**more: Any) -> EngineSettings:
    fields: dict[str, Any] = {"model_path": "m", "dtype": "float32", "slots": 4, "max_context_tokens": 64}
    return EngineSettings(**(fields | more))


def started(*arguments: str) -> ManagedServer:
    return ManagedServer([sys.executable, "-c", SERVER, *arguments], os.environ)


def child_of(server: ManagedServer) -> int:
    return int(re.findall(r"child (\d+)", server.last_output())[0])


def gone(pid: int, limit_s: float = 10.0) -> bool:
    """Whether a process has ended: an orphan may stay as a zombie where no init reaps it."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# --- what it is started with ------------------------------------------------------------------------------------


def test_defaults_on_a_gpu_and_that_the_users_own_win() -> None:
    """Graphs of decoding without torch.compile, the V2 runner, no sampler that compiles at its first use."""
    assert process_environment(GPU, 2, {}) == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }
    own = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "1", "CUDA_VISIBLE_DEVICES": "7,5,3,1"}
    made = process_environment(GPU, 1, own)
    assert {name: made[name] for name in own} == own | {"CUDA_VISIBLE_DEVICES": "3"}
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "CUDA_VISIBLE_DEVICES"} & process_environment(CPU, 1, {}).keys()

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert engine_arguments(settings(), MODEL, GPU)["compilation_config"] == graphs
    assert "compilation_config" not in engine_arguments(settings(), MODEL, CPU)
    eager = engine_arguments(settings(engine_arguments={"enforce_eager": True}), MODEL, GPU)
    assert "compilation_config" not in eager
    chosen = {"compilation_config": {"mode": 3}}
    assert engine_arguments(settings(engine_arguments=chosen), MODEL, GPU)["compilation_config"] == {"mode": 3}


def test_options_are_those_of_the_engine_in_process_and_what_headway_needs_of_a_server() -> None:
    options = serve_options(settings(max_context_tokens=9000), MODEL, CPU, {"lora_target_modules": ["q", "k"]})
    text = " ".join(options)
    for part in (
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--scheduling-policy priority",
        "--max-num-seqs 5",
        "--max-model-len 9000",
        "--max-num-batched-tokens 9000",  # a prompt is one step there
        "--no-enable-chunked-prefill",
        "--enforce-eager",
        "--lora-target-modules q k",
        '--structured-outputs-config {"backend":"guidance"}',
    ):
        assert part in text, part
    assert not re.search(r"--(model|weight-transfer|worker-ext|disable-log)", text)
    on_gpu = serve_options(settings(engine_arguments={"enable_chunked_prefill": True}), MODEL, GPU)
    assert {"--enable-chunked-prefill", "--no-enforce-eager"} <= {*on_gpu}
    assert '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}' in on_gpu


NAMES = st.from_regex(r"[a-z]{1,8}(_[a-z]{1,8})?", fullmatch=True)


# A name with no_ would read as the negation of the rest; vLLM's fields have none.
@given(st.dictionaries(NAMES.filter(lambda name: not name.startswith("no_")), st.one_of(st.booleans(), st.integers())))
def test_every_argument_is_one_flag(arguments: dict[str, Any]) -> None:
    flags = flags_of(arguments)
    parsed: dict[str, Any] = {}
    while flags:
        name = flags.pop(0).removeprefix("--")
        value: Any = flags.pop(0) if flags and not flags[0].startswith("--") else not name.startswith("no-")
        parsed[name.removeprefix("no-").replace("-", "_")] = int(value) if isinstance(value, str) else value
    assert parsed == arguments


def test_the_environment_of_a_server() -> None:
    on_cpu = serve_environment(CPU, 1, {"A": "b"}, adapted=True)
    assert (on_cpu["A"], on_cpu["VLLM_SERVER_DEV_MODE"], on_cpu["TORCH_COMPILE_DISABLE"]) == ("b", "1", "1")
    assert on_cpu["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    on_gpu = serve_environment(GPU, 1, {}, adapted=False)
    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["VLLM_USE_V2_MODEL_RUNNER"]) == ("2", "1")
    assert not {"VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_V1_MULTIPROCESSING"} & on_gpu.keys()


@pytest.mark.parametrize(
    ("versions", "message"),
    [({}, "vLLM is not installed; on a CPU: pip install"), ({"vllm": "0.29.1"}, "vllm 0.29.1 is installed, headway")],
)
def test_a_vllm_that_is_missing_or_another(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise core.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(core.importlib.metadata, "version", version)
    with pytest.raises(ConfigurationError, match=f"generator.engine = 'vllm-server': {message}"):
        require_version("vllm-server")
    versions |= {"vllm-cpu": "0.32.0"}
    if "vllm" not in versions:
        assert require_version("vllm") == "0.32.0"


# --- its process ------------------------------------------------------------------------------------------------


def test_it_answers_and_its_processes_end_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    server = started()
    pid = child_of(server)
    assert server.get("/health") == b""
    assert "one line of what it does" in server.last_output()
    server.close()
    assert gone(pid)
    server.close()
    assert "one line of what it does" in capfd.readouterr().err  # in the replica's log, too


def test_one_that_does_not_come_up_shows_its_last_lines() -> None:
    with pytest.raises(
        HeadwayError, match=r"ended with exit code 1 before it answered\n.*\none line of what it does\n"
    ):
        started("fail")


def test_one_that_dies_shows_its_last_lines() -> None:
    server = started()
    pid = child_of(server)
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    with pytest.raises(OSError, match=r"refused|reset|RemoteDisconnected"):
        server.get("/health")
    assert server.last_output().startswith("\nThe last lines of its output:\none line of what it does\nchild")


def test_one_that_dies_behind_its_first_answer_is_not_waited_for() -> None:
    server = started()
    os.killpg(os.getpgid(child_of(server)), signal.SIGKILL)
    since_s = time.monotonic()
    with pytest.raises(HeadwayError, match=r"`vllm serve` answers no more .*\nThe last lines of its output:\none line"):
        connect(server, slots=4, context_tokens=10)
    assert time.monotonic() - since_s < 20


def test_the_run_kills_no_replica_before_its_server_had_its_time(tmp_path: Path) -> None:
    def limit_s(devices: list[str], engine: str) -> float:
        raw = {"run": {"directory": "r"}, "model": {"path": str(tmp_path)}, "tasks": {"train": {"path": "t"}}}
        raw["generator"] = {"devices": devices, "engine": engine}
        return _start_limit_s(validate_experiment(raw, "test"))

    assert limit_s(["cuda:0"], "vllm-server") > SERVER_START_S
    assert limit_s(["http://h:1"], "vllm-server") == limit_s(["cuda:0"], "vllm") < SERVER_START_S


def test_nothing_of_it_outlives_a_replica_that_is_killed(tmp_path: Path) -> None:
    """Alone, without its group: as the kernel's OOM killer does."""
    program = (
        "import os, pathlib, sys, time\n"
        "from headway.generator.engines.vllm.managed_server import ManagedServer\n"
        f"server = ManagedServer([sys.executable, '-c', {SERVER!r}], os.environ)\n"
        f"pathlib.Path({str(tmp_path / 'lines')!r}).write_text(server.last_output())\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as replica:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"ready\n"
        pid = int(re.findall(r"child (\d+)", (tmp_path / "lines").read_text())[0])
        group = os.getpgid(pid)
        assert group not in (os.getpgid(replica.pid), pid)
        replica.kill()
    assert gone(pid)
    assert gone(group)


def test_nothing_of_it_outlives_a_guard_that_is_killed() -> None:
    server = started()
    pid = child_of(server)
    group = os.getpgid(pid)
    server._guard.kill()
    assert gone(pid)
    assert gone(group)
    server.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_start_that_fails_ends_the_run_only_at_its_beginning(
    restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one is repeated by the pool. A port that another process took first is replaced."""
    commands: list[list[str]] = []

    def fail(command: list[str], environment: dict[str, str]) -> ManagedServer:
        commands.append(command)
        raise HeadwayError(f"it ended{': OSError: [Errno 98] Address already in use' * (len(commands) == 1)}")

    monkeypatch.setattr(managed_server, "ManagedServer", fail)
    monkeypatch.setattr(managed_server, "_missing_metadata", lambda: "")
    monkeypatch.setenv(KEY_VARIABLE, "k")
    with pytest.raises(HeadwayError, match=r"it ended$") as raised:
        start_server(settings(restarted=restarted), MODEL, CPU, {})
    assert isinstance(raised.value, ConfigurationError) is not restarted
    assert len(commands) == 2
    assert commands[0][3:5] == ["serve", "m"]


def test_metadata_of_a_package_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve` asks for the version of a distribution called vllm."""
    monkeypatch.setattr(managed_server, "require_version", lambda engine: "0.32.0")
    folder = managed_server._missing_metadata()
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": folder}, capture_output=True)
    assert done.stdout == b"0.32.0+cpu\n"


def test_a_port_is_free_and_on_the_loopback_interface() -> None:
    one, other = started(), started()
    try:
        assert one.port != other.port
        assert {one.host, other.host} == {"127.0.0.1"}
        with socket.socket() as client:
            client.connect(("127.0.0.1", one.port))
    finally:
        one.close()
        other.close()
