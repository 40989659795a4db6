"""The durable buffer: lifecycle, refusals, resume, retention, full disk, damaged files."""

import shutil
import sqlite3

import pytest

from headway.buffer.readers import read_history
from headway.buffer.store import GroupBuffer
from headway.records.curriculum import Draw, TaskEvidence
from headway.records.environment import PartialRollout
from headway.records.errors import AccountingError, BufferCorrupt, BufferFull, StorageFailed
from headway.records.generation import PartialResponse, VersionSpan
from headway.records.rollout import Batch, Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import EXPERTS, TokenRows

FAILURE = Failure(boundary="engine", cause="died twice", infrastructure=True)


def group(index, size=2, version=0):
    task = Task(task_id=f"{index:016x}", prompt=f"{index}+1=", answer=str(index + 1), metadata={"n": [1, 2]})
    return Group(
        index=index, task=task, prompt_ids=(5, 6, 7), size=size, admitted_version=version, admitted_s=float(index)
    )


def rollout(owner, member, length=4, failed=False):
    return Rollout(
        group=owner.index,
        member=member,
        prompt_ids=owner.prompt_ids,
        response_ids=tuple(range(length)),
        response_logprobs=(-0.5,) * length,
        response_mask=(True,) * length,
        versions=(VersionSpan(version=owner.admitted_version, tokens=length),) if length else (),
        finish_reason="error" if failed else "stop",
        reward=float(member % 2),
        solved=member % 2 == 1,
        failure=FAILURE if failed else None,
        finished_s=3.0,
        token_rows={EXPERTS: TokenRows.of([[member, 2]] * (length + 2))},
    )


def finished(owner, failed=()):
    return FinishedGroup(group=owner, rollouts=tuple(rollout(owner, m, failed=m in failed) for m in range(owner.size)))


def reopened(path, tmp_path, name="crash"):
    """The files as kill -9 would leave them now: copied without closing, opened elsewhere."""
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in path.parent.glob("buffer.db*"):
        shutil.copy(file, folder / file.name)
    return GroupBuffer(folder / "buffer.db", 8)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "buffer.db"


@pytest.fixture
def buffer(path):
    opened = GroupBuffer(path, 8)
    yield opened
    opened.close()


def train(buffer, *indices):
    step = buffer.completed_steps
    buffer.commit_batch(Batch(step=step, groups=indices))
    buffer.complete_step(step, "trained")


def admitted(buffer, count, size=2, version=0):
    groups = [group(buffer.next_index + i, size, version) for i in range(count)]
    for g in groups:
        buffer.admit(g)
    return groups


def test_records_come_back_exactly_as_they_went_in(buffer, path, tmp_path):
    owner = group(0, 3)
    done = finished(owner, failed={1})
    buffer.admit(owner)
    buffer.finish_group(done)
    again = reopened(path, tmp_path)
    assert again.load([0]) == (done,)
    assert again.open_groups()[0].finished == done
    assert again.next_index == 1
    assert again.audit() == []


def test_admissions_are_written_with_the_next_transition(buffer, path, tmp_path):
    first, second = admitted(buffer, 2)
    lost = reopened(path, tmp_path, "before")
    assert (lost.next_index, lost.open_groups(), lost.rollout_counts()["admitted"]) == (0, [], 0)
    buffer.finish_group(finished(second))
    kept = reopened(path, tmp_path, "after")
    assert [(r.group, r.state) for r in kept.open_groups()] == [(first, "open"), (second, "buffered")]
    assert (kept.next_index, kept.audit()) == (2, [])
    buffer.admit(group(2))
    buffer.close()
    assert GroupBuffer(path, 4).next_index == 3


