"""The smallest complete asynchronous loop: generate, verify, train, publish, under a staleness budget.

Two worker processes (a generator and a trainer) and this file. No durable buffer, no recovery, no ledger: read
headway/orchestrator for those. With budget 0 it computes the same losses as `headway train`.

    python examples/minimal_loop.py experiment.toml --run.steps=5 --queue.budget=2
"""

from __future__ import annotations

import asyncio
import sys

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.groups.outcome import group_outcome
from headway.config.load import load_experiment
from headway.config.schema import Experiment
from headway.control.admission import credit
from headway.control.staleness import OpenGroup, select_batch
from headway.generator.client import GeneratorPool
from headway.records.rollout import FinishedGroup, Group
from headway.records.training import StepReport
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.verdicts import apply_verdict, to_verdict
from headway.rollout.verification.verifiers import resolve_verifier
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.tasks.cursor import TaskCursor
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.client import TrainerClient


async def minimal_loop(experiment: Experiment) -> list[StepReport]:
    """Train ``run.steps`` steps; returns the report of each."""
    clock = RealClock()
    launcher = LocalLauncher(clock)
    generator = GeneratorPool(launcher, experiment, clock)
    trainer = TrainerClient(launcher, experiment, run_id="minimal-loop")
    await asyncio.gather(generator.start(), trainer.start())

    tokenizer = Tokenizer.load(experiment.model.path)
    tasks = TaskCursor(load_tasks(experiment.tasks.train, experiment.run.seed), experiment.run.seed)
    verify = resolve_verifier(experiment.verifier)
    seed = experiment.run.seed
    sampler = TurnSampler(generator.generate, tokenizer, experiment.rollout, clock, run_seed=seed)
    rollouts = SingleTurn(sampler)
    queue, size = experiment.queue, experiment.rollout.group_size

    running: dict[int, Group] = {}
    finished: dict[int, FinishedGroup] = {}
    attempts: set[asyncio.Task[None]] = set()
    changed = asyncio.Event()
    version = admitted = 0  # completed steps; index of the next group
    reports: list[StepReport] = []

    async def attempt(group: Group) -> None:
        """All members of one group, from prompt to reward."""
        members = await asyncio.gather(*(rollouts.generate_member(group, member) for member in range(size)))
        verdicts = [to_verdict(verify(group.task, sampler.text(r))) for r in members]
        judged = [apply_verdict(r, verdict, clock.now()) for r, verdict in zip(members, verdicts, strict=True)]
        outcome = group_outcome(judged, size=size, limits=queue)
        del running[group.index]
        if outcome.ending is None:  # else it leaves N at once: another group may open
            finished[group.index] = FinishedGroup(group=group, rollouts=tuple(judged))
        changed.set()

    async with asyncio.TaskGroup() as background:
        while version < experiment.run.steps:
            applied = await generator.applied_version()
            while len(running) * size < experiment.concurrent_rollouts and credit(
                open_groups=len(running) + len(finished),
                completed_steps=version,
                applied_version=applied,
                groups_per_step=queue.groups_per_step,
                budget=queue.budget,
            ):
                task = tasks.next()
                group = Group(
                    index=admitted,
                    task=task,
                    prompt_ids=tokenizer.render(task.prompt, experiment.model.template),
                    size=size,
                    admitted_version=applied,
                    admitted_s=clock.now(),
                )
                running[admitted] = group
                admitted += 1
                attempts.add(started := background.create_task(attempt(group)))
                started.add_done_callback(attempts.discard)

            candidates = [
                OpenGroup(index=i, first_version=g.admitted_version, state="running") for i, g in running.items()
            ] + [OpenGroup(index=i, first_version=g.first_version, state="finished") for i, g in finished.items()]
            batch = select_batch(version, candidates, queue.groups_per_step, queue.budget, "wait").groups
            if not batch:
                changed.clear()
                await changed.wait()
                continue
            groups = [finished.pop(index) for index in batch]
            report = await trainer.train_step(build_batch(version, groups, experiment))
            version = report.version
            reports.append(report)
            await generator.update_weights(await trainer.publish(version))  # in flight: nothing is discarded
            print(f"step {version}: loss {report.metrics['loss']:+.6f}, {report.samples} samples", flush=True)
        for attempt_left in attempts:  # no step is left for them
            attempt_left.cancel()
    await asyncio.gather(generator.stop(), trainer.stop())
    return reports


if __name__ == "__main__":
    asyncio.run(minimal_loop(load_experiment(sys.argv[1], sys.argv[2:])))
