"""Writes the report's section on sandboxes: counts, latencies, failures. The section is empty for runs without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.records.ledger import StepRecord
from headway.records.sandbox_statistics import Latencies, PoolStatistics, SandboxStatistics
from headway.report.formats import percent

_LATENCIES = {
    "queue": "waiting for a slot",
    "start": "making one",
    "exec": "a command, asked to answered",
    "exec_overhead": "... less what it ran itself",
}


def sandbox_sentences(steps: Sequence[StepRecord]) -> list[str]:
    """Summarise the sandboxes of all steps in sentences; [] where no step has any."""
    step_statistics = [step.sandboxes for step in steps if step.sandboxes]
    if not step_statistics:
        return []
    total, last = (SandboxStatistics.total([stats.counted() for stats in step_statistics]).pool, step_statistics[-1])
    pool, reaper = last.pool, last.reaper
    sentences = [
        f"{total.started:,} were started and {total.execs:,} commands run; at most "
        f"{max(s.pool.peak for s in step_statistics):,} of {pool.capacity:,} slots were used. At the last step "
        f"{pool.live:,} were alive, {pool.paused:,} of them paused, and {pool.waiters:,} rollouts waited for one.",
        *_failures(total),
        f"LEAKED: {pool.leaked:,} couldn't be ended." if pool.leaked else "None leaked.",
    ]
    if total.hedges or total.retries or total.breaker_openings:
        sentences.append(
            f"{total.retries:,} starts were tried again; {total.hedges:,} slow ones were made twice, and "
            f"{total.hedges_won:,} times the second was first; the breaker opened {total.breaker_openings:,} times."
        )
    if reaper.owners or reaper.stuck or reaper.failed:
        stuck = f", {reaper.stuck:,} owners can't be cleaned up after" if reaper.stuck else ""
        failed_text = f"; the last check failed: {reaper.failed}" if reaper.failed else ""
        sentences.append(
            f"Left by dead owners and removed: {reaper.sandboxes:,} of {reaper.owners:,} owners{stuck}{failed_text}."
        )
    injected_counts = SandboxStatistics.total(step_statistics).injected
    if injected_counts:
        sentences.append(f"Faults on purpose (HEADWAY_INJECT_SANDBOX_FAULTS): {_counts_text(injected_counts)}.")
    return sentences


def _failures(total: PoolStatistics) -> list[str]:
    sentences: list[str] = []
    for operation, causes, try_count in (
        ("starts", total.start_failures, total.started + sum(total.start_failures.values())),
        ("commands", total.exec_failures, total.execs),
    ):
        if causes:
            failed_share = sum(causes.values()) / max(1, try_count)
            sentences.append(f"Of {try_count:,} {operation} {percent(failed_share)} failed: {_counts_text(causes)}.")
    if not sentences:
        sentences.append("No start and no command failed.")
    if total.lost:
        sentences.append(f"{total.lost:,} ended while they were in use.")
    return sentences


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))


def latency_rows(steps: Sequence[StepRecord]) -> list[list[str]]:
    """Make a row (label, count, p50 ms, p99 ms) for each latency that was measured."""
    rows: list[list[str]] = []
    for name, label in _LATENCIES.items():
        total = Latencies.total(getattr(step.sandboxes.pool, name) for step in steps if step.sandboxes)
        if total.count:
            rows.append([label, f"{total.count:,}", _ms(total.quantile_s(0.5)), _ms(total.quantile_s(0.99))])
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
