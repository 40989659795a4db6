"""Evaluation of kernels on a CPU: rates, honesty of times, deceptions and honest solutions.

    python benchmarks/kernels.py [--evaluations 60] [--timed 20] [--aa 200] [--planted 20] [--quick]

`evaluations_per_s`: C++ sources that were never seen before, five trials each and variants of their values, not timed,
several at once; `compile_share`: of their time, what the compiler takes. `over_fresh_process`: the same of plain torch,
over processes that import torch, run five trials and end, as many at once as there are cores. `p95_over_p50`: of an
evaluation's duration without its wait for a place. `timed_per_s`: C++, with times, one device.
`cheats_rewarded`: of the sources in tests/support/kernel_sources.py that mean to deceive; `honest_refused`: of their
correct twins and the built-in problems' solutions, those that didn't pass; `solutions_passed`: of the latter.
`aa_p95`: deviation of the speed-up of a candidate that equals its reference, 95th percentile; `aa_busy_p95` beside a
process that keeps another core busy; `planted_1_2`, `planted_3`: the smallest and largest speed-up found where the
reference does 1.2 times the work of a call of 0.5 ms, and 3 times that of one of 0.2 ms.

Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from kernel_sources import CHEATS, CPP, HONEST, REFERENCE, TASK, submission

from benchmarks.parts.kernel_solutions import solutions
from headway.kernels.evaluator import KernelEvaluator
from headway.kernels.tasks import builtin_tasks
from headway.records.kernels import KernelEvaluation, KernelTask
from headway.services.serve_kernels import KernelSettings, make_evaluator

FRESH = f"""
import torch
space, new = {{}}, {{}}
exec({REFERENCE!r}, space)
exec({HONEST["torch"]!r}, new)
model, candidate = space["Model"](0.1), new["ModelNew"](0.1)
for seed in range(5):
    torch.manual_seed(seed)
    inputs = space["get_inputs"]()
    assert torch.allclose(model(*inputs), candidate(*inputs), atol=1e-4, rtol=1e-4)