def test_open_groups_are_generated_again_and_failed_members_of_finished_ones_have_ended(buffer, path, tmp_path):
    owner, unfinished = admitted(buffer, 2, size=3)
    buffer.finish_group(finished(owner, failed={0}))
    again = reopened(path, tmp_path)
    first, second = again.open_groups()
    assert (first.state, first.finished) == ("buffered", finished(owner, failed={0}))
    assert (second.state, second.finished, second.rollouts) == ("open", None, ())
    assert again.accounting().open_rollouts == 5  # the failed one has ended
    assert dict(again.accounting().failures) == {"engine": 1}
    again.end_group(unfinished.index, "overdue", "budget")
    train(again, 0)
    assert dict(again.accounting().endings) == {"trained": 2, "failed": 1, "overdue": 3}
    assert again.audit() == []


def test_a_committed_batch_is_pending_after_a_kill_and_is_trained_unchanged(buffer, path, tmp_path):
    for owner in admitted(buffer, 3):
        buffer.finish_group(finished(owner))
    buffer.commit_batch(Batch(step=0, groups=(0, 2)))
    again = reopened(path, tmp_path)
    pending = again.pending_batch()
    assert pending is not None
    assert (pending.step, pending.attempt, pending.outcome) == (0, 0, None)
    assert [g.group.index for g in pending.groups] == [0, 2]
    with pytest.raises(AccountingError, match="should be open or buffered, but is batched"):
        again.end_group(0, "overdue", "budget")
    with pytest.raises(AccountingError, match="is committed and not completed"):
        again.commit_batch(Batch(step=0, groups=(1,)))
    again.complete_step(0, "trained")
    assert again.pending_batch() is None
    assert again.completed_steps == 1
    assert again.consumed() == {0: [0, 2]}
    assert again.audit() == []


def test_a_batch_committed_in_parts_is_pending_and_replayed_in_the_same_parts(buffer, path, tmp_path):
    for owner in admitted(buffer, 4):
        buffer.finish_group(finished(owner))
    buffer.commit_batch(Batch(step=0, groups=(1, 3)))
    buffer.commit_batch(Batch(step=0, groups=(0,)), further=True)
    again = reopened(path, tmp_path)
    pending = again.pending_batch()
    assert pending is not None
    assert [[g.group.index for g in part] for part in pending.parts] == [[1, 3], [0]]
    for refused in (
        lambda: again.commit_batch(Batch(step=0, groups=(2,))),  # not said to be a further part
        lambda: again.commit_batch(Batch(step=0, groups=(0,)), further=True),  # in it already
        lambda: again.commit_batch(Batch(step=1, groups=(2,)), further=True),
    ):
        with pytest.raises(AccountingError):
            refused()
    again.commit_batch(Batch(step=0, groups=(2,)), further=True)
    assert again.audit() == []
    again.complete_step(0, "trained")
    assert again.consumed() == {0: [1, 3, 0, 2]}
    assert again.audit() == []
    with pytest.raises(AccountingError, match="no batch is committed"):
        again.commit_batch(Batch(step=1, groups=(4,)), further=True)


def test_replay_gives_the_same_batches_with_payloads_and_changes_nothing(buffer):
    for owner in admitted(buffer, 4):
        buffer.finish_group(finished(owner))
    train(buffer, 1)
    train(buffer, 0)
    buffer.commit_batch(Batch(step=2, groups=(2, 3)))
    logged = list(buffer.batches_since(1))
    assert [(b.step, b.outcome, [g.group.index for g in b.groups]) for b in logged] == [
        (1, "trained", [0]),
        (2, None, [2, 3]),
    ]
    assert logged[0].groups[0] == finished(group(0))
    buffer.complete_step(1, "trained")  # replayed: already known
    assert buffer.completed_steps == 2
    with pytest.raises(AccountingError, match="ends as skipped"):
        buffer.complete_step(1, "skipped")  # the replay must not end otherwise
    with pytest.raises(BufferCorrupt, match="the log ends at step 3"):
        list(buffer.batches_since(4))


