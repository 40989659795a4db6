"""What a sample costs the orchestrator with few and with many open groups: real loops, rules, buffer, pool and router
over fake workers, in virtual time.

*waiting*: 100 groups generate at a time, whatever is open, and all others wait for a slot. *buffered*: the trainer is
what is waited for, so all but 100 are finished and buffered. The time that the fakes take is measured and left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.generator.fake import DrivenReplica
from headway.generator.fake_replica import ReplicaCosts
from headway.orchestrator.assembly import Actors, assemble
from headway.records.generation import GenerationRequest
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.records.training import StepReport, TrainBatch
from headway.rollout.fake import FakeVerifier
from headway.runtime.clock import Clock, run_virtual
from headway.trainer.fake import FakeTrainer
from parts.fakes import FakeLauncher, FakeWorker, fake_worker
from parts.orchestrator_replay import DELTA_TOKENS, PROMPT_TOKENS, RESPONSE_TOKENS

Load = Literal["waiting", "buffered"]
SIZE, GROUPS_PER_STEP, GENERATING = 8, 20, 100


class Apart:
    """Adds up the CPU time of the fakes, calls inside calls once."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def wrap(self, owner: type, *names: str) -> Callable[[], None]:
        """Time these methods; the function that comes back ends that."""
        before = {name: getattr(owner, name) for name in names}
        for name, method in before.items():
            setattr(owner, name, self._timed(method))

        def undo() -> None:
            for name, method in before.items():
                setattr(owner, name, method)

        return undo

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any) -> Any:
            if self._depth:
                return method(*args)
            self._depth = 1
            started = time.process_time()
            try:
                return method(*args)
            finally:
                self._depth = 0
                self.spent_s += time.process_time() - started

        return timed


class _Tokenizer:
    stop_ids = (1,)

    def render(self, prompt: object, template: str) -> tuple[int, ...]:
        return tuple(range(2, 2 + PROMPT_TOKENS))

    def decode(self, ids: Any) -> str:
        return "text"


@contextlib.contextmanager
def apart_from_fakes() -> Iterator[Apart]:
    """Adds up the CPU time of the fake replicas in the block."""
    apart = Apart()
    undo = [
        apart.wrap(FakeWorker, "_stream", "_emit", "_submit", "_end"),
        apart.wrap(DrivenReplica, "_wake"),
    ]
    try:
        yield apart
    finally:
        for one in undo:
            one()


def cost_s(load: Load, open_groups: int, steps: int) -> float:
    """CPU seconds a sample, over ``steps`` steps while ``open_groups`` are open."""
    with apart_from_fakes() as apart, tempfile.TemporaryDirectory() as folder:
        return run_virtual(lambda clock: _measure(clock, Path(folder), load, open_groups, steps, apart))


def _experiment(folder: Path, load: Load, open_groups: int) -> Experiment:
    rollouts = SIZE * (open_groups if load == "waiting" else min(open_groups, GENERATING))
    return validate_experiment(
        {
            "run": {"directory": str(folder), "steps": 1_000_000},
            "model": {"path": "none"},
            "tasks": {"train": {"path": "none"}},
            "evaluation": {"test": "never"},
            "checkpoint": {"every_steps": 1_000_000},
            "rollout": {"group_size": SIZE, "max_response_tokens": RESPONSE_TOKENS},
            "generator": {"slots": SIZE * GENERATING},
            "weights": {"steps_per_publish": 1},
            "queue": {
                "groups_per_step": GROUPS_PER_STEP,
                "budget": open_groups // GROUPS_PER_STEP - 1,
                "max_concurrent_rollouts": rollouts,
            },
        },
        "benchmark",
    )


async def _measure(clock: Clock, folder: Path, load: Load, open_groups: int, steps: int, apart: Apart) -> float:
    experiment = _experiment(folder, load, open_groups)
    # A delta is DELTA_TOKENS; rollouts stay apart by the lengths of those that fill the slots first.
    costs = ReplicaCosts(token_s=fake_worker.STREAM_INTERVAL_S / DELTA_TOKENS, slots=SIZE * GENERATING)
    numbers, verdicts = itertools.count(), itertools.count()

    def length_of(request: GenerationRequest) -> int:
        if load == "buffered" and not trainer.version:
            return 1
        number = next(numbers)
        return 1 + number % RESPONSE_TOKENS if number < SIZE * GENERATING else RESPONSE_TOKENS

    def reward(task: Task, text: str) -> Verdict:
        solved = bool(next(verdicts) % 2)
        return Verdict(reward=float(solved), solved=solved)

    trainer = _Trainer(clock, 0.01 if load == "buffered" else 0.0)
    pool = GeneratorPool(FakeLauncher(clock, costs, length_of=length_of), experiment, clock)
    actors = Actors(
        generator=pool,
        trainer=trainer,
        verifier=FakeVerifier(reward, clock),
        tokenizer=_Tokenizer(),
        train_tasks=[Task(task_id=str(i), prompt=str(i)) for i in range(500)],
        record=lambda line: None,
    )
    with ExitStack() as stack:
        run = assemble(experiment, actors, clock, folder / "buffer.db", stack)
        state = run.context.state

        def full() -> bool:
            return state.open_groups == open_groups and (load == "waiting" or not state.running)

        trainer.full, trainer.steps, trainer.now_s = full, steps, lambda: time.process_time() - apart.spent_s
        for actor in (pool, trainer, actors.verifier):
            await actor.start()
        await run.begin()
        with contextlib.suppress(_Measured):
            await run.train()
        await pool.stop()
    start_s, end_s = trainer.marks
    return (end_s - start_s) / (steps * GROUPS_PER_STEP * SIZE)


class _Measured(Exception):
    """Enough steps are trained."""


class _Trainer(FakeTrainer):
    """Begins when everything is open, and ends the run after one step and ``steps`` more."""

    full: Callable[[], bool]
    now_s: Callable[[], float]  # CPU time
    steps: int

    def __init__(self, clock: Clock, seconds_per_sample: float) -> None:
        super().__init__(clock, seconds_per_sample, keep_batches=False)
        self.marks: list[float] = []
        self._wait = clock.sleep

    async def train_step(self, batch: TrainBatch) -> StepReport:
        """See `FakeTrainer`."""
        if self.version == 0:
            while not self.full():
                await self._wait(0.01)
        elif self.version == 1:  # the first step's record counts what filled the queue
            self.marks.append(self.now_s())
        elif self.version == 1 + self.steps:
            self.marks.append(self.now_s())
            raise _Measured
        return await super().train_step(batch)
