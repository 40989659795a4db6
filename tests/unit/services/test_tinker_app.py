"""The Tinker service over HTTP: the SDK unmodified, tenants that don't see each other, and hostile requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cookbook import PYTHON
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch_folders import scratch_folder
from tinker_service import CountingSampler, Disk, HistoryTrainer, Service, call

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.server import serving
from headway.runtime.clock import Clock, RealClock, run_virtual

SUPPORT = Path(__file__).resolve().parents[2] / "support"
CLIENT, LOOP = SUPPORT / "tinker_client.py", SUPPORT / "tinker_loop.py"
POSTS = ("create_model", "load_weights", "get_info", "create_sampling_session", "asample", "cancel_future", "telemetry",
         "weights_info", "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external",
         "retrieve_future", "session_heartbeat", "forward_backward", "client/config", "create_session")  # fmt: skip


def opened(store: Path, clock: Clock, step_s: float = 1.0) -> tuple[Service, HistoryTrainer]:
    disk = Disk()
    trainer = HistoryTrainer(disk, clock, step_s)
    wall = time.time if isinstance(clock, RealClock) else clock.now
    return Service(store, trainer, CountingSampler(disk, clock, step_s), clock, wall), trainer


@pytest.mark.skipif(not PYTHON.is_file(), reason="no tinker cookbook: make install-cookbook")
def test_the_sdk_trains_samples_and_keeps_checkpoints(tmp_path: Path) -> None:
    async def main() -> tuple[dict[str, Any], HistoryTrainer, Service]:
        service, trainer = opened(tmp_path, RealClock(), 0.001)
        external = tmp_path / "checkpoints"

        async def save(model_id: str, path: str, kind: Any, original: Any = trainer.save) -> int:
            (external / path).mkdir(parents=True, exist_ok=True)
            (external / path / "adapter_config.json").write_text("config", encoding="utf-8")
            return await original(model_id, path, kind)

        trainer.save = save  # type: ignore[method-assign]
        async with serving(service.app, EndpointConfig(address="127.0.0.1:0")) as address:
            program = await asyncio.create_subprocess_exec(
                str(PYTHON), str(CLIENT), address, "tml-a", stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": "", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            output, _ = await program.communicate()
            assert program.returncode == 0
        await service.kill()
        return json.loads(output.decode().strip().splitlines()[-1]), trainer, service

    seen, trainer, service = asyncio.run(main())
    run = seen["paths"][0].split("/")[2]
    assert seen["models"] == ["tiny"]
    assert seen["info"] == ["qwen3", 8]
    assert seen["steps"] == [3, {"gradients:sum": 1.0}] * 3
    assert (seen["many"], seen["shapes"], seen["custom"]) == (2500, [[3, 2], [3]], 1.0)
    assert seen["samples"] == [[[9, 10], "length"]] * 2
    assert seen["prompt_logprobs"] is None
    assert "loss_fn = 'stable_reinforce': valid: cross_entropy, importance_sampling, ppo" in seen["refused"]
    kinds = ("external_weights", "sampler_weights", "weights")
    assert seen["checkpoints"] == [f"{kind}/first" for kind in kinds]
    assert seen["published"] == [[f"{kind}/first", kind == "weights", True] for kind in kinds]
    assert (seen["weights"], seen["download"]) == ([8], "config")
    assert seen["run"] == [8, seen["paths"][0], 1]
    assert (seen["frozen"], seen["base"], seen["left"], seen["session"]) == ([9], [0.0], 2, [1, 3])
    # Every step was applied once, in order: three, one over all chunks and the custom loss, and one on samples.
    steps = trainer.disk.states[run][2]
    assert [(len(gradients), rate) for gradients, rate in steps[1:]] == [
        (1, 0.01), (1, 0.02), (1, 0.03), (4, 0.1), (1, 0.2)]  # fmt: skip
    assert [state[2][: len(steps)] == steps for name, state in trainer.disk.states.items() if name != run] == [True] * 2
    assert not [status for _, status in service.app.responses if status >= 500]


@pytest.mark.skipif(not PYTHON.is_file(), reason="no tinker cookbook: make install-cookbook")
def test_the_sdk_notices_no_restart_of_service_and_trainer(tmp_path: Path) -> None:
    async def main() -> tuple[list[Any], HistoryTrainer, int]:
        clock, disk, restarts, address = RealClock(), Disk(), 0, "127.0.0.1:0"
        program: asyncio.subprocess.Process | None = None
        while True:
            trainer = HistoryTrainer(disk, clock, 0.002)  # a new one knows what is durable, and nothing else
            service = Service(tmp_path, trainer, CountingSampler(disk, clock), clock, time.time)
            async with serving(service.app, EndpointConfig(address=address)) as url:
                address = url.removeprefix("http://")
                if program is None:
                    program = await asyncio.create_subprocess_exec(
                        str(PYTHON), str(LOOP), url, "40", stdout=asyncio.subprocess.PIPE,
                        env={**os.environ, "PYTHONPATH": "", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
                    )  # fmt: skip
                    output = asyncio.ensure_future(program.communicate())
                waiter = asyncio.ensure_future(trainer.busy.wait())
                if restarts == 4:
                    waiter.cancel()
                await asyncio.wait({output, *([] if restarts == 4 else [waiter])}, return_when=asyncio.FIRST_COMPLETED)
                await service.kill()
            if output.done():
                assert program.returncode == 0
                return json.loads((await output)[0].decode().strip().splitlines()[-1]), trainer, restarts
            restarts += 1

    metrics, trainer, restarts = asyncio.run(main())
    (state,) = trainer.disk.states.values()
    assert restarts == 4
    assert metrics == [{"gradients:sum": 2.0}] * 40
    assert [rate for _, rate in state[2][1:]] == [(step + 1) / 1000 for step in range(40)]


async def tenants(clock: Clock) -> tuple[Service, dict[str, str]]:
    """Two tenants; the first has a session, a model, a sampler, checkpoints and futures."""
    service, _ = opened(scratch_folder("tinker"), clock)
    _, body = await service.post("create_session", {"sdk_version": "0.38.0"})
    session = body["session_id"]
    model = f"{session}:train:0"
    await service.post(
        "create_model",
        {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2},
         "user_metadata": {"secret": "s"}},
    )  # fmt: skip
    await service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    await service.post("save_weights_external", {"model_id": model, "seq_id": 2, "path": "e"})
    await service.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0})
    await clock.sleep(20)
    return service, {"session": session, "model": model, "sampler": f"{session}:sample:0"}


def test_a_tenants_objects_do_not_exist_for_another() -> None:
    async def main(clock: Clock) -> None:
        service, ids = await tenants(clock)
        session, model, sampler = ids["session"], ids["model"], ids["sampler"]
        path = f"tinker://{model}/weights/w"
        checkpoint = f"training_runs/{model}/checkpoints/weights/w"
        objects: list[tuple[str, str, Any]] = [
            ("GET", f"sessions/{session}", {}),
            ("POST", f"sessions/{session}/finish", {}),
            ("GET", f"samplers/{sampler}", {}),
            ("GET", f"training_runs/{model}", {}),
            ("GET", f"training_runs/{model}/checkpoints", {}),
            ("DELETE", checkpoint, {}),
            ("POST", f"{checkpoint}/publish", {}),
            ("DELETE", f"{checkpoint}/publish", {}),
            ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 3600}),
            ("GET", f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls", {}),
            ("POST", "get_info", {"model_id": model}),
            ("POST", "weights_info", {"tinker_path": path}),
            ("POST", "session_heartbeat", {"session_id": session}),
            ("POST", "retrieve_future", {"request_id": f"{model}:1"}),
            ("POST", "cancel_future", {"request_id": f"{sampler}:0"}),
            ("POST", "optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}),
            ("POST", "save_weights", {"model_id": model, "seq_id": 4}),
            ("POST", "asample", {"sampling_session_id": sampler, "seq_id": 0}),
            ("POST", "create_model", {"session_id": session, "model_seq_id": 1}),
            ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9}),
        ]
        for method, route, fields in objects:
            status, body = await call(service.app, method, route, fields, key="tml-b")
            assert status == 404, (route, status, body)
            assert "secret" not in json.dumps(body)
        for route in ("sessions", "checkpoints", "training_runs"):
            _, body = await call(service.app, "GET", route, key="tml-b")
            assert not body[route]
            _, body = await call(service.app, "GET", route)
            assert body[route]
        # What is published can be read by another, and loaded, but not changed.
        await call(service.app, "POST", f"{checkpoint}/publish", {})
        assert (await call(service.app, "POST", "weights_info", {"tinker_path": path}, key="tml-b"))[0] == 200
        _, body = await call(service.app, "GET", f"training_runs/{model}/checkpoints", key="tml-b")
        assert [entry["checkpoint_id"] for entry in body["checkpoints"]] == ["weights/w"]
        assert (await call(service.app, "DELETE", checkpoint, key="tml-b"))[0] == 404
        _, body = await call(service.app, "POST", "create_session", {"sdk_version": "0.38.0"}, key="tml-b")
        other = body["session_id"]
        load = {"session_id": other, "model_seq_id": 0, "path": path, "optimizer": True}
        _, body = await call(service.app, "POST", "load_weights", load, key="tml-b")
        _, body = await call(service.app, "POST", "retrieve_future", {"request_id": body["request_id"]}, key="tml-b")
        assert body == {"model_id": f"{other}:train:0", "path": path, "type": "load_weights"}
        load |= {"path": f"tinker://{model}/external_weights/e", "model_seq_id": 1}
        _, body = await call(service.app, "POST", "load_weights", load, key="tml-b")
        _, body = await call(service.app, "POST", "retrieve_future", {"request_id": body["request_id"]}, key="tml-b")
        assert "there is no such checkpoint" in body["error"]
        await service.kill()

    run_virtual(main, 1000.0)


def test_checkpoints_expire_and_a_clock_that_jumps_back_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: Clock) -> None:
        service, ids = await tenants(clock)
        checkpoint = f"training_runs/{ids['model']}/checkpoints/weights/w"
        for ttl_s in (3599, 10**9, "x", True):
            status, _ = await call(service.app, "PUT", f"{checkpoint}/ttl", {"ttl_seconds": ttl_s})
            assert status == 400
        assert (await call(service.app, "PUT", f"{checkpoint}/ttl", {"ttl_seconds": 3600}))[0] == 200
        monkeypatch.setattr(service.dispatch, "_wall", lambda: clock.now() - 10_000)
        await clock.sleep(100)
        _, body = await call(service.app, "GET", f"training_runs/{ids['model']}")
        assert body["last_checkpoint"]["checkpoint_id"] == "weights/w"
        monkeypatch.undo()
        await clock.sleep(3600)
        _, body = await call(service.app, "GET", f"training_runs/{ids['model']}")
        assert body["last_checkpoint"] is None
        await service.kill()

    run_virtual(main, 10_000.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "session_id",
        "model_id",
        "seq_id",
        "model_seq_id",
        "sampling_session_id",
        "path",
        "num_samples",
        "prompt",
        "request_id",
        "lora_config",
        "adam_params",
        "sampling_params",
        "ttl_seconds",
        "tinker_path",
        "base_model",
        "user_metadata",
        "sampling_session_seq_id",
        "kind",
        "optimizer",
    ]
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_request_makes_the_service_fail(data: st.DataObject) -> None:
    async def main(clock: Clock) -> None:
        service, ids = await tenants(clock)
        known = st.sampled_from([*ids.values(), f"{ids['model']}:1", f"tinker://{ids['model']}/weights/w", "tiny"])
        number = itertools.count(4)
        for _ in range(25):
            route = data.draw(st.sampled_from(POSTS))
            fields = data.draw(st.dictionaries(NAMES, known | JSON | st.integers(0, 5), max_size=7))
            if data.draw(st.booleans()):
                fields |= {"model_id": ids["model"], "seq_id": next(number)}
            body = msgspec.json.encode(fields)
            if data.draw(st.integers(0, 4)) == 0:
                body = body[: data.draw(st.integers(0, len(body)))]
            coding = {"content-encoding": data.draw(st.sampled_from(["", "zstd", "gzip"]))}
            status, answer = await call(service.app, "POST", route, body, headers=coding, key=data.draw(
                st.sampled_from(["tml-a", "tml-b", "", "tml-\x80"])))  # fmt: skip
            assert status < 500, (route, body, answer)
        await clock.sleep(60)
        _, body = await service.post("retrieve_future", {"request_id": f"{ids['model']}:1"})
        assert body["path"].endswith("/weights/w")
        await service.kill()

    run_virtual(main, 5000.0)