"""
WORK = """
import ctypes
import torch
library = load_cpp(r'''
extern "C" void run(const float* x, float* y, long count, long rounds) {
    for (long i = 0; i < count; i++) y[i] = x[i];
    for (long r = 0; r < rounds; r++)  // outside: passes cost the same, whatever their number
        for (long i = 0; i < count; i++) y[i] = y[i] * 0.999f + 0.001f / (1.0f + y[i] * y[i]);
    for (long i = 0; i < count; i++) y[i] = x[i] + 0.0f * y[i];
}
''')
library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
class NAME(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        library.run(x.data_ptr(), y.data_ptr(), x.numel(), ROUNDS)
        return y
def get_inputs():
    return [torch.rand(COUNT) + 0.5]
def get_init_inputs():
    return []
"""


def work(name: str, rounds: int, count: int = 4096) -> str:
    """A source whose calls do ``rounds`` rounds of arithmetic on ``count`` values."""
    return WORK.replace("NAME", name).replace("ROUNDS", str(rounds)).replace("COUNT", str(count))


def is_rewarded(found: KernelEvaluation) -> bool:
    return not found.cheat and not found.infrastructure and found.correct


class Runs:
    """The parts, one evaluator for all."""

    def __init__(self, evaluator: KernelEvaluator) -> None:
        self._evaluator = evaluator
        self._count = 0

    async def _one(
        self, source: str, *, task: KernelTask = TASK, timed: bool = False
    ) -> tuple[float, KernelEvaluation]:
        self._count += 1
        wanted = submission(f"{source}\n# {self._count}\n", task=task, timed=timed, timed_trials=20)
        since_s = time.monotonic()
        found = await self._evaluator.evaluate(wanted)
        return time.monotonic() - since_s - found.seconds.get("wait", 0.0), found

    async def _rate(
        self, sources: list[str], *, timed: bool = False
    ) -> tuple[float, list[float], list[KernelEvaluation]]:
        await self._one(sources[0])
        since_s = time.monotonic()
        found = await asyncio.gather(*(self._one(source, timed=timed) for source in sources))
        whole_s = time.monotonic() - since_s
        assert all(one.correct for _, one in found), next(one for _, one in found if not one.correct)
        return len(sources) / whole_s, [took_s for took_s, _ in found], [one for _, one in found]

    async def rates(self, evaluations: int, timed: int) -> dict[str, Any]:
        own = [CPP.replace("sinf(x[i])", f"sinf(x[i]) + 0.0f * {n}") for n in range(evaluations)]
        per_s, took_s, found = await self._rate(own)
        plain_per_s, _, _ = await self._rate([HONEST["torch"]] * evaluations)
        timed_per_s, _, _ = await self._rate(own[:timed], timed=True)
        compile_s = sum(one.seconds["compile"] for one in found)
        return {
            "evaluations_per_s": round(per_s, 2),
            "compile_share": round(compile_s / sum(took_s), 3),
            "plain_per_s": round(plain_per_s, 2),
            "timed_per_s": round(timed_per_s, 2),
            "over_fresh_process": round(plain_per_s / await asyncio.to_thread(fresh_per_s), 1),
            "p95_over_p50": round(float(np.quantile(took_s, 0.95) / np.median(took_s)), 2),
        }

    async def deceptions(self) -> dict[str, Any]:
        cheats = [await self._one(cheat.source, timed=True) for cheat in CHEATS]
        twins = [await self._one(cheat.twin, timed=True) for cheat in CHEATS]
        rewarded = [cheat.name for cheat, (_, found) in zip(CHEATS, cheats, strict=True) if is_rewarded(found)]
        refused = [cheat.name for cheat, (_, found) in zip(CHEATS, twins, strict=True) if not is_rewarded(found)]
        unnamed = [cheat.name for cheat, (_, found) in zip(CHEATS, cheats, strict=True) if not found.cheat]
        for name, these in (("rewarded", rewarded), ("refused", refused), ("not named", unnamed)):
            print(f"{name}: {', '.join(these) or 'none'}", flush=True)
        return {"cheats": len(CHEATS), "cheats_rewarded": len(rewarded), "honest_refused": len(refused)}

    async def rounds_of(self, call_ms: float) -> int:
        """Rounds of arithmetic that take a call this long on this machine."""
        source, rounds = work("ModelNew", 200), 200
        task = msgspec.structs.replace(TASK, source=work("Model", rounds), backend="cpp", forbidden_operators=())
        _, found = await self._one(source, task=task, timed=True)
        assert found.timing is not None, found
        return round(rounds * call_ms / found.timing.mean)

    async def speedups(self, count: int, factor: float, rounds: int, size: int = 4096) -> tuple[list[float], int]:
        """Speed-ups found where the reference does ``factor`` times the work, and how many were refused."""
        name = f"work-{factor}-{rounds}-{size}"
        reference = work("Model", round(rounds * factor), size)
        task = msgspec.structs.replace(TASK, name=name, source=reference, backend="cpp", forbidden_operators=())
        found = [await self._one(work("ModelNew", rounds, size), task=task, timed=True) for _ in range(count)]
        kept = [one.speedup for _, one in found if one.speedup is not None]
        seen = next((one for _, one in found if one.timing is not None), found[0][1])
        print(f"{name}: {len(kept)} of {count}; {seen.timing}", flush=True)
        return kept, count - len(kept)


async def failed_solutions() -> tuple[int, list[str]]:
    """How many honest solutions of the built-in problems there are, and which don't pass the service's evaluator."""
    tasks = {(task.name, backend): task for backend in ("torch", "cpp") for task in builtin_tasks(backend)}
    found: dict[str, KernelEvaluation] = {}
    async with make_evaluator(KernelSettings(concurrency=3)) as evaluator:
        for one in solutions():
            wanted = submission(one.source, task=tasks[one.problem, one.backend], timed=False)
            found[f"{one.problem} ({one.style})"] = await evaluator.evaluate(wanted)
    return len(found), [name for name, evaluation in found.items() if not is_rewarded(evaluation)]


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A process that keeps a core busy during the block."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def fresh_per_s() -> float:
    cores = len(os.sched_getaffinity(0))
    since_s = time.monotonic()
    for _ in range(2):
        running = [subprocess.Popen([sys.executable, "-c", FRESH]) for _ in range(cores)]
        assert all(process.wait() == 0 for process in running)
    return 2 * cores / (time.monotonic() - since_s)


def deviation(speedups: list[float]) -> float | None:
    return round(float(np.quantile(np.abs(np.asarray(speedups) - 1), 0.95)), 4) if speedups else None


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("evaluations", 60), ("timed", 20), ("aa", 200), ("planted", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true")
    told = parser.parse_args()
    if told.quick:
        told.evaluations, told.timed, told.aa, told.planted = 16, 4, 4, 3
    result: dict[str, Any] = {}
    async with KernelEvaluator() as evaluator:
        runs = Runs(evaluator)
        result |= await runs.rates(told.evaluations, told.timed)
        print(json.dumps(result), flush=True)
        result |= await runs.deceptions()
        count, failed = await failed_solutions()
        print(f"solutions that failed: {', '.join(failed) or 'none'}", flush=True)
        result |= {"honest_refused": result["honest_refused"] + len(failed), "solutions_passed": count - len(failed)}
        even, refused = await runs.speedups(told.aa, 1.0, 150)
        result |= {"aa_p95": deviation(even), "aa_refused": refused}
        with busy_process():
            even, refused = await runs.speedups(told.aa, 1.0, 151)
        result |= {"aa_busy_p95": deviation(even), "aa_busy_refused": refused}
        for name, factor, call_ms in (("planted_1_2", 1.2, 0.5), ("planted_3", 3.0, 0.2)):
            found, refused = await runs.speedups(told.planted, factor, await runs.rounds_of(call_ms))
            result |= {name: [round(min(found), 3), round(max(found), 3)] if found else None}
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
