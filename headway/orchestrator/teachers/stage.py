"""The stage of a run in which teachers outside of the trainer score finished rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.algorithms.teacher_scores import score_rows
from headway.config.external_models import TeacherConfig
from headway.config.schema import Experiment
from headway.control.logprob_limits import compare
from headway.control.stalls import LOOPS
from headway.orchestrator.teachers.replicas import ReplicaTeacher
from headway.orchestrator.teachers.server import ServedTeacher
from headway.records.errors import ConfigurationError, InfrastructureError
from headway.records.generation import PromptLogprobs, probe_ids
from headway.records.ledger import TeacherStatistics
from headway.records.rollout import Branch, Failure, Group, Rollout, TeacherMark
from headway.records.task import Task
from headway.records.tokens import CONTEXT, TEACHER, TokenIds, TokenMask, TokenRows
from headway.runtime.clock import Clock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.tokens.tokenizer import Tokenizer

_PRECISION = "mixture"  # in whose limits a model agrees with itself: a server's isn't known, nor is its batch the same


class TeacherScorer(Protocol):
    """Scores given ids."""

    called: str
    read_tokens: int  # since the process began, of failed requests and probes too

    @property
    def cost(self) -> float:
        """The cost of ``read_tokens``."""
        ...

    async def start(self) -> str:
        """Start, and return what names the model. Raises ConfigurationError."""
        ...

    async def score(self, ids: TokenIds, scored: NDArray[np.bool_], top: int) -> tuple[PromptLogprobs, int]:
        """See `ServedTeacher.score`. Raises InfrastructureError."""
        ...

    async def close(self) -> None: ...


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A teacher as it was when the run began: RUN/teachers.json."""

    model: str  # its name
    logprobs: tuple[float, ...]  # of a probe's ids but the first

    @property
    def digest(self) -> str:
        """Equal for equal identities."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()

    def difference(self, other: Identity) -> str:
        """Return what shows that the two are other models; "" if nothing does."""
        if self.model != other.model:
            return f"the model {other.model!r} where the run began with {self.model!r}"
        reason = compare(other.logprobs, self.logprobs, _PRECISION).wrong
        return reason and f"another model than at the run's start: its {reason}"


class BusyTime:
    """Measures the time in which at least one block ``with`` it runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running, self._since_s, self._busy_s = 0, 0.0, 0.0

    def __enter__(self) -> None:
        self._count()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._count()
        self._running -= 1

    def take(self) -> float:
        """The seconds since the last call."""
        self._count()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def _count(self) -> None:
        now_s = self._clock.now()
        self._busy_s += now_s - self._since_s if self._running else 0.0
        self._since_s = now_s


