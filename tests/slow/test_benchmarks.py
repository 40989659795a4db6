"""The benchmarks still run, and say what their docstrings promise."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_processes import running, spec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.long
def test_pipeline_in_short(tmp_path: Path, benchmark_module: Any) -> None:
    """No timing is asserted: `--quick` is too short to measure anything."""
    command = [sys.executable, str(BENCHMARKS / "pipeline.py"), "--quick", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    spreads = ["async_over_sync", "balance", "together_ceiling", "orchestrator_cpu_ms_per_sample"]
    if "efficiency" in result:  # claimed only when both sides are about equally fast
        spreads.append("efficiency")
    for name in spreads:
        assert 0 < result[f"{name}_min"] <= result[name] <= result[f"{name}_max"], name
    assert result["rounds"] == 1
    assert 0 <= result["max_trajectory_staleness"] <= 2
    assert result["length_p99_over_median"] > 1
    assert result["foreign_cores_max"] >= 0
    role_of = benchmark_module("parts.pipeline_machine").role_of
    measured = [{role_of(log) for log in run.glob("logs/*")} for run in (tmp_path / "runs").glob("run-*")]
    for roles in ({"generator"}, {"trainer"}, {"generator", "trainer"}, {"generator", "trainer", "verifier"}):
        assert roles in measured  # production, consumption, together, a system: whose CPU it was is known


@pytest.mark.long
def test_headways_side_of_the_trl_comparison() -> None:
    command = [sys.executable, str(BENCHMARKS / "vs_trl.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    [rates] = result["headway"].values()
    assert rates[0] > 0
    assert "trl" not in result


@pytest.mark.long
def test_orchestrator_in_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "orchestrator.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["cpu_over_floor"] == pytest.approx(
        result["cpu_us_per_sample"] / result["floor_us_per_sample"], rel=0.01
    )
    assert result["growth_10k"] == max(result["growth_waiting"], result["growth_buffered"])
    assert 0 < result["wakeups_per_sample"] <= result["passes_per_sample"]
    for name in ("cpu_over_floor", "growth_10k"):
        assert f"{name}: {result[name]} (target: at most" in done.stdout


@pytest.mark.long
def test_recording_in_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "recording.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["recording_cost"] == max(result["orchestrator"], result["trainer"])
    assert result["recorder_us"] > 0
    assert result["trainer_us"] > 0
    assert 8 * 128 < result["trainer_bytes_per_sample"] < 12 * 128


def test_many_nodes_in_short() -> None:
    """No timing is asserted, but nodes that fail and come back, or others in their place, and books that balance."""
    sizes = ["--rounds=1", "--nodes=12", "--few=4", "--hours=0.1", "--lost-per-hour=3"]
    command = [sys.executable, str(BENCHMARKS / "many_nodes.py"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["books_balance"]
    assert found["nodes_lost"] >= 4
    assert found["nodes_joined"] >= 2
    assert found["cpu_per_event_12_over_4"] > 0


def test_weight_update_in_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "weight_update.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    found = result["engines"]["torch"]
    median, least, most = found["over_copy"]
    assert result["pause_over_copy"][0] == median
    assert least <= median <= most
    assert (found["updates"], found["bytes"] // 4) == (3, 2_361_728)
    assert found["copy_s"] > 0


def test_weight_deltas_in_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "weight_update.py"), "--delta", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["delta_bytes_share"] < 0.2
    assert result["worst_tensor_over_bound"] < 1.15
    assert result["over_whole"] < 1
    assert min(result["pause_over_copy"], result["encode_over_copy"], result["step_with_encoding"]) > 0


def test_tinker_in_short() -> None:
    command = [sys.executable, str(BENCHMARKS / "tinker.py"), "--parts", "cobatch", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["cobatch_8"] > 1  # a common pass is cheaper than eight of 16 tokens
    assert result["over_skyrl"] is None


@pytest.mark.long
def test_links_in_short() -> None:
    """No timing is asserted: `--quick` is too short to measure anything."""
    command = [sys.executable, str(BENCHMARKS / "links.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["uplink_copies"] <= 1.1
    assert all(ratio is None or ratio > 0 for ratio in result.values())


@pytest.mark.long
def test_router_in_short() -> None:
    """No timing is asserted: `--quick` is too short to measure anything."""
    command = [sys.executable, str(BENCHMARKS / "router.py"), "--quick", "--rate=200", "--replicas=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["max_ms"]
    assert result["requests"] == 360  # of 400, a tenth is warm-up
    assert 100 < result["arrivals_per_s"] < 400
    assert result["cpu_ms_per_request"] > 0
    assert result["http_answers"] == {"200": 400}
    assert 0 < result["http_p50_ms"] <= result["http_p99_ms"]
    assert result["http_cpu_ms_per_request"] > 0


SERVER = """
import asyncio, os, sys

