"""Audits a run independently: the buffer's accounting, its batch log and the checkpoint chain.

``python -m headway.buffer.audit RUN`` proves from the files alone that every finished group was trained
exactly once or ended with a reason, and that each checkpoint holds exactly the steps of the log.
It reads plain SQL and JSON and shares no code with the buffer. Exit codes: 0 no violations, 4 violations,
2 there is nothing to audit.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_VIOLATIONS_LISTED = 20


@dataclass
class AuditReport:
    """The result of an audit: violations, notes and counts. ``violations`` is empty when the run is consistent."""

    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: Counter[str] = field(default_factory=Counter)  # state, or ending of ended ones -> groups
    rollouts: Counter[str] = field(default_factory=Counter)  # ending, or "open" -> rollouts
    failures: Counter[str] = field(default_factory=Counter)  # boundary -> rollouts; none has a reward
    admitted_groups: int = 0
    admitted_rollouts: int = 0
    completed_steps: int = 0
    skipped_steps: int = 0
    pending_step: int | None = None
    max_staleness: int = 0  # largest trajectory staleness of a trained group
    checkpoints: list[int] = field(default_factory=list)  # versions

    def expect(self, condition: bool, violation: str) -> None:
        if not condition:
            self.violations.append(violation)


def audit_database(connection: sqlite3.Connection) -> AuditReport:
    """Check the buffer's tables against each other; return violations and counts."""
    report = AuditReport()
    groups = {
        row[0]: row[1:]
        for row in connection.execute(
            "SELECT idx, size, state, ending, reason, step, first_version, task IS NULL FROM groups ORDER BY idx"
        )
    }
    meta_values = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    step_by_group = _audit_batches(connection, report, groups)
    _audit_groups(report, groups, step_by_group)
    _audit_rollouts(connection, report, groups, step_by_group, meta_values.get("released_version", 0))
    return report


def audit_file(database: Path) -> list[str]:
    """Return the violations in a ``buffer.db``, read over a separate connection.

    Any thread may call it; an event loop should use one, as it takes long (11 s after 16,438 steps of 32 groups)."""
    with closing(sqlite3.connect(database, timeout=10.0)) as connection:
        connection.execute("PRAGMA query_only=ON")
        return audit_database(connection).violations


def _audit_batches(
    connection: sqlite3.Connection, report: AuditReport, groups: dict[int, tuple[Any, ...]]
) -> dict[int, int]:
    """Check that steps are consecutive, each is trained once and no group is in two batches.

    Returns the trained step by group.
    """
    step_by_group: dict[int, int] = {}
    batch_of: dict[int, tuple[int, int]] = {}
    next_step, next_attempt = 0, 0
    for step, attempt, groups_json, outcome in connection.execute(
        "SELECT step, attempt, groups, outcome FROM batches ORDER BY step, attempt"
    ):
        label = f"batch {step}.{attempt}"
        report.expect((step, attempt) == (next_step, next_attempt), f"{label} where {next_step}.{next_attempt} is next")
        report.expect(report.pending_step is None, f"{label} follows a batch whose step is not completed")
        part_indices = _parts(groups_json)
        for part in part_indices:
            report.expect(bool(part) and part == sorted(set(part)), f"{label}: groups {part} not ascending")
        indices = [index for part in part_indices for index in part]
        valid = {"trained": ("ended", "trained"), "skipped": ("ended", "discarded"), None: ("batched", None)}[outcome]
        for index in indices:
            report.expect(index not in batch_of, f"group {index} is in {label} and in batch {batch_of.get(index)}")
            batch_of[index] = (step, attempt)
            if index not in groups:
                report.violations.append(f"{label} holds group {index}, which was never admitted")
                continue
            _, state, ending, _, group_step, _, _ = groups[index]
            report.expect((state, ending) == valid, f"{label} is {outcome}, its group {index} is {state} {ending}")
            report.expect(group_step == step, f"group {index} has step {group_step}, the log has {step}")
        if outcome == "trained":
            step_by_group.update((index, step) for index in indices)
            report.completed_steps += 1
            next_step, next_attempt = step + 1, 0
        elif outcome == "skipped":
            report.skipped_steps += 1
            next_step, next_attempt = step, attempt + 1
        else:
            report.pending_step = step
    report.expect(
        all(index in batch_of for index, group in groups.items() if group[1] == "batched"),
        "a group is marked as batched, but is in no batch",
    )
    return step_by_group


