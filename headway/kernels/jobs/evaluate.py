"""`headway kernels eval`: answers read from a file, judged, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.kernels.jobs.judging import JudgeAll, require_success
from headway.kernels.jobs.task_files import KernelTaskFile
from headway.kernels.prompts import source_in
from headway.kernels.scores import CandidateScores, JudgedTask, score_tasks, scores_by_level
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.tasks.source_rows import read_objects, short

_TEXTS = ("text", "response")  # of a model's answer; the second is that of a run's exported rollouts


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of each evaluation: fields of KernelSubmission."""

    correct_trials: int = 5
    timed: bool = True
    seed: int = 42
    timeout_s: float = 600.0


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a model's answers; `row` is its line beside other models."""

    model: str
    tasks_file: str
    answers_file: str
    judge: JudgeSettings
    scores: CandidateScores
    levels: dict[str, CandidateScores]
    tasks: dict[str, list[str]]  # the outcome of each candidate; "": not evaluated
    missing: list[tuple[str, str]]  # task, why a candidate of it wasn't evaluated
    surplus: int  # answers beyond the number a task may have, left out

    @property
    def row(self) -> dict[str, Any]:
        """The model's row of a leaderboard: each share as [value, low, high]."""
        scores = self.scores
        shares = {f"compiled_pass@{k}": share for k, share in scores.compiled.items()}
        shares |= {f"correct_pass@{k}": share for k, share in scores.correct.items()}
        shares |= {f"fast_{p}": share for p, share in scores.fast.items()}
        count_names = ("tasks", "candidates", "missing", "unanswered", "untimed")
        columns = {"model": self.model} | {name: getattr(scores, name) for name in count_names}
        return columns | {name: [share.value, *share.interval] for name, share in shares.items()}


def read_answers(path: Path, task_file: KernelTaskFile, max_answers: int | None) -> tuple[dict[str, list[str]], int]:
    """Candidates' sources by task name, at most ``max_answers`` of each task, and the number left out by that limit. An
    answer without a source is "". Raises ConfigurationError for a row without an answer or of no task of the file."""
    sources_by_task: dict[str, list[str]] = {task_name: [] for task_name in task_file.tasks}
    surplus_count = 0
    for location, row in read_objects(path):
        task_name = task_file.name_of(row, location)
        if not task_name:
            raise ConfigurationError(f"{location}: {_task_reference(row)} isn't a task of {task_file.path}")
        if max_answers is not None and len(sources_by_task[task_name]) == max_answers:
            surplus_count += 1
        else:
            sources_by_task[task_name].append(answer_source(row, location))
    if not any(sources_by_task.values()):
        raise ConfigurationError(f"{path}: no answers; valid: one JSON object a line")
    return sources_by_task, surplus_count


def answer_source(row: Mapping[str, Any], location: str) -> str:
    """The source in a row, or in its answer's text; "": there is none. Raises ConfigurationError."""
    if isinstance(source := row.get("source"), str):
        return source
    if (text := answer_text(row)) is None:
        raise ConfigurationError(
            f'{location}: it has {", ".join(sorted(row))}; needed: "source", or an answer\'s "text"'
        )
    return source_in(text)


def answer_text(row: Mapping[str, Any]) -> str | None:
    """The text of a row's answer; None: the row has none."""
    return next((text for key in _TEXTS if isinstance(text := row.get(key), str)), None)


async def evaluate_answers(
    judge: JudgeAll, task_file: KernelTaskFile, answers: Mapping[str, Sequence[str]], settings: JudgeSettings
) -> list[JudgedTask]:
    """The tasks of the file with their answers' evaluations. Raises HeadwayError as `judge_all` does, and if no answer
    could be evaluated."""
    named_sources = [(name, source) for name, sources in answers.items() for source in sources if source]
    evaluations = await judge([submission_of(task_file, name, source, settings) for name, source in named_sources])
    require_success(evaluations)
    ordered, empty = iter(evaluations), KernelEvaluation(text="the answer holds no source")
    judged_by_task = {name: tuple(next(ordered) if s else empty for s in sources) for name, sources in answers.items()}
    return [JudgedTask(name=n, level=t.kernel.level, evaluations=judged_by_task[n]) for n, t in task_file.tasks.items()]


def submission_of(task_file: KernelTaskFile, name: str, source: str, settings: JudgeSettings) -> KernelSubmission:
    """The submission of a candidate."""
    return KernelSubmission(task=task_file.tasks[name].kernel, source=source, **msgspec.structs.asdict(settings))


def kernel_report(
    judged: Sequence[JudgedTask],
    ks: Sequence[int],
    settings: JudgeSettings,
    model: str,
    files: tuple[str, str],
    surplus: int,
) -> KernelReport:
    """The report on judged tasks. ``files``: of the tasks, of the answers."""
    return KernelReport(
        judge=settings,
        scores=score_tasks(judged, ks, timed=settings.timed),
        levels=scores_by_level(judged, ks, timed=settings.timed),
        tasks={task.name: ["" if e.infrastructure else e.outcome for e in task.evaluations] for task in judged},
        missing=[(task.name, e.infrastructure) for task in judged for e in task.evaluations if e.infrastructure],
        model=model,
        tasks_file=files[0],
        answers_file=files[1],
        surplus=surplus,
    )


def _task_reference(row: Mapping[str, Any]) -> str:
    return next((f"{key} = {short(row[key])}" for key in ("task", "task_id") if key in row), "its prompt's task")
