"""The kernel service over HTTP: TritonForge's fields, refusals, leases, back-pressure, infrastructure, its process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from kernel_service import HOST, REFERENCE, ServedKernels, candidate, reached, served_kernels
from prometheus_client.parser import text_string_to_metric_families

from headway.kernels.device_queries import KernelDevice
from headway.records.kernels import KernelFault

GPUS = [KernelDevice(name=f"cuda:{index}", vendor="nvidia", model="H100") for index in range(2)]
KEY = "a-key-that-is-long-enough"


def play(test: Callable[[ServedKernels], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with served_kernels(**options) as service:
            return await test(service)

    return asyncio.run(main())


def test_answer_has_the_servers_and_the_articles_names() -> None:
    async def test(service: ServedKernels) -> None:
        response = await service.eval(
            candidate(speedup=1.75), seed_num=7, num_correct_trials=3, num_perf_trials=10, compare_compiled=True
        )
        assert response.status_code == 200
        answer = response.json()
        assert [answer[name] for name in ("compiled", "correctness", "compile_ok")] == [True] * 3
        assert (answer["pass_rate"], answer["fault_type"], answer["runtime"]) == (1.0, None, 2.0)
        assert answer["raw_reward"] == pytest.approx(1.05)
        assert answer["perf_stats"]["speedup"] == 1.75
        assert answer["runtime_stats"]["num_trials"] == 10
        assert answer["metadata"]["hardware"] == HOST.model
        assert answer["evaluation"]["device"] == "cpu:0"
        [seen] = service.judge.seen
        assert (seen.seed, seen.correct_trials, seen.timed_trials, seen.timeout_s) == (7, 3, 10, 60.0)
        assert seen.compare_compiled
        assert seen.task.source == REFERENCE

    play(test)


def test_sources_in_base64_are_the_same_submission() -> None:
    async def test(service: ServedKernels) -> None:
        source = candidate(speedup=2.0) + "# \u00e9\n"
        await service.eval(source)
        coded = {"custom_model_src": None, "original_model_src": None}
        for name, text in (("original", REFERENCE), ("custom", source)):
            coded[f"{name}_model_src_b64"] = base64.b64encode(text.encode()).decode()
        response = await service.http.post("/eval", json={**coded, "backend": "torch"})
        assert response.status_code == 200, response.text
        assert service.judge.seen[0] == service.judge.seen[1]

    play(test)


def test_constants_of_further_sizes_have_any_names() -> None:
    async def test(service: ServedKernels) -> None:
        shapes = [{"batch_size": 3, "N": 5}, {"input_shape[0]": 7}]
        response = await service.eval(candidate(), shapes=shapes)
        assert response.status_code == 200, response.text
        assert list(service.judge.seen[0].task.shapes) == shapes

    play(test)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"custom_model_src": "absent"}, 400, "custom_model_src: neither is given; valid: custom_model_src or"),
    ({"custom_model_src": "class Model: ..."}, 400, "custom_model_src: defines no ModelNew"),
    ({"original_model_src": "class Model: ..."}, 400, "original_model_src: defines no get_inputs"),
    ({"custom_model_src": 5}, 400, "custom_model_src = 5: valid: `str"),
    ({"custom_model_src_b64": "eA=="}, 400, "custom_model_src: both are given"),
    ({"custom_model_src": None, "custom_model_src_b64": "%%"}, 400, "_src_b64 = '%%': valid: UTF-8 in base64"),
    ({"custom_model_src": None, "custom_model_src_b64": "/w=="}, 400, "not UTF-8: byte 0xff at 0; valid: UTF-8"),
    ({"num_perf_trials": 0}, 400, "num_perf_trials = 0: valid: `int` >= 1"),
    ({"num_correct_trials": -1}, 400, "num_correct_trials = -1: valid: `int` >= 1"),
    ({"num_correct_trials": True}, 400, "num_correct_trials = True"),
    ({"seed_num": 1 << 64}, 400, "seed_num = 18446744073709551616"),
    ({"backend": "metal"}, 400, "backend = 'metal': valid: one of torch, cpp, triton, cuda"),
    ({"backend": "cuda"}, 400, "backend = 'cuda': not available on this machine: there is no nvcc"),
    ({"preferred_device": 7}, 400, "preferred_device = 7: there is no such device; valid: 0 (cpu:0), 1 (cpu:1)"),
    ({"preferred_device": "cuda:0"}, 400, "preferred_device = 'cuda:0': there is no such device"),
    ({"timeout_s": 61}, 400, "timeout_s = 61.0: valid: at most 60"),
    ({"tolerances": {"float32": [1, -1]}}, 400, "tolerances = "),
    ({"shapes": [{"a; import os": 1}]}, 400, "shapes = "),
    ({"custom_model_src": candidate() + "#" * 100_000}, 413, "bytes; valid: at most 100000"),
    ({"custom_model_src": "x" * 1_500_000}, 413, "the request's body is larger than 400000 bytes"),
]


@pytest.mark.parametrize(("change", "status", "words"), REFUSED, ids=lambda part: str(part)[:30])
def test_bad_requests_are_refused_by_field_value_and_what_is_valid(
    change: dict[str, Any], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change.get("backend") == "cuda":
        monkeypatch.setenv("PATH", "/nowhere")

    async def test(service: ServedKernels) -> None:
        response = await service.eval(candidate(), **change)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert words in error["message"]
        assert response.json()["retryable"] is False
        assert error["param"] in {*change, *(name.removesuffix("_b64") for name in change), None}
        assert error["param"] is not None or "body" in error["message"]
        assert not service.judge.seen
        assert (await service.eval(candidate())).status_code == 200

    play(test)


def test_bodies_that_are_no_json_object_are_refused() -> None:
    async def test(service: ServedKernels) -> None:
        for raw, words in (
            (b"{", "not valid JSON"),
            (b'{"custom_model_src": "\xff"}', "can't decode byte 0xff"),
            (b"[]", "must be a JSON object"),
            (b"[" * 100_000, "not valid JSON"),
        ):
            response = await service.http.post("/eval", content=raw)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
        assert (await service.http.get("/eval")).headers["allow"] == "POST"
        assert (await service.http.get("/nowhere")).status_code == 404

    play(test)


def test_a_task_that_fails_itself_is_named() -> None:
    async def test(service: ServedKernels) -> None:
        response = await service.eval(candidate(task_fails="task t: its Model raises"))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "task t: its Model raises"

    play(test)


def test_other_hosts_names_are_refused_on_loopback() -> None:
    async def test(service: ServedKernels) -> None:
        for host, status in (("evil.example", 421), ("127.0.0.1.evil.example:80", 421), ("localhost:8000", 200)):
            for path in ("/health", "/gpu_status"):
                response = await service.http.get(path, headers={"host": host})
                assert response.status_code == status, (host, path)

    play(test)


def test_keys_are_required_but_for_health() -> None:
    async def test(service: ServedKernels) -> None:
        assert (await service.eval(candidate())).status_code == 200
        async with httpx.AsyncClient(base_url=service.address, trust_env=False) as anonymous:
            assert (await anonymous.get("/health")).status_code == 200
            for method, path in (("GET", "/metrics"), ("GET", "/gpu_status"), ("POST", "/cleanup"), ("POST", "/eval")):
                response = await anonymous.request(method, path)
                assert response.status_code == 401, path
            wrong = await anonymous.get("/gpu_status", headers={"authorization": "Bearer wrong"})
            assert wrong.status_code == 401

    play(test, keys=[KEY])


def test_an_evaluator_that_leases_cores_itself_has_others_to_compile_meanwhile() -> None:
    async def test(service: ServedKernels) -> None:
        asked = [asyncio.create_task(service.eval(candidate(gate=number))) for number in range(4)]
        await reached(lambda: len(service.judge.seen) == 3 and service.dispatch.waiting["cpu"] == 1)
        assert [one.device for one in service.judge.seen] == ["", "", ""]
        assert service.devices.describe()[0]["state"] == "free"  # the evaluator's to lease
        service.judge.gate.set()
        assert [(await one).status_code for one in asked] == [200] * 4
        await service.eval(candidate(), preferred_device=0)
        assert service.judge.seen[-1].device == "cpu:1"

    play(test, cores=("cpu:1",), concurrency=2, leases_cores=True)


def test_timed_evaluations_have_devices_of_their_own_and_the_others_share() -> None:
    async def test(service: ServedKernels) -> None:
        timed = [service.eval(candidate(seconds=0.02, number=n)) for n in range(6)]
        untimed = [service.eval(candidate(gate=n), measure_performance=False) for n in range(6)]
        others = asyncio.gather(*untimed)
        await reached(lambda: service.judge.running[""] == 4)
        assert all(one.status_code == 200 for one in await asyncio.gather(*timed))
        service.judge.gate.set()
        assert all(one.json()["runtime"] == -1.0 for one in await others)
        assert service.judge.peaks == {"cpu:0": 1, "cpu:1": 1, "": 4}
        preferred = await service.eval(candidate(), preferred_device=1)
        assert preferred.json()["evaluation"]["device"] == "cpu:1"

    play(test)


def test_full_queues_are_refused_with_retry_after() -> None:
    async def test(service: ServedKernels) -> None:
        waiting = [asyncio.create_task(service.eval(candidate(gate=n))) for n in range(4)]
        await reached(lambda: service.dispatch.waiting["cpu"] == 2)
        response = await service.eval(candidate())
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["retryable"] is True
        assert (await service.eval(candidate(), measure_performance=False)).status_code == 200
        service.judge.gate.set()
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 4

    play(test, queue=2)


def test_a_wait_that_takes_too_long_is_refused() -> None:
    async def test(service: ServedKernels) -> None:
        first = asyncio.create_task(service.eval(candidate(gate=1)))
        await reached(lambda: service.dispatch.running == 1)
        assert (await service.eval(candidate())).status_code == 429
        service.judge.gate.set()
        assert (await first).status_code == 200

    play(test, cores=["cpu:0"], queue_s=0.05)


def test_infrastructure_failures_are_retried_and_never_a_reward() -> None:
    async def test(service: ServedKernels) -> None:
        response = await service.eval(candidate(fails=2))
        assert (response.status_code, response.json()["correctness"]) == (200, True)
        for told in ({"fails": 9}, {"raises": "a bug"}):
            response = await service.eval(candidate(**told))
            assert response.status_code == 503
            assert response.json()["retryable"] is True
            assert "raw_reward" not in response.json()
            assert response.headers["retry-after"] == "5"
        assert "RuntimeError: a bug" in response.json()["error"]["message"]
        counts = service.dispatch.counts
        assert (counts.evaluations, counts.retries, counts.failures) == (1, 6, 2)
        assert [one["state"] for one in service.devices.describe()] == ["free", "free"]

    play(test)


def test_a_hung_evaluator_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.services.kernel_dispatch._OVERTIME_S", 0.05)

    async def test(service: ServedKernels) -> None:
        response = await service.eval(candidate(gate=1), timeout_s=0.05)
        assert response.status_code == 503
        assert "didn't end within 0.1 s" in response.json()["error"]["message"]

    play(test, retries=1)


def test_a_gpu_lost_in_mid_timing_moves_the_lease() -> None:
    async def test(service: ServedKernels) -> None:
        lost = asyncio.create_task(service.eval(candidate(gate=1, fault="process_error")))
        await reached(lambda: service.dispatch.running == 1)
        del service.gpus[0]
        service.judge.gate.set()
        answer = (await lost).json()
        assert [seen.device for seen in service.judge.seen] == ["cuda:0", "cuda:1"]
        assert answer["evaluation"]["device"] == "cuda:1"  # where the fault is the candidate's
        assert answer["fault_type"] == "process_error"
        assert ("device_lost", "cuda:0: its driver lists cuda:1") in service.events
        status = (await service.http.get("/gpu_status")).json()
        assert [one["state"] for one in status["devices"]] == ["lost", "free", "free", "free"]
        del service.gpus[0]
        response = await service.eval(candidate(fault="unknown"))
        assert response.status_code == 503
        assert "no gpu device is free: cuda:0 is lost, cuda:1 is lost" in response.json()["error"]["message"]

    play(test, gpus=GPUS)


def test_a_gpu_with_memory_faults_is_set_aside_until_its_reset() -> None:
    async def test(service: ServedKernels) -> None:
        for number in range(3):
            source = candidate(fault="illegal_memory_access", number=number)
            assert (await service.eval(source, preferred_device=0)).json()["raw_reward"] == 0.1
        assert (await service.eval(candidate(), preferred_device=0)).json()["evaluation"]["device"] == "cuda:1"
        statistics = (await service.http.get("/fault_statistics")).json()
        assert statistics["faults"] == {"illegal_memory_access": 3}
        assert statistics["devices"]["cuda:0"] == {"illegal_memory_access": 3}
        assert (await service.http.post("/reset_gpu/9")).status_code == 404
        reset = await service.http.post("/reset_gpu/0")
        assert reset.json()["available_devices"] == ["cuda:0", "cuda:1", "cpu:0", "cpu:1"]
        assert (await service.eval(candidate(), preferred_device=0)).json()["evaluation"]["device"] == "cuda:0"
        assert (await service.http.post("/reset_devices")).json()["status"] == "done"
        assert (await service.http.post("/cleanup")).json()["status"] == "done"

    play(test, gpus=GPUS)


def test_cores_and_gpus_are_shown_in_one_schema() -> None:
    async def test(service: ServedKernels) -> None:
        devices = (await service.http.get("/gpu_status")).json()["devices"]
        assert len({tuple(one) for one in devices}) == 1
        assert [(one["device_id"], one["vendor"]) for one in devices] == [(0, "nvidia"), (1, "nvidia"), (2, "cpu")]
        health = (await service.http.get("/health")).json()
        assert (health["total_gpu_devices"], health["available_gpu_devices"]) == (3, 3)
        info = (await service.http.get("/backend_info")).json()
        assert info["backends"]["cpp"]["devices"] == ["cpu:0"]
        assert info["backends"]["torch"]["devices"] == ["cuda:0", "cuda:1", "cpu:0"]
        wrong = await service.eval(candidate(), backend="cpp", preferred_device=1)
        assert "preferred_device = 1: valid: for backend = 'cpp': cpu:0" in wrong.json()["error"]["message"]

    play(test, gpus=GPUS, cores=["cpu:0"])


def test_faulty_requests_beside_a_healthy_one_do_not_harm_it() -> None:
    faults = get_args(KernelFault)

    async def test(service: ServedKernels) -> None:
        sources = [candidate(fault=fault, seconds=0.01) for fault in faults]
        bad = [service.eval(source) for source in sources]
        bad += [service.eval(candidate(raises="a bug")), service.eval("no class"), service.eval(candidate(cheat="it"))]
        healthy = service.eval(candidate(speedup=3.0, seconds=0.05))
        *answers, whole = await asyncio.gather(*bad, healthy)
        assert [one.json()["fault_type"] for one in answers[: len(faults)]] == list(faults)
        assert [one.status_code for one in answers[len(faults) :]] == [503, 400, 200]
        assert answers[-1].json()["raw_reward"] == 0.0
        assert whole.json()["raw_reward"] == pytest.approx(2.3)

    play(test)


def test_a_client_that_leaves_frees_its_device() -> None:
    async def test(service: ServedKernels) -> None:
        for measure in (True, False):
            leaving = asyncio.create_task(service.eval(candidate(gate=1), measure_performance=measure))
            await reached(lambda: service.dispatch.running == 1)
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            await reached(lambda: service.dispatch.running == 0)
        assert service.judge.cancelled == 2
        assert (await service.eval(candidate())).status_code == 200
        text = (await service.http.get("/metrics")).text
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        responses = {tuple(one.labels.values()): one.value for one in families["headway_kernels_responses"]}
        assert responses == {("/eval", "0"): 2, ("/eval", "200"): 1}
        assert families["headway_kernels_evaluations"][0].value == 1
        states = [one.labels for one in families["headway_kernels_device"]]
        assert states == [{"device": "cpu:0", "state": "free"}]

    play(test, cores=["cpu:0"])


@contextlib.contextmanager
def process(
    *arguments: str, evaluator: str = "kernel_service:make_judge", **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headway serve-kernels` over the scripted evaluator, or its own (""), and its address."""
    command = [sys.executable, "-m", "headway.cli.main", "serve-kernels", "--port", "0", *arguments]
    command += ["--evaluator", evaluator] if evaluator else []
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            lines = [child.stdout.readline(), child.stdout.readline()]
            address = lines[1].removeprefix("HEADWAY_KERNELS=").strip()
            assert address.startswith("http://"), (lines, child.stderr.read())
            yield child, address
        finally:
            child.kill()