class TeacherStage:
    """Scores the rollouts of finished groups by the teachers that their sources' rules name.

    Lifecycle: `start` (processes run, servers answer, each is the model of the run's start) -> `score` ... -> `stop`.
    A teacher in the trainer is given the ids that it reads in the prompt's place, if it has a ``context``.
    """

    def __init__(
        self,
        experiment: Experiment,
        tokenizer: Tokenizer,
        clock: Clock,
        waits: Waits,
        make_replicas: Callable[[str, TeacherConfig], ReplicaTeacher],
    ) -> None:
        """``make_replicas(name, teacher)`` makes the pool of a teacher with devices, not started yet."""
        self._experiment, self._tokenizer, self._clock, self._waits = experiment, tokenizer, clock, waits
        self._rules = experiment.rules
        self._scorers: dict[str, TeacherScorer] = {
            name: make_replicas(name, teacher) if teacher.server is None else ServedTeacher(name, teacher.server)
            for name, teacher in experiment.used_teachers.items()
            if teacher.scores
        }
        self._identities: dict[str, Identity] = {}
        self._busy = BusyTime(clock)
        self._statistics = TeacherStatistics()
        self._counted = 0, 0.0  # tokens and cost in the statistics taken so far

    async def start(self) -> None:
        """Start the teachers, and compare them with those of the run's start. Raises ConfigurationError."""
        file = RunDirectory(self._experiment.run.directory).teachers
        stored = read_identities(file)
        for name, scorer in self._scorers.items():
            model = await scorer.start()
            try:
                identity = await self._identify(scorer, model)
            except InfrastructureError as error:
                raise ConfigurationError(f"{scorer.called}: {error}") from None
            if name in stored and (difference := stored[name].difference(identity)):
                raise ConfigurationError(f"{scorer.called} is {difference}; a run keeps its teachers")
            self._identities[name] = stored.get(name, identity)
        if self._identities:
            RunDirectory(self._experiment.run.directory).write_json(file, self._identities)

    async def stop(self) -> None:
        """Stop the teachers' processes."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))

    def take_statistics(self) -> TeacherStatistics | None:
        """The statistics since the last call; None if all teachers are in the trainer."""
        scorers, (tokens, cost) = self._scorers.values(), self._counted
        self._counted = sum(scorer.read_tokens for scorer in scorers), sum(scorer.cost for scorer in scorers)
        counted = {"tokens": self._counted[0] - tokens, "cost": self._counted[1] - cost, "busy_s": self._busy.take()}
        statistics, self._statistics = msgspec.structs.replace(self._statistics, **counted), TeacherStatistics()
        return statistics if scorers else None

    async def score(self, group: Group, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """Return the verified ``rollouts`` of a group with their teacher's scores. A rollout whose teacher failed has
        failed as infrastructure; those that had failed or left their group before are returned as they are."""
        name = self._rules.of(group.task.source).teacher
        unscored = [rollout for rollout in rollouts if name and rollout.valid and rollout.teacher is None]
        if not unscored:
            return rollouts
        teacher, scorer = self._experiment.teachers[name], self._scorers.get(name)
        try:
            context = context_ids(teacher, group.task, self._tokenizer, self._experiment)
        except ConfigurationError as error:
            return tuple(_failed(rollout, f"teacher {name}: {error}", infrastructure=False) for rollout in rollouts)
        if scorer is None:
            rows = {} if context is None else {CONTEXT: TokenRows.of([context.array.tolist()], 4)}
            return tuple(_with_rows(rollout, rows) if rollout in unscored else rollout for rollout in rollouts)
        with self._busy, self._waits.on("a teacher", LOOPS, f"group {group.index}"):
            outcomes = await asyncio.gather(*(self._scored(name, rollout, context) for rollout in unscored))
            difference = await self._changed(name, scorer)
        if difference:
            outcomes = [_failed(rollout, difference) for rollout in unscored]
        self._count(outcomes)
        scored_by_member = {rollout.member: rollout for rollout in outcomes}
        return tuple(scored_by_member.get(rollout.member, rollout) for rollout in rollouts)

    async def _scored(self, name: str, rollout: Rollout, context: TokenIds | None) -> Rollout:
        scorer, top = self._scorers[name], self._experiment.teachers[name].top_k or 0
        started_s, read_tokens, scored = self._clock.now(), 0, list[Rollout | Branch]()
        try:
            for sequence in rollout.sequences:
                prompt = TokenIds(sequence.prompt_ids) if context is None else context
                ids, mask = prompt + sequence.response_ids, TokenMask(sequence.response_mask).array
                is_scored = np.concatenate([np.zeros(len(prompt), np.bool_), mask])
                is_scored[:1] = False
                if not is_scored.any():
                    scored.append(sequence)
                    continue
                scores, tokens = await scorer.score(ids, is_scored, top)
                read_tokens += tokens
                rows = score_rows(scores, is_scored)[len(prompt) :]
                rows = TokenRows.joined((TokenRows.empty(len(sequence.prompt_ids)), rows))
                scored.append(_with_rows(sequence, {TEACHER: rows}))
        except InfrastructureError as error:
            return _failed(rollout, str(error))
        trunk, *branches = scored
        assert isinstance(trunk, Rollout)
        price = self._experiment.teachers[name].server
        mark = TeacherMark(
            name=name,
            identity=self._identities[name].digest,
            tokens=read_tokens,
            cost=0.0 if price is None else read_tokens * price.price_prompt / 1e6,
            score_s=self._clock.now() - started_s,
        )
        return msgspec.structs.replace(trunk, branches=tuple(branches), teacher=mark)

    async def _changed(self, name: str, scorer: TeacherScorer) -> str:
        """Return why the teacher isn't the one of the run's start any more; "" if it is."""
        stored = self._identities[name]
        try:
            difference = stored.difference(await self._identify(scorer, stored.model))
        except InfrastructureError as error:
            return str(error)
        return difference and f"{scorer.called} is {difference}"

    async def _identify(self, scorer: TeacherScorer, model: str) -> Identity:
        ids = TokenIds(probe_ids(0, self._tokenizer.vocabulary_size, self._experiment.max_sequence_tokens))
        is_scored = np.arange(len(ids)) > 0
        scores, _ = await scorer.score(ids, is_scored, 0)
        return Identity(model=model, logprobs=tuple(scores.logprobs[1:].tolist()))

    def _count(self, rollouts: Sequence[Rollout]) -> None:
        statistics = self._statistics
        self._statistics = msgspec.structs.replace(
            statistics,
            rollouts=statistics.rollouts + sum(rollout.teacher is not None for rollout in rollouts),
            failures=statistics.failures + sum(rollout.failure is not None for rollout in rollouts),
        )


def context_ids(teacher: TeacherConfig, task: Task, tokenizer: Tokenizer, experiment: Experiment) -> TokenIds | None:
    """The ids that a teacher reads in the prompt's place; None: it reads the prompt. Raises ConfigurationError for a
    task that lacks a column, or is a conversation, and for ids beyond ``rollout.max_prompt_tokens``."""
    if not teacher.context:
        return None
    if len(task.messages) > 1:
        raise ConfigurationError(f"context with task {task.task_id}, a conversation of {len(task.messages)} messages")
    try:
        text = teacher.context_of(task.prompt, task.answer, task.metadata)
    except ValueError as error:
        raise ConfigurationError(f"task {task.task_id}: {error}") from None
    ids, limit = tokenizer.render(text, experiment.model.template), experiment.rollout.max_prompt_tokens
    if not 1 <= len(ids) <= limit:
        reason = f"{len(ids)} tokens of task {task.task_id}; valid: 1 to {limit}, rollout.max_prompt_tokens"
        raise ConfigurationError(f"context of {reason}")
    return TokenIds(ids)


def read_identities(file: Path) -> dict[str, Identity]:
    """The teachers of a run's start, by name. Raises ConfigurationError for a damaged file."""
    if not file.is_file():
        return {}
    try:
        return msgspec.convert(json.loads(file.read_bytes()), dict[str, Identity])
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{file} is damaged: {error}") from None


def _with_rows(sequence: Rollout | Branch, rows: Mapping[str, TokenRows]) -> Any:
    return msgspec.structs.replace(sequence, token_rows={**sequence.token_rows, **rows}) if rows else sequence


def _failed(rollout: Rollout, cause: str, *, infrastructure: bool = True) -> Rollout:
    if not rollout.valid:
        return rollout
    failure = Failure(boundary="engine", cause=cause, infrastructure=infrastructure)
    return msgspec.structs.replace(rollout, failure=failure, reward=0.0, solved=False)
