"""Are a training step and a decoding round as fast as another checkout's? Both in turn, step by step, on one core.

    git worktree add /tmp/before COMMIT && make -C /tmp/before install
    python benchmarks/paired_steps.py /tmp/before [--pairs 40] [--core 0] [--only trainer/48M/bfloat16 ...]

Each checkout has a process with its own ``.venv``, which waits while the other computes: two neighbours in time are a
second apart, so that a machine whose speed drifts by the minute says which is faster, as `paired.py` can't there. CPU
seconds of the process; who is first turns. The process that was started second was up to 8 % slower with equal code
(where its memory lies, perhaps), so both are started anew for every ten pairs, in turned order.

Loads: a training step of `trainer.py`'s models, a round of `engine.py`'s small model at 16 and 64 requests, 32 new
tokens each, both dtypes. A ratio above 1: this checkout is faster; shown are the median of the pairs and its 95 %
interval (`paired.py`).

Last line, one JSON object: load -> ``median``, ``low``, ``high`` and ``pairs``; and ``worse``, as of `paired.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOADS = [
    *(f"trainer/{model}/{dtype}" for model in ("2.4M", "48M") for dtype in ("float32", "bfloat16")),
    *(f"engine/{requests}/{dtype}" for requests in (16, 64) for dtype in ("float32", "bfloat16")),
]
NEW_TOKENS = 32
PAIRS_OF_A_START = 10


def training(size_name: str, dtype: str, folder: Path) -> Callable[[int], object]:
    """The function that trains step N of a model of `trainer.py`."""
    import trainer

    size = trainer.MODELS[size_name]
    trainer.write_model(size, folder)
    service = trainer.trainer(folder, dtype, size.sequences * trainer.TOKENS)
    shape = size.sequences, 1, 1, trainer.TOKENS, size.vocabulary
    return lambda step: service.train_step(trainer.lay_out(trainer.batch(step, *shape)))


def decoding(requests: str, dtype: str, folder: Path) -> Callable[[int], object]:
    """The function that answers a round of requests with the small model of `engine.py`."""
    import engine

    ours = engine.Ours(engine.random_folder(folder, "small"), dtype, int(requests))
    return lambda step: ours.run(engine.prompts_of(step, int(requests)), NEW_TOKENS, step)


def work(load: str, core: int) -> None:
    """Do one step for each line of the input, and print its CPU seconds."""
    import torch

    logging.disable(logging.CRITICAL)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path.cwd() / "benchmarks"))
    kind, size, dtype = load.split("/")
    with tempfile.TemporaryDirectory() as folder:
        step = (training if kind == "trainer" else decoding)(size, dtype, Path(folder))
        for number, _ in enumerate(sys.stdin):
            started = time.process_time()
            step(number)
            print(json.dumps(time.process_time() - started), flush=True)


class Side:
    """A checkout's process, which computes a step when it is asked for one."""

    def __init__(self, checkout: Path, load: str, core: int) -> None:
        command = [str(checkout / ".venv/bin/python"), str(Path(__file__)), "--work", load, "--core", str(core)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=checkout, **pipes)

    def step(self) -> float:
        """CPU seconds of one more step. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args} has ended")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(load: str, before: Path, pairs: int, core: int) -> dict[str, float]:
    """The ratios of one load, as the module says."""
    from paired import interval

    ratios: list[float] = []
    for start in range(-(-pairs // PAIRS_OF_A_START)):
        checkouts = [ROOT, before] if start % 2 else [before, ROOT]
        sides = {checkout: Side(checkout, load, core) for checkout in checkouts}
        try:
            for side in sides.values():  # warm-up
                side.step()
                side.step()
            for number in range(min(PAIRS_OF_A_START, pairs - len(ratios))):
                order = checkouts if number % 2 else checkouts[::-1]
                seconds = {checkout: sides[checkout].step() for checkout in order}
                ratios.append(seconds[before] / seconds[ROOT])
        finally:
            for side in sides.values():
                side.close()
    median, low, high = interval(ratios)
    print(f"{load}: {median:.3f} ({low:.3f} to {high:.3f}) of {pairs} pairs", flush=True)
    return {"median": median, "low": low, "high": high, "pairs": pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the other commit, with its environment")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=LOADS, default=LOADS, help="these loads alone")
    parser.add_argument("--work", choices=LOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.core)
        return 0
    if options.before is None or not (options.before / ".venv/bin/python").exists():
        print(f"{options.before} has no .venv/bin/python: run make install there", file=sys.stderr)
        return 2
    before = options.before.resolve()
    ratio_by_load = {load: compare(load, before, options.pairs, options.core) for load in options.only}
    worse = [load for load, ratio in ratio_by_load.items() if ratio["median"] < 0.97 or ratio["high"] < 1]
    print(json.dumps({**ratio_by_load, "worse": worse}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
