"""`headway simulate`: runs the real loops, buffer and rules in virtual time, over actors that a scenario describes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from headway.control.rates.links import update_s
from headway.generator.fake import FakeGenerator
from headway.orchestrator.assembly import Actors, assemble
from headway.orchestrator.run import Run
from headway.orchestrator.teachers.fake import FakeTeachers
from headway.planner.environment import EnvironmentGenerator
from headway.planner.outcome import SimulationOutcome, measure
from headway.planner.scenario import Scenario
from headway.planner.workload import WorkloadModel, numbered_tasks
from headway.records.counted import CountedTokens
from headway.records.errors import ConfigurationError
from headway.records.generation import GenerationRequest
from headway.records.ledger import LedgerLine
from headway.records.rollout import Rollout
from headway.records.task import Task
from headway.records.training import TrainBatch
from headway.rollout.fake import FakeRollout, FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import EVENT_SIMULATED, Ledger, read_ledger
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.summary import summarise
from headway.telemetry.trace_file import TraceFile
from headway.trainer.fake import FakeTrainer

OnLine = Callable[[LedgerLine], None]
SCENARIO_FILE = "scenario.json"  # in the run's folder: the scenario that was simulated


def simulate(scenario: Scenario, *, name: str = "scenario", on_line: OnLine | None = None) -> SimulationOutcome:
    """Simulate ``scenario`` to its end; its run's folder then holds the files of a live run: ledger, summary, buffer.

    A folder that holds an earlier simulation is emptied first. Deterministic: the same scenario writes the same ledger
    to the byte. Raises ConfigurationError when the folder holds a live run; Deadlock when the simulated run would
    make no progress; any HeadwayError that would have ended the run.
    """
    experiment = scenario.experiment()
    directory = RunDirectory(experiment.run.directory)
    _clear_earlier(directory)
    directory.begin(experiment, resume=False)
    try:
        directory.write_json(directory.path / SCENARIO_FILE, json.loads(scenario.model_dump_json()))

        async def main(clock: Clock) -> SimulationOutcome:
            with ExitStack() as stack:
                return await _simulate(scenario, name, directory, clock, stack, on_line)

        return run_virtual(main)
    finally:
        directory.release()


def is_simulated(path: Path) -> bool:
    """Whether the folder holds a simulation."""
    return (path / SCENARIO_FILE).is_file() and RunDirectory(path).has_run()


def simulated_tasks(path: Path) -> list[Task] | None:
    """The tasks of the simulation in this folder; None where there is no simulation."""
    if not is_simulated(path):
        return None
    return numbered_tasks(json.loads((path / SCENARIO_FILE).read_text(encoding="utf-8"))["workload"]["tasks"])


def _clear_earlier(directory: RunDirectory) -> None:
    """Empty the folder of an earlier simulation. Raises ConfigurationError when it holds a live run, RunLocked while
    another simulation writes there."""
    path = directory.path
    if not directory.has_run():
        return
    if not is_simulated(path):
        raise ConfigurationError(f"{path} holds a live run: choose another run.directory for the simulation")
    directory.acquire()
    try:
        for child_path in path.iterdir():
            if child_path.is_dir():
                shutil.rmtree(child_path)
            elif child_path != directory.lock:
                child_path.unlink()
    finally:
        directory.release()


async def _simulate(
    scenario: Scenario, name: str, directory: RunDirectory, clock: Clock, stack: ExitStack, on_line: OnLine | None
) -> SimulationOutcome:
    ledger = stack.enter_context(Ledger(directory.path, clock))
    if on_line is not None:
        ledger.subscribe(on_line)
    recorder = stack.enter_context(closing(RolloutRecorder(directory.path, scenario.ledger, clock, ledger.event)))
    simulated_run = SimulatedRun(scenario, clock)
    observe = None
    if scenario.ledger.trace:
        trace_file = stack.enter_context(TraceFile(directory.path, clock, 0.0, on_failure=ledger.event))
        ledger.subscribe(trace_file.on_line)
        observe = trace_file.write
    actors = simulated_run.actors(record=ledger.record, observe=observe, recorder=recorder)
    run = assemble(scenario.experiment(), actors, clock, directory.buffer, stack)
    generator, trainer = scenario.hardware.generator, scenario.hardware.trainer
    run.context.meter.peak_flops_per_s = trainer.peak_flops_per_s
    device_counts = {"devices_per_replica": generator.devices_per_replica, "trainer_devices": trainer.devices}
    ledger.event(EVENT_SIMULATED, name, seed=scenario.run.seed, **device_counts)
    await drive(run)
    counts = msgspec.to_builtins(simulated_run.environment.counts)
    if scenario.workload.multi_turn:
        rounded_counts = {key: round(value, 6) for key, value in counts.items()}
        ledger.event("environment", "what the sandboxes did", **rounded_counts)
    lines = read_ledger(directory.path)
    summary = summarise(lines)
    directory.write_json(directory.summary, summary)
    counts = {key: float(value) for key, value in counts.items()}
    return measure(scenario, summary, lines, await simulated_run.engine.statistics(), counts)


async def drive(run: Run) -> None:
    """Run a run from start to end, and close it."""
    context = run.context
    for actor in (context.generator, context.trainer, context.verifier):
        await actor.start()
    await run.begin()
    await run.train()
    await run.conclude()


class SimulatedRun:
    """The fake actors of one simulated scenario."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.scenario = scenario
        self.trainer = self._trainer(clock)
        self.workload = WorkloadModel(scenario, lambda: self.trainer.version)
        self.engine = self._engine(clock)
        self.environment = EnvironmentGenerator(self.engine, self.workload, scenario, clock)
        self.verifier = FakeVerifier(
            lambda task, response: self.workload.solved(task, int(response)),
            clock,
            latency_s=lambda task, response: self.workload.verify_s(int(response)),
            workers=scenario.hardware.verifiers,
        )
        self.teachers = self._teachers(clock)

    def actors(
        self,
        record: Callable[[LedgerLine], None],
        keep_sample: Callable[[dict[str, object]], None] = lambda line: None,
        observe: Any = None,
        recorder: RolloutRecorder | None = None,
    ) -> Actors:
        """The fake actors, as ``orchestrator.assembly.assemble`` takes them."""
        is_multi_turn, hardware = self.scenario.workload.multi_turn, self.scenario.hardware.generator
        return Actors(
            generator=self.environment if is_multi_turn else self.engine,
            trainer=self.trainer,
            verifier=self.verifier,
            teachers=self.teachers,
            tokenizer=CountingTokenizer(self.workload),
            train_tasks=numbered_tasks(self.scenario.workload.tasks),
            record=record,
            keep_sample=keep_sample,
            observe=observe,
            recorder=recorder,
            shared=range(hardware.replicas if hardware.shares_devices else 0),
            cpu_s=lambda: 0.0,  # the simulation's own CPU time isn't the run's
            rollouts=functools.partial(FakeRollout, environment=self.environment) if is_multi_turn else None,
        )

    def _teachers(self, clock: Clock) -> FakeTeachers | None:
        hardware = self.scenario.hardware.teachers

        def rollout_s(rollout: Rollout) -> float:
            return hardware.rollout_s + rollout.all_tokens * hardware.token_s

        scores = hardware.rollout_s or hardware.token_s
        return FakeTeachers(clock, rollout_s, at_once=hardware.at_once) if scores else None

    def _trainer(self, clock: Clock) -> FakeTrainer:
        hardware, scenario = self.scenario.hardware.trainer, self.scenario
        shares_devices, link = scenario.hardware.generator.shares_devices, hardware.link_bytes_per_s

        def step_s(batch: TrainBatch) -> float:
            batch_tokens = sum(s.rollout.all_tokens for s in batch.samples)
            extra_s = hardware.step_s.draw(scenario.run.seed * 1_000_003 + batch.step, batch.step)
            seconds = hardware.step_fixed_s + batch_tokens * hardware.token_s + extra_s
            return max(0.0, seconds * scenario.drifted("hardware.trainer.step_s", batch.step))

        return FakeTrainer(
            clock,
            step_s,
            publish_s=hardware.publish_s,
            link_s=0.0 if link is None else update_s(hardware.version_bytes, link, hardware.changed_share),
            checkpoint_s=hardware.checkpoint_s,
            keep_checkpoints=scenario.checkpoint.keep_last,
            flops_per_token=hardware.flops_per_token,
            keep_batches=False,
            on_work=lambda computes: self.engine.trainer_computes(computes and not shares_devices),
            lost_s=None if hardware.beside == 1.0 else lambda: self.engine.busy_s * (1.0 - 1.0 / hardware.beside),
        )

    def _engine(self, clock: Clock) -> FakeGenerator:
        scenario, settings = self.scenario, self.scenario.generator
        hardware = scenario.hardware.generator
        is_multi_turn, has_drift = self.scenario.workload.multi_turn, bool(scenario.drift)

        def step_s(running: int) -> float:
            seconds = hardware.decode_fixed_s + hardware.decode_request_s * running
            if not has_drift:
                return seconds
            return seconds * scenario.drifted("hardware.generator.decode_s", self.trainer.version)

        def length_of(request: GenerationRequest) -> int:
            return request.sampling.max_tokens if is_multi_turn else self.workload.plan(request).tokens

        prefill_rate = hardware.prefill_tokens_per_s
        prefill_delay = _delay(prefill_rate) if prefill_rate and hardware.prefill_elsewhere else None
        return FakeGenerator(
            clock,
            slots=settings.slots,
            token_s=step_s,
            length_of=length_of,
            prefill_s=prefill_delay,
            prefill_token_s=1 / prefill_rate if prefill_rate and prefill_delay is None else 0.0,
            update_s=hardware.update_s,
            update_mode=settings.update_mode,
            beside=hardware.beside,
            replicas=hardware.replicas,
            kv_token_s=hardware.decode_kv_token_s,
            kv_capacity_tokens=settings.kv_capacity_tokens,
            counted=True,
        )


def _delay(rate: float) -> Callable[[GenerationRequest], float]:
    """Make the function request -> seconds of its prefill, at ``rate`` tokens a second."""
    return lambda request: (len(request.prompt_ids) + len(request.partial.ids)) / rate


class CountingTokenizer:
    """A tokenizer whose prompts have the described lengths; a response decodes to its seed, by which the verifier
    identifies it."""

    stop_ids = (1,)

    def __init__(self, workload: WorkloadModel) -> None:
        self._workload = workload

    def render(self, prompt: object, template: str) -> CountedTokens:
        return self._workload.prompt(int(str(prompt)))

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids.seed) if isinstance(ids, CountedTokens) else f"{len(ids)} tokens"