def test_a_skipped_step_discards_its_groups_and_the_step_is_tried_again(buffer):
    for owner in admitted(buffer, 2):
        buffer.finish_group(finished(owner))
    assert buffer.commit_batch(Batch(step=0, groups=(0,))) == 0
    buffer.complete_step(0, "skipped", "loss is nan")
    assert buffer.completed_steps == 0
    assert buffer.commit_batch(Batch(step=0, groups=(1,))) == 1
    buffer.complete_step(0, "trained")
    assert [(b.step, b.attempt) for b in buffer.batches_since(0)] == [(0, 1)]
    assert dict(buffer.accounting().reasons) == {("discarded", "skipped: loss is nan"): 2, ("trained", "step 0"): 2}
    assert buffer.audit() == []


def test_payloads_stay_until_the_oldest_kept_checkpoint_covers_them(buffer, path):
    def stored():
        return [r[0] for r in sqlite3.connect(path).execute("SELECT DISTINCT id >> 16 FROM payloads ORDER BY 1")]

    owners = admitted(buffer, 5)
    for owner in owners[:4]:
        buffer.finish_group(finished(owner))
    train(buffer, 0)
    train(buffer, 1)
    train(buffer, 2)
    assert stored() == [0, 1, 2, 3]
    assert buffer.release_covered(2) == 2
    assert stored() == [2, 3]
    assert buffer.release_covered(1) == 0  # an older mark changes nothing
    assert [b.step for b in buffer.batches_since(2)] == [2]
    with pytest.raises(BufferCorrupt, match="released, so a checkpoint of at least that version is needed"):
        list(buffer.batches_since(1))
    with pytest.raises(AccountingError, match="3 steps are completed"):
        buffer.release_covered(4)
    buffer.end_group(3, "overdue", "budget")
    buffer.end_group(owners[4].index, "overdue", "budget")
    assert stored() == [2]  # what will never be trained goes at once
    assert buffer.consumed() == {0: [0], 1: [1], 2: [2]}
    assert buffer.audit() == []


def test_capacity_is_reserved_at_admission_so_finishing_never_blocks(path):
    buffer = GroupBuffer(path, 2)
    owners = admitted(buffer, 2)
    with pytest.raises(BufferFull, match="all 2 slots"):
        buffer.admit(group(2))
    for owner in owners:
        buffer.finish_group(finished(owner))
    assert (buffer.statistics().used, buffer.statistics().buffered) == (2, 2)
    buffer.end_group(0, "filtered", "zero_variance")
    buffer.admit(group(2))
    statistics = buffer.statistics()
    assert (statistics.used, statistics.capacity, statistics.peak, statistics.waiters) == (2, 2, 2, 0)
    assert (statistics.open, statistics.buffered) == (1, 1)


def test_age_of_the_oldest_buffered_group(path):
    class Hand:
        t = 10.0

        def now(self):
            return self.t

        async def sleep(self, seconds):
            raise AssertionError

    clock = Hand()
    buffer = GroupBuffer(path, 4, clock)
    for owner in admitted(buffer, 2):
        clock.t += 5
        buffer.finish_group(finished(owner))
    clock.t = 26.0
    assert buffer.statistics().oldest_age_s == 11.0
    train(buffer, 0)
    assert buffer.statistics().oldest_age_s == 6.0
    buffer.end_group(1, "discarded", "end")
    assert buffer.statistics().oldest_age_s == 0.0


