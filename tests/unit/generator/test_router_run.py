"""A whole run over the real pool and its router, with fake replicas that die, stall and join, in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeLauncher
from simulated_run import PlainTokenizer, experiment_of, long_tailed

from headway.config.router import RouterConfig
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.orchestrator.assembly import Actors, assemble
from headway.orchestrator.run import Run
from headway.records.errors import RemoteError, WeightsMismatch
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.task import Task
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer

STEPS, GROUPS, SIZE = 30, 4, 4


async def assembled(clock: Clock, folder: Path, stack: ExitStack, lines: list[LedgerLine]) -> tuple[Run, FakeLauncher]:
    """A run that has started its actors."""
    experiment = experiment_of(
        folder,
        run={"steps": STEPS},
        rollout={"group_size": SIZE, "max_response_tokens": 200},
        generator={"devices": ["cpu:0", "cpu:2"], "slots": 8},
        queue={"groups_per_step": GROUPS, "budget": 2, "filter_zero_variance": False},
    )
    costs = ReplicaCosts(token_s=0.02, slots=8, kv_capacity_tokens=2000)
    launcher = FakeLauncher(clock, costs, length_of=lambda one: long_tailed(0, one, 200), update_s=0.05)
    pool = GeneratorPool(
        launcher,
        experiment,
        clock,
        on_event=lambda name, detail, **data: run.context.event(name, detail, **data),
        router=RouterConfig(health_interval_s=0.5, health_timeout_s=1.0),
    )
    trainer = FakeTrainer(clock, 0.02, publish_s=0.01)
    actors = Actors(
        generator=pool,
        trainer=trainer,
        verifier=FakeVerifier(lambda task, text: int(text) % 2, clock, latency_s=0.005),
        tokenizer=PlainTokenizer(),
        train_tasks=[Task(task_id=str(i), prompt=str(i)) for i in range(50)],
        record=lines.append,
    )
    run = assemble(experiment, actors, clock, folder / "buffer.db", stack)
    for actor in (pool, trainer, actors.verifier):
        await actor.start()
    return run, launcher


def test_deaths_stalls_and_newcomers_lose_no_rollout_and_stand_in_the_ledger():
    lines: list[LedgerLine] = []

    async def main(clock: Clock) -> list[int]:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            run, launcher = await assembled(clock, Path(folder), stack, lines)
            pool: Any = run.context.generator

            async def trouble() -> None:
                await clock.sleep(3.0)
                launcher.workers[0].kill()
                await pool.join("cpu:3")
                await clock.sleep(2.0)
                recover = launcher.workers[1].hang()
                await clock.sleep(4.0)
                recover()
                launcher.workers[-1].refuse = 1
                await clock.sleep(1.0)
                await pool.leave("generator-1")

            troubling = asyncio.create_task(trouble())
            await run.begin(0, None)
            await run.train()
            await troubling
            await run.conclude()
            context = run.context
            assert context.buffer.audit() == []
            routing = pool.routing()
            assert (routing.used_tokens, routing.open_requests, routing.waiters) == (0, 0, 0)
            await pool.stop()
            return [index for groups in context.buffer.consumed().values() for index in groups]

    consumed = run_virtual(main, limit_s=10_000)
    assert sorted(consumed) == list(range(STEPS * GROUPS))
    steps = [line for line in lines if isinstance(line, StepRecord)]
    assert len(steps) == STEPS
    assert max(step.trajectory_staleness.max for step in steps) <= 2
    total = {name: sum(getattr(step.router, name) for step in steps) for name in ("routed", "moves", "retries")}
    assert total["moves"] > 0
    assert total["retries"] > 0
    assert total["routed"] >= STEPS * GROUPS * SIZE + total["moves"] + total["retries"]
    assert sum(step.router.breaker_openings for step in steps) == 1
    assert all(0 <= step.router.used_tokens <= step.router.peak_tokens for step in steps)
    assert any(step.router.open_requests and step.router.oldest_age_s for step in steps)
    events = [line.event for line in lines if isinstance(line, EventRecord)]
    for name in ("breaker_opened", "breaker_closed", "generator_joined", "generator_silent", "generator_left"):
        assert events.count(name) == 1, name


def test_a_restarted_replica_that_computes_something_else_ends_the_run_with_its_cause():
    """Though another replica goes on, and would for ever."""

    async def main(clock: Clock) -> None:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            run, launcher = await assembled(clock, Path(folder), stack, [])

            async def refused(spec: Any) -> Any:
                error = WeightsMismatch("module lm_head: its output differs")
                raise RemoteError(spec.name, "__init__", str(error), "") from error

            async def trouble() -> None:
                await clock.sleep(3.0)
                launcher.start = refused  # type: ignore[method-assign]
                launcher.workers[0].kill()

            troubling = asyncio.create_task(trouble())
            await run.begin(0, None)
            with pytest.raises(WeightsMismatch, match="module lm_head"):
                await run.train()
            await troubling
            assert launcher.workers[1].alive
            await run.context.generator.stop()

    run_virtual(main, limit_s=10_000)
