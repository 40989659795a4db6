"""The copy of the books equals the original, row by row."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from headway.buffer.database import Statement
from headway.buffer.replica_service import AccountingReplicaService
from headway.buffer.store import GroupBuffer
from headway.records.curriculum import TaskEvidence
from headway.records.environment import PartialRollout
from headway.records.errors import RunLocked, StorageFailed
from headway.records.generation import PartialResponse, VersionSpan
from headway.records.rollout import Batch, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.runtime.child import WorkerContext

CONTEXT = cast("WorkerContext", None)


def group(index: int, version: int) -> Group:
    task = Task(task_id=str(index), prompt="p")
    return Group(index=index, task=task, prompt_ids=(1,), size=2, admitted_version=version, admitted_s=index / 3)


def finished(index: int, version: int) -> FinishedGroup:
    span = (VersionSpan(version=version, tokens=1),)
    common: dict[str, Any] = {"response_ids": (2,), "response_logprobs": (-1 / 3,), "response_mask": (True,)}
    rollouts = [
        Rollout(group=index, member=m, prompt_ids=(1,), versions=span, reward=m / 7, **common) for m in range(2)
    ]
    return FinishedGroup(group=group(index, version), rollouts=tuple(rollouts))


def transit(buffer: GroupBuffer, chosen: random.Random, open_: list[int], buffered: list[int]) -> None:
    """One random transition."""
    version = buffer.completed_steps
    act = chosen.choice(["admit", "admit", "finish", "finish", "park", "end", "step", "skip", "release"])
    if act == "admit" and buffer.statistics().used < 20:
        open_.append(buffer.next_index)
        buffer.admit(group(buffer.next_index, version))
    elif act == "finish" and open_:
        index = open_.pop(chosen.randrange(len(open_)))
        ending = chosen.choice([None, None, None, "filtered"])
        evidence = TaskEvidence(group=index, solved=1, valid=2, zero_variance=False, version=version)
        buffer.finish_group(finished(index, version), ending, "why", evidence)
        buffered += [index] if ending is None else []
    elif act == "park" and open_:
        response = PartialResponse(ids=(5,), logprobs=(-0.1,), versions=(VersionSpan(version=version, tokens=1),))
        buffer.park(PartialRollout(group=chosen.choice(open_), member=1, response=response, resumes=0))
    elif act == "end" and open_:
        buffer.end_group(open_.pop(), "overdue", "late", {0: (3, True)})
    elif act in ("step", "skip") and len(buffered) >= 2:
        taken = sorted(buffered[:2])
        del buffered[:2]
        buffer.commit_batch(Batch(step=version, groups=tuple(taken)))
        buffer.complete_step(version, "trained" if act == "step" else "skipped", "nan")
    elif act == "release":
        buffer.make_durable()
        buffer.release_covered(max(0, version - 2))


def rows(path: Path) -> dict[str, list[Any]]:
    with sqlite3.connect(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in tables}


@pytest.mark.parametrize("seed", [0, 1])
def test_copy_equals_the_original_after_a_thousand_transitions(tmp_path: Path, seed: int) -> None:
    journal: list[Any] = []
    buffer = GroupBuffer(tmp_path / "buffer.db", 24, journal=journal.append)
    copy = AccountingReplicaService(CONTEXT, folder=str(tmp_path / "copy"))
    chosen, open_, buffered = random.Random(seed), [], []
    for _ in range(100):
        transit(buffer, chosen, open_, buffered)
    with sqlite3.connect(tmp_path / "buffer.db") as connection:
        copy.store(connection.serialize())
    copy.replace(len(journal))
    sent = len(journal)
    for _ in range(900):
        transit(buffer, chosen, open_, buffered)
        if chosen.random() < 0.2 and len(journal) > sent:
            sent = copy.apply(sent + 1, journal[sent:])
    buffer.close()
    sent = copy.apply(sent + 1, journal[sent:]) if len(journal) > sent else sent
    copy.close()
    original, copied = rows(tmp_path / "buffer.db"), rows(tmp_path / "copy" / "buffer.db")
    assert original == copied
    assert sum(map(len, original.values())) > 300
    resumed = GroupBuffer(tmp_path / "copy" / "buffer.db", 24)
    assert resumed.audit() == []


def test_copy_refuses_a_gap_and_a_second_holder_and_sets_another_runs_books_aside(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "buffer.db").write_bytes(b"another's")
    GroupBuffer(tmp_path / "buffer.db", 4).close()
    copy = AccountingReplicaService(CONTEXT, folder=str(folder))
    nothing: list[list[Statement]] = [[]]
    with pytest.raises(StorageFailed):
        copy.apply(1, nothing)
    copy.store((tmp_path / "buffer.db").read_bytes())
    copy.replace(5)
    assert (folder / "buffer.db.old").read_bytes() == b"another's"
    with pytest.raises(StorageFailed, match="transaction 7 reaches"):
        copy.apply(7, nothing)
    assert copy.apply(6, nothing) == 6
    with pytest.raises(RunLocked):
        AccountingReplicaService(CONTEXT, folder=str(folder))
    copy.close()


def test_books_set_aside_are_whole_also_after_a_kill_and_stay_when_the_copys_process_is_replaced(
    tmp_path: Path,
) -> None:
    journal: list[Any] = []
    buffer = GroupBuffer(tmp_path / "buffer.db", 24, journal=journal.append)
    empty = (tmp_path / "buffer.db").read_bytes()
    copy = AccountingReplicaService(CONTEXT, folder=str(tmp_path / "copy"))
    copy.store(empty)
    copy.replace(0)
    buffer.admit(group(0, 0))
    buffer.make_durable()
    copy.apply(1, journal)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "copy", killed)  # what a kill now would leave
    copy.close()
    buffer.close()
    for again in (False, True):
        successor = AccountingReplicaService(CONTEXT, folder=str(killed), again=again)
        successor.store(empty)
        successor.replace(0)
        successor.close()
        assert rows(killed / "buffer.db.old") == rows(tmp_path / "buffer.db")
