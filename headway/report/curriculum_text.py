"""`headway explain-task` explains why tasks were drawn."""

from __future__ import annotations

from collections.abc import Sequence

from headway.records.curriculum import REGIONS, CurriculumExplanation, DrawExplanation, Posterior, TaskExplanation
from headway.report.recorded_samples import visible

MAX_DRAWS = 8  # the newest draws of a task
MAX_BAND_CHANGES = 6
_BAR = 40  # characters
_REGION_MEANS = {
    "unseen": "no group of it has finished",
    "unsolved": "all attempts are likely to fail",
    "band": "attempts are likely to differ: a learning signal",
    "trivial": "all attempts are likely to succeed",
}


def task_text(task: TaskExplanation, *, full: bool = False) -> str:
    """Describe a task on one screen; ``full``: list every draw of the task, not only the newest."""
    lines = [
        f"task {task.task_id}" + (f" of {visible(task.source)}" if task.source else ""),
        f"  prompt {_truncated(task.prompt, 90)}" + (f"   answer {_truncated(task.answer, 30)}" if task.answer else ""),
        f"  now    {task.region}: {_REGION_MEANS[task.region]}; {_posterior(task.now)}",
    ]
    draws = task.draws if full else task.draws[-MAX_DRAWS:]
    hidden_count = len(task.draws) - len(draws)
    lines += ["", f"drawn {_times(len(task.draws))}" + (f", the last {len(draws)}:" if hidden_count else "")]
    for draw in draws:
        lines += _draw_lines(draw)
    lines += ["", *_next_draw_lines(task)]
    return "\n".join(lines)


def _draw_lines(draw: DrawExplanation) -> list[str]:
    lines = [f"  group {draw.group}, version {draw.version}: {draw.reason}: {draw.explanation}"]
    if draw.posterior is not None:
        lines.append(f"    known  {_posterior(draw.posterior)}")
    lines.append(f"    size   {draw.size} attempts: {draw.size_explanation}")
    if draw.solved is None:
        lines.append(f"    -> {draw.outcome}")
    else:
        change_text = ""
        if (prior := draw.posterior_before) is not None and (updated := draw.posterior_after) is not None:
            change_text = f": solve rate {prior.mean:.2f} -> {updated.mean:.2f}, signal {updated.signal:.2f}"
        lines.append(f"    -> solved {draw.solved} of {draw.valid}{change_text}; {draw.outcome}")
    return lines


def _next_draw_lines(task: TaskExplanation) -> list[str]:
    """Describe how the task may be drawn next."""
    if not task.adaptive:
        return ["next: when it is its turn (curriculum.mode = 'uniform'); a curriculum would see these rates"]
    lines = [f"next, at group {task.next_index}, for {task.size} attempts were it drawn now:"]
    if task.region == "band":
        cooldown_text = f"it rests for {task.rests_groups} more groups, unless all of the band do"
        lines.append(
            "  band   " + (cooldown_text if task.rests_groups else f"probability {task.band_probability:.4f} of a draw")
        )
    elif task.region == "unseen":
        lines.append("  band   not before it was seen once")
    else:
        lines.append(f"  band   no: signal {task.now.signal:.2f} is below {task.min_signal:.2f}")
    if task.due_groups is not None and task.region == "unsolved":
        lines.append("  replay " + (f"due after {task.due_groups} more groups" if task.due_groups else "due now"))
    lines.append("  cursor when the plain walk comes to it")
    return lines


def overview_text(curriculum: CurriculumExplanation) -> str:
    """Describe the curriculum of a run on one screen."""
    if not curriculum.adaptive:
        head_line = "every task in turn (curriculum.mode = 'uniform'); what a curriculum would see:"
    else:
        low, high = curriculum.known_limits
        head_line = (
            f"band: attempts of a group of {curriculum.group_size} differ with probability "
            f"{curriculum.min_signal:.2f} or more (known solve rates of {low:.2f} to {high:.2f})"
        )
    lines = [head_line, "", f"{curriculum.tasks:,} tasks, {curriculum.groups:,} groups drawn"]
    lines += [f"  {region:9}{curriculum.regions.get(region, 0):>8,}  {_REGION_MEANS[region]}" for region in REGIONS]
    lines += ["", "seen tasks by expected solve rate", *_histogram(curriculum.solve_rates)]
    lines += ["", "draws" + " " * 10 + "groups   flat"]
    for reason, count in curriculum.draws.items():
        share = curriculum.zero_variance_share.get(reason)
        lines.append(f"  {reason:9}{count:>10,}   " + ("   –" if share is None else f"{share:4.0%}"))
    if curriculum.band_changes:
        hidden_count = len(curriculum.band_changes) - MAX_BAND_CHANGES
        lines += ["", "the band moved" + (f" {len(curriculum.band_changes)} times, lastly" if hidden_count > 0 else "")]
        lines += [
            f"  {band_change.old_limit:.2f} -> {band_change.new_limit:.2f}  {band_change.reason} "
            f"({band_change.zero_variance_share:.0%} of {band_change.groups})"
            for band_change in curriculum.band_changes[-MAX_BAND_CHANGES:]
        ]
    if curriculum.following:
        lines += ["", "next, if no group finishes before"]
        lines += [
            f"  group {draw.group}: {draw.task_id} {_truncated(draw.prompt, 24)}, {draw.size} attempts: {draw.reason}"
            for draw in curriculum.following
        ]
    return "\n".join(lines)


def _histogram(counts: Sequence[int]) -> list[str]:
    peak_count = max([*counts, 1])
    return [
        f"  {i / 10:.1f}–{(i + 1) / 10:.1f} {count:>7,} {'█' * round(_BAR * count / peak_count)}".rstrip()
        for i, count in enumerate(counts)
    ]


def _posterior(known: Posterior) -> str:
    return (
        f"solve rate {known.mean:.2f} ({known.low:.2f}–{known.high:.2f}, of {known.attempts:.1f} attempts), "
        f"signal {known.signal:.2f}"
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _truncated(text: str, max_characters: int) -> str:
    escaped = visible(text.replace("\n", "⏎"))
    return repr(escaped if len(escaped) <= max_characters else escaped[: max_characters - 1] + "…")