def test_sigterm_in_mid_evaluation_ends_the_process_cleanly(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with process("--cores", "0", JUDGE_CLOSED=str(closed)) as (child, address):
        assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()
        body = json.dumps({"original_model_src": REFERENCE, "custom_model_src": candidate(gate=1), "backend": "torch"})
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            head = f"POST /eval HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body.encode())
            while httpx.get(f"{address}/health", trust_env=False).json()["running"] < 1:
                pass
            child.send_signal(signal.SIGTERM)
            answer = client.recv(1 << 16).decode()
        assert re.match(r"HTTP/1.1 503 ", answer), answer
        assert child.wait(20) == 0
        assert child.stdout is not None
        assert child.stdout.read() == "stopped\n"
        assert closed.read_text() == "1 cancelled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluator", "devices"), [("", ["cpu:0"]), ("kernel_service:make_judge", ["cuda:0", "cpu:0"])]
)
def test_no_gpu_is_listed_where_the_evaluator_uses_none(tmp_path: Path, evaluator: str, devices: list[str]) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU-aa, NVIDIA H100 80GB HBM3, 9.0, 0, 37, 1024, 81559, 0'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with process("--cores", "0", evaluator=evaluator, PATH=path, CUDA_VISIBLE_DEVICES="0") as (_, address):
        status = httpx.get(f"{address}/gpu_status", trust_env=False).json()
    assert [one["device"] for one in status["devices"]] == devices


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cores", "4096"], "--cores 4096: device cpu:4096: this machine has"),
        (["--cores", "0,0"], "a core is named twice"),
        (["--cores", "x"], "valid: sets of cores, say 2-3,4-5"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines can reach it, so keys are required: --key-file FILE"),
        (["--key-file", "/nowhere"], "--key-file /nowhere: "),
        (["--host", "203.0.113.7", "--key-file", "KEYS"], "--host and --port = '203.0.113.7:0'"),
        (["--evaluator", "nowhere:make"], "--evaluator = 'nowhere:make'"),
        (["--queue", "-1"], "should be greater than or equal to 0"),
        (["--concurrency", "0"], "should be greater than or equal to 1"),
    ],
)
def test_bad_options_end_with_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.cli.main import main

    (tmp_path / "keys").write_text(KEY)
    given = [str(tmp_path / "keys") if argument == "KEYS" else argument for argument in arguments]
    assert main(["serve-kernels", "--port", "0", *given]) == 2
    assert words in " ".join(re.sub(r"[│\s]+", " ", capsys.readouterr().err).split())
