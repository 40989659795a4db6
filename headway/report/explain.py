"""`headway explain-task`: why tasks were drawn, in words."""

from __future__ import annotations

from collections.abc import Sequence

from headway.records.curriculum import (
    REGIONS,
    CurriculumExplanation,
    DrawExplanation,
    Posterior,
    TaskExplanation,
)
from headway.report.show import visible

SHOWN_DRAWS = 8  # of a task, the newest
SHOWN_MOVES = 6
_BAR = 40  # characters
_REGION_MEANS = {
    "unseen": "no group of it has finished",
    "unsolved": "attempts are likely to fail all",
    "band": "attempts are likely to differ: the tasks that teach",
    "trivial": "attempts are likely to succeed all",
}


def task_text(found: TaskExplanation, *, whole: bool = False) -> str:
    """Describe a task on one screen; ``whole``: with every draw of it."""
    lines = [
        f"task {found.task_id}" + (f" of {visible(found.source)}" if found.source else ""),
        f"  prompt {_short(found.prompt, 90)}" + (f"   answer {_short(found.answer, 30)}" if found.answer else ""),
        f"  now    {found.region}: {_REGION_MEANS[found.region]}; {_posterior(found.now)}",
    ]
    draws = found.draws if whole else found.draws[-SHOWN_DRAWS:]
    hidden = len(found.draws) - len(draws)
    lines += ["", f"drawn {_times(len(found.draws))}" + (f", the last {len(draws)}:" if hidden else "")]
    for draw in draws:
        lines += _draw_lines(draw)
    lines += ["", *_ahead(found)]
    return "\n".join(lines)


def _draw_lines(draw: DrawExplanation) -> list[str]:
    lines = [f"  group {draw.group}, version {draw.version}: {draw.reason}: {draw.why}"]
    if draw.posterior is not None:
        lines.append(f"    known  {_posterior(draw.posterior)}")
    lines.append(f"    size   {draw.size} attempts: {draw.size_why}")
    if draw.solved is None:
        lines.append(f"    -> {draw.outcome}")
    else:
        moved = ""
        if draw.before is not None and draw.after is not None:
            moved = f": solve rate {draw.before.mean:.2f} -> {draw.after.mean:.2f}, signal {draw.after.signal:.2f}"
        lines.append(f"    -> solved {draw.solved} of {draw.valid}{moved}; {draw.outcome}")
    return lines


def _ahead(found: TaskExplanation) -> list[str]:
    """Describe how the task may be drawn next."""
    if not found.adaptive:
        return ["next: when it is its turn (curriculum.mode = 'uniform'); a curriculum would see these rates"]
    lines = [f"next, at group {found.next_index}, for {found.size} attempts were it drawn now:"]
    if found.region == "band":
        rests = f"it rests for {found.rests_groups} more groups, unless all of the band do"
        lines.append(
            "  band   " + (rests if found.rests_groups else f"probability {found.band_probability:.4f} of a draw")
        )
    elif found.region == "unseen":
        lines.append("  band   not before it was seen once")
    else:
        lines.append(f"  band   no: signal {found.now.signal:.2f} is below {found.min_signal:.2f}")
    if found.due_groups is not None and found.region == "unsolved":
        lines.append("  replay " + (f"due after {found.due_groups} more groups" if found.due_groups else "due now"))
    lines.append("  cursor when the plain walk comes to it")
    return lines


def overview_text(found: CurriculumExplanation) -> str:
    """Describe the curriculum of a run on one screen."""
    if not found.adaptive:
        head = "every task in turn (curriculum.mode = 'uniform'); what a curriculum would see:"
    else:
        low, high = found.known_limits
        head = (
            f"band: attempts of a group of {found.group_size} differ with probability {found.min_signal:.2f} or more "
            f"(known solve rates of {low:.2f} to {high:.2f})"
        )
    lines = [head, "", f"{found.tasks:,} tasks, {found.groups:,} groups drawn"]
    lines += [f"  {region:9}{found.regions.get(region, 0):>8,}  {_REGION_MEANS[region]}" for region in REGIONS]
    lines += ["", "seen tasks by expected solve rate", *_histogram(found.solve_rates)]
    lines += ["", "draws" + " " * 10 + "groups   flat"]
    for reason, count in found.draws.items():
        share = found.zero_variance_share.get(reason)
        lines.append(f"  {reason:9}{count:>10,}   " + ("   –" if share is None else f"{share:4.0%}"))
    if found.moves:
        hidden = len(found.moves) - SHOWN_MOVES
        lines += ["", "the band moved" + (f" {len(found.moves)} times, lastly" if hidden > 0 else "")]
        lines += [
            f"  {move.before:.2f} -> {move.after:.2f}  {move.why} ({move.zero_variance_share:.0%} of {move.groups})"
            for move in found.moves[-SHOWN_MOVES:]
        ]
    if found.following:
        lines += ["", "next, if no group finished meanwhile"]
        lines += [
            f"  group {draw.group}: {draw.task_id} {_short(draw.prompt, 24)}, {draw.size} attempts: {draw.reason}"
            for draw in found.following
        ]
    return "\n".join(lines)


def _histogram(counts: Sequence[int]) -> list[str]:
    most = max([*counts, 1])
    return [
        f"  {i / 10:.1f}–{(i + 1) / 10:.1f} {count:>7,} {'█' * round(_BAR * count / most)}".rstrip()
        for i, count in enumerate(counts)
    ]


def _posterior(known: Posterior) -> str:
    return (
        f"solve rate {known.mean:.2f} ({known.low:.2f}–{known.high:.2f}, of {known.attempts:.1f} attempts), "
        f"signal {known.signal:.2f}"
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _short(text: str, most: int) -> str:
    shown = visible(text.replace("\n", "⏎"))
    return repr(shown if len(shown) <= most else shown[: most - 1] + "…")
