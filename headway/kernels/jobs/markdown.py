"""A report on kernels as Markdown: the leaderboard's row, levels, outcomes, speed-ups, what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from headway.kernels.jobs.evaluate import KernelReport
from headway.kernels.scores import CandidateScores, Share

_MAX_NAMED_MISSING = 10


def markdown_report(report: KernelReport) -> str:
    """The report's text."""
    return "\n".join(_lines(report)) + "\n"


def leaderboard(report: KernelReport) -> list[str]:
    """The header and row of a leaderboard, as lines."""
    return _table("model", {report.model: report.scores})


def caveats(scores: CandidateScores) -> list[str]:
    """Sentences on candidates and tasks that the figures don't cover; []: the figures cover all."""
    notes = []
    if scores.missing:
        notes.append(
            f"{scores.missing} of {scores.missing + scores.candidates} candidates were not evaluated, by failures of "
            "the infrastructure: no figure includes them."
        )
    if scores.unanswered:
        notes.append(f"{scores.unanswered} of {scores.tasks} tasks have no answer: no figure includes them.")
    if scores.untimed and scores.fast:
        notes.append(
            f"{scores.untimed} correct candidates have no speed-up, since timing was refused: fast_p counts them as no "
            "faster."
        )
    for k, share in scores.correct.items():
        if share.tasks < scores.tasks:
            notes.append(f"pass@{k} is over {share.tasks} of {scores.tasks} tasks: the others have fewer evaluations.")
    return notes


def _lines(report: KernelReport) -> Iterator[str]:
    scores, judge_settings = report.scores, report.judge
    yield f"# Kernels of {report.model}"
    yield ""
    yield f"{scores.candidates} candidates for {scores.tasks} tasks of {report.tasks_file}, from {report.answers_file}."
    yield from caveats(scores)
    if report.surplus:
        yield f"{report.surplus} answers beyond -n are left out."
    yield ""
    yield from leaderboard(report)
    yield ""
    yield from _table("level", report.levels)
    yield ""
    yield (
        "pass@k: unbiased, the mean over tasks. fast_p: the mean over tasks of the share of candidates that are "
        "correct and more than p times as fast as the reference; with one candidate a task, KernelBench's. In "
        f"brackets: 95 % intervals over tasks. {judge_settings.correct_trials} trials"
        f" from seed {judge_settings.seed}{'' if judge_settings.timed else ', nothing timed'}."
    )
    yield from ["", "| outcome | candidates | share |", "| --- | --- | --- |"]
    for outcome, candidate_count in scores.outcomes.items():
        yield f"| {outcome.replace('_', ' ')} | {candidate_count} | {candidate_count / scores.candidates:.3f} |"
    if scores.speedups is not None:
        speedups = scores.speedups
        quantiles_text = ", ".join(f"{float(q):.0%}: {math.exp(value):.3g}" for q, value in speedups.quantiles.items())
        mean = math.exp(speedups.mean)
        yield ""
        yield f"Speed-up of {speedups.count} correct candidates: geometric mean {mean:.3g}, quantiles {quantiles_text}."
    if report.missing:
        yield from ["", "Not evaluated:", ""]
        yield from (f"- {task}: {reason}" for task, reason in report.missing[:_MAX_NAMED_MISSING])
        if len(report.missing) > _MAX_NAMED_MISSING:
            yield f"- and {len(report.missing) - _MAX_NAMED_MISSING} more, in the JSON report"


def _table(named: str, rows: Mapping[str, CandidateScores]) -> list[str]:
    first_scores = next(iter(rows.values()))
    title_by_field = {"compiled": "compiles, pass@", "correct": "correct, pass@", "fast": "fast_"}
    columns = [(field, key) for field in title_by_field for key in getattr(first_scores, field)]
    titles = [named, "tasks", "candidates", *(f"{title_by_field[field]}{key}" for field, key in columns)]
    lines = [_table_row(titles), _table_row(["---"] * len(titles))]
    for row_name, scores in rows.items():
        tasks_text = f"{scores.tasks - scores.unanswered} of " * bool(scores.unanswered) + str(scores.tasks)
        candidates_text = f"{scores.candidates}" + f" ({scores.missing} missing)" * bool(scores.missing)
        share_cells = (_format_share(getattr(scores, field).get(key)) for field, key in columns)
        lines.append(_table_row([row_name, tasks_text, candidates_text, *share_cells]))
    return lines


def _format_share(share: Share | None) -> str:
    if share is None:
        return "–"
    low, high = share.interval
    return f"{share.value:.3f} [{low:.3f}, {high:.3f}]"


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
