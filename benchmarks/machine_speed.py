"""How fast the machine's cores are while something is measured: on a shared host that swings within seconds.

    python benchmarks/machine_speed.py [SECONDS]        # a line a second: milliseconds of each core for the same work

A process of its own does the same small work twice a second, on one core after the other, and notes the CPU time that
took: not the time on the clock, so it makes no difference who else wants the core. Some milliseconds of work before are
not counted: a core that was idle begins slowly. It takes 1 % of a core. What computes all the time is faster by as much
as its core is, so rates of runs that were made one after the other are compared after each is divided by the mean speed
of its own seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_EVERY_S = 0.5
_WARM, _WORK = 60_000, 20_000  # turns of the loop
_USUAL_S = 0.0009  # CPU time of the work on the machine that the results come from, when nothing slows it: speed 1


class Speedometer:
    """Notes the speed from ``with`` on. Times are those of ``time.monotonic``."""

    def __enter__(self) -> Speedometer:
        self._folder = tempfile.TemporaryDirectory(prefix="headway-speed-")
        self._log = Path(self._folder.name) / "log"
        self._log.touch()
        self._process = subprocess.Popen([sys.executable, __file__, "--log", str(self._log), str(os.getpid())])
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def mean(self, start_s: float, end_s: float) -> float:
        """Of the cores between two times, 1 as usual; of so short a time that there is no sample, the nearest one."""
        lines = [line.split() for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        samples = [(float(at), _USUAL_S / float(took)) for at, _, took in lines]
        middle_s = (start_s + end_s) / 2
        inside = [speed for at, speed in samples if start_s <= at <= end_s]
        return statistics.fmean(inside or [min(samples, key=lambda sample: abs(sample[0] - middle_s))[1]])


def _sample(core: int) -> float:
    """CPU seconds of the work on this core."""
    os.sched_setaffinity(0, {core})
    _work(_WARM)
    began_s = time.thread_time()
    _work(_WORK)
    return time.thread_time() - began_s


def _work(turns: int) -> int:
    count = 0
    for number in range(turns):
        count += number & 3
    return count


def _write(log: Path, parent: int) -> None:
    """A line a sample, until the parent is gone."""
    cores = sorted(os.sched_getaffinity(0))
    with log.open("a") as file:
        number = 0
        while os.getppid() == parent:
            core = cores[number % len(cores)]
            file.write(f"{time.monotonic()} {core} {_sample(core)}\n")
            file.flush()
            number += 1
            time.sleep(_EVERY_S)


def main() -> None:
    if sys.argv[1:2] == ["--log"]:
        _write(Path(sys.argv[2]), int(sys.argv[3]))
        return
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(int(sys.argv[1]) if sys.argv[1:] else 20):
        print("  ".join(f"core {core}: {1000 * _sample(core):.3f} ms" for core in cores), flush=True)
        time.sleep(1.0)


if __name__ == "__main__":
    main()
