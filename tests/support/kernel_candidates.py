"""Runs candidates of kernel tasks beside their references in a plain process, without an evaluator.

``python kernel_candidates.py TASKS.json`` reads pairs of a task and a candidate's source and prints one JSON object for
each: the largest error as a share of what the tolerances allow, ATen's operators that the candidate called, and the
eager reference's milliseconds a call on one core.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.kernels.tasks import resized_source
from headway.records.kernels import KernelTask

FACTORS = (1.0, 0.0, 16.0, 2.0**-10, -1.0)  # of the inputs' values
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-Wl,-z,defs")


class Pair(msgspec.Struct, frozen=True):
    """A task and a candidate for it."""

    task: KernelTask
    candidate: str


class Outcome(msgspec.Struct, frozen=True):
    """What running a pair has shown."""

    error: float | None  # largest, as a share of the tolerance; None: another dtype or shape, NaN, or it raised
    operators: tuple[str, ...]
    reference_ms: float
    text: str = ""


def run_pairs(pairs: list[Pair], timeout_s: float) -> list[Outcome]:
    """The outcomes of all pairs, from one process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.json"
        path.write_bytes(msgspec.json.encode(pairs))
        done = subprocess.run(
            [sys.executable, __file__, str(path)], capture_output=True, timeout=timeout_s, check=False
        )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [msgspec.json.decode(line, type=Outcome) for line in done.stdout.splitlines()]


def load_cpp(source: str) -> ctypes.CDLL:
    file = Path(sys.argv[1]).with_name(hashlib.sha256(source.encode()).hexdigest()[:16] + ".cpp")
    file.write_text(source)
    subprocess.run(["g++", *FLAGS, str(file), "-o", str(file.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(file.with_suffix(".so")))


def run_source(source: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source, "candidate", "exec"), space)
    return space


def error_of(task: KernelTask, expected: Any, got: Any) -> float:
    """Largest error as a share of what the task tolerates."""
    import torch

    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        return float("inf")
    absolute, relative = task.tolerances.get(str(expected.dtype).removeprefix("torch."), (0.5, 0.0))
    size = max(1.0, float(expected.double().square().mean().sqrt()))
    exceeded = (got.double() - expected.double()).abs() / (absolute * size + relative * expected.double().abs())
    return float(torch.nan_to_num(exceeded, nan=float("inf")).max())


def run_pair(pair: Pair) -> Outcome:
    """Compare candidate and reference in all shapes of the task with two seeds; time the reference in its first one."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    called: set[str] = set()

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    error, milliseconds = 0.0, 0.0
    space = run_source(pair.candidate)
    for shape in ({}, *pair.task.shapes):
        reference = run_source(resized_source(pair.task.source, shape))
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = reference["Model"](*reference["get_init_inputs"]())
            torch.manual_seed(seed)
            candidate = space["ModelNew"](*reference["get_init_inputs"]())
            own = reference["get_inputs"]()
            for factor in FACTORS:
                inputs = [value * factor if value.is_floating_point() else value for value in own]
                expected = model(*inputs)
                if not expected.isfinite().all():
                    continue
                kept = [value.clone() for value in inputs]
                with Listener():
                    got = candidate(*inputs)
                error = max(error, error_of(pair.task, expected, got))
                assert all(map(torch.equal, kept, inputs)), "inputs changed"
            if not shape and seed == 1:
                times = []
                for _ in range(7):
                    start = time.perf_counter()
                    model(*own)
                    times.append(1e3 * (time.perf_counter() - start))
                milliseconds = sorted(times[2:])[2]
    return Outcome(error if math.isfinite(error) else None, tuple(sorted(called)), milliseconds)


def main() -> None:
    """Print the outcomes of a file's pairs."""
    import torch

    torch.set_num_threads(1)
    vars(builtins)["load_cpp"] = load_cpp
    pairs = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Pair])
    with torch.no_grad():
        for pair in pairs:
            try:
                outcome = run_pair(pair)
            except Exception as error:
                outcome = Outcome(None, (), 0.0, f"{type(error).__name__}: {error}")
            print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