def test_whatever_is_out_of_turn_is_refused_and_changes_nothing(buffer):
    a, b = admitted(buffer, 2)
    calls = [
        lambda: buffer.finish_group(finished(group(9))),
        lambda: buffer.finish_group(FinishedGroup(group=a, rollouts=(rollout(a, 0),))),
        lambda: buffer.finish_group(FinishedGroup(group=a, rollouts=(rollout(a, 0), rollout(a, 0)))),
        lambda: buffer.finish_group(FinishedGroup(group=a, rollouts=(rollout(a, 0), rollout(a, 2)))),
        lambda: buffer.finish_group(FinishedGroup(group=a, rollouts=(rollout(a, 0), rollout(b, 1)))),
        lambda: buffer.finish_group(finished(a), "trained", "no"),
        lambda: buffer.commit_batch(Batch(step=0, groups=(0,))),
        lambda: buffer.commit_batch(Batch(step=0, groups=())),
        lambda: buffer.complete_step(0, "trained"),
        lambda: buffer.end_group(0, "trained", "no"),
        lambda: buffer.end_group(7, "overdue", "no"),
        lambda: buffer.admit(group(5)),
        lambda: buffer.admit(group(0)),
    ]
    for call in calls:
        with pytest.raises(AccountingError):
            call()
    buffer.finish_group(finished(a))
    buffer.finish_group(finished(b))
    for call in (
        lambda: buffer.finish_group(finished(a)),
        lambda: buffer.commit_batch(Batch(step=1, groups=(0, 1))),
        lambda: buffer.commit_batch(Batch(step=0, groups=(1, 0))),
        lambda: buffer.commit_batch(Batch(step=0, groups=(1, 1))),
    ):
        with pytest.raises(AccountingError):
            call()
    train(buffer, 0, 1)
    assert dict(buffer.accounting().endings) == {"trained": 4}
    assert buffer.audit() == []


def test_a_full_disk_is_a_clear_error_and_nothing_is_half_written(path):
    buffer = GroupBuffer(path, 4000)
    pages = buffer._connection.execute("PRAGMA page_count").fetchone()[0]
    buffer._connection.execute(f"PRAGMA max_page_count={pages + 30}")

    def fill():
        for index in range(4000):
            buffer.admit(group(index, 8))
            buffer.finish_group(finished(group(index, 8)))

    with pytest.raises(StorageFailed, match="no space left"):
        fill()
    used, next_index = buffer.statistics().used, buffer.next_index
    assert used > 0
    assert buffer.audit() == []
    buffer._connection.execute("PRAGMA max_page_count=1000000")
    for record in buffer.open_groups():
        if record.state == "open":
            buffer.finish_group(finished(record.group))
    assert buffer.audit() == []
    buffer.close()
    again = GroupBuffer(path, 4000)
    assert (again.statistics().used, again.next_index) == (used, next_index)


def test_damaged_foreign_and_newer_files_are_refused_by_name(tmp_path):
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database" * 1000)
    with pytest.raises(BufferCorrupt, match=r"garbage\.db is damaged"):
        GroupBuffer(garbage, 4)

    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    with pytest.raises(BufferCorrupt, match="not a group buffer"):
        GroupBuffer(foreign, 4)

    newer = tmp_path / "newer.db"
    GroupBuffer(newer, 4).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(
        BufferCorrupt,
        match="has schema 99, and this Headway reads schema 7: resume the run with",
    ):
        GroupBuffer(newer, 4)

    with pytest.raises(StorageFailed, match="unable to open"):
        GroupBuffer(tmp_path / "missing" / "buffer.db", 4)


def test_a_page_torn_in_the_middle_is_found_on_opening(tmp_path):
    path = tmp_path / "buffer.db"
    buffer = GroupBuffer(path, 400)
    for owner in admitted(buffer, 60, size=4):
        buffer.finish_group(finished(owner))
    buffer.close()
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(BufferCorrupt, match="damaged"):
        GroupBuffer(path, 400)


def test_length_bias_and_books_are_rebuilt_from_disk(buffer, path, tmp_path):
    owners = admitted(buffer, 4)
    for owner in owners[:3]:
        buffer.finish_group(finished(owner))
    train(buffer, 0, 1)
    buffer.end_group(2, "filtered", "zero_variance")
    buffer.end_group(3, "overdue", "budget")
    again = reopened(path, tmp_path)
    books = again.accounting()
    books.check(**again.rollout_counts())
    assert again.rollout_counts() == {"admitted": 8, "open_now": 0}
    bias = again.length_bias(2)
    statistics = bias.statistics()
    assert [sum(lengths.values()) for lengths in bias.lengths()] == [4, 6]
    assert statistics.censored_share == 0.0  # both cohorts are closed
    assert statistics.cut_share == 0.25
    assert statistics.scheduling_ks > 0