def _audit_groups(report: AuditReport, groups: dict[int, tuple[Any, ...]], trained_at: dict[int, int]) -> None:
    """Check that indices have no gap, every ended group has an ending and a reason, and trained ones are in the log."""
    report.admitted_groups = len(groups)
    report.expect(list(groups) == list(range(len(groups))), "admission indices have a gap")
    for index, (size, state, ending, reason, _, first_version, _) in groups.items():
        report.admitted_rollouts += size
        report.groups[ending if state == "ended" else state] += 1
        report.expect((state == "ended") == (ending is not None), f"group {index} is {state} with ending {ending}")
        report.expect(state != "ended" or bool(reason), f"group {index} ended as {ending} without a reason")
        report.expect((ending == "trained") == (index in trained_at), f"group {index}: {ending}: the log differs")
        if index in trained_at and first_version is not None:
            report.max_staleness = max(report.max_staleness, trained_at[index] - first_version)
            report.expect(first_version <= trained_at[index], f"group {index} was trained before it was sampled")


def _audit_rollouts(
    connection: sqlite3.Connection,
    report: AuditReport,
    groups: dict[int, tuple[Any, ...]],
    trained_at: dict[int, int],
    released_version: int,
) -> None:
    """Check that every rollout is open or ended once, and that payloads exist exactly while they are needed.

    A rollout ends as its group did or separately (failed, filtered, pruned, discarded)."""
    members: Counter[int] = Counter()
    finished_counts: Counter[int] = Counter()
    for index, member, is_finished, ending, reason, boundary, reward in connection.execute(
        "SELECT grp, member, finished, ending, reason, boundary, reward FROM rollouts"
    ):
        label = f"rollout {index}-{member}"
        if index not in groups:
            report.violations.append(f"{label} belongs to no group")
            continue
        size, state, group_ending = groups[index][:3]
        members[index] += 1
        finished_counts[index] += is_finished
        report.rollouts[ending or "open"] += 1
        report.expect(0 <= member < size, f"{label} is beyond its group's {size} members")
        report.expect((ending is None) or bool(reason), f"{label} ended as {ending} without a reason")
        if boundary is not None:
            report.failures[boundary] += 1
            report.expect(ending == "failed", f"{label} failed ({boundary}), and ended as {ending}")
            report.expect(not reward, f"{label} failed ({boundary}), and has the reward {reward}")
        # Endings of single members, when their group finished.
        member_endings = {"failed", "filtered", "pruned", "discarded"}
        endings = {group_ending, *member_endings} if state == "ended" else {None, *member_endings}
        report.expect(ending in endings, f"{label} is {ending or 'open'}, its group is {state} {group_ending or ''}")
        report.expect(bool(is_finished) or ending is not None, f"{label} is neither finished nor ended")
        report.expect(ending != "trained" or bool(is_finished), f"{label} was trained, but never finished")
    payloads = Counter(dict(connection.execute("SELECT id >> 16, count(*) FROM payloads GROUP BY id >> 16").fetchall()))
    for index, (size, state, ending, _, _, _, task_missing) in groups.items():
        report.rollouts["open"] += 0 if state == "ended" else size - members[index]
        expected = 0 if state == "open" else size
        report.expect(members[index] == expected, f"group {index}, {state}: {members[index]} of {expected} rollouts")
        is_kept = state != "ended" or (ending == "trained" and trained_at.get(index, -1) >= released_version)
        needed = finished_counts[index] if is_kept else 0
        report.expect(payloads[index] == needed, f"group {index}: {payloads[index]} payloads, {needed} expected")
        report.expect(not (is_kept and task_missing), f"group {index}: its task is missing")
    report.expect(payloads.keys() <= groups.keys(), "there are payloads of unknown groups")
    for (index,) in connection.execute("SELECT DISTINCT id >> 16 FROM partials").fetchall():
        is_open = index in groups and groups[index][1] == "open"
        report.expect(is_open, f"group {index} has parked members, but isn't open")
    report.expect(
        report.admitted_rollouts == report.rollouts.total(),
        f"{report.admitted_rollouts} rollouts admitted, {report.rollouts.total()} accounted for",
    )


def _parts(logged: str) -> list[list[int]]:
    """The groups of each part of a batch: the logged list, or a list beside the batch's demonstrations."""
    entry: Any = json.loads(logged)
    return entry["parts"] if isinstance(entry, dict) else entry


