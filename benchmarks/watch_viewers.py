"""What does `headway watch` cost a machine that trains? The server's CPU time under twenty viewers of a live run.

    python benchmarks/watch_viewers.py [--seconds 60]

The run is the quickstart's experiment (examples/arithmetic) from a random model that doesn't learn, so that the load
stays what it is, with its trace and its record. Fifteen viewers listen to *Now*, five open a random rollout every 5 s.
Their own CPU time doesn't count.

Last line, one JSON object: `cost_of_20_viewers` (CPU-seconds of the server over cores x time), `cpu_s`, `seconds`,
`cores`, `events_per_viewer_per_s`, `rollouts_opened`, `slowest_open_s`, `steps` of the run meanwhile, `live_rss_mb` of
the server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parts.trained_run import ARITHMETIC, CONFIG, SAME_LOAD, headway
from parts.watch_processes import WatchServer, watch

from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger

TARGET = 0.05
LISTENERS, OPENERS, OPEN_EVERY_S = 15, 5, 5.0
START_LIMIT_S = 600.0
WARM_S = 5.0  # viewers connect, the server reads what is there already


@contextmanager
def live_run(folder: Path) -> Iterator[Path]:
    """The folder of a run that trains until the block ends; it has completed three steps."""
    tasks, model, run = folder / "tasks", folder / "model", folder / "run"
    subprocess.run([sys.executable, str(ARITHMETIC / "make_tasks.py"), str(tasks)], check=True)
    headway("init-model", str(model), "--texts", f"{tasks}/sft.jsonl", "--character-level", quiet=True)
    paths = [f"--tasks.{split}.path={tasks}/{split}.jsonl" for split in ("train", "validation", "test")]
    load = [f"--{one}" for one in SAME_LOAD if not one.startswith("ledger.trace")]
    load.append("--queue.filter_zero_variance=false")  # a random model solves nothing: every group would be filtered
    more = [f"--model.path={model}", f"--run.directory={run}", "--run.steps=5000", "--run.time_limit_s=100000"]
    log = (folder / "train.log").open("w")
    command = [sys.executable, "-m", "headway.cli.main", "train", CONFIG, "--quiet", *paths, *load, *more]
    with log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while steps_of(run) < 3:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the run has no steps:\n{(folder / 'train.log').read_text()[-2000:]}")
                time.sleep(0.5)
            yield run
        finally:
            process.terminate()
            process.wait()


def steps_of(run: Path) -> int:
    """Steps in the ledger of a run that may not have begun."""
    return sum(isinstance(line, StepRecord) for line in read_ledger(run)) if (run / "ledger.jsonl").exists() else 0


class Viewers:
    """Twenty viewers of a run, a thread each, until ``close``."""

    def __init__(self, server: WatchServer, run: str) -> None:
        self.events = 0
        self.opened_s: list[float] = []
        self.errors: list[str] = []
        self._server, self._run = server, run
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._listen, daemon=True) for _ in range(LISTENERS)]
        self._threads += [threading.Thread(target=self._open, args=(n,), daemon=True) for n in range(OPENERS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30.0)

    def _listen(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30.0)
        try:
            with contextlib.closing(connection):
                connection.request("GET", f"/api/stream?run={quote(self._run)}")
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ValueError(f"/api/stream: {answer.status}")
                while not self._ended.is_set():
                    line = answer.readline()  # not inside the sum: another thread's would be lost meanwhile
                    self.events += line.startswith(b"data:")
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _open(self, number: int) -> None:
        chance = random.Random(number)
        self._ended.wait(chance.uniform(0.0, OPEN_EVERY_S))
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                found = self._server.read("/api/rollouts", run=self._run, limit=1)
                self._server.read("/api/rollout", run=self._run, row=chance.randrange(found["rollouts"]))
            except (OSError, AssertionError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.opened_s.append(time.monotonic() - began_s)
            self._ended.wait(OPEN_EVERY_S - self.opened_s[-1])


def measure(seconds: float) -> dict[str, Any]:
    """The cost of twenty viewers over ``seconds`` of a run that is started for it."""
    cores = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="headway-watch-"))
    try:
        with live_run(folder) as path, watch(path, cache=folder / "cache") as server:
            (run,) = server.read("/api/runs")["runs"]
            viewers = Viewers(server, run["id"])
            time.sleep(WARM_S)
            before = (server.cpu_s(), time.monotonic(), viewers.events, steps_of(path))
            time.sleep(seconds)
            after = (server.cpu_s(), time.monotonic(), viewers.events, steps_of(path))
            viewers.close()
            memory_mb = server.memory_mb()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if viewers.errors:
        raise SystemExit(f"{len(viewers.errors)} viewers failed, the first: {viewers.errors[0]}")
    cpu_s, passed_s, events, steps = (new - old for new, old in zip(after, before, strict=True))
    return {
        "cost_of_20_viewers": round(cpu_s / (cores * passed_s), 4),
        "cpu_s": round(cpu_s, 2),
        "seconds": round(passed_s, 1),
        "cores": cores,
        "events_per_viewer_per_s": round(events / LISTENERS / passed_s, 2),
        "rollouts_opened": len(viewers.opened_s),
        "slowest_open_s": round(max(viewers.opened_s, default=0.0), 3),
        "steps": steps,
        "live_rss_mb": round(memory_mb),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    found = measure(parser.parse_args().seconds)
    print(f"cost_of_20_viewers: {found['cost_of_20_viewers']} (target: at most {TARGET:g})")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
