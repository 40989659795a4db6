"""`headway check` of a policy in simulators: what would stop the run, its memory, its rates, and other placements."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import seed_of
from headway.embodied.simulators.opening import open_simulator
from headway.embodied.workers import Learn, LearnReport, Simulate
from headway.flow.run import Flow, run
from headway.records.check_report import Finding
from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.exporters import missing_packages

_MAX_STEPS = 1000  # of a calibration


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of some training steps."""

    steps: int  # that were measured; the first one, which loads and compiles, is not
    simulate_us: float  # of a worker, for an environment step with its policy
    learn_us: float  # of the learner, for an environment step
    worker_bytes: int  # resident memory of a simulators' worker without lanes
    lane_bytes: int  # ... and of each of its lanes
    learner_bytes: int  # resident memory of the learner


def findings(experiment: SimulatorExperiment, *, resume: bool, opens: bool) -> list[Finding]:
    """The errors that would stop the run. ``opens``: build a lane in this process, as its workers would."""

    def errors() -> Iterator[tuple[str, str]]:
        for key, devices in (
            ("simulator.devices", experiment.simulator.devices),
            ("trainer.devices", experiment.trainer.devices),
        ):
            for device in devices:
                try:
                    parse_device(device).check()
                except ConfigurationError as error:
                    yield key, str(error)
        yield from (("ledger.trackers", text) for text in missing_packages(experiment))
        directory = RunDirectory(experiment.run.directory)
        if resume and not directory.has_run():
            yield "run.directory", f"{directory.path} holds no run to resume: start it without --resume"
        elif not resume and directory.has_run():
            text = f"{directory.path} already holds a run: continue it with --resume, or choose another directory"
            yield "run.directory", text
        if opens:
            try:
                open_simulator(experiment.simulator, 1, partial(seed_of, experiment.run.seed, 0, 0)).close()
            except HeadwayError as error:
                yield "simulator.environment", str(error)

    return [Finding(level="error", key=key, message=message) for key, message in errors()]


def calibrate(experiment: SimulatorExperiment, seconds: float) -> Calibrated:
    """Train for about ``seconds`` in a temporary folder, with the run's workers. Raises as the run would."""
    plan = {"simulate": experiment.simulator.devices, "learn": experiment.trainer.devices}
    with tempfile.TemporaryDirectory(prefix="headway-check-") as folder:
        return run(_measure, plan, experiment, Path(folder), seconds)


async def _measure(flow: Flow, experiment: SimulatorExperiment, folder: Path, seconds: float) -> Calibrated:
    blocks, clock = experiment.simulator.blocks, RealClock()
    simulate = await flow.workers("simulate", Simulate, experiment, str(folder / "lives"), (0,) * blocks)
    spaces, *_ = await simulate.spaces()
    learn = (await flow.workers("learn", Learn, experiment, spaces, str(folder / "states"), "", most_workers=1)).on(0)
    weights, end_s, reports = await learn.weights(), clock.now() + seconds, list[LearnReport]()
    async for step in flow.steps(_MAX_STEPS):
        numbers = flow.channel("blocks", balance="round_robin", consumers=simulate)
        fragments = flow.channel("fragments")
        acting = simulate.collect(weights, step, numbers, fragments)
        learning = learn.step(step, blocks, fragments)
        await numbers.put_all(range(blocks))
        numbers.close()
        await acting
        fragments.close()
        reports.append(await learning)
        weights = reports[-1].weights
        if len(reports) > 1 and clock.now() >= end_s:
            break
    memory = await simulate.memory()
    measured = reports[1:]
    transitions = sum(report.transitions for report in measured)
    lanes = sum(worker.lanes for worker in memory)
    return Calibrated(
        steps=len(measured),
        simulate_us=1e6 * sum(report.simulate_s for report in measured) / transitions,
        learn_us=1e6 * sum(report.compute_s for report in measured) / transitions,
        worker_bytes=max(worker.idle_bytes for worker in memory),
        lane_bytes=sum(worker.present_bytes - worker.idle_bytes for worker in memory) // lanes,
        learner_bytes=(await learn.memory()),
    )


def plan_rows(experiment: SimulatorExperiment) -> dict[str, str]:
    """Describe what the run would do."""
    settings, trainer = experiment.simulator, experiment.trainer
    transitions = settings.lanes * settings.steps_per_fragment
    return {
        "simulators": f"{settings.environment} ({settings.backend}), {settings.lanes} lanes in {settings.blocks} "
        f"blocks of {settings.block_lanes}, on {', '.join(settings.devices)}",
        "learner": f"on {', '.join(trainer.devices)}: {trainer.passes} passes over {transitions:,} transitions, "
        f"{trainer.minibatch} a minibatch",
        "placement": "planned by the run's own steps" if experiment.plans_itself else _mode(experiment),
        "staleness": f"budget {experiment.queue.budget}, correction {experiment.algorithm.correction}",
        "run": f"{experiment.run.steps:,} steps, {experiment.run.steps * transitions:,} environment steps, in "
        f"{experiment.run.directory}",
    }


def _mode(experiment: SimulatorExperiment) -> str:
    simulator_devices, learner_devices = {*experiment.simulator.devices}, {*experiment.trainer.devices}
    if not simulator_devices & learner_devices:
        return "spatial: simulators and learner have devices of their own"
    is_same = simulator_devices == learner_devices
    return "temporal: they take turns on the same devices" if is_same else "hybrid: some devices are shared by turns"


def forecast_rows(experiment: SimulatorExperiment, measured: Calibrated) -> dict[str, str]:
    """Describe memory and rates, and what the measured times give in other placements on the run's devices."""
    settings, budget = experiment.simulator, experiment.queue.budget
    workers, devices = len(settings.devices), len(experiment.devices)
    simulate_us, learn_us = measured.simulate_us, measured.learn_us
    lanes = -(-settings.blocks // workers) * settings.block_lanes
    is_overlapping = budget > 0 and not {*settings.devices} & {*experiment.trainer.devices}
    worker_us = simulate_us / workers
    placements = {"the same devices, in turns": simulate_us / min(devices, settings.blocks) + learn_us}
    if devices > 1:
        separate_us = simulate_us / min(devices - 1, settings.blocks)
        placements["the learner on a device of its own, budget 0"] = separate_us + learn_us
        placements["... budget 1 or more, corrected"] = max(separate_us, learn_us)
    configured_us = max(worker_us, learn_us) if is_overlapping else worker_us + learn_us
    return {
        "memory": f"{measured.worker_bytes / 1e6:,.0f} MB + {measured.lane_bytes / 1e6:,.2f} MB a lane: "
        f"{(measured.worker_bytes + lanes * measured.lane_bytes) / 1e6:,.0f} MB in each of {workers} simulators' "
        f"workers ({lanes} lanes); {measured.learner_bytes / 1e6:,.0f} MB in the learner",
        "times": f"{simulate_us:,.0f} µs an environment step in a simulators' worker, {learn_us:,.0f} µs in the "
        f"learner ({measured.steps} steps measured)",
        "forecast": f"{1e6 / configured_us:,.0f} environment steps/s as configured",
        f"on {devices} devices": "; ".join(f"{label}: {1e6 / us:,.0f}" for label, us in placements.items()),
    }
