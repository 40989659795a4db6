"""Plans from a profile, against live runs on this machine (the parts ``live`` and ``grid`` of planner.py).

The profile is of the quickstart's model on its own task, one group size, one length limit. Settings that it predicts
differ from it in the model, lengths, group size, slots, budget or placement. The learning rate is 0, so that the load
stays what it is: the workload (lengths, the share of groups that can be trained) is given as the first live run of a
setting shows it, the rate is predicted. Each live rate is the median of three runs, interleaved over the settings.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.config.load import load_experiment
from headway.control.tuning.run_figures import figures
from headway.models.sizes import sizes_of
from headway.planner.catalogue.read import Catalogue
from headway.planner.from_run import read_run, response_tokens
from headway.planner.model_figures import model_figures
from headway.planner.pool_file import PlannedWorkload, PlanPool, read_pool
from headway.planner.profile import Profile, ProfiledCurves
from headway.planner.quantities import constant
from headway.planner.run_plan import Placement, plan_run, predicted_rate
from headway.records.check_report import Calibration
from headway.records.ledger import StepRecord
from parts.trained_run import CONFIG, SAME_LOAD, headway, train_alone

SECONDS = 14  # of a live run, its start not counted
ROUNDS = 3
PLACES = {
    "spatial": ('["cpu:0"]', '["cpu:1"]', Placement(0, 1, 0, 1, 0)),
    "temporal": ('["cpu:0", "cpu:1"]', '["cpu:0", "cpu:1"]', Placement(0, 2, 0, 2, 2)),
    "hybrid": ('["cpu:0", "cpu:1"]', '["cpu:1"]', Placement(0, 2, 0, 1, 1)),
}
COMMON = (
    "queue.groups_per_step=16",
    "generator.slots=64",
    "run.steps=100000",
    *SAME_LOAD,
)


class Setting(NamedTuple):
    """A live run that is predicted. ``options``: beside ``COMMON``."""

    model: str  # "profiled", or another one
    placement: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        changed = ", ".join(option.partition(".")[2] for option in self.options)
        return f"{self.model}, {self.placement}" + (f", {changed}" if changed else "")


OTHER = ("queue.filter_zero_variance=false",)  # a random model solves nothing: all groups are trained
SETTINGS = (
    Setting("profiled", "spatial", ("rollout.group_size=4",)),
    Setting("profiled", "spatial", ("rollout.group_size=16",)),
    Setting("profiled", "spatial", ("rollout.max_response_tokens=40",)),
    Setting("profiled", "spatial", ("generator.slots=24",)),
    Setting("profiled", "spatial", ("queue.budget=6",)),
    Setting("profiled", "temporal", ("rollout.group_size=4",)),
    Setting("profiled", "temporal", ("rollout.max_response_tokens=40",)),
    Setting("profiled", "hybrid"),
    Setting("profiled", "hybrid", ("rollout.group_size=16",)),
    Setting("other", "spatial", OTHER),
    Setting("other", "temporal", OTHER),
    Setting("other", "spatial", (*OTHER, "rollout.group_size=4")),
    Setting("other", "hybrid", OTHER),
)
GRID_SLOTS = (16, 64, 128)
GRID = tuple(Setting("profiled", place, (f"generator.slots={slots}",)) for place in PLACES for slots in GRID_SLOTS)


def starts(directory: Path) -> dict[str, Path]:
    """Folders with tasks and a model: the quickstart's cold start, and a random model with five times the weights."""
    start, other = directory / "start", directory / "other"
    headway("quickstart", str(start), "--cold-start-only", quiet=True)
    if not other.exists():
        other.mkdir()
        (other / "tasks").symlink_to((start / "tasks").resolve())
        sizes = ("--layers", "5", "--width", "160", "--heads", "4", "--kv-heads", "2")
        texts = ("--texts", f"{start}/tasks/sft.jsonl", "--character-level")
        command = [sys.executable, "-m", "headway.cli.main", "init-model", str(other / "sft"), *texts, *sizes]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"profiled": start, "other": other}


def measured_profile(directory: Path, start: Path) -> Profile:
    path = directory / "profile.json"
    if not path.exists():
        tasks = [f"--tasks.{split}.path={start}/tasks/{split}.jsonl" for split in ("train", "validation", "test")]
        options = [f"--{option}" for option in COMMON]
        command = [sys.executable, "-m", "headway.cli.main", "plan", CONFIG, "--profile", "--output", str(path)]
        subprocess.run([*command, f"--model.path={start}/sft", *tasks, *options], check=True)
    return msgspec.json.decode(path.read_bytes(), type=Profile)


def overrides(setting: Setting, start: Path) -> list[str]:
    generators, trainers, _ = PLACES[setting.placement]
    devices = (f"generator.devices={generators}", f"trainer.devices={trainers}", f"model.path={start}/sft")
    return [*COMMON, *setting.options, *devices]


