"""Ray's side of the links' benchmark: for each line on standard input, the median of so many actor calls, in s.

Runs in an interpreter that has Ray; imports nothing of Headway. The caller runs on the first core, the actor on the
last one."""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import ray  # type: ignore[import-not-found]


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    api: Any = ray
    api.init("local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)

    def pin(where: list[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), where)

    class Echo:
        def __init__(self) -> None:
            pin(cores[-1:])

        def echo(self, value: Any) -> Any:
            return value

    actor = api.remote(Echo).remote()
    for _ in range(100):
        api.get(actor.echo.remote(1))
    pin(cores[:1])
    print("ready", flush=True)
    for line in sys.stdin:
        times_s: list[float] = []
        for _ in range(int(line)):
            started = time.perf_counter()
            api.get(actor.echo.remote(1))
            times_s.append(time.perf_counter() - started)
        print(statistics.median(times_s), flush=True)


if __name__ == "__main__":
    main()
