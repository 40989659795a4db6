"""Device names, what a machine has, and the environment a worker is started with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.records.errors import ConfigurationError
from headway.runtime import devices
from headway.runtime.devices import Device, cpu_multiplies_bfloat16, machine_cores, parse_device, sharing


@pytest.mark.parametrize(
    ("text", "kind", "first", "last", "threads", "torch_name"),
    [("cpu:0", "cpu", 0, 0, 1, "cpu"), ("cpu:2-5", "cpu", 2, 5, 4, "cpu"), ("cuda:3", "cuda", 3, 3, None, "cuda:3")],
)
def test_names(text: str, kind: str, first: int, last: int, threads: int | None, torch_name: str):
    device = parse_device(text)
    assert (device.kind, device.first, device.last, device.threads) == (kind, first, last, threads)
    assert device.torch_device() == torch_name
    assert str(device) == text


@pytest.mark.parametrize("text", ["", "cpu", "gpu:0", "cpu:-1", "cpu:1-0", "cuda:0-1", "cpu:0,1", "cpu:0 ", "CPU:0"])
def test_anything_else_is_refused_naming_what_is_valid(text: str):
    with pytest.raises(ConfigurationError, match=r"valid: cuda:N, cpu:N or cpu:N-M") as caught:
        parse_device(text)
    assert repr(text) in str(caught.value)


def test_a_server_is_a_device_that_pins_nothing():
    device = parse_device("http://10.0.0.7:8000")
    assert (device.kind, str(device), device.threads) == ("server", "http://10.0.0.7:8000", 1)
    assert device.torch_device() == "cpu"
    assert device.core_ids() == ()
    device.check()
    assert device.shares_with(parse_device("http://10.0.0.7:8000"))
    assert not device.shares_with(parse_device("http://10.0.0.7:8001"))
    assert not device.shares_with(parse_device("cpu:0"))
    assert not sharing(["http://10.0.0.7:8000"], ["cpu:0", "cuda:0"])
    for text in ("http://host", "http://host:80/path", "http://:80", "https://host:1", "http://a b:1"):
        with pytest.raises(ConfigurationError, match="not a"):
            parse_device(text)


def test_a_core_beyond_the_machine_is_refused_naming_what_it_has():
    count = len(machine_cores())
    parse_device(f"cpu:0-{count - 1}").check()
    with pytest.raises(ConfigurationError, match=rf"device cpu:0-{count}: this machine has {count} usable core"):
        parse_device(f"cpu:0-{count}").check()


def test_indices_count_the_cores_that_may_be_used():
    assert parse_device("cpu:1-2").core_ids([3, 8, 11, 12]) == (8, 11)
    assert parse_device("cpu:0").core_ids([5]) == (5,)
    with pytest.raises(ConfigurationError, match=r"1 usable core\(s\), cpu:0$"):
        parse_device("cpu:1").core_ids([5])


def test_gpus_are_counted_without_a_gpu_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    parse_device("cuda:1").check()
    with pytest.raises(ConfigurationError, match=r"device cuda:2: this machine shows 2 GPU\(s\), cuda:0 to cuda:1"):
        parse_device("cuda:2").check()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="shows no GPU"):
        parse_device("cuda:0").check()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices.Path, "exists", lambda self: False)
    monkeypatch.setattr(os, "listdir", lambda path: ["nvidia0", "nvidiactl", "nvidia-uvm", "null"])
    parse_device("cuda:0").check()
    assert devices.cuda_device_count() == 1


def test_environment_matches_threads_to_cores_and_keeps_freed_memory():
    environment = Device(kind="cpu", first=0, last=1).environment()
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert environment["GOMP_SPINCOUNT"] == "3000"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "8000000000"
    assert "OMP_NUM_THREADS" not in Device(kind="cuda", first=0, last=0).environment()


def test_apply_pins_this_process_which_still_hands_out_all_cores():
    last = len(machine_cores()) - 1
    program = (
        "import os; from headway.runtime.devices import parse_device, machine_cores\n"
        f"parse_device('cpu:{last}').apply()\n"
        "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], len(machine_cores()))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"[{machine_cores()[last]}] 1 {last + 1}"


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx avx2 fma\n", False),
        ("flags\t\t: fpu avx2 avx512bw avx512vl\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("nothing is known\n", True),
    ],
)
def test_bfloat16_products_are_known_by_the_cores_flags(cpuinfo: str, fast: bool) -> None:
    assert cpu_multiplies_bfloat16(cpuinfo) is fast


@given(*[st.tuples(st.sampled_from(["cpu", "cuda", "east/cpu"]), st.integers(0, 3), st.integers(0, 2))] * 2)
def test_devices_share_exactly_where_their_units_do(one, other):
    first, second = (
        parse_device(f"{kind}:{low}-{low + more}" if kind != "cuda" and more else f"{kind}:{low}")
        for kind, low, more in (one, other)
    )
    assert bool(first.units() & second.units()) == first.shares_with(second)
    assert sharing([str(first)], [str(second)]) == ([0] if first.shares_with(second) else [])
