"""What it costs to be watched: CPU of one ledger line and of one rollout's trace, exporter by exporter.

    python benchmarks/exporters.py

Records the lines of many steps with one exporter at a time (W&B offline, MLflow to SQLite, Trackio local when it is
installed) and prints, per line: CPU of the calling thread, which is the orchestrator's hot path, and of the whole
process once every line is exported, each less what the ledger alone takes. W&B's own process is not counted. Each is
measured several times, in turn; printed are medians and the range.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.orchestrator.step_metrics import group_trace
from headway.records.generation import VersionSpan
from headway.records.ledger import Distribution, LengthStatistics, StepRecord, TokenStatistics
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.ledger import Ledger
from headway.telemetry.trace_file import TraceFile

LINES, ROUNDS = 200, 5
GROUP_SIZE, GROUPS = 8, 1000
METRICS = ("loss", "entropy", "grad_norm", "clip_fraction", "ratio_p01", "ratio_p50", "ratio_p99", "learning_rate",
           "mismatch_k3", "mismatch_max")  # fmt: skip


def step_record(step: int) -> StepRecord:
    """A step like the quickstart's."""
    return StepRecord(
        step=step,
        version=step + 1,
        step_s=1.0,
        samples=64,
        trajectory_staleness=Distribution(mean=1.3, max=3, histogram={"0": 10, "1": 30, "2": 20, "3": 4}),
        tokens=TokenStatistics(
            staleness=Distribution(mean=0.9, max=3, histogram={"0": 500, "1": 800, "2": 200, "3": 20})
        ),
        endings={"trained": 64, "filtered": 16},
        lengths=LengthStatistics(
            histogram={str(end): 3 for end in (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 160)}
        ),
        metrics={name: 0.1 * step for name in METRICS},
    )


def experiment_of(folder: Path, tracker: str) -> Experiment:
    on = {"trackers": [] if tracker in ("none", "prometheus") else [tracker], "table_every_steps": 0}
    if tracker == "prometheus":
        on["prometheus"] = "127.0.0.1:0"
    raw = {
        "run": {"directory": str(folder)},
        "model": {"path": "none"},
        "tasks": {"train": {"path": "none"}},
        "ledger": on,
    }
    return validate_experiment(raw, "benchmark")


def line_cost_us(tracker: str) -> tuple[float, float]:
    """CPU microseconds per line: of the calling thread, of the process."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_of(Path(folder) / "run", tracker)
        directory = RunDirectory(experiment.run.directory)
        directory.begin(experiment, resume=False)
        lines = [step_record(step) for step in range(LINES)]
        with directory, Ledger(directory.path, RealClock()) as ledger:
            exports = start_exports(experiment, directory, ledger, resume=False)
            process_s, thread_s = time.process_time(), time.thread_time()
            for line in lines:
                ledger.record(line)
            thread_s = time.thread_time() - thread_s
            exports.close()
            process_s = time.process_time() - process_s
            assert b"exporter_" not in directory.ledger.read_bytes(), "lines were lost"
    return thread_s / LINES * 1e6, process_s / LINES * 1e6


def rollout_cost_us() -> float:
    """CPU microseconds to trace one rollout of a finished group, written to the file."""
    rollout = Rollout(group=0, member=0, prompt_ids=(1, 2), response_ids=(3,) * 30, first_token_s=1e5 + 0.123456,
                      versions=(VersionSpan(version=3, tokens=30),), generated_s=1e5 + 0.234567,
                      finished_s=1e5 + 0.345678, verify_s=1e-4, reward=1.0)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, TraceFile(folder, RealClock(), time.time()) as trace:
        started_s = time.thread_time()
        for index in range(GROUPS):
            group = Group(index=index, task=Task(task_id=str(index), prompt=""), prompt_ids=(1, 2), size=GROUP_SIZE,
                          admitted_version=3, admitted_s=1e5)  # fmt: skip
            finished = FinishedGroup(group=group, rollouts=(rollout,) * GROUP_SIZE)
            trace.write(group_trace(finished, 1e5 + 0.5))
        return (time.thread_time() - started_s) / GROUPS / GROUP_SIZE * 1e6


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):7.0f} [{min(values):.0f} to {max(values):.0f}]"


def main() -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": tempfile.mkdtemp()}
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{tempfile.mkdtemp()}/mlflow.db"
    packages = {"tensorboard": "tensorboardX", "prometheus": "prometheus_client"}
    names = ["none", "tensorboard", "prometheus", "wandb", "mlflow", "trackio"]
    names = [n for n in names if n == "none" or importlib.util.find_spec(packages.get(n, n)) is not None]
    measure: Callable[[str], tuple[float, float]] = line_cost_us
    for name in names:
        measure(name)  # imports, tables, caches
    costs = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            costs[name].append(measure(name))
    base_thread, base_process = (statistics.median(cost[i] for cost in costs["none"]) for i in (0, 1))
    print(f"CPU µs per ledger line (median and range of {ROUNDS} rounds of {LINES} lines)")
    print(f"{'':12} {'calling thread':>28} {'whole process':>28}")
    print(
        f"{'ledger alone':12} {spread([c[0] for c in costs['none']]):>28} {spread([c[1] for c in costs['none']]):>28}"
    )
    for name in names[1:]:
        thread = spread([cost[0] - base_thread for cost in costs[name]])
        process = spread([cost[1] - base_process for cost in costs[name]])
        print(f"{'+ ' + name:12} {thread:>28} {process:>28}")
    print(f"CPU µs to trace one rollout: {spread([rollout_cost_us() for _ in range(ROUNDS)]).strip()}")


if __name__ == "__main__":
    main()
