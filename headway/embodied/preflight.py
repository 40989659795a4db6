"""`headway check` of a policy in simulators: what would stop the run, its memory, its rates, and other placements."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import msgspec

from headway.config.control import ControlConfig
from headway.config.schema import CheckpointConfig, LedgerConfig, RunConfig
from headway.config.simulation import EpisodeEvaluationConfig, SimulatorExperiment
from headway.embodied.block import seed_of
from headway.embodied.driver import plan_of, train
from headway.embodied.tokens.lanes import open_lanes
from headway.flow.placement import text_of
from headway.records.check_report import Findings
from headway.records.ledger import EventRecord, StepRecord
from headway.runtime.devices import parse_device
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.exporters import missing_packages
from headway.telemetry.ledger import EVENT_START, read_ledger


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of some training steps."""

    steps: int  # that were measured; the first one, which loads and compiles, is not
    simulate_us: float  # of a worker, for an environment step with its policy
    learn_us: float  # of the learner, for an environment step
    worker_bytes: int  # resident memory of a simulators' worker without lanes
    lane_bytes: int  # ... and of each of its lanes
    learner_bytes: int  # resident memory of the learner


def findings(experiment: SimulatorExperiment, *, resume: bool, opens: bool) -> Findings:
    """The errors that would stop the run. ``opens``: build a lane in this process, as its workers would."""
    errors = Findings()
    for section_name in ("simulator", "trainer"):
        for device in getattr(experiment, section_name).devices:
            with errors.refused(f"{section_name}.devices"):
                parse_device(device).check()
    for text in missing_packages(experiment):
        errors.error("ledger.trackers", text)
    with errors.refused("run.directory"):
        RunDirectory(experiment.run.directory).require_startable(resume=resume)
    if opens:
        with errors.refused("simulator.environment"):
            open_lanes(experiment, 1, partial(seed_of, experiment.run.seed, 0, 0)).close()
    return errors


def calibrate(experiment: SimulatorExperiment, seconds: float) -> Calibrated:
    """Train for about ``seconds``, at most 1000 steps, in a temporary folder. Raises as the run would."""
    with tempfile.TemporaryDirectory(prefix="headway-check-") as folder:
        run = RunConfig(directory=f"{folder}/run", steps=1000, time_limit_s=seconds, seed=experiment.run.seed)
        sections = {"run": run, "checkpoint": CheckpointConfig(every_steps=1000)}
        sections |= {"evaluation": EpisodeEvaluationConfig(), "ledger": LedgerConfig(), "control": ControlConfig()}
        train(experiment.model_copy(update=sections))
        lines = read_ledger(run.directory)
    memory = next(line.data for line in lines if isinstance(line, EventRecord) and line.event == EVENT_START)
    steps = [line for line in lines if isinstance(line, StepRecord)]
    measured = [(step, step.episodes) for step in steps[1:] or steps if step.episodes]
    transitions = sum(episodes.transitions for _, episodes in measured)
    return Calibrated(
        steps=len(measured),
        simulate_us=1e6 * sum(episodes.simulate_s for _, episodes in measured) / transitions,
        learn_us=1e6 * sum(step.trainer_compute_s for step, _ in measured) / transitions,
        worker_bytes=int(memory["worker_bytes"]),
        lane_bytes=int(memory["lane_bytes"]),
        learner_bytes=measured[-1][1].learner_bytes,
    )


def plan_rows(experiment: SimulatorExperiment) -> dict[str, str]:
    """Describe what the run would do."""
    settings, trainer = experiment.simulator, experiment.trainer
    transitions = settings.lanes * settings.steps_per_fragment
    return {
        "simulators": f"{settings.environment} ({settings.backend}), {settings.lanes} lanes in {settings.blocks} "
        f"blocks of {settings.block_lanes}",
        "learner": f"{trainer.passes} passes over {transitions:,} transitions, {trainer.minibatch} a minibatch",
        "placement": "planned by the run's own steps" if experiment.plans_itself else text_of(plan_of(experiment)),
        "staleness": f"budget {experiment.queue.budget}, correction {experiment.algorithm.correction}",
        "run": f"{experiment.run.steps:,} steps, {experiment.run.steps * transitions:,} environment steps, in "
        f"{experiment.run.directory}",
    }


def forecast_rows(experiment: SimulatorExperiment, measured: Calibrated) -> dict[str, str]:
    """Describe memory and rates, and what the measured times give in other placements on the run's devices."""
    settings, devices = experiment.simulator, len(experiment.devices)
    workers, learn_us = len(settings.devices), measured.learn_us
    lanes = -(-settings.blocks // workers) * settings.block_lanes
    overlaps = experiment.queue.budget > 0 and not {*settings.devices} & {*experiment.trainer.devices}

    def rate(workers: int, combined: Callable[[tuple[float, float]], float]) -> str:
        return f"{1e6 / combined((measured.simulate_us / min(workers, settings.blocks), learn_us)):,.0f}"

    placements = {"the same devices, in turns": rate(devices, sum)}
    if devices > 1:
        placements["the learner on a device of its own, budget 0"] = rate(devices - 1, sum)
        placements["... budget 1 or more, corrected"] = rate(devices - 1, max)
    return {
        "memory": f"{measured.worker_bytes / 1e6:,.0f} MB + {measured.lane_bytes / 1e6:,.2f} MB a lane: "
        f"{(measured.worker_bytes + lanes * measured.lane_bytes) / 1e6:,.0f} MB in each of {workers} simulators' "
        f"workers ({lanes} lanes); {measured.learner_bytes / 1e6:,.0f} MB in the learner",
        "times": f"{measured.simulate_us:,.0f} µs an environment step in a simulators' worker, {learn_us:,.0f} µs in "
        f"the learner ({measured.steps} steps measured)",
        "forecast": f"{rate(workers, max if overlaps else sum)} environment steps/s as configured",
        f"on {devices} devices": "; ".join(f"{label}: {text}" for label, text in placements.items()),
    }
