"""`headway serve-tinker` with its real workers: the tinker SDK unmodified, kills of the workers, refused settings."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import warm_programs
from cookbook import SDK
from served_tinker import service, write_settings
from tiny_run import write_inputs

from headway.config.adapter import AdapterConfig
from headway.models.adapter_targets import adapted_targets, stored_metadata
from headway.models.configuration import DecoderConfig
from headway.records.errors import ConfigurationError
from headway.services.tinker.serve import memory_of, tinker_settings_from

pytestmark = pytest.mark.real
LEARNER = Path(__file__).resolve().parents[1] / "support" / "tinker_learner.py"
needs_sdk = pytest.mark.skipif(not SDK.is_file(), reason="no tinker SDK: make install-clients, or install-cookbook")
KEY = "tml-0123456789abcdef"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker")
    write_inputs(folder)
    return folder


def started_learner(address: str, inputs: Path, steps: int, key: str = KEY) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": "", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    command = [str(SDK), str(LEARNER), address, key, str(inputs / "model"), str(steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome_of(program: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors[-4000:]
    return json.loads(output.strip().splitlines()[-1])


def workers_of(store: Path) -> dict[str, int]:
    """The pids of the workers, by the names of their logs."""
    pids: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            log = Path(os.readlink(folder / "fd" / "1"))
        except OSError:
            continue
        if log.parent == store and log.suffix == ".log":
            pids[log.stem] = int(folder.name)
    return pids


@needs_sdk
@pytest.mark.slow
def test_the_sdk_learns_and_samples_what_it_trains(inputs: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (tmp_path / "keys").write_text(f"anna train,sample,operate {digest}\n")
    file = write_settings(tmp_path, inputs / "model", keys=str(tmp_path / "keys"), prices="1.5", resident_adapters=2)
    with service(file) as (process, address):
        seen = outcome_of(started_learner(address, inputs, 8))
        answered = urllib.request.urlopen(urllib.request.Request(f"{address}/tenants", headers={"x-api-key": KEY}))
        (account,) = json.load(answered)["tenants"]
        answered = urllib.request.urlopen(urllib.request.Request(f"{address}/metrics", headers={"x-api-key": KEY}))
        metrics = dict(line.rsplit(" ", 1) for line in answered.read().decode().splitlines() if line[0] != "#")
        second = warm_programs.start(
            warm_programs.HEADWAY, "serve-tinker", str(file), environment=dict(os.environ),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert "store" in second.communicate(timeout=60)[0]
        assert second.returncode == 2
    assert process.returncode == 0
    assert seen["losses"][-1] < 0.7 * seen["losses"][0]
    assert max(seen["differences"]) < 1e-4
    assert seen["repeated"] == seen["sampled"][0]
    assert float(metrics["headway_tinker_paged_out_samplers"]) > 0
    assert seen["prompt"][0] is None
    assert seen["prompt"][1] < 1e-4
    assert seen["base"] > 1e-2
    if seen["sdk"] >= [0, 26]:
        assert seen["inflight"][0] < 1e-4
        assert seen["inflight"][1] > 1e-3
    assert [entry and len(entry) for entry in seen["top"]] == [None] + [3] * 6
    assert seen["again"] == pytest.approx(seen["same"], rel=1e-6)
    assert account["tenant"] == "anna"
    assert account["sampled_tokens"] > 8 * 4
    assert account["trained_tokens"] > 8 * 3 * 6
    assert account["dollars"] > 0
    checkpoint = tmp_path / "store" / "checkpoints" / seen["path"].removeprefix("tinker://")
    stored_metadata(checkpoint, inputs / "model")
    merged = warm_programs.start(
        warm_programs.HEADWAY, "merge", str(inputs / "model"), str(checkpoint), str(tmp_path / "merged"),
        environment=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = merged.communicate(timeout=60)
    assert merged.returncode == 0, output


@needs_sdk
@pytest.mark.long
def test_kills_of_service_trainer_and_generator_change_no_bit(inputs: Path, tmp_path: Path) -> None:
    with service(write_settings(tmp_path, inputs / "model")) as (_, address):
        undisturbed = outcome_of(started_learner(address, inputs, 12))
    (tmp_path / "again").mkdir()
    file, store = write_settings(tmp_path / "again", inputs / "model"), tmp_path / "again" / "store"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    generator = random.Random(5)
    with ExitStack() as services:
        open_service = partial(service, file, f"--endpoint.address=127.0.0.1:{port}")
        process, address = services.enter_context(open_service())
        program = started_learner(address, inputs, 12)
        killed: list[str] = []
        while program.poll() is None and len(killed) < 8:
            time.sleep(generator.uniform(0.3, 2.0))
            pids = {**workers_of(store), "service": process.pid}
            name = generator.choice(sorted(pids)) if len(pids) == 3 else ""
            if not name or killed.count(name) >= 3:
                continue
            killed.append(name)
            os.kill(pids[name], signal.SIGKILL)
            if name == "service":
                process.wait()
                process, _ = services.enter_context(open_service())
        seen = outcome_of(program)
    assert len(killed) >= 3
    for name in ("losses", "norms", "sampled"):
        assert seen[name] == undisturbed[name]
    assert seen["again"] == pytest.approx(undisturbed["again"], rel=1e-4)  # after samples, whose KV is computed again


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--generator.engine=vllm"], "generator.engine = 'vllm': its adapters are fixed at its start; valid: 'torch'"),
        (["--endpoint.address=0.0.0.0:8000"], "over plain HTTP, which shows everyone the keys: valid: a loopback"),
        (["--trainer.devices=['cpu:0']"], "is the generator's: valid: a device of its own"),
        (["--model.adapter.rank=4"], "model.adapter is set: valid: unset"),
        (["--tinker.max_rnk=4"], "max_rank"),
        (["--tinker.stable_reinforce=cispo"], "stable_reinforce"),
    ],
)
def test_settings_that_cant_be_served_are_refused(
    inputs: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        tinker_settings_from(str(write_settings(tmp_path, inputs / "model")), overrides)
    assert message in str(refused.value)


def test_the_base_is_described_as_clients_name_it(inputs: Path, tmp_path: Path) -> None:
    settings = tinker_settings_from(str(write_settings(tmp_path, inputs / "model")), [])
    base = settings.base
    assert (base.name, base.tokenizer) == (str(inputs / "model"), str((inputs / "model").resolve()))
    assert base.architecture == "qwen3"
    assert settings.experiment.model.adapter is None


def test_check_prints_the_memory_of_both_bases_and_all_adapters(inputs: Path, tmp_path: Path) -> None:
    sizes: list[dict[str, int]] = []
    for resident_adapters in (1, 33):
        settings = tinker_settings_from(
            str(write_settings(tmp_path, inputs / "model", resident_adapters=resident_adapters, max_rank=8)), []
        )
        uses = memory_of(settings)
        assert [use.name for use in uses] == ["generator-0", "trainer-0"]
        assert all(use.parts["weights"] > 0 for use in uses)
        sizes.append({use.name: use.total_bytes for use in uses})
    adapter = sum(target.size for target in adapted_targets(DecoderConfig.from_pretrained(inputs / "model"),
                                                            AdapterConfig(rank=8, alpha=32.0)))  # fmt: skip
    assert sizes[1]["trainer-0"] - sizes[0]["trainer-0"] == 32 * 16 * adapter
    assert sizes[1]["generator-0"] - sizes[0]["generator-0"] == 32 * 12 * adapter
    checked = warm_programs.start(
        warm_programs.HEADWAY, "check", str(tmp_path / "tinker.toml"), environment=dict(os.environ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = checked.communicate(timeout=60)
    assert checked.returncode == 0, output
    assert "other adapters" in output