def live_steps(folder: Path) -> list[StepRecord]:
    """Steps in steady state: the first third of the time is left out."""
    steps = read_run(folder).steps
    end_s = sum(step.step_s for step in steps)
    passed_s, kept = 0.0, list[StepRecord]()
    for step in steps:
        passed_s += step.step_s
        if passed_s > end_s / 3:
            kept.append(step)
    return kept


def run_live(directory: Path, settings: tuple[Setting, ...], rounds: int) -> dict[Setting, list[float]]:
    """Samples/s of each setting's runs; those that are there already stay."""
    found: dict[Setting, list[float]] = {setting: [] for setting in settings}
    where = starts(directory)
    for number in range(rounds):
        order = settings if number % 2 == 0 else settings[::-1]
        for place, setting in enumerate(order):
            folder = directory / f"round-{number}" / str(setting).replace(", ", "-").replace("=", "-")
            if not (folder / "summary.json").exists():
                options = [f"--{one}" for one in (*overrides(setting, where[setting.model]), f"run.seed={number}")]
                train_alone(folder, where[setting.model], str(setting), [*options, f"--run.time_limit_s={SECONDS}"])
                left = (rounds - number) * len(settings) - place - 1
                print(f"round {number + 1}, {setting}: trained; {left} runs remain", flush=True)
            measured = figures(live_steps(folder))
            found[setting].append(measured.samples_per_s if measured else 0.0)
    return found


def pool_of(directory: Path, workload: PlannedWorkload | None) -> PlanPool:
    path = directory / "pool.toml"
    path.write_text('profile = "profile.json"\n[[devices]]\ndevice = "cpu"\ncount = 2\n')
    pool = read_pool(path, Catalogue.read())
    return msgspec.structs.replace(pool, tables=pool.tables.model_copy(update={"workload": workload}))


def workload_of(folder: Path, profiled: Calibration) -> PlannedWorkload:
    """The workload that a live run had."""
    run, steps = read_run(folder), live_steps(folder)
    finished = sum(step.flow.finished_groups for step in steps)
    return PlannedWorkload(
        prompt_tokens=constant(profiled.prompt_tokens),
        response_tokens=response_tokens(steps, run.experiment.rollout.max_response_tokens),
        group_correlation=profiled.lengths.group_correlation,
        verify_s=profiled.verify_response_s,
        acceptance=max(0.05, min(1.0, sum(step.flow.accepted_groups for step in steps) / max(1, finished))),
    )


def live(directory: Path) -> dict[str, Any]:
    """Predict held-out settings, and compare with live runs."""
    where = starts(directory)
    profile = measured_profile(directory, where["profiled"])
    rates = run_live(directory, SETTINGS, ROUNDS)
    errors: dict[str, float] = {}
    for setting, measured in rates.items():
        folder = directory / "round-0" / str(setting).replace(", ", "-").replace("=", "-")
        experiment = load_experiment(CONFIG, overrides(setting, where[setting.model]))
        pool = pool_of(directory, workload_of(folder, profile.points[0].measured))
        curves = ProfiledCurves(experiment, model_figures(sizes_of(experiment.model.path)), pool, profile)
        predicted = predicted_rate(experiment, pool, curves, PLACES[setting.placement][2]) or 0.0
        middle = statistics.median(measured)
        errors[str(setting)] = predicted / middle - 1
        print(
            f"live: {setting!s:60} predicted {predicted:6.0f}, measured {middle:6.0f} samples/s "
            f"[{min(measured):.0f}, {max(measured):.0f}]: {errors[str(setting)]:+.1%}",
            flush=True,
        )
    sizes = sorted(abs(error) for error in errors.values())
    return {
        "prediction_median_error": round(statistics.median(sizes), 4),
        "prediction_worst_error": round(sizes[-1], 4),
        "predictions": {name: round(error, 4) for name, error in errors.items()},
    }


def grid(directory: Path) -> dict[str, Any]:
    """The chosen plan's live rate over the best of all placements and numbers of slots."""
    where = starts(directory)
    profile = measured_profile(directory, where["profiled"])
    rates = {setting: statistics.median(found) for setting, found in run_live(directory, GRID, ROUNDS).items()}
    experiment = load_experiment(CONFIG, [*COMMON, "generator.slots=128", f"model.path={where['profiled']}/sft"])
    pool = pool_of(directory, None)
    curves = ProfiledCurves(experiment, model_figures(sizes_of(experiment.model.path)), pool, profile)
    plan = plan_run(experiment, pool, curves, "time").plan
    slots = json.loads(plan.settings["generator.slots"])
    chosen = Setting("profiled", plan.mode, (f"generator.slots={min(GRID_SLOTS, key=lambda one: abs(one - slots))}",))
    for setting, rate in rates.items():
        print(f"grid: {setting!s:45} {rate:6.0f} samples/s" + ("  <- planned" if setting == chosen else ""))
    return {
        "plan_over_best_of_grid": round(rates[chosen] / max(rates.values()), 4),
        "grid": {str(setting): round(rate, 1) for setting, rate in rates.items()},
        "planned": f"{plan.mode}, {slots} slots, {plan.samples_per_s:.0f} samples/s",
    }