def test_draws_and_what_groups_showed_come_back_in_the_order_of_commits(buffer, path, tmp_path):
    draw = Draw(reason="band", probability=0.25, alpha=1.5, beta=2.5, signal=0.8, min_signal=0.5, size=2)
    owners = [group(index, version=index) for index in range(4)]
    for owner in owners:
        buffer.admit(owner, draw=draw if owner.index % 2 else None)

    def shown(index):
        return TaskEvidence(group=index, solved=1, valid=2, zero_variance=index == 0, version=index)

    buffer.finish_group(finished(owners[2]), evidence=shown(2))
    buffer.finish_group(finished(owners[0]), "filtered", "zero_variance", shown(0))
    buffer.finish_group(finished(owners[1], failed=(0, 1)), "failed", "too_few_valid")
    for again in (buffer, reopened(path, tmp_path)):
        groups = again.drawn_groups()
        assert [one.index for one in groups] == [0, 1, 2, 3]
        assert [one.draw for one in groups] == [None, draw, None, draw]
        assert [one.evidence for one in groups] == [shown(0), None, shown(2), None]
        assert groups[2].finished_as < groups[0].finished_as
        assert [one.ending for one in groups] == ["filtered", "failed", None, None]
        assert [one.reason for one in groups] == ["zero_variance", "too_few_valid", "", ""]
        assert [(one.size, one.admitted_version) for one in groups] == [(2, index) for index in range(4)]
        assert [one.task_id for one in groups] == [owner.task.task_id for owner in owners]
    assert read_history(path) == buffer.drawn_groups()


def test_making_durable_keeps_working_and_is_recorded(buffer, path):
    (owner,) = admitted(buffer, 1)
    buffer.finish_group(finished(owner))
    train(buffer, 0)
    buffer.make_durable()
    assert buffer._connection.execute("PRAGMA synchronous").fetchone()[0] == 1
    assert buffer._meta("durable_version") == 1


def test_parked_members_are_kept_until_their_group_finishes(path, tmp_path):
    buffer = GroupBuffer(path, 8)
    owners = [group(0), group(1)]
    for owner in owners:
        buffer.admit(owner)
    rows = {EXPERTS: TokenRows.of([[3, 1], [], [0, 2]])}
    spans = (VersionSpan(version=3, tokens=2),)
    part = PartialResponse(ids=(7, 8), logprobs=(-0.125, -0.25), versions=spans, token_rows=rows)
    first = PartialRollout(group=0, member=1, response=PartialResponse(), resumes=0)
    again = PartialRollout(group=0, member=1, response=part, resumes=1, environment_version=3)
    for parked in (first, again, PartialRollout(group=1, member=0, response=part, resumes=0)):
        buffer.park(parked)
    assert next(record.parked for record in reopened(path, tmp_path).open_groups()) == (again,)
    buffer.finish_group(finished(owners[0]))
    buffer.end_group(1, "overdue", "budget", {0: (9, True)})
    after = reopened(path, tmp_path)
    assert [record.parked for record in after.open_groups()] == [()]
    assert after.audit() == buffer.audit() == []
    assert after.length_bias(2).statistics().cut_share == 0.0  # group 0 isn't ended: the cohort is open
    with pytest.raises(AccountingError, match="should be open"):
        buffer.park(first)
    buffer.admit(group(2))
    with pytest.raises(AccountingError, match="member 2 of group 2, which has 2"):
        buffer.park(PartialRollout(group=2, member=2, response=part, resumes=0))
