"""A whole run under the virtual clock: the real loops, rules and buffer; fake generator, trainer and verifier."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.fake import FakeGenerator
from headway.orchestrator.assembly import Actors, assemble
from headway.orchestrator.context import Decide
from headway.records.generation import GenerationRequest
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.task import Task
from headway.records.trace import TraceLine
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.summary import last_live_step, recorded_steps
from headway.trainer.fake import FakeTrainer, Latency


class PlainTokenizer:
    """Two-token prompts; a response decodes to its length, so that a fake verifier can judge it."""

    stop_ids = (1,)

    def render(self, prompt: object, template: str) -> tuple[int, ...]:
        return (2, 3)

    def decode(self, ids: Sequence[int]) -> str:
        return str(len(ids))


@dataclass
class Outcome:
    """What a simulated run left behind."""

    experiment: Experiment
    lines: list[LedgerLine]
    trainer: FakeTrainer
    audit: list[str]
    trained_groups: list[int]
    admitted_groups: int
    duration_s: float
    bias_lengths: tuple[dict[int, int], dict[int, int]]
    endings: dict[str, int] = field(default_factory=dict)
    trainers: list[FakeTrainer] = field(default_factory=list)  # of every process of the run

    @property
    def steps(self) -> list[StepRecord]:
        return [line for line in self.lines if isinstance(line, StepRecord)]

    def event(self, name: str) -> EventRecord:
        return next(line for line in reversed(self.lines) if isinstance(line, EventRecord) and line.event == name)


def experiment_of(folder: Path, **sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": str(folder), "steps": 12},
        "model": {"path": "none"},
        "tasks": {"train": {"path": "none"}},
        "evaluation": {"test": "never"},
        "checkpoint": {"every_steps": 5},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate_experiment(raw, "simulation")


def small_run(*, budget: int = 2, steps: int, slots: int = 32, **options: Any) -> Outcome:
    """A run of 4 groups of 4 a step; ``options``: of `simulate`."""
    experiment = experiment_of(
        Path("none"),
        run={"steps": steps},
        rollout={"group_size": 4, "max_response_tokens": 200},
        generator={"slots": slots},
        queue={"groups_per_step": 4, "budget": budget},
        checkpoint={"every_steps": 1000},
    )
    return simulate(experiment, **options)


def long_tailed(seed: int, request: GenerationRequest, longest: int) -> int:
    """A log-normal length that depends on the request's seed alone."""
    draw = random.Random(f"{seed}-{request.sampling.seed}").lognormvariate(2.5, 1.0)
    return max(1, min(longest, int(draw)))


def controlled(mode: str, *, steps: int = 60, **control: Any) -> Experiment:
    """The experiment of the controller's tests: its queue has room for many more groups than a step takes."""
    return experiment_of(
        Path("none"),
        run={"steps": steps},
        rollout={"group_size": 4, "max_response_tokens": 200},
        generator={"slots": 32},
        queue={"groups_per_step": 4, "budget": 4},
        control={"mode": mode, **control},
    )


