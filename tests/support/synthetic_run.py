"""A made-up run's ledger, for tests of its readers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from step_records import step_of

from headway.records.ledger import Distribution, EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.runtime.run_directory import SCHEMA
from headway.telemetry.ledger import Replays


def step_record(step: int, **changes: object) -> StepRecord:
    """A plausible step of a run that learns; every field that a plot shows is set."""
    random = np.random.default_rng(step)
    solve = 0.45 + 0.5 * (1 - math.exp(-step / 60)) + float(random.normal(0, 0.02))
    step_s = 1.0 + 0.1 * float(random.random())
    wait_s = 0.25 * step_s
    histogram = {"0": 10, "1": 30, "2": 20, "3": 4}
    fields: dict[str, object] = {
        "step": step,
        "time_s": (step + 1) * 1.05,
        "step_s": step_s,
        "samples": 64,
        "groups": 8,
        "consumption_per_s": 64 / (step_s - wait_s),
        "production_per_s": 80 + float(random.normal(0, 4)),
        "effective_production_per_s": 62 + float(random.normal(0, 4)),
        "trainer_wait_s": wait_s,
        "trainer_compute_s": 0.6 * step_s,
        "publish_s": 0.01,
        "apply_s": 0.03,
        "apply_pause_s": 0.004,
        "trainer_wait_ratio": wait_s / step_s,
        "generator_wait_ratio": 0.03 + 0.02 * float(random.random()),
        "orchestrator_cpu_s": 0.05,
        "verify_s": 0.01,
        "open_groups": 30,
        "running_groups": 20 + int(random.integers(0, 4)),
        "parked_groups": 0,
        "buffered_groups": int(random.integers(3, 12)),
        "buffer_capacity_groups": 40,
        "oldest_age_s": 1.5 + float(random.random()),
        "engines__kv_used_tokens": 6000,
        "engines__kv_capacity_tokens": 12000,
        "engines__running_rollouts": 120,
        "engines__slots": 128,
        "trajectory_staleness": Distribution(mean=1.3, max=3, histogram=histogram),
        "tokens__staleness": Distribution(mean=0.9, max=3, histogram={"0": 500, "1": 800, "2": 200, "3": 20}),
        "endings": {"trained": 64, "filtered": 16},
        "rewards__mean": solve,
        "rewards__std": 0.4,
        "rewards__solve_rate": min(1.0, solve),
        "rewards__solve_rate_histogram": [2, 0, 1, 0, 1, 1, 0, 2, 0, 1, 2 + step // 20],
        "rewards__zero_variance_share": min(0.8, 0.3 + step / 400),
        "lengths__mean": 26.0,
        "lengths__p50": 15.0,
        "lengths__p99": 143.0,
        "lengths__max": 200,
        "lengths__truncated_share": 0.02,
        "length_bias__ks": 0.02,
        "length_bias__scheduling_ks": 0.005,
        "length_bias__filter_ks": 0.018,
        "length_bias__censored_share": 0.05,
        "tokens__generated_per_s": 20000.0,
        "tokens__trained_per_s": 1700.0,
        "flops_per_s": 3e9,
        "mfu_step": 0.3,
        "mfu_compute": 0.5,
        "peak_flops_per_s": 9e10,
        "metrics": {
            "loss": float(random.normal(0, 0.01)),
            "entropy": 0.4 * math.exp(-step / 100) + 0.05,
            "grad_norm": 0.3 + float(random.random()),
            "clip_fraction": 0.01,
            "ratio_p01": 0.8,
            "ratio_p50": 1.0,
            "ratio_p99": 1.3,
            "learning_rate": 5e-4,
            "mismatch_k3": 1e-4,
            "mismatch_max": 0.5,
        },
    }
    return step_of(**{**fields, **changes})  # type: ignore[arg-type]


def evaluation(phase: str, version: int, solve_rate: float, split: str = "test", **changes: object) -> EvaluationRecord:
    fields: dict[str, object] = {
        "split": split,
        "phase": phase,
        "step": version,
        "first_version": version,
        "last_version": version + (1 if phase == "during" else 0),
        "held": phase != "during",
        "tasks": 500,
        "samples": 500,
        "solve_rate": solve_rate,
        "standard_error": math.sqrt(solve_rate * (1 - solve_rate) / 500),
        "reward_mean": solve_rate,
        "length_mean": 26.0,
        "duration_s": 2.0,
        "time_s": version * 1.05,
    }
    return EvaluationRecord(**{**fields, **changes})  # type: ignore[arg-type]


def synthetic_lines(steps: int = 120) -> list[LedgerLine]:
    """A whole run: before, steps with validations in between, after, the books, the end."""
    lines: list[LedgerLine] = [
        EventRecord(event="start", detail="<synthetic> & made up"),
        evaluation("before", 0, 0.452),
    ]
    for step in range(steps):
        lines.append(step_record(step))
        if step % 20 == 19:
            rate = min(0.96, 0.45 + 0.5 * (1 - math.exp(-step / 60)))
            lines.append(evaluation("during", step + 1, rate, split="validation", tasks=200))
    lines.append(EventRecord(event="best", step=steps, data={"version": steps}))
    lines.append(evaluation("after", steps, 0.93))
    books = {"balanced": 1, "open": 24, "trained": 64 * steps, "filtered": 16 * steps}
    lines.append(EventRecord(event="accounting", step=steps, data=books))
    lines.append(EventRecord(event="end", step=steps, time_s=steps * 1.05 + 3))
    return lines


def resolved(lines: Iterable[LedgerLine]) -> list[LedgerLine]:
    """What a reader of the ledger keeps of ``lines``: without those that later ones replace."""
    kept: dict[int, LedgerLine] = {}
    replays = Replays()
    for number, line in enumerate(lines):
        for old in replays.take(number, line):
            del kept[old]
        kept[number] = line
    return list(kept.values())


def write_run(folder: Path, lines: list[LedgerLine], budget: int | None = 4) -> Path:
    """Write ``lines`` as the ledger of the run directory ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "ledger.jsonl").write_bytes(text)
    if budget is not None:
        (folder / "config.json").write_text(json.dumps({"schema": SCHEMA, "queue": {"budget": budget}}))
    return folder