async def serve(reader, writer):
    served = 0
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
            body = await reader.readexactly(length)
            served += 1
            if b"slow" in body:
                await asyncio.sleep(0.05)
            if b"broken" in body:
                break
            if b"busy" in body:
                writer.write(b"HTTP/1.1 429 Too Many Requests\\r\\nContent-Length: 2\\r\\n\\r\\nno")
            elif b"stream" in body:
                writer.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n5\\r\\n0\\r\\n\\r\\n\\r\\n")
                await asyncio.sleep(0.03)
                writer.write(b"1\\r\\nx\\r\\n0\\r\\n\\r\\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
            if served == 40:  # as servers do; now and then just as the next request comes
                break
    except asyncio.IncompleteReadError:
        pass
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.long
def test_http_load_counts_from_the_scheduled_arrival(tmp_path: Path) -> None:
    """Of four kinds of requests in turn: one takes 50 ms, one streams for 30 ms, one is refused, one is answered."""
    bodies = tmp_path / "requests.jsonl"
    bodies.write_text("".join(json.dumps({"body": kind}) + "\n" for kind in ("slow", "stream", "busy", "quick")))
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/x"
        command = [sys.executable, str(BENCHMARKS / "router.py"), f"--url={url}", "--rate=200", "--seconds=4"]
        command += [f"--requests={bodies}", f"--pid={server.pid}", "--soak"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        bodies.write_text(json.dumps({"body": "broken"}) + "\n")
        done = subprocess.run([*command[:-1], "--rate=50", "--seconds=1"], capture_output=True, text=True, timeout=60)
        broken = json.loads(done.stdout.splitlines()[-1])
    finally:
        server.kill()
        server.communicate()
    assert {why: n for why, n in found["http_answers"].items() if why != "sent again"} == {"200": 600, "429": 200}
    assert found["http_requests"] == 720  # of 800, a tenth is warm-up
    assert 0 < found["http_first_p50_ms"] < found["http_p50_ms"]
    assert 30 < found["http_p50_ms"] <= found["http_p99_ms"] > 50  # more, where the machine is busy
    assert 100 < found["http_arrivals_per_s"] < 400
    assert found["http_connections"] >= 800 // 40
    assert found["http_cpu_ms_per_request"] > 0
    assert found["sockets"] > 0
    assert found["leaks"] is False
    assert broken["http_answers"] == {"closed": 50}


LEAK = """
import socket, sys, time
memory, sockets = [], []
while True:
    if "memory" in sys.argv: memory.append(b"x" * 300_000)
    if "sockets" in sys.argv: sockets.append(socket.socket())
    time.sleep(0.02)
"""


@pytest.mark.parametrize("what", ["nothing", "memory", "sockets"])
def test_a_soak_tells_a_leak(what: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAK, what])
    try:
        command = [sys.executable, str(BENCHMARKS / "soak.py"), str(process.pid), "--seconds=3", "--every=0.05"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        process.kill()
        process.wait()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["leaks"] is (what != "nothing"), done.stdout + done.stderr
    assert done.returncode == found["leaks"]
    assert (found["rss_growth_mb"] > 4) == (what == "memory")
    assert (found["sockets_growth"] > 8) == (what == "sockets")


def test_cpu_is_booked_by_what_a_worker_is_wherever_it_computes(tmp_path: Path, benchmark_module: Any) -> None:
    machine = benchmark_module("parts.pipeline_machine")

    def named(name: str) -> Any:
        return running(spec(name=name, device="cpu:0-1", log_path=tmp_path / "logs" / f"{name}.log"))

    async def main() -> None:
        before = machine.snapshot()
        unknown = running(spec(name="generator-1", device="cpu:0-1"))  # no log, no name to be known by
        async with named("generator-0"), named("trainer-0"), unknown:
            usage = machine.between(before, machine.snapshot())
            assert usage.roles_s.keys() == {"orchestrator", "generator", "trainer", machine.OTHER}
            assert min(usage.roles_s[role] for role in ("generator", "trainer")) > 0

    asyncio.run(main())


def test_a_placement_names_the_cores_of_both_sides(benchmark_module: Any) -> None:
    placement = benchmark_module("parts.pipeline_load").Placement
    assert str(placement(("cpu:0",), ("cpu:1",), 32)) == "1 x 32 slots on 0|1"
    assert str(placement(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 16)) == "2 x 16 slots on 0,1|0,1"
    assert str(placement(("cpu:0-1",), ("cpu:0-1",), 64)) == "1 x 64 slots on 0-1|0-1"


def test_the_cpu_accounts_need_nothing_of_headway() -> None:
    """TRL's interpreter imports them."""
    code = "import sys; sys.modules['headway'] = None\nfrom parts import pipeline_machine as m; print(m.snapshot())"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "orchestrator" in done.stdout
