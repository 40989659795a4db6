"""Converts between rows of the buffer's tables and records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Literal

import msgspec

from headway.control.accounting import Accounting
from headway.control.length_bias import LengthBias
from headway.records.curriculum import Draw, DrawnGroup, TaskEvidence
from headway.records.environment import PartialRollout
from headway.records.errors import BufferCorrupt
from headway.records.rollout import Ending, FinishedGroup, Group, LoggedDemonstrations, Rollout
from headway.records.task import Task
from headway.records.tokens import TokenIds, decoder

Outcome = Literal["trained", "skipped"]

MEMBER_BITS = 16  # a group has fewer than 2 ** 16 members
INSERT_GROUP = (
    "INSERT INTO groups (idx, task_id, task, prompt_ids, size, admitted_version, admitted_s, draw, state)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'open')"
)
INSERT_ROLLOUT = "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_rollout_decoder = decoder(Rollout)
_parked_decoder = decoder(PartialRollout)
_task_decoder = msgspec.json.Decoder(Task)
_draw_decoder = msgspec.json.Decoder(Draw)
_ids_decoder = decoder(TokenIds)


class BufferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Fill of the buffer, in groups. A group reserves its slot at admission, so finishing one never waits."""

    used: int = 0  # groups open, buffered or batched
    capacity: int = 0  # groups
    peak: int = 0
    waiters: int = 0  # always 0, see above
    oldest_age_s: float = 0.0  # of the buffered groups, since they finished (or the buffer was opened)
    open: int = 0
    buffered: int = 0
    batched: int = 0


class LoggedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of the log with its payloads, for a replay."""

    step: int  # trainer version before the step
    attempt: int  # how many attempts at this step were skipped before
    outcome: Outcome | None  # None: committed, its step not completed
    parts: tuple[tuple[FinishedGroup, ...], ...]  # in the order of training; one unless queue.groups_per_part is set
    demonstrations: LoggedDemonstrations | None = None

    @property
    def groups(self) -> tuple[FinishedGroup, ...]:
        """All groups of the batch, in the order of training."""
        return tuple(group for part in self.parts for group in part)


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A group that had not ended when the buffer was opened."""

    group: Group
    state: Literal["open", "buffered", "batched"]
    rollouts: tuple[Rollout, ...]  # failed ones included; none while it is open
    parked: tuple[PartialRollout, ...] = ()  # partial rollouts of its parked members, while it is open

    @property
    def finished(self) -> FinishedGroup | None:
        """The group with all members once it is buffered or batched, else None."""
        return None if self.state == "open" else FinishedGroup(group=self.group, rollouts=self.rollouts)


def payload_id(group: int, member: int) -> int:
    return group << MEMBER_BITS | member


def payload_ids(group: int) -> tuple[int, int]:
    """Return the first and the last id that a payload of this group can have."""
    return payload_id(group, 0), payload_id(group, (1 << MEMBER_BITS) - 1)


def rollout_row(rollout: Rollout) -> tuple[object, ...]:
    """Return the row of a finished member; one that leaves its group (failed, filtered, pruned) has an ending."""
    failure = rollout.failure
    ending, reason = rollout.ended or (None, None)
    return (
        rollout.group,
        rollout.member,
        1,
        ending,
        reason,
        failure.boundary if failure else None,
        failure.cause if failure else None,
        None if failure else rollout.reward,
        None if failure else int(rollout.solved),
        rollout.response_tokens,
        int(rollout.finish_reason in ("stop", "length")),
        rollout.first_version,
        rollout.opened_s,
        rollout.generated_s,
        rollout.finished_s,
        rollout.verify_s,
    )


def end_rows(connection: sqlite3.Connection, index: int, ending: Ending, reason: str, step: int | None) -> None:
    """End a group and those of its members that haven't ended; only a trained group keeps its payloads."""
    connection.execute(
        "UPDATE groups SET state = 'ended', ending = ?, reason = ?, step = ? WHERE idx = ?",
        (ending, reason, step, index),
    )
    connection.execute(
        "UPDATE rollouts SET ending = ?, reason = ? WHERE grp = ? AND ending IS NULL", (ending, reason, index)
    )
    if ending != "trained":
        delete_payloads(connection, index)
        delete_partials(connection, index)


def delete_partials(connection: sqlite3.Connection, index: int) -> None:
    connection.execute("DELETE FROM partials WHERE id BETWEEN ? AND ?", payload_ids(index))


def delete_payloads(connection: sqlite3.Connection, index: int) -> None:
    """Delete the rollouts, the task and the prompt of a group."""
    connection.execute("DELETE FROM payloads WHERE id BETWEEN ? AND ?", payload_ids(index))
    connection.execute("UPDATE groups SET task = NULL, prompt_ids = NULL WHERE idx = ?", (index,))


def read_group(connection: sqlite3.Connection, index: int) -> Group:
    """Read the group at ``index`` with its task and prompt. Raises BufferCorrupt when they were released."""
    row = connection.execute(
        "SELECT task, prompt_ids, size, admitted_version, admitted_s FROM groups WHERE idx = ?", (index,)
    ).fetchone()
    if row is None or row[0] is None:
        raise BufferCorrupt(f"the payload of group {index} is not in the buffer (any more)")
    return Group(
        index=index,
        task=_task_decoder.decode(row[0]),
        prompt_ids=_ids_decoder.decode(row[1]),
        size=row[2],
        admitted_version=row[3],
        admitted_s=row[4],
    )


