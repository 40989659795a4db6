"""Proves references before a run: tasks that a verifier doesn't solve by their own answers are left out."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headway.config.schema import Experiment
from headway.config.sources import TaskSource, VerifierSettings
from headway.orchestrator.task_sets import named_verifiers, rollouts_may_reward
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.verification import client
from headway.rollout.verification.reference_checks import provable_parts
from headway.runtime.user_cache import cache_root, write_cached
from headway.runtime.workers import EventCallback
from headway.tasks.source_rows import short
from headway.tasks.sources import row_name_of
from headway.telemetry.ledger import EVENT_LEFT_OUT

_AT_ONCE = 100  # references that a verifier's process is given together
_REPORT_S = 5.0  # between lines of progress
_MOST_SHARE = 0.01  # of a source's tasks that may be left out
_MOST_KEPT = 1_000_000  # proofs of one verifier in the cache
_PACKAGES = ("math-verify", "latex2sympy2-extended", "sympy", "reasoning-gym")
_VARIABLE_PARTS = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
_NO_ANSWER = (
    "regex without an answer, which any match would solve: columns.answer names its column or path "
    "(reward_model.ground_truth); columns.answer = '' says that a match is enough"
)


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one source that are left out for reasons of one kind."""

    split: str
    source: str
    reason: str  # of the first
    tasks: tuple[Task, ...]
    of: int  # tasks of the source, these included

    def line(self, sources: Sequence[TaskSource]) -> str:
        """Format the count, the reason, and the row of the first task in a line."""
        first_task, task_count = self.tasks[0], len(self.tasks)
        row_name = row_name_of(sources, first_task) or f"task {first_task.task_id}"
        subject = f"{task_count:,} of {self.of:,} tasks of {self.source} " + ("is" if task_count == 1 else "are")
        return f"{subject} left out: {row_name}: answer {short(first_task.answer)}: {self.reason}"


async def prove_references(
    experiment: Experiment,
    sets: Mapping[str, Sequence[Task]],
    pool: client.VerifierPool,
    known: Mapping[str, str] | None = None,
) -> list[LeftOut]:
    """Find the tasks of ``sets`` (by split) whose own answers the verifiers of ``pool``, started, don't solve. None
    where environments or functions of the user's may give the rewards. Proofs are kept in the user's cache. ``known``:
    reasons of tasks that this run has left out before, by id."""
    if rollouts_may_reward(experiment):
        return []
    settings = {"": experiment.verifier, **named_verifiers(experiment, sets)}
    known, reasons = known or {}, dict[tuple[str, str], str]()
    tasks_by_verifier: dict[str, list[Task]] = defaultdict(list)
    for split, tasks in sets.items():
        explicit = {s.display_name for s in getattr(experiment.tasks, split) if s.columns.answer == "" or s.convert}
        for task in tasks:
            verifier = settings[task.verifier]
            if task.task_id in known:
                reasons[split, task.task_id] = known[task.task_id]
            elif not task.answer.strip() and _is_regex(verifier) and task.source not in explicit:
                reasons[split, task.task_id] = _NO_ANSWER
            elif provable_parts(verifier):
                tasks_by_verifier[task.verifier].append(task)
    for key, tasks in tasks_by_verifier.items():
        proofs = await _proofs(settings[key], tasks, pool)
        reasons |= {(split, t.task_id): proofs[t.task_id] for split in sets for t in tasks if proofs[t.task_id]}
    return _by_reason(sets, reasons)


def _is_regex(verifier: VerifierSettings) -> bool:
    part_settings = verifier.parameters.get("parts", []) if verifier.name == "weighted" else [{"name": verifier.name}]
    return any(settings.get("name") == "regex" for settings in part_settings)


async def _proofs(verifier: VerifierSettings, tasks: Sequence[Task], pool: client.VerifierPool) -> dict[str, str]:
    """The reasons for which tasks aren't solved by their answers, by id; "" for those that are."""
    is_generated = any(part.name == "reasoning-gym" for part in provable_parts(verifier))
    content_by_task = {task.task_id: _content(task, is_generated) for task in tasks}
    cache_path = cache_root("references") / f"{_identity(verifier)}.msgpack"
    cached: dict[bytes, str] = {}
    with suppress(OSError, msgspec.DecodeError):
        cached = msgspec.msgpack.decode(cache_path.read_bytes(), type=dict[bytes, str])
    unproved = {content_by_task[task.task_id]: task for task in tasks if content_by_task[task.task_id] not in cached}
    outcomes = await _prove(list(unproved.values()), pool)
    lasting_reasons = {content: reason for content, (reason, lasts) in zip(unproved, outcomes, strict=True) if lasts}
    reasons = cached | {content: reason for content, (reason, _) in zip(unproved, outcomes, strict=True)}
    if lasting_reasons:
        stored_reasons = dict([*cached.items(), *lasting_reasons.items()][-_MOST_KEPT:])
        with suppress(OSError):
            write_cached(cache_path, lambda file: file.write(msgspec.msgpack.encode(stored_reasons)))
    return {task_id: reasons[content] for task_id, content in content_by_task.items()}


def _content(task: Task, generated: bool) -> bytes:
    """Digest of a proof's inputs besides the verifier."""
    metadata = msgspec.json.encode(task.metadata, order="sorted") if generated else b""
    return hashlib.blake2b(task.answer.encode("utf-8", "surrogatepass") + b"\0" + metadata, digest_size=16).digest()


