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
    per_step = [step.sandboxes for step in steps if step.sandboxes]
    if not per_step:
        return []
    total, last = (SandboxStatistics.total([stats.counted() for stats in per_step]).pool, per_step[-1])
    pool, reaper = last.pool, last.reaper
    sentences = [
        f"{total.started:,} were started and {total.execs:,} commands run; at most "
        f"{max(s.pool.peak for s in per_step):,} of {pool.capacity:,} slots were used. At the last step "
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
        failed = f"; the last check failed: {reaper.failed}" if reaper.failed else ""
        sentences.append(
            f"Left by dead owners and removed: {reaper.sandboxes:,} of {reaper.owners:,} owners{stuck}{failed}."
        )
    injected = SandboxStatistics.total(per_step).injected
    if injected:
        sentences.append(f"Faults on purpose (HEADWAY_INJECT_SANDBOX_FAULTS): {_counts_text(injected)}.")
    return sentences


def _failures(total: PoolStatistics) -> list[str]:
    sentences: list[str] = []
    for operation, causes, tries in (
        ("starts", total.start_failures, total.started + sum(total.start_failures.values())),
        ("commands", total.exec_failures, total.execs),
    ):
        if causes:
            share = sum(causes.values()) / max(1, tries)
            sentences.append(f"Of {tries:,} {operation} {percent(share)} failed: {_counts_text(causes)}.")
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
