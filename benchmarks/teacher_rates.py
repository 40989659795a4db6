"""Whether `headway check` and `headway plan` predict a run that waits for its teacher, on two cores.

    python benchmarks/teacher_rates.py [--seconds 60]

The teacher is a random model of 44 M parameters in a replica on the second core, beside the trainer, which hardly
computes; the policy on the first one has a few thousand. The last line is one JSON object:

- ``memory``: resident memory of the teacher's worker at its peak, less that of one with the policy's model / what
  `headway check` predicts beyond its base
- ``check``, ``plan``: samples/s of the live run in steady state / the forecast after a calibration, the rate of the
  same placement by `headway plan`'s profile
- ``bound``: the live run's verdict, and the forecast's binding constraint
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from parts.plan_live import live_steps

from headway.config.load import load_experiment
from headway.config.schema import Experiment
from headway.control.tuning.balance import balance_of, waits_of
from headway.control.tuning.run_figures import figures
from headway.models.initialise import initialise_model
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.capacity import peak_resident_bytes
from headway.orchestrator.preflight.memory import BASE_BYTES, teacher_uses
from headway.planner.catalogue.read import Catalogue
from headway.planner.model_figures import model_figures
from headway.planner.pool_file import read_pool
from headway.planner.profile import ProfiledCurves, measure_profile
from headway.planner.run_plan import Placement, predicted_rate
from headway.records.check_report import CheckReport

SIZES = {"layers": 14, "width": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536}
OVERRIDES = ("--trainer.warmup_steps=0", "--evaluation.test=never", "--ledger.trackers=[]")
EXPERIMENT = """
[run]
directory = "{folder}/run"
steps = 100000
[model]
path = "{folder}/policy"
[tasks.train]
path = "{folder}/tasks.jsonl"
[verifier]
name = "exact"
[rollout]
group_size = 4
max_prompt_tokens = 16
max_response_tokens = 96
[generator]
devices = ["cpu:0"]
slots = 32
[queue]
groups_per_step = 4
budget = 2
filter_zero_variance = false
[trainer]
devices = ["cpu:1"]
learning_rate = 0.0
[algorithm]
teacher = "big"
[teachers.big]
path = "{folder}/teacher"
devices = ["cpu:1"]
top_k = 20
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-teacher-") as name:
        print(json.dumps(measured(Path(name), options.seconds)))
    return 0


def measured(folder: Path, seconds: int) -> dict[str, Any]:
    config = write_inputs(folder)
    experiment = load_experiment(config, [])
    report = checked(config)
    assert report.forecast is not None
    assert report.calibration is not None
    print(f"check: {report.calibration.teach_response_s:.3f} s a rollout, {report.forecast.reason}", flush=True)
    planned = planned_rate(folder, experiment)
    base_bytes, _ = live(config, folder / "base", 15, f"--teachers.big.path={folder}/policy")
    peak_bytes, per_s = live(config, folder / "live", seconds)
    waits = waits_of(live_steps(folder / "live"))
    (use,) = teacher_uses(experiment)
    predicted_bytes = use.total_bytes - BASE_BYTES["generator"]
    forecast_per_s = report.forecast.outcome.samples_per_s
    print(f"memory: {(peak_bytes - base_bytes) / 1e6:.1f} MB of {predicted_bytes / 1e6:.1f} MB predicted")
    print(f"samples/s: {per_s:.3f} live, {forecast_per_s:.3f} by check, {planned:.3f} by plan; {waits}")
    return {
        "memory": round((peak_bytes - base_bytes) / predicted_bytes, 3),
        "check": round(per_s / forecast_per_s, 3),
        "plan": round(per_s / planned, 3),
        "bound": [balance_of(waits, experiment.queue.budget), report.forecast.binding],
    }


def write_inputs(folder: Path) -> Path:
    """The experiment's file, with both models and the tasks beside it."""
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = (json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts)
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    small = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    for name, sizes in (("policy", small), ("teacher", SIZES)):
        initialise_model(folder / name, prompts, character_level=True, **sizes)
    config = folder / "experiment.toml"
    config.write_text(EXPERIMENT.format(folder=folder))
    return config


def checked(config: Path) -> CheckReport:
    command = [sys.executable, "-m", "headway.cli.main", "check", str(config), "--json", *OVERRIDES]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=CheckReport)


def planned_rate(folder: Path, experiment: Experiment) -> float:
    """Samples/s that `headway plan` expects of the live run's placement, by a profile of this machine."""
    profile = measure_profile(experiment, 10.0, lambda text, done, total: print(f"profile: {text}", flush=True))
    (folder / "pool.toml").write_text('profile = "profile.json"\n[[devices]]\ndevice = "cpu"\ncount = 2\n')
    pool = read_pool(folder / "pool.toml", Catalogue.read())
    curves = ProfiledCurves(experiment, model_figures(sizes_of(experiment.model.path)), pool, profile)
    rate = predicted_rate(experiment, pool, curves, Placement(0, 1, 0, 1, 0))
    assert rate is not None
    return rate


def live(config: Path, folder: Path, seconds: int, *options: str) -> tuple[int, float]:
    """The peak resident bytes of the teacher's worker, and samples/s in steady state, of a run of ``seconds``."""
    settings = (f"--run.directory={folder}", f"--run.time_limit_s={seconds}", *OVERRIDES, *options)
    command = [sys.executable, "-m", "headway.cli.main", "train", str(config), *settings]
    peak_bytes = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        running = True
        while running:
            if (worker := worker_of(folder / "logs" / "teacher-big-0.log")) is not None:
                peak_bytes = max(peak_bytes, peak_resident_bytes(worker) or 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                running = False
    if process.returncode:
        raise SystemExit(f"headway train failed: {process.returncode}")
    run_figures = figures(live_steps(folder))
    return peak_bytes, run_figures.samples_per_s if run_figures else 0.0


def worker_of(log: Path) -> int | None:
    """Id of the process that writes ``log``; None: there is none yet."""
    for link in Path("/proc").glob("[0-9]*/fd/[12]"):
        try:
            if link.readlink() == log:
                return int(link.parts[2])
        except OSError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(main())
