"""Generates and verifies rollouts for a calibration as a run does, without admission, buffer or training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.algorithms.groups.filters import GroupFilters
from headway.config.schema import Experiment
from headway.orchestrator.collect_loop import verify_rollouts
from headway.orchestrator.state import Signal
from headway.orchestrator.task_sets import training_weights
from headway.records.clients import Generator, Verifier, Watch
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationRequest, GenerationResult
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.turn_sampler import Resumption, TurnSampler
from headway.rollout.verification.scored_text import ScoredText
from headway.runtime.clock import Clock
from headway.tasks.cursor import TaskCursor
from headway.tokens.tokenizer import Tokenizer

_KEPT = 256  # responses


class CalibrationLoad:
    """Keeps ``limit`` rollouts running, in groups. Like in the dispatch loop, a group opens when all its members may
    run. Records the length of each response and whether it ended.

    ``run`` until ``stop``; responses that still grow then are cut off, and counted as cut off.
    """

    def __init__(
        self,
        experiment: Experiment,
        generator: Generator,
        verifier: Verifier,
        tokenizer: Tokenizer,
        tasks: Sequence[Task],
        clock: Clock,
    ) -> None:
        self.limit = 0
        self.ended: list[int] = []  # tokens of responses that ended
        self.cut: list[int] = []  # ... and of those that were cut off
        self.groups: list[tuple[int, ...]] = []  # lengths of the members of groups that ended whole and verified
        self.accepted = 0  # of them, trainable
        self.responses: list[Rollout] = []  # some that ended, for batches to be made of
        self.complete: list[tuple[Group, tuple[Rollout, ...]]] = []  # some groups whose members all ended
        self.tasks: dict[int, Task] = {}  # group -> its task, of those responses
        self.prompt_tokens: list[int] = []
        self.failures: list[str] = []
        self.verify_response_s: list[float] = []  # of each group verified: seconds, the way there and back included
        self._experiment = experiment
        self._generator = generator
        self._verifier = verifier
        self._tokenizer = tokenizer
        self._cursor = TaskCursor(tasks, experiment.run.seed, training_weights(experiment))
        self._clock = clock
        self._scored = ScoredText.of(experiment, tokenizer)
        self._filters = GroupFilters(experiment, lambda rollout: tokenizer.decode(rollout.judged_ids))
        self._open: set[str] = set()
        self._unfinished = 0
        self._changed = Signal()
        self._stopping = False
        self._verifying = 0
        sampler = TurnSampler(
            self._generate,
            tokenizer,
            experiment.rollout,
            clock,
            run_seed=experiment.run.seed,
            request_prefix="calibration-",
            resume_gate=self._never_resume,
            kept_sets=experiment.kept_sets,
        )
        self._rollouts = make_rollouts(experiment, sampler)

    def set_limit(self, rollouts: int) -> None:
        self.limit = rollouts
        self._changed.notify()

    async def run(self) -> None:
        """Open groups up to the limit until cancelled."""
        size, index = self._experiment.rollout.group_size, 0
        async with asyncio.TaskGroup() as groups:
            while True:
                change_count = self._changed.count
                while not self._stopping and self._unfinished + size <= max(size, self.limit) and self.limit:
                    groups.create_task(self._group(self._next(index)), name=f"calibration-{index}")
                    index += 1
                    self._unfinished += size
                await self._changed.wait(change_count)

    async def stop(self) -> None:
        """Open no more groups, and cut off the running responses."""
        self._stopping = True
        while self._open:
            for request_id in tuple(self._open):
                self._generator.cancel(request_id)
            await self._changed.wait(self._changed.count)

    def texts(self) -> list[tuple[Task, list[str]]]:
        """Tasks and the responses to them, as a verifier receives them."""
        texts_by_group: dict[int, list[str]] = {}
        for rollout in self.responses:
            texts_by_group.setdefault(rollout.group, []).append(self._scored.rollout(rollout))
        return [(self.tasks[group], texts) for group, texts in texts_by_group.items()]

    def prompt(self, index: int) -> Sequence[int]:
        """Token ids of the prompt of the next task."""
        return self._next(index).prompt_ids

    def _next(self, index: int) -> Group:
        task = self._cursor.next()
        return Group(
            index=index,
            task=task,
            prompt_ids=self._tokenizer.render(task.content, self._experiment.model.template),
            size=self._experiment.rollout.group_size,
            admitted_version=0,
            admitted_s=self._clock.now(),
        )

    async def _generate(self, request: GenerationRequest, watch: Watch | None = None, /) -> GenerationResult:
        self._open.add(request.request_id)
        try:
            result = await self._generator.generate(request, watch)
        finally:
            self._open.discard(request.request_id)
            self._changed.notify()
        if result.finish_reason == "abort":
            self.cut.append(len(result.response.ids))
        return result

    async def _never_resume(self, parked: PartialRollout) -> Resumption:
        """Never resume: a response that was cut off stays so."""
        await asyncio.Event().wait()
        return "continue"

    async def _group(self, group: Group) -> None:
        rollouts = await asyncio.gather(*(self._member(group, member) for member in range(group.size)))
        if not self._stopping and len(self.complete) < _KEPT:
            self.complete.append((group, tuple(rollouts)))
        if self._stopping or self._verifying >= self._experiment.verifier.workers:
            return  # no queue before the verifiers: it would hide how fast they are
        self._verifying += 1
        started_s = self._clock.now()
        try:
            verified = await verify_rollouts(group.task, rollouts, self._verifier, self._scored, self._clock)
        finally:
            self._verifying -= 1
        self.verify_response_s.append((self._clock.now() - started_s) / group.size)
        self.failures += [r.failure.cause for r in verified if r.failure is not None]
        self.groups.append(tuple(rollout.response_tokens for rollout in verified if rollout.response_ids))
        filtered_group = self._filters.apply(FinishedGroup(group=group, rollouts=verified))
        self.accepted += filtered_group.outcome.ending is None

    async def _member(self, group: Group, member: int) -> Rollout:
        rollout = await self._rollouts.generate_member(group, member)
        self._unfinished -= 1
        self._changed.notify()
        if rollout.failure is None:
            self.ended.append(rollout.response_tokens)
            self.prompt_tokens.append(len(rollout.prompt_ids))
            if len(self.responses) < _KEPT:
                self.responses.append(rollout)
                self.tasks[group.index] = group.task
        return rollout
