"""`headway kernels eval`: answers read from a file, judged, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.kernels.jobs.judging import JudgeAll, require_some
from headway.kernels.jobs.task_files import KernelTaskFile
from headway.kernels.prompts import source_in
from headway.kernels.scores import CandidateScores, JudgedTask, score_tasks, scores_by_level
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.tasks.rows import read_objects, short

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
        counted = ("tasks", "candidates", "missing", "unanswered", "untimed")
        counts = {"model": self.model} | {name: getattr(scores, name) for name in counted}
        return counts | {name: [share.value, *share.interval] for name, share in shares.items()}


def read_answers(path: Path, book: KernelTaskFile, most: int | None) -> tuple[dict[str, list[str]], int]:
    """Candidates' sources by the name of their task, at most ``most`` of each, and how many are left out for that. An
    answer that holds no source is "". Raises ConfigurationError: a row of no task of the file, or without an answer."""
    found: dict[str, list[str]] = {name: [] for name in book.tasks}
    surplus = 0
    for where, row in read_objects(path):
        name = book.name_of(row, where)
        if not name:
            raise ConfigurationError(f"{where}: {_named(row)} is no task of {book.path}")
        if most is not None and len(found[name]) == most:
            surplus += 1
        else:
            found[name].append(answer_source(row, where))
    if not any(found.values()):
        raise ConfigurationError(f"{path}: no answers; valid: one JSON object a line")
    return found, surplus


def answer_source(row: Mapping[str, Any], where: str) -> str:
    """The source that a row gives, or that its answer's text holds; "": there is none. Raises ConfigurationError."""
    if isinstance(source := row.get("source"), str):
        return source
    if (text := answer_text(row)) is None:
        raise ConfigurationError(f'{where}: it has {", ".join(sorted(row))}; needed: "source", or an answer\'s "text"')
    return source_in(text)


def answer_text(row: Mapping[str, Any]) -> str | None:
    """The text of the answer in a row; None: it has none."""
    return next((text for key in _TEXTS if isinstance(text := row.get(key), str)), None)


async def evaluate_answers(
    judge: JudgeAll, book: KernelTaskFile, answers: Mapping[str, Sequence[str]], settings: JudgeSettings
) -> list[JudgedTask]:
    """The tasks of the file with their answers' evaluations. Raises HeadwayError as `judge_all` does, and where nothing
    could be evaluated."""
    named = [(name, source) for name, sources in answers.items() for source in sources if source]
    results = await judge([submission_of(book, name, source, settings) for name, source in named])
    require_some(results)
    in_turn, nothing = iter(results), KernelEvaluation(text="the answer holds no source")
    found = {name: tuple(next(in_turn) if one else nothing for one in sources) for name, sources in answers.items()}
    return [
        JudgedTask(name=name, level=task.kernel.level, evaluations=found[name]) for name, task in book.tasks.items()
    ]


def submission_of(book: KernelTaskFile, name: str, source: str, settings: JudgeSettings) -> KernelSubmission:
    """The submission of a candidate."""
    return KernelSubmission(task=book.tasks[name].kernel, source=source, **msgspec.structs.asdict(settings))


def kernel_report(
    judged: Sequence[JudgedTask],
    ks: Sequence[int],
    settings: JudgeSettings,
    model: str,
    files: tuple[str, str],
    surplus: int,
) -> KernelReport:
    """The report on judged tasks of a file, and answers of another."""
    return KernelReport(
        judge=settings,
        scores=score_tasks(judged, ks, timed=settings.timed),
        levels=scores_by_level(judged, ks, timed=settings.timed),
        tasks={task.name: ["" if one.infrastructure else one.outcome for one in task.evaluations] for task in judged},
        missing=[(task.name, one.infrastructure) for task in judged for one in task.evaluations if one.infrastructure],
        model=model,
        tasks_file=files[0],
        answers_file=files[1],
        surplus=surplus,
    )


def _named(row: Mapping[str, Any]) -> str:
    return next((f"{key} = {short(row[key])}" for key in ("task", "task_id") if key in row), "its prompt's task")