def simulate(
    experiment: Experiment,
    *,
    seed: int = 0,
    token_s: float = 0.01,
    sample_s: Latency = 0.02,
    publish_s: float = 0.01,
    verify_s: float = 0.005,
    reward: Any = None,
    skip_steps: frozenset[int] = frozenset(),
    generator_options: dict[str, Any] | None = None,
    shared: bool = False,
    interrupt_s: float | None = None,
    kills_s: tuple[float, ...] = (),
    resumed: Experiment | None = None,
    spoil: Callable[[FakeTrainer], None] = lambda trainer: None,
    observe: Callable[[Clock], Callable[[TraceLine], None]] | None = None,
    look: Callable[[Clock], Decide] | None = None,
    record_to: Path | None = None,
    demonstrations: Demonstrations | None = None,
) -> Outcome:
    """Run ``experiment`` to its end in virtual time.

    ``interrupt_s``: Ctrl-C so long after the start. ``kills_s``: the orchestrator is killed so long after each of its
    starts, and resumed, with other settings where ``resumed`` gives them. ``spoil``: changes the first trainer, say
    into one that dies. ``shared``: replicas and trainer take turns on their devices. ``observe``: makes, for each
    process of the run, what is told who ran when; ``look``: what asks the controller's model. ``record_to``: a folder
    that the rollouts are recorded in.
    """
    longest = experiment.rollout.max_response_tokens

    async def main(clock: Clock) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            settings = experiment.run.model_copy(update={"directory": folder, "seed": seed})
            lines: list[LedgerLine] = []
            trainers: list[FakeTrainer] = []
            for session, kill_s in enumerate([*kills_s, None]):
                now = resumed if session and resumed is not None else experiment
                resolved = now.model_copy(update={"run": settings})
                generator = FakeGenerator(
                    clock,
                    slots=now.generator.slots,
                    token_s=token_s,
                    update_mode=now.generator.update_mode,
                    **{"length_of": lambda request: long_tailed(seed, request, longest)} | (generator_options or {}),
                )
                trainer = FakeTrainer(clock, sample_s, publish_s=publish_s, skip_steps=skip_steps)
                trainers.append(trainer)
                if session == 0:
                    spoil(trainer)
                actors = Actors(
                    generator=generator,
                    trainer=trainer,
                    verifier=FakeVerifier(reward or (lambda task, r: int(r) % 2), clock, latency_s=verify_s),
                    tokenizer=PlainTokenizer(),
                    demonstrations=demonstrations,
                    train_tasks=[Task(task_id=str(i), prompt=str(i)) for i in range(50)],
                    record=lines.append,
                    shared=range((generator_options or {}).get("replicas", 1) if shared else 0),
                    observe=observe and observe(clock),
                    controller=look and look(clock),
                    recorder=record_to and RolloutRecorder(record_to, now.ledger, clock, _event_of(lines)),
                )
                outcome = await _session(resolved, actors, clock, lines, trainer, kill_s, interrupt_s)
                if outcome is not None:
                    outcome.trainers = trainers
                    return outcome
            raise AssertionError("every session was killed")

    return run_virtual(main)


def _event_of(lines: list[LedgerLine]) -> Callable[..., None]:
    return lambda name, detail, **data: lines.append(EventRecord(step=0, event=name, detail=detail, data=data))


async def _session(
    experiment: Experiment,
    actors: Actors,
    clock: Clock,
    lines: list[LedgerLine],
    trainer: FakeTrainer,
    kill_s: float | None,
    interrupt_s: float | None,
) -> Outcome | None:
    """One process of the run: to its end, or killed (None)."""
    with ExitStack() as stack:
        run = assemble(experiment, actors, clock, Path(experiment.run.directory) / "buffer.db", stack)
        for actor in (actors.generator, actors.trainer, actors.verifier):
            await actor.start()

        async def whole() -> None:
            await run.begin(recorded_steps(lines), last_live_step(lines))
            await run.train()
            await run.conclude()

        async def interrupt() -> None:
            assert interrupt_s is not None
            await clock.sleep(interrupt_s)
            run.interrupt()

        interruption = asyncio.create_task(interrupt()) if interrupt_s is not None else None
        try:
            async with asyncio.timeout(kill_s):
                await whole()
        except TimeoutError:
            if kill_s is None:
                raise
            return None
        finally:
            if interruption is not None:
                interruption.cancel()
        context = run.context
        if actors.recorder is not None:
            actors.recorder.close()
        return Outcome(
            experiment=experiment,
            lines=lines,
            trainer=trainer,
            audit=context.buffer.audit(),
            trained_groups=[index for groups in context.buffer.consumed().values() for index in groups],
            admitted_groups=context.buffer.next_index,
            duration_s=context.time_s(),
            bias_lengths=context.meter.length_bias.lengths(),
            endings=dict(context.state.accounting.endings),
        )
