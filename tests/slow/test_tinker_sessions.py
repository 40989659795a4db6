"""A thousand sessions of which most die, and ten thousand steps, on `headway serve-tinker` with its real workers."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_tinker import service, write_settings
from tiny_run import write_inputs

from headway.services.tinker.wire import message_classes

pytestmark = [pytest.mark.real, pytest.mark.long]
LIVING, DEAD, TIMEOUT_S = 50, 950, 30.0


class Connection:
    """One connection to the service, as the SDK's requests without the SDK: a thousand of it would need a thousand
    processes."""

    def __init__(self, address: str) -> None:
        self._http = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)

    def get(self, path: str) -> dict[str, float]:
        self._http.request("GET", path, headers={"x-api-key": "tml-a"})
        lines = self._http.getresponse().read().decode().splitlines()
        return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def post(self, route: str, content: Any) -> Any:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._http.request("POST", f"/api/v1/{route}", body, {"x-api-key": "tml-a"})
        reply = self._http.getresponse()
        text = reply.read()
        assert reply.status == 200, (route, text)
        return json.loads(text) if reply.headers["content-type"] == "application/json" else text

    def outcome(self, future: dict[str, Any]) -> Any:
        while isinstance(answer := self.post("retrieve_future", {"request_id": future["request_id"]}), dict):
            if answer.get("type") != "try_again":
                assert "error" not in answer, answer
                return answer
        return answer


def loss_of(answer: bytes) -> float:
    return dict(message_classes()["ForwardBackwardOutput"].FromString(answer).metrics)["loss:sum"]


class Tenant:
    """A session with a model and a sampler of its newest weights."""

    def __init__(self, connection: Connection, base: str, seed: int) -> None:
        self._seed, self._samples = seed, 0
        self.session = connection.post("create_session", {"sdk_version": "0.38.0"})["session_id"]
        self.model = f"{self.session}:train:0"
        fields = {"session_id": self.session, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": 8}}
        connection.outcome(connection.post("create_model", fields))
        self._sequence = 1

    def step(self, connection: Connection) -> float:
        """An optimiser step on data of its own; returns the loss."""
        passed = connection.post("forward_backward", self._pass())
        adam = {"learning_rate": 0.01, "grad_clip_norm": 1.0}
        stepped = connection.post("optim_step", {"model_id": self.model, "seq_id": self._next(), "adam_params": adam})
        loss = loss_of(connection.outcome(passed))
        connection.outcome(stepped)
        return loss

    def loss(self, connection: Connection) -> float:
        return loss_of(connection.outcome(connection.post("forward_backward", self._pass(forward_only=True))))

    def publish(self, connection: Connection) -> None:
        fields = {"model_id": self.model, "seq_id": self._next(), "sampling_session_seq_id": 0}
        self.sampler = connection.outcome(connection.post("save_weights_for_sampler", fields))["sampling_session_id"]

    def ask(self, connection: Connection, tokens: int) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 5, 7]}]}
        fields = {"sampling_session_id": self.sampler, "seq_id": self._samples, "prompt": prompt, "num_samples": 1}
        self._samples += 1
        return connection.post("asample", fields | {"sampling_params": {"max_tokens": tokens, "stop": [], "seed": 1}})

    def heartbeat(self, connection: Connection) -> None:
        connection.post("session_heartbeat", {"session_id": self.session})

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _pass(self, *, forward_only: bool = False) -> bytes:
        message = message_classes()["ForwardBackwardRequest"](
            model_id=self.model, seq_id=self._next(), loss_fn="cross_entropy", forward_only=forward_only
        )
        generator = random.Random(self._seed)
        for _ in range(3):
            ids = [generator.randrange(2, 15) for _ in range(9)]
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], "<i4").tobytes()
            for name, values in (("target_tokens", np.array(ids[1:], "<i8")), ("weights", np.ones(8, "<f4"))):
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = 2 if name == "target_tokens" else 1
                tensor.shape.append(8)
                tensor.dense = values.tobytes()
        return message.SerializeToString()


def latencies_s(connection: Connection, tenants: Sequence[Tenant], rounds: int) -> list[float]:
    """Of steps of the tenants in turn."""
    seconds: list[float] = []
    for _ in range(rounds):
        for tenant in tenants:
            began_s = time.monotonic()
            tenant.step(connection)
            seconds.append(time.monotonic() - began_s)
        for tenant in tenants:
            tenant.heartbeat(connection)
    return seconds


def in_parallel(address: str, work: Callable[[Connection, int], Any], count: int, threads: int = 4) -> list[Any]:
    def part(thread: int) -> list[Any]:
        connection = Connection(address)
        return [(number, work(connection, number)) for number in range(thread, count, threads)]

    with ThreadPoolExecutor(threads) as pool:
        rows = [row for rows in pool.map(part, range(threads)) for row in rows]
    return [row for _, row in sorted(rows, key=lambda row: row[0])]


def memory_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6 + sum(memory_mb(child) for child in children)


def test_nine_hundred_and_fifty_of_a_thousand_sessions_die_and_load_again(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    base = str(tmp_path / "model")
    limits: dict[str, Any] = {"models_per_tenant": 2000, "session_timeout_s": TIMEOUT_S, "resident_adapters": 1000}
    with service(write_settings(tmp_path, base, **limits)) as (process, address):
        connection = Connection(address)
        living = [Tenant(connection, base, seed) for seed in range(LIVING)]
        latencies_s(connection, living, 2)
        alone_s, early_mb = latencies_s(connection, living, 10), memory_mb(process.pid)

        def born(own: Connection, number: int) -> tuple[Tenant, float]:
            tenant = Tenant(own, base, LIVING + number)
            tenant.step(own)
            tenant.step(own)
            if number % 19 == 0:
                tenant.publish(own)
                tenant.ask(own, 60)  # nobody asks for its reply
            for other in living[number % 50 :: 50]:
                other.heartbeat(own)
            return tenant, tenant.loss(own)

        dead = in_parallel(address, born, DEAD)
        began_s, crowded_mb = time.monotonic(), memory_mb(process.pid)
        crowded = connection.get("/metrics")
        assert crowded["headway_tinker_samplers"] >= 10
        beside_s: list[float] = []
        while time.monotonic() < began_s + TIMEOUT_S + 5:
            beside_s += latencies_s(connection, living, 1)
        freed, freed_mb = connection.get("/metrics"), memory_mb(process.pid)
        assert freed["headway_tinker_samplers"] == freed["headway_tinker_open_samples"] == 0
        assert freed['headway_tinker_events_total{event="dead_sessions"}'] == DEAD
        p99 = [float(np.quantile(seconds, 0.99)) for seconds in (alone_s, beside_s)]
        print(f"p99 of a step {p99[0] * 1e3:.1f} ms alone, {p99[1] * 1e3:.1f} ms while {DEAD} die; "
              f"memory {early_mb:.0f}, {crowded_mb:.0f}, {freed_mb:.0f} MB")  # fmt: skip
        assert p99[1] <= 1.5 * p99[0]
        assert freed_mb - early_mb < 0.1 * early_mb
        for tenant, loss in random.Random(0).sample(dead, 100):
            assert tenant.loss(connection) == loss
        tenant, loss = dead[0]
        assert tenant.step(connection) == loss  # its last step's weights, and data that are always the same


def test_ten_thousand_steps_leave_memory_and_store_bounded(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with service(write_settings(tmp_path, tmp_path / "model")) as (process, address):
        connection = Connection(address)
        tenant, sizes = Tenant(connection, str(tmp_path / "model"), 0), list[tuple[float, float]]()
        for number in range(10_000):
            tenant.step(connection)
            if number % 1000 == 999:
                stored = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*") if file.is_file())
                sizes.append((memory_mb(process.pid), stored / 1e6))
                print(f"{number + 1} steps: memory {sizes[-1][0]:.1f} MB, store {sizes[-1][1]:.2f} MB", flush=True)
        assert sizes[-1][0] < sizes[1][0] + 20
        assert sizes[-1][1] < sizes[1][1] + 30