def _identity(verifier: VerifierSettings) -> str:
    """Digest of a verifier: its name and parameters, the libraries' versions and our own code."""
    digest_inputs = [msgspec.json.encode(verifier.model_dump(), order="sorted")]
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest_inputs.append(f"{package} {importlib.metadata.version(package)}".encode())
    digest_inputs += [file.read_bytes() for file in sorted(Path(client.__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"\0".join(digest_inputs), digest_size=12).hexdigest()


async def _prove(tasks: Sequence[Task], pool: client.VerifierPool) -> list[tuple[str, bool]]:
    """Return each task's reason ("": proved), and whether it would be the same again, in order. Prints progress on
    stderr."""
    loop = asyncio.get_running_loop()
    reported_at_s, done_count = loop.time(), 0
    worker_count = len(pool.worker_states)
    if len(tasks) > 20 * _AT_ONCE:
        pool.set_workers(max(worker_count, pool.max_workers()))

    async def prove(chunk: Sequence[Task]) -> list[tuple[str, bool]]:
        nonlocal reported_at_s, done_count
        bare_tasks = [msgspec.structs.replace(task, prompt="", messages=()) for task in chunk]
        failures = [verdict.failure for verdict in await pool.prove(bare_tasks)]
        done_count += len(chunk)
        if loop.time() - reported_at_s > _REPORT_S:
            reported_at_s = loop.time()
            print(f"references: {done_count:,} of {len(tasks):,} have been scored", file=sys.stderr)
        return [("", True) if failure is None else (failure.cause, not failure.infrastructure) for failure in failures]

    chunks = (tasks[start : start + _AT_ONCE] for start in range(0, len(tasks), _AT_ONCE))
    try:
        return [outcome for outcomes in await asyncio.gather(*map(prove, chunks)) for outcome in outcomes]
    finally:
        pool.set_workers(worker_count)


def _by_reason(sets: Mapping[str, Sequence[Task]], reasons: Mapping[tuple[str, str], str]) -> list[LeftOut]:
    tasks_by_reason: dict[tuple[str, str, str], list[tuple[Task, str]]] = defaultdict(list)
    task_counts: dict[tuple[str, str], int] = defaultdict(int)
    for split, tasks in sets.items():
        for task in tasks:
            task_counts[split, task.source] += 1
            if reason := reasons.get((split, task.task_id)):
                tasks_by_reason[split, task.source, _VARIABLE_PARTS.sub("", reason)].append((task, reason))
    return [
        LeftOut(
            split=split,
            source=source,
            reason=reasoned_tasks[0][1],
            tasks=tuple(task for task, _ in reasoned_tasks),
            of=task_counts[split, source],
        )
        for (split, source, _), reasoned_tasks in tasks_by_reason.items()
    ]


def refused_sources(left_out: Iterable[LeftOut]) -> dict[tuple[str, str], str]:
    """Describe each (split, source) of which too many tasks are left out."""
    counts_by_source: dict[tuple[str, str], tuple[int, int]] = {}
    for exclusion in left_out:
        previous_count, _ = counts_by_source.get((exclusion.split, exclusion.source), (0, 0))
        counts_by_source[exclusion.split, exclusion.source] = previous_count + len(exclusion.tasks), exclusion.of
    return {
        source_key: f"{count:,} of {total:,} tasks of {source_key[1]} aren't solved by their own answers, more than 1 %"
        for source_key, (count, total) in counts_by_source.items()
        if count > _MOST_SHARE * total
    }


async def leave_out_unproved(
    experiment: Experiment,
    sets: Mapping[str, Sequence[Task]],
    pool: client.VerifierPool,
    on_event: EventCallback,
    file: Path | None = None,
) -> dict[str, list[Task]]:
    """Return ``sets`` without the tasks whose references don't prove themselves; ``on_event`` receives these. ``file``:
    in the run's folder, for its resume. Raises ConfigurationError where they are more than 1 % of a source."""
    known_reasons = read_left_out(file)
    left_out = await prove_references(experiment, sets, pool, known_reasons)
    lines = [f"tasks.{part.split}: {part.line(getattr(experiment.tasks, part.split))}" for part in left_out]
    if refusal_by_source := refused_sources(left_out):
        refusals = [f"tasks.{split}: {reason}" for (split, _), reason in refusal_by_source.items()]
        raise ConfigurationError("; ".join(refusals + lines[:5]))
    for exclusion, line in zip(left_out, lines, strict=True):
        on_event(EVENT_LEFT_OUT, line, split=exclusion.split, source=exclusion.source, tasks=len(exclusion.tasks))
    reasons = known_reasons | {task.task_id: exclusion.reason for exclusion in left_out for task in exclusion.tasks}
    if file is not None and reasons != known_reasons:
        write_cached(file, lambda opened: opened.write(msgspec.json.encode(reasons)))
    removed = {(exclusion.split, task.task_id) for exclusion in left_out for task in exclusion.tasks}
    return {split: [task for task in tasks if (split, task.task_id) not in removed] for split, tasks in sets.items()}


def read_left_out(file: Path | None) -> dict[str, str]:
    """Read the ids of the tasks that a run has left out, and the reasons, from its folder's file. Raises
    ConfigurationError."""
    if file is None or not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except msgspec.DecodeError as error:
        problem_text = "is damaged, and the tasks that this run has left out are needed"
        raise ConfigurationError(f"{file} {problem_text}: {error}") from None
