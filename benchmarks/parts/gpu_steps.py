"""A step of ``gpu_measure.py`` in its process: ``python -m benchmarks.parts.gpu_steps STEP SETTINGS``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import torch

from benchmarks.gpu_measure import NOT_RUN, ROOT
from benchmarks.parts.gpu_load import NotRun, Settings, copy_bandwidth, give, lack, timed
from headway.kernels.device_queries import query_gpus
from headway.trainer.peak_flops import measure_peak_flops

# Imported in its process alone: each costs seconds.
STEPS = {
    "facts": "gpu_steps:facts_step",
    "kernels": "gpu_checks:kernels_step",
    "step": "gpu_checks:decoding_step",
    "engine": "gpu_rates:engine_step",
    "trainer": "gpu_rates:trainer_step",
    "publish": "gpu_rates:publish_step",
    "vllm": "gpu_rates:vllm_step",
    "loop": "gpu_rates:loop_step",
    "tests": "gpu_steps:tests_step",
    "nccl": "gpu_steps:nccl_step",
}
PACKAGES = ("torch", "triton", "transformers", "peft", "vllm", "llguidance", "numpy")


def facts_step(settings: Settings) -> None:
    """The card, its driver and the machine; copy bandwidth and bfloat16 products, the ceilings of the other steps."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    give(versions=versions | {"python": sys.version.split()[0]}, machine=machine(settings))
    if settings.start_s is None:
        lack("seconds of transfer and start", "the call has no --called-at")
    else:
        give(transfer_and_start_s=settings.start_s)
    give(copy_gb_per_s=round(copy_bandwidth(settings) / 1e9, 1))
    size = 256 if settings.quick else 1024
    ones = torch.ones(size, size, device=settings.device, dtype=torch.bfloat16)
    if not bool((ones @ ones == size).all()):
        raise RuntimeError("a bfloat16 product of ones is wrong")
    limits: dict[str, Any] = {"limit_s": 0.3 if settings.quick else 1.0}
    give(bfloat16_tflops_per_s=round(measure_peak_flops(settings.device, torch.bfloat16, **limits) / 1e12, 4))


def machine(settings: Settings) -> dict[str, Any]:
    """Host and GPU. Others' processes on the GPU would make every number doubtful."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    host: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory_bytes / 1e9)}
    host |= {"shared_memory_gb": round(shared_bytes / 1e9, 1), "nvcc": shutil.which("nvcc") is not None}
    if settings.device == "cpu":
        return host
    columns = "name,memory.total,driver_version,clocks.max.sm,power.limit"
    lines = [
        subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout
        for query in (f"--query-gpu={columns}", "--query-compute-apps=pid,used_memory")
    ]
    gpus = query_gpus() or ()
    used_mb = round(gpus[0].memory_used_bytes / 1e6) if gpus else None
    driver = {"gpu": lines[0].splitlines()[0], "gpus": len(gpus), "used_before_mb": used_mb}
    return host | driver | {"cuda": torch.version.cuda, "processes": len(lines[1].splitlines())}


def tests_step(settings: Settings) -> None:
    """tests/gpu up to its first failure."""
    chosen = ["-k", "a fault"] if settings.fault else []
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-x", "-rA", "-o", "cache_dir=/tmp/pytest-gpu", *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout[-4000:], run.stderr[-2000:])
    counts = {
        name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", run.stdout[-300:])
    }
    give(tests=counts)
    if run.returncode:
        raise RuntimeError(f"pytest ended with exit code {run.returncode}: {counts}")
    if not counts.get("passed"):
        raise NotRun(f"no test ran: {counts}")


def nccl_step(settings: Settings) -> None:
    """A process group of one rank: what it gathers and sums is what it was given."""
    distributed = torch.distributed
    backend = "nccl" if settings.device == "cuda" else "gloo"
    count = 1 << 20 if settings.quick else 1 << 28
    values = torch.randn(count, device=settings.device)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        options: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous", "rank": 0, "world_size": 1}
        start_s = timed(settings, lambda: distributed.init_process_group(backend, **options))
        gathered, summed = torch.full_like(values, torch.nan), values.clone()
        distributed.all_gather_into_tensor(gathered, values)
        sum_s = min(timed(settings, lambda: distributed.all_reduce(summed)) for _ in range(3))
        same = torch.equal(gathered, values) and torch.equal(summed, values)
        distributed.destroy_process_group()
    give(backend=backend, start_s=round(start_s, 3), all_reduce_s_per_gb=round(sum_s / (4e-9 * count), 4))
    if not same:
        raise RuntimeError(f"{backend}: one rank's sum or gathered tensor isn't its own")


def main() -> None:
    name, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    if settings.device == "cpu":
        torch.set_num_threads(1)
    if settings.fault:
        from benchmarks.parts.gpu_faults import plant

        plant(name)
    try:
        module, _, function = STEPS[name].partition(":")
        getattr(importlib.import_module(f"benchmarks.parts.{module}"), function)(settings)
    except NotRun as reason:
        print(f"{NOT_RUN}{reason}", flush=True)


if __name__ == "__main__":
    main()