def audit_checkpoints(connection: sqlite3.Connection, folder: Path, report: AuditReport) -> None:
    """Check that every complete checkpoint holds exactly the trained batches of the steps before its version."""
    indices_by_step = {
        step: [index for part in _parts(groups) for index in part]
        for step, groups in connection.execute("SELECT step, groups FROM batches WHERE outcome IS NOT 'skipped'")
    }
    released_row = connection.execute("SELECT value FROM meta WHERE key = 'released_version'").fetchone()
    for path in sorted(folder.glob("step_*")):
        name_match = re.fullmatch(r"step_(\d+)", path.name)
        state_file = path / "state.json"
        if name_match is None or not state_file.exists():
            report.notes.append(f"checkpoint {path.name} is incomplete: ignored")
            continue
        version = int(name_match[1])
        try:
            checkpoint_state = json.loads(state_file.read_text(encoding="utf-8"))
            consumed_by_step = {int(step): list(groups) for step, groups in checkpoint_state["consumed"].items()}
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            report.violations.append(f"checkpoint {path.name}: unreadable state.json ({type(error).__name__}: {error})")
            continue
        report.checkpoints.append(version)
        stated_version = checkpoint_state.get("version", version)
        report.expect(stated_version == version, f"checkpoint {path.name} holds version {stated_version}")
        report.expect(
            sorted(consumed_by_step) == list(range(version)),
            f"checkpoint {path.name} holds {len(consumed_by_step)} steps, not the {version} before its version",
        )
        for step, indices in sorted(consumed_by_step.items()):
            report.expect(
                indices == indices_by_step.get(step),
                f"checkpoint {path.name}: step {step} trained {indices}, the log has {indices_by_step.get(step)}",
            )
        repeats = [i for i, count in Counter(i for g in consumed_by_step.values() for i in g).items() if count > 1]
        report.expect(not repeats, f"checkpoint {path.name}: groups {repeats} were trained more than once")
    if released_row is not None and released_row[0] > 0:
        report.expect(
            any(version >= released_row[0] for version in report.checkpoints),
            f"payloads before step {released_row[0]} were released, but no checkpoint covers them",
        )


def accounting_folder(directory: Path) -> Path:
    """Return the folder of a run's buffer.db: its ``cluster.accounting_directory``, or the run's folder."""
    try:
        cluster_settings = json.loads((directory / "config.json").read_bytes()).get("cluster", {})
    except (OSError, ValueError, AttributeError):  # the audit needs no experiment
        return directory
    return Path(cluster_settings.get("accounting_directory") or directory)


def audit_run(run: str | Path) -> AuditReport:
    """Audit the run's ``buffer.db`` and ``RUN/checkpoints``. Raises FileNotFoundError, sqlite3.Error."""
    directory = Path(run)
    database = accounting_folder(directory) / "buffer.db"
    if not database.is_file():
        raise FileNotFoundError(f"{database} does not exist")
    connection = sqlite3.connect(database, timeout=10.0)
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("BEGIN")  # one snapshot, also of a run in progress
        integrity_rows = connection.execute("PRAGMA integrity_check(5)").fetchall()
        report = audit_database(connection)
        report.violations.extend(f"database: {line}" for (line,) in integrity_rows if line != "ok")
        audit_checkpoints(connection, directory / "checkpoints", report)
    finally:
        connection.close()
    return report


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{label} {count}" for label, count in counts.most_common() if count) or "none"


def format_report(run: str, report: AuditReport) -> str:
    """Format the report as text: counts, notes, the first MAX_VIOLATIONS_LISTED violations, a verdict."""
    pending_text = "" if report.pending_step is None else f", step {report.pending_step} committed and not completed"
    versions_text = ", ".join(map(str, report.checkpoints)) or "none"
    lines = [
        f"audit of {run}",
        f"  groups    {report.admitted_groups} admitted: {_counts_text(report.groups)}",
        f"  rollouts  {report.admitted_rollouts} admitted: {_counts_text(report.rollouts)}",
        f"  failures  {_counts_text(report.failures)}; none has a reward",
        f"  steps     {report.completed_steps} trained, {report.skipped_steps} skipped{pending_text}",
        f"  staleness at most {report.max_staleness} steps (first token of a trained group)",
        f"  checkpoints of versions {versions_text}",
        *(f"  note: {note}" for note in report.notes),
    ]
    listed_violations = report.violations[:MAX_VIOLATIONS_LISTED]
    lines += [f"  VIOLATION: {violation}" for violation in listed_violations]
    if len(report.violations) > len(listed_violations):
        lines.append(f"  ... and {len(report.violations) - len(listed_violations)} more")
    verdict = "every finished group was trained exactly once or ended with a reason"
    lines.append(
        f"  {'FAILED: ' + str(len(report.violations)) + ' violations' if report.violations else 'ok: ' + verdict}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the audit as a command; ``arguments``: one run directory. Prints the report, returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m headway.buffer.audit RUN", file=sys.stderr)
        return 2
    try:
        report = audit_run(arguments[0])
    except (FileNotFoundError, sqlite3.Error) as error:
        print(f"nothing to audit in {arguments[0]}: {error}", file=sys.stderr)
        return 2
    print(format_report(arguments[0], report))
    return 4 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
