"""The durable, bounded group buffer (design.md, rules 7 and 8), stored in ``RUN/buffer.db``."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from headway.buffer.audit import audit_database
from headway.buffer.database import Statement, open_database, reading, transaction
from headway.buffer.row_encoding import (
    INSERT_GROUP,
    INSERT_ROLLOUT,
    MEMBER_BITS,
    BatchEntry,
    BufferStatistics,
    LoggedBatch,
    OpenRecord,
    Outcome,
    count_members,
    delete_partials,
    delete_payloads,
    end_rows,
    payload_id,
    read_accounting,
    read_consumed,
    read_counts,
    read_drawn_groups,
    read_ends,
    read_group,
    read_length_bias,
    read_parked,
    read_rollouts,
    rollout_row,
)
from headway.control.accounting import Accounting
from headway.control.length_bias import LengthBias
from headway.records.curriculum import Draw, DrawnGroup, TaskEvidence
from headway.records.environment import PartialRollout
from headway.records.errors import AccountingError, BufferCorrupt, BufferFull, EpochLost, HeadwayError, StorageFailed
from headway.records.rollout import ENDINGS, Batch, Ending, FinishedGroup, Group, Rollout
from headway.records.tokens import encoder
from headway.runtime.clock import Clock, RealClock
from headway.telemetry.rollouts.recorder import RolloutRecorder


@dataclass
class _Entry:
    """In-memory state of a group that has not ended."""

    size: int
    task_id: str
    state: Literal["open", "buffered", "batched"] = "open"
    parked: bool = False  # there may be partial rollouts of its members on disk


class GroupBuffer:
    """A bounded store of groups from admission to their end, committed to disk at every transition.

    Lifecycle of a group: ``admit`` -> *open* -> ``finish_group``, all members at once -> *buffered* ->
    ``commit_batch`` (its batch, or a part) -> *batched* -> ``complete_step`` -> *ended* (trained, or discarded
    when the step was skipped). From open or buffered it may end by ``end_group`` or by ``finish_group(..., ending)``.

    Invariants: at most ``capacity_groups`` groups have not ended, and finishing never blocks; every method is one
    atomic transaction that survives kill -9 of the process once it returned (an admission once any group's next
    transition did, else its index and task are used again); a finished group is trained exactly once in the surviving
    history or ends with a reason; payloads stay until ``release_covered``, when the oldest kept checkpoint has them.

    Example, one group a step: ``admit(g0); finish_group(f0); commit_batch(Batch(step=0, groups=(0,)))``, kill
    -9, open again: ``pending_batch`` is step 0 with g0; train it; ``complete_step(0, "trained")``. A call costs one
    transaction of about 0.1 ms. Use it from one thread.
    """

    def __init__(
        self,
        path: str | Path,
        capacity_groups: int,
        clock: Clock | None = None,
        fence: Callable[[], None] = lambda: None,
        journal: Callable[[Sequence[Statement]], None] | None = None,
        recorder: RolloutRecorder | None = None,
    ) -> None:
        """Open or create the buffer. ``fence`` and ``journal`` are passed to each `transaction`; ``recorder`` receives
        committed changes. Raises BufferCorrupt, StorageFailed (see ``open_database``)."""
        if capacity_groups < 1:
            raise ValueError(f"capacity_groups {capacity_groups} must be at least 1")
        self.path = Path(path)
        self._capacity = capacity_groups
        self._clock: Clock = clock or RealClock()
        self._fence, self._journal = fence, journal
        self._connection = open_database(self.path)
        self._entries: dict[int, _Entry] = {}
        self._buffered_s: dict[int, float] = {}  # clock when a buffered group finished, oldest first
        self._encoder = encoder()
        self._admissions: list[tuple[object, ...]] = []  # rows of groups that the next transaction writes
        try:
            with reading(self.path):
                self._recover()
        except HeadwayError:
            self._connection.close()
            raise
        self._peak = len(self._entries)
        self.recorder = recorder
        if recorder is not None:
            recorder.begin(lambda share: count_members(self._connection, share), lambda: read_ends(self._connection))

    # -- state ---------------------------------------------------------------------------------------

    @property
    def next_index(self) -> int:
        """Admission index of the next group."""
        return self._next_index

    @property
    def completed_steps(self) -> int:
        """Number of trained steps in the log, which is the version after the last of them."""
        return self._completed_steps

    @property
    def released_version(self) -> int:
        """The oldest version from which a run can resume: payloads of earlier steps were released."""
        return self._released_version

    def statistics(self) -> BufferStatistics:
        buffered_count, batched = len(self._buffered_s), 0 if self._pending is None else len(self._pending[2].groups)
        return BufferStatistics(
            used=len(self._entries),
            capacity=self._capacity,
            peak=self._peak,
            oldest_age_s=self._clock.now() - next(iter(self._buffered_s.values())) if buffered_count else 0.0,
            open=len(self._entries) - buffered_count - batched,
            buffered=buffered_count,
            batched=batched,
        )

    # -- transitions ---------------------------------------------------------------------------------

    def admit(self, group: Group, draw: Draw | None = None) -> None:
        """Open a group and reserve its slot; the row is written with the next transition of any group.
        ``draw``: why its task was drawn. Raises BufferFull, or AccountingError for an index out of order."""
        if group.index != self._next_index:
            raise AccountingError(f"group {group.index} is admitted, but index {self._next_index} is next")
        if not 1 <= group.size < 1 << MEMBER_BITS:
            raise ValueError(f"group {group.index} has {group.size} members")
        if len(self._entries) >= self._capacity:
            raise BufferFull(f"group {group.index}: all {self._capacity} slots of the buffer are in use")
        row = (
            group.index,
            group.task.task_id,
            msgspec.json.encode(group.task),
            self._encoder.encode(group.prompt_ids),
            group.size,
            group.admitted_version,
            group.admitted_s,
            None if draw is None else msgspec.json.encode(draw),
        )
        self._admissions.append(row)
        self._next_index += 1
        self._entries[group.index] = _Entry(size=group.size, task_id=group.task.task_id)
        self._peak = max(self._peak, len(self._entries))

    def finish_group(
        self,
        finished: FinishedGroup,
        ending: Ending | None = None,
        reason: str = "",
        evidence: TaskEvidence | None = None,
    ) -> None:
        """Commit a group's members; those that left it (failed, filtered, pruned) end here.
        The group is then buffered, or ends at once with ``ending`` (failed, filtered, pruned). ``evidence``: of the
        group about its task. Raises AccountingError when the group isn't open or a member is missing or twice."""
        index = finished.group.index
        group_state = self._entry(index, "open")
        members = [rollout.member for rollout in finished.rollouts]
        if sorted(members) != list(range(group_state.size)):
            raise AccountingError(f"group {index} finishes with members {members} of {group_state.size}")
        for rollout in finished.rollouts:
            if rollout.group != index:
                raise AccountingError(f"rollout {rollout.rollout_id} finishes in group {index}")
        self._require_ending(index, ending)
        with self._transaction() as connection:
            self._insert_rollouts(connection, finished.rollouts, ending)
            connection.execute(
                "UPDATE groups SET state = 'buffered', first_version = ? WHERE idx = ?", (finished.first_version, index)
            )
            if evidence is not None:
                connection.execute(
                    "INSERT INTO evidence (grp, solved, valid, zero_variance, version) VALUES (?, ?, ?, ?, ?)",
                    (index, evidence.solved, evidence.valid, evidence.zero_variance, evidence.version),
                )
            if group_state.parked:
                delete_partials(connection, index)
            if ending is not None:
                end_rows(connection, index, ending, reason, None)
        if self.recorder is not None:
            self.recorder.finished(finished)
        if ending is None:
            group_state.state = "buffered"
            self._buffered_s[index] = self._clock.now()
        else:
            self._forget([index], ending, reason)

    def park(self, parked: PartialRollout) -> None:
        """Store the partial rollout of an open group's member until the group finishes or ends; replace an earlier one.
        Raises AccountingError when the group isn't open or has no such member."""
        state = self._entry(parked.group, "open")
        if not 0 <= parked.member < state.size:
            raise AccountingError(f"member {parked.member} of group {parked.group}, which has {state.size}, is parked")
        with self._transaction() as connection:
            row = (payload_id(parked.group, parked.member), self._encoder.encode(parked))
            connection.execute("REPLACE INTO partials VALUES (?, ?)", row)
        state.parked = True

    def end_group(
        self, index: int, ending: Ending, reason: str, lengths: Mapping[int, tuple[int, bool]] | None = None
    ) -> None:
        """End an open or buffered group: its members end with ``ending`` and ``reason``, unless they failed.
        ``lengths``: response tokens of unfinished members and whether generation was complete, by member (default 0).
        Raises AccountingError when the group has ended, is in a batch, or for ``trained``."""
        group_state = self._entry(index, "open", "buffered")
        self._require_ending(index, ending)
        unfinished_members = range(group_state.size) if group_state.state == "open" else ()
        rows: list[tuple[object, ...]] = []
        for member in unfinished_members:
            tokens, is_complete = (lengths or {}).get(member, (0, False))
            rows.append((index, member, 0, ending, reason, *[None] * 4, tokens, int(is_complete), -1, *[None] * 4))
        with self._transaction() as connection:
            connection.executemany(INSERT_ROLLOUT, rows)
            end_rows(connection, index, ending, reason, None)
        if self.recorder is not None and unfinished_members:
            tokens_by_member = {member: (lengths or {}).get(member, (0, False))[0] for member in unfinished_members}
            self.recorder.unfinished(index, group_state.task_id, tokens_by_member)
        self._forget([index], ending, reason)
        self._buffered_s.pop(index, None)

    def commit_batch(self, batch: Batch, *, further: bool = False) -> int:
        """Commit membership and order of a batch, or of its next part (``further``), before it is trained on.
        Returns the attempt, 0 unless attempts at this step were skipped. Raises AccountingError when another batch
        is pending (for a further part: when none is), the step isn't the next one, or a group isn't buffered."""
        if further != (self._pending is not None):
            pending_text = "no batch" if self._pending is None else f"the batch of step {self._pending[0]}"
            raise AccountingError(f"step {batch.step}, {further=}: {pending_text} is committed and not completed")
        if batch.step != self._completed_steps:
            raise AccountingError(f"a batch for step {batch.step}, but step {self._completed_steps} is next")
        if not batch.groups or list(batch.groups) != sorted(set(batch.groups)):
            raise AccountingError(f"step {batch.step}: groups {batch.groups} are not ascending and distinct")
        group_states = [self._entry(index, "buffered") for index in batch.groups]
        former_entry = BatchEntry(parts=[]) if self._pending is None else self._pending[2]
        entry = BatchEntry(parts=[*former_entry.parts, list(batch.groups)], demonstrations=batch.demonstrations)
        with self._transaction() as connection:
            query = "SELECT count(*) FROM batches WHERE step = ? AND outcome IS NOT NULL"
            attempt: int = connection.execute(query, (batch.step,)).fetchone()[0]
            row = (batch.step, attempt, entry.text)
            connection.execute("REPLACE INTO batches VALUES (?, ?, ?, NULL)", row)
            query = "UPDATE groups SET state = 'batched', step = ? WHERE idx = ?"
            connection.executemany(query, [(batch.step, index) for index in batch.groups])
        for index, group_state in zip(batch.groups, group_states, strict=True):
            group_state.state = "batched"
            del self._buffered_s[index]
        self._pending = (batch.step, attempt, entry)
        return attempt

    def complete_step(self, step: int, outcome: Outcome, reason: str = "") -> None:
        """Complete the pending batch's step: its groups end as trained, or as discarded for ``reason`` when skipped.
        A replay of a trained step changes nothing. Raises AccountingError if the step isn't pending otherwise."""
        if self._pending is None or self._pending[0] != step:
            if outcome == "trained" and 0 <= step < self._completed_steps:
                return
            raise AccountingError(f"step {step} ends as {outcome}, but has no pending batch")
        _, attempt, entry = self._pending
        group_indices = entry.groups
        ending: Ending = "trained" if outcome == "trained" else "discarded"
        end_reason = f"step {step}" if outcome == "trained" else f"skipped: {reason}" if reason else "skipped"
        with self._transaction() as connection:
            query = "UPDATE batches SET outcome = ? WHERE step = ? AND attempt = ?"
            connection.execute(query, (outcome, step, attempt))
            for index in group_indices:
                end_rows(connection, index, ending, end_reason, step)
        self._forget(group_indices, ending, end_reason, step)
        self._pending = None
        if outcome == "trained":
            self._completed_steps = step + 1

    def release_covered(self, version: int) -> int:
        """Delete payloads and tasks of groups trained at steps < ``version``; return the number of groups.
        ``version``: of the *oldest* kept and durable checkpoint. Raises AccountingError for uncompleted steps."""
        if version > self._completed_steps:
            raise AccountingError(f"a checkpoint of version {version}, but {self._completed_steps} steps are completed")
        if version <= self._released_version:
            return 0
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT groups FROM batches WHERE step >= ? AND step < ? AND outcome = 'trained'",
                (self._released_version, version),
            ).fetchall()
            indices = [index for (groups_json,) in rows for index in BatchEntry.decode(groups_json).groups]
            for index in indices:
                delete_payloads(connection, index)
            connection.execute("REPLACE INTO meta VALUES ('released_version', ?)", (version,))
        self._released_version = version
        return len(indices)

    def make_durable(self) -> None:
        """Fsync everything committed so far: a commit alone survives kill -9, not a power cut.
        Call it before a checkpoint is written, so that no checkpoint is ever ahead of the log."""
        self._connection.execute("PRAGMA synchronous=FULL")
        try:
            with self._transaction() as connection:
                connection.execute("REPLACE INTO meta VALUES ('durable_version', ?)", (self._completed_steps,))
        finally:
            self._connection.execute("PRAGMA synchronous=NORMAL")

    # -- resume --------------------------------------------------------------------------------------

    def open_groups(self) -> list[OpenRecord]:
        """Return all groups that have not ended, by index. The *open* ones must be generated again."""
        with self._reading():
            return [
                OpenRecord(
                    group=read_group(self._connection, index),
                    state=group_state.state,
                    rollouts=read_rollouts(self._connection, index),
                    parked=read_parked(self._connection, index),
                )
                for index, group_state in sorted(self._entries.items())
            ]

    def pending_batch(self) -> LoggedBatch | None:
        """Return the committed batch whose step was not completed: it is trained next, unchanged."""
        if self._pending is None:
            return None
        return self._logged(*self._pending, outcome=None)

    def _logged(self, step: int, attempt: int, entry: BatchEntry, outcome: Outcome | None) -> LoggedBatch:
        parts, demonstrations = tuple(map(self.load, entry.parts)), entry.demonstrations
        return LoggedBatch(step=step, attempt=attempt, outcome=outcome, parts=parts, demonstrations=demonstrations)

    def batches_since(self, version: int) -> Iterator[LoggedBatch]:
        """Yield the batches to replay on a checkpoint of ``version``: steps version, version + 1, ... in order.
        The pending batch comes last; skipped attempts changed nothing and are left out. Payloads are read one by one.
        Raises BufferCorrupt when payloads of these steps were released or a step is missing."""
        if version < self._released_version:
            raise BufferCorrupt(
                f"{self.path}: can't replay from version {version}: the payloads of steps before "
                f"{self._released_version} were released, so a checkpoint of at least that version is needed"
            )
        if version > (log_end := self._completed_steps + (self._pending is not None)):
            raise BufferCorrupt(f"{self.path}: the log ends at step {log_end}, the checkpoint has version {version}")
        with self._reading():
            query = "SELECT step, attempt, groups, outcome FROM batches WHERE step >= ? AND outcome IS NOT 'skipped'"
            rows = self._connection.execute(f"{query} ORDER BY step, attempt", (version,)).fetchall()
        for expected_step, (step, attempt, groups_json, outcome) in enumerate(rows, start=version):
            if step != expected_step:
                raise BufferCorrupt(f"{self.path}: step {expected_step} is missing in the batch log")
            yield self._logged(step, attempt, BatchEntry.decode(groups_json), outcome)

    def load(self, indices: Sequence[int]) -> tuple[FinishedGroup, ...]:
        """Read groups with their payloads. Raises BufferCorrupt when one was released."""
        with self._reading():
            return tuple(
                FinishedGroup(group=read_group(self._connection, i), rollouts=read_rollouts(self._connection, i))
                for i in indices
            )

    def consumed(self) -> dict[int, list[int]]:
        """Return all completed steps as a checkpoint records them: step -> group indices in the order of training."""
        with self._reading():
            return read_consumed(self._connection)

    def drawn_groups(self) -> list[DrawnGroup]:
        """Return every group ever admitted, by index: why its task was drawn, its ending and its evidence."""
        with self._reading():
            return read_drawn_groups(self._connection)

    def accounting(self) -> Accounting:
        """Rebuild the accounting of everything ever admitted."""
        with self._reading():
            size_by_group = {index: group_state.size for index, group_state in self._entries.items()}
            return read_accounting(self._connection, self._next_index, size_by_group)

    def rollout_counts(self) -> dict[str, int]:
        """Count ``admitted`` and ``open_now`` from disk: the arguments of ``Accounting.check``."""
        with self._reading():
            return read_counts(self._connection)

    def length_bias(self, groups_per_step: int) -> LengthBias:
        """Compute the length-bias statistics of everything ever admitted, ready to be continued."""
        with self._reading():
            return read_length_bias(self._connection, groups_per_step)

    def audit(self, on_disk: Sequence[str] | None = None) -> list[str]:
        """Return violations of the invariants as text: on disk (or those of `audit_file`) and in memory."""
        problems = list(audit_database(self._connection).violations if on_disk is None else on_disk)
        states = dict(self._connection.execute("SELECT idx, state FROM groups WHERE state <> 'ended'").fetchall())
        states |= {row[0]: "open" for row in self._admissions}
        if states != {index: group_state.state for index, group_state in self._entries.items()}:
            problems.append("groups that have not ended differ between memory and disk")
        if len(self._entries) > self._capacity:
            problems.append(f"{len(self._entries)} groups in a buffer of {self._capacity}")
        return problems

    def close(self) -> None:
        """Write pending admissions and close the file; a second call is a no-op."""
        try:
            with contextlib.suppress(StorageFailed, EpochLost, sqlite3.ProgrammingError):  # or it is closed already
                self._write_admissions()
        finally:
            self._connection.close()

    # -- internals -----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with transaction(self._connection, self.path, self._fence, self._journal) as connection:
            if self._admissions:
                connection.executemany(INSERT_GROUP, self._admissions)
            yield connection
        self._admissions.clear()

    def _write_admissions(self) -> None:
        if self._admissions:
            with self._transaction():
                pass

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Write pending admissions before the block's reads; errors as `reading`."""
        self._write_admissions()
        with reading(self.path):
            yield

    def _meta(self, key: str) -> int:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else 0

    def _recover(self) -> None:
        execute = self._connection.execute
        self._next_index: int = execute("SELECT coalesce(max(idx) + 1, 0) FROM groups").fetchone()[0]
        self._released_version = self._meta("released_version")
        self._completed_steps: int = execute(
            "SELECT coalesce(max(step) + 1, 0) FROM batches WHERE outcome = 'trained'"
        ).fetchone()[0]
        pending_rows = execute("SELECT step, attempt, groups FROM batches WHERE outcome IS NULL").fetchall()
        if len(pending_rows) > 1:
            raise BufferCorrupt(f"{self.path}: {len(pending_rows)} batches are pending at once")
        self._pending: tuple[int, int, BatchEntry] | None = None  # step, attempt, groups and demonstrations
        for step, attempt, groups_json in pending_rows:
            self._pending = (step, attempt, BatchEntry.decode(groups_json))
        now_s = self._clock.now()
        rows = execute("SELECT idx, size, task_id, state FROM groups WHERE state <> 'ended' ORDER BY idx").fetchall()
        for index, size, task_id, state in rows:
            # A member may be parked: the disk isn't read for that here.
            self._entries[index] = _Entry(size=size, task_id=task_id, state=state, parked=True)
            if state == "buffered":
                self._buffered_s[index] = now_s

    def _entry(self, index: int, *states: str) -> _Entry:
        entry = self._entries.get(index)
        if entry is None or entry.state not in states:
            fate_text = "was never admitted" if index >= self._next_index else "has ended"
            raise AccountingError(
                f"group {index} should be {' or '.join(states)}, but {f'is {entry.state}' if entry else fate_text}"
            )
        return entry

    def _require_ending(self, index: int, ending: Ending | None) -> None:
        if ending == "trained" or (ending is not None and ending not in ENDINGS):
            raise AccountingError(f"group {index} can't end as {ending!r} here")

    def _insert_rollouts(
        self, connection: sqlite3.Connection, rollouts: Sequence[Rollout], ending: Ending | None
    ) -> None:
        """Insert the rows of newly finished members, and payloads only where they may still be trained."""
        connection.executemany(INSERT_ROLLOUT, [rollout_row(rollout) for rollout in rollouts])
        if ending is None:
            connection.executemany(
                "INSERT INTO payloads VALUES (?, ?)",
                [(payload_id(r.group, r.member), self._encoder.encode(r)) for r in rollouts],
            )

    def _forget(self, groups: Sequence[int], ending: Ending, reason: str, step: int | None = None) -> None:
        """Drop the in-memory state of groups whose end is committed."""
        for index in groups:
            del self._entries[index]
        if self.recorder is not None:
            self.recorder.ended(groups, ending, reason, step)