def read_rollouts(connection: sqlite3.Connection, index: int) -> tuple[Rollout, ...]:
    """Read the stored records of a group's finished members, ordered by member."""
    rows = connection.execute("SELECT body FROM payloads WHERE id BETWEEN ? AND ? ORDER BY id", payload_ids(index))
    return tuple(_rollout_decoder.decode(body) for (body,) in rows)


def read_parked(connection: sqlite3.Connection, index: int) -> tuple[PartialRollout, ...]:
    """Read the newest partial rollouts of an open group's parked members, ordered by member."""
    rows = connection.execute("SELECT body FROM partials WHERE id BETWEEN ? AND ? ORDER BY id", payload_ids(index))
    return tuple(_parked_decoder.decode(body) for (body,) in rows)


def read_accounting(connection: sqlite3.Connection, next_index: int, open_sizes: Mapping[int, int]) -> Accounting:
    """Rebuild the accounting of everything stored. ``open_sizes``: index -> size of every group that has not ended."""
    count_by_ending = {
        (ending, reason): count
        for ending, reason, count in connection.execute(
            "SELECT ending, reason, count(*) FROM rollouts WHERE ending IS NOT NULL GROUP BY ending, reason"
        )
    }
    failures = connection.execute(
        "SELECT boundary, count(*) FROM rollouts WHERE boundary IS NOT NULL GROUP BY boundary"
    ).fetchall()
    open_members: dict[int, list[int]] = {}
    for index, size in open_sizes.items():
        rows = connection.execute("SELECT member FROM rollouts WHERE grp = ? AND ending IS NOT NULL", (index,))
        ended_members = {member for (member,) in rows}
        open_members[index] = [member for member in range(size) if member not in ended_members]
    accounting = Accounting()
    accounting.restore(next_index=next_index, open_members=open_members, ended=count_by_ending, failures=dict(failures))
    return accounting


def read_counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Count the rollouts ever admitted (``admitted``) and those that have not ended (``open_now``)."""
    admitted_count = connection.execute("SELECT coalesce(sum(size), 0) FROM groups").fetchone()[0]
    ended_count = connection.execute("SELECT count(*) FROM rollouts WHERE ending IS NOT NULL").fetchone()[0]
    return {"admitted": admitted_count, "open_now": admitted_count - ended_count}


def count_members(connection: sqlite3.Connection, share: float) -> int:
    """Count rollouts with a row, finished or ended, of the groups that a recorder samples for ``share``."""
    sampled_condition = "grp = 0 OR CAST(grp * ?1 AS INTEGER) > CAST((grp - 1) * ?1 AS INTEGER)"
    query = f"SELECT count(*) FROM rollouts WHERE {sampled_condition}"
    return connection.execute(query, (share,)).fetchone()[0]


def read_ends(connection: sqlite3.Connection) -> list[tuple[int, str, str, int | None]]:
    """Read (group, ending, reason, step) of every group that has ended."""
    return connection.execute("SELECT idx, ending, reason, step FROM groups WHERE state = 'ended'").fetchall()


class BatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The column ``groups`` of a batch: a list of parts, each of group indices; a table where it has demonstrations."""

    parts: list[list[int]]
    demonstrations: LoggedDemonstrations | None = None

    @classmethod
    def decode(cls, text: str) -> BatchEntry:
        if text.startswith("["):
            return cls(parts=msgspec.json.decode(text, type=list[list[int]]))
        return msgspec.json.decode(text, type=cls)

    @property
    def text(self) -> str:
        return json.dumps(self.parts if self.demonstrations is None else msgspec.to_builtins(self))

    @property
    def groups(self) -> list[int]:
        """The groups of all parts, in the order of training."""
        return [index for part in self.parts for index in part]


def read_consumed(connection: sqlite3.Connection) -> dict[int, list[int]]:
    """Read the group indices of every trained step, in the order of training, by step."""
    rows = connection.execute("SELECT step, groups FROM batches WHERE outcome = 'trained' ORDER BY step").fetchall()
    return {step: BatchEntry.decode(groups).groups for step, groups in rows}


def read_length_bias(connection: sqlite3.Connection, groups_per_step: int) -> LengthBias:
    """Compute length-bias statistics of everything stored."""
    bias = LengthBias(groups_per_step)
    for index, size in connection.execute("SELECT idx, size FROM groups ORDER BY idx"):
        bias.admit(index, size)
    rows = connection.execute(
        "SELECT grp, ending, length, complete, count(*) FROM rollouts WHERE ending IS NOT NULL"
        " GROUP BY grp, ending, length, complete"
    )
    for index, ending, length, complete, count in rows:
        bias.end(index, ending, length, complete=bool(complete), count=count)
    return bias


def read_drawn_groups(connection: sqlite3.Connection) -> list[DrawnGroup]:
    """Read every group ever admitted, by index: why it was drawn, its ending and its evidence."""
    rows = connection.execute(
        "SELECT idx, task_id, size, admitted_version, draw, ending, reason, step, e.id, e.solved, e.valid,"
        " e.zero_variance, e.version FROM groups LEFT JOIN evidence e ON e.grp = idx ORDER BY idx"
    )
    return [
        DrawnGroup(
            index=index,
            task_id=task_id,
            size=size,
            admitted_version=admitted,
            draw=None if draw is None else _draw_decoder.decode(draw),
            ending=ending,
            reason=reason or "",
            step=step,
            evidence=None
            if row_id is None
            else TaskEvidence(group=index, solved=solved, valid=valid, zero_variance=bool(is_flat), version=version),
            finished_as=row_id or 0,
        )
        for index, task_id, size, admitted, draw, ending, reason, step, row_id, solved, valid, is_flat, version in rows
    ]
