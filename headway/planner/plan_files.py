"""The work of `headway plan CONFIG --pool FILE`: plans, simulates the plan, and writes it as files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from headway.config.load import changed_experiment, validate
from headway.config.schema import Experiment
from headway.models.sizes import ModelSizes, sizes_of
from headway.planner.catalogue.read import Catalogue
from headway.planner.from_run import kept_sections, steps_to_simulate
from headway.planner.model_figures import model_figures
from headway.planner.pool_file import PlanPool, read_pool
from headway.planner.profile import Profile, ProfiledCurves
from headway.planner.run_plan import PlannedRun, plan_run
from headway.planner.scenario import Scenario
from headway.planner.scenario_text import toml_text
from headway.planner.simulate import OnLine, simulate
from headway.planner.stage_curves import RooflineCurves, StageCurves
from headway.records.errors import ConfigurationError
from headway.records.ledger import LedgerLine, StepRecord
from headway.records.plan import PLAN_FILE, Objective, RunPlan
from headway.runtime.run_directory import write_atomically

Decoded = TypeVar("Decoded")


class PlanOutputs(NamedTuple):
    """Paths of the files to write; "": that file isn't written."""

    plan: str = ""
    experiment: str = ""
    picture: str = ""


def plan_for(
    experiment: Experiment,
    pool: str,
    catalogue: Catalogue,
    objective: Objective,
    *,
    simulated: bool,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> RunPlan:
    """Plan a run on the pool in the file ``pool``; ``simulated``: with the rate that the real orchestrator reaches by
    it in virtual time, whose steps ``on_step`` counts. Raises ConfigurationError."""
    sizes = sizes_of(experiment.model.path)
    plan_pool = read_pool(pool, catalogue)
    curves = _curves(experiment, sizes, plan_pool)
    planned = plan_run(experiment, plan_pool, curves, objective)
    if not simulated or planned.plan.mode == "hybrid":  # a scenario's replicas all pause while it trains, or none do
        return planned.plan
    with tempfile.TemporaryDirectory(prefix="headway-plan-") as folder:
        scenario = _scenario(experiment, planned, folder)

        def show(line: LedgerLine) -> None:
            if isinstance(line, StepRecord):
                on_step(line.version, scenario.run.steps)

        samples_per_s = simulate(scenario, name="plan", on_line=show).samples_per_s
    return msgspec.structs.replace(planned.plan, simulated_samples_per_s=samples_per_s)


def _curves(experiment: Experiment, sizes: ModelSizes, pool: PlanPool) -> StageCurves:
    path = pool.tables.profile
    if not path:
        return RooflineCurves(experiment, sizes, pool)
    profile = _decoded(path, Profile, "not a profile of headway plan --profile")
    return ProfiledCurves(experiment, model_figures(sizes), pool, profile)


def _scenario(experiment: Experiment, planned: PlannedRun, folder: str) -> Scenario:
    """The plan's run as `headway simulate` takes it."""
    generation, training, measured = planned.best.generation, planned.best.training, planned.best.measured
    workload = planned.workload
    raw_scenario: dict[str, Any] = {
        "run": {"directory": f"{folder}/run", "steps": steps_to_simulate(experiment), "seed": experiment.run.seed},
        **kept_sections(experiment, {}),
        "hardware": {
            "verifiers": experiment.verifier.workers,
            "teachers": {"at_once": planned.best.shape.teachers, "rollout_s": measured.teach_response_s},
            "generator": {
                "replicas": generation.replicas,
                "devices_per_replica": generation.per_replica,
                "decode_fixed_s": measured.decode_fixed_s,
                "decode_request_s": measured.decode_request_s,
                "update_s": measured.pause_s,
                "shares_devices": planned.best.placement.mode == "temporal",
            },
            "trainer": {
                "devices": training.copies,
                "step_fixed_s": measured.train_fixed_s,
                "token_s": measured.train_token_s,
                "publish_s": measured.publish_s,
            },
        },
        "workload": {
            "prompt_tokens": json.loads(workload.prompt_tokens.model_dump_json()),
            "response_tokens": json.loads(workload.response_tokens.model_dump_json()),
            "group_correlation": workload.group_correlation,
            "verify_s": measured.verify_response_s,
            "impossible_share": 1.0 - workload.acceptance if experiment.queue.filter_zero_variance else 0.0,
        },
    }
    raw_scenario.setdefault("generator", {})["slots"] = generation.slots
    if experiment.generator.update_mode == "finish":  # of adapters, which a scenario doesn't have; they end no request
        raw_scenario["generator"]["update_mode"] = "keep"
    return validate(raw_scenario, "the plan's scenario", Scenario)


def read_plan(path: str | Path) -> RunPlan:
    """Read a plan that was written. Raises ConfigurationError."""
    return _decoded(path, RunPlan, "not a plan of headway plan")


def _decoded(path: str | Path, kind: type[Decoded], otherwise: str) -> Decoded:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is {otherwise}: {error}") from None


def require_writable(outputs: PlanOutputs) -> None:
    """Raise ConfigurationError for a file that exists already, or whose folder doesn't."""
    path_by_option = {"--output": outputs.plan, "--write": outputs.experiment, "--picture": outputs.picture}
    for option, path in path_by_option.items():
        if path and Path(path).exists():
            raise ConfigurationError(f"{option} {path}: the file already exists")
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigurationError(f"{option} {path}: there is no folder {Path(path).parent}")
        if path and list(path_by_option.values()).count(path) > 1:
            raise ConfigurationError(f"{option} {path}: two outputs have the same name")


def write_outputs(experiment: Experiment, plan: RunPlan, outputs: PlanOutputs) -> None:
    """Write the requested files. Raises ConfigurationError for an experiment that can't express the plan, before
    anything is written, and as `require_writable`."""
    if outputs.experiment and plan.refused:
        raise ConfigurationError(f"--write {outputs.experiment}: {'; '.join(plan.refused)}")
    require_writable(outputs)
    planned_experiment = changed_experiment(experiment, plan.settings) if outputs.experiment else experiment
    if outputs.plan:
        write_atomically(Path(outputs.plan), msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    if outputs.experiment:
        settings = planned_experiment.model_dump(mode="json", exclude_defaults=True)
        comment = f"Planned for {plan.pool}: {plan.mode}, {plan.samples_per_s:.3g} samples/s expected"
        write_atomically(Path(outputs.experiment), toml_text(settings, [comment]).encode())


def keep_plan(path: str, run_directory: str, on_line: OnLine | None) -> OnLine:
    """Wrap ``on_line`` so that the run's folder gets the plan, for its report, once the run has begun."""
    plan_bytes, is_kept = Path(path).read_bytes(), False

    def observe(line: LedgerLine) -> None:
        nonlocal is_kept
        if not is_kept:
            is_kept = True
            write_atomically(Path(run_directory) / PLAN_FILE, plan_bytes)
        if on_line is not None:
            on_line(line)

    return observe
