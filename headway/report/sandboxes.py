"""The report's section on sandboxes: counts, latencies, failures. Empty where a run has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.records.ledger import StepRecord
from headway.records.sandbox_statistics import Latencies, PoolStatistics, SandboxStatistics
from headway.report.formats import percent

_LATENCIES = {
    "queue": "waiting for a place",
    "start": "making one",
    "exec": "a command, asked to answered",
    "exec_overhead": "... less what it ran itself",
}


def sandbox_sentences(steps: Sequence[StepRecord]) -> list[str]:
    """Summarise the sandboxes of all steps in sentences; [] where no step has any."""
    found = [step.sandboxes for step in steps if step.sandboxes]
    if not found:
        return []
    total, last = SandboxStatistics.total([one.counted() for one in found]).pool, found[-1]
    now, reaper = last.pool, last.reaper
    sentences = [
        f"{total.started:,} were started and {total.execs:,} commands run; at most {max(s.pool.peak for s in found):,} "
        f"of {now.capacity:,} places were taken. At the last step {now.live:,} lived, {now.paused:,} of them paused, "
        f"and {now.waiters:,} rollouts waited for one.",
        *_failures(total),
        f"LEAKED: {now.leaked:,} couldn't be ended." if now.leaked else "None leaked.",
    ]
    if total.hedges or total.retries or total.breaker_openings:
        sentences.append(
            f"{total.retries:,} starts were tried again; {total.hedges:,} slow ones were made twice, and "
            f"{total.hedges_won:,} times the second was first; the breaker opened {total.breaker_openings:,} times."
        )
    if reaper.owners or reaper.stuck or reaper.failed:
        stuck = f", {reaper.stuck:,} owners can't be cleaned up after" if reaper.stuck else ""
        failed = f"; the last look failed: {reaper.failed}" if reaper.failed else ""
        sentences.append(
            f"Left by dead owners and removed: {reaper.sandboxes:,} of {reaper.owners:,} owners{stuck}{failed}."
        )
    injected = SandboxStatistics.total(found).injected
    if injected:
        sentences.append(f"Faults on purpose (HEADWAY_INJECT_SANDBOX_FAULTS): {_listed(injected)}.")
    return sentences


def _failures(total: PoolStatistics) -> list[str]:
    sentences: list[str] = []
    for what, causes, tries in (
        ("starts", total.start_failures, total.started + sum(total.start_failures.values())),
        ("commands", total.exec_failures, total.execs),
    ):
        if causes:
            share = sum(causes.values()) / max(1, tries)
            sentences.append(f"Of {tries:,} {what} {percent(share)} failed: {_listed(causes)}.")
    if not sentences:
        sentences.append("No start and no command failed.")
    if total.lost:
        sentences.append(f"{total.lost:,} ended while somebody had them.")
    return sentences


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))


def latency_rows(steps: Sequence[StepRecord]) -> list[list[str]]:
    """Rows (what, count, p50 ms, p99 ms) of every latency that was measured."""
    rows: list[list[str]] = []
    for name, what in _LATENCIES.items():
        total = Latencies.total(getattr(step.sandboxes.pool, name) for step in steps if step.sandboxes)
        if total.count:
            rows.append([what, f"{total.count:,}", _ms(total.quantile_s(0.5)), _ms(total.quantile_s(0.99))])
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
