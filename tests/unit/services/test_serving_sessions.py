"""What `headway serve` keeps of sessions: for how long, how much, and how they are written down when a disk is full."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_serving import ask, sessions

from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.sessions import Session
from headway.records.errors import HeadwayError, Overloaded
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.line_file import LineFile
from headway.services.serve import ServedSessions
from headway.services.session_record import SessionRecord, recorded_line
from headway.tokens.messages import normal_messages


def test_a_long_call_leaves_its_session_all_its_time() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, engine = sessions(clock, over=over)
        engine.takes_s, engine.clock = 500.0, clock
        await ask(access.session("", "x"))  # ends at 500
        await clock.sleep(590)
        access.sweep()
        assert not over
        await clock.sleep(20)
        access.sweep()
        assert [session.rollout for session in over] == ["x"]

    run_virtual(main)


def test_the_longest_unused_end_when_all_keep_too_many_tokens() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=over, max_kept_tokens=450)
        made: list[Session] = []
        for name in "abcdefghijklmn":
            await ask(access.session("", "used"), name)  # by each call it keeps more
            made.append(access.session("", name))
            await ask(made[-1])
        access.sweep()
        gone = [session.rollout for session in over]
        assert gone == list("abcdefghijklmn")[: len(gone)] != []
        left = [*made[len(gone) :], access.session("", "used")]
        assert 400 < sum(session.recorder.kept_tokens for session in left) <= 450
        assert all(recorded_line(session) for session in over)

    run_virtual(main)


def test_who_comes_again_is_not_the_longest_unused() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=over, max_kept_tokens=100)
        first, name = access.session("", "a"), "a"
        while sum(named.tokens for named in access._named.values()) <= 100:  # the last call's tokens are too many
            await ask(access.session("", name))
            name = chr(ord(name) + 1)
        assert not over
        assert access.session("", "a") is first
        assert [session.rollout for session in over] == ["b"]

    run_virtual(main)


def test_no_session_begins_while_those_at_work_keep_too_many_tokens() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, engine = sessions(clock, over=over, max_kept_tokens=100)
        engine.clock, engine.takes_s = clock, 10.0
        busy = access.session("", "busy")
        async with asyncio.TaskGroup() as calls:
            for _ in range(8):
                calls.create_task(ask(busy))
            await clock.sleep(5)
            calls.create_task(ask(busy))
            await clock.sleep(7)
            with pytest.raises(Overloaded, match="the sessions at work have"):
                access.session("", "new")
            assert access.session("", "busy") is busy  # it goes on
            assert access.session("").rollout == ""  # so does who keeps nothing
        assert not over
        access.session("", "new")
        assert over == [busy]

    run_virtual(main)


async def filled(access: ServedSessions, max_kept_tokens: int) -> Session:
    """One session alone that keeps more."""
    session = access.session("", "a")
    while session.recorder.kept_tokens <= max_kept_tokens:
        await ask(session)
    return session


def test_a_reward_reaches_the_session_it_is_posted_for() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=over, max_kept_tokens=100)
        session = await filled(access, 100)
        assert access.rollout("", "a") is session  # though it is what has too many tokens
        access.rollout("", "a").post_reward(1.0)
        assert access.session("", "a") is session  # its own next call doesn't end it
        access.sweep()
        assert [recorded.reward for recorded in over] == [1.0]

    run_virtual(main)


def test_a_session_whose_request_is_being_read_goes_on() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=over, max_kept_tokens=100)
        session = await filled(access, 100)
        with session.attended():
            await clock.sleep(1000)
            access.sweep()
            assert not over
        access.sweep()
        assert over == [session]

    run_virtual(main)


@pytest.mark.slow
def test_a_session_that_is_over_is_freed_without_the_collector() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> ServedSessions:
        access, _ = sessions(clock, over=over)
        session, messages = access.session("", "a"), normal_messages([{"role": "user", "content": "1+2?"}])
        for _ in range(3):
            answering = session.call(CallRequest(messages=messages))
            assert answering.task is not None
            await answering.task
            answering.note_received()
            (turn,) = answering.call.turns
            assert turn is not None
            messages = (*messages, turn.message, *messages[:1])
        assert turn.parent is not None
        access.seal_all()
        return access

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        kept_alive = run_virtual(main)
        over.clear()
        gc.collect()
        kept = {type(thing).__name__ for thing in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept_alive is not None
    assert not kept & {"RecordedTurn", "Answer", "Message", "Recorder", "Session", "InflightCall", "RecordedCall"}


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process get no larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def over_of(*names: str) -> list[Session]:
    found: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=found)
        for name in names:
            await ask(access.session("", name))
        access.session("", "unused")
        access.seal_all()

    run_virtual(main)
    return found


def test_a_full_disk_loses_no_session(tmp_path: Path) -> None:
    path, told = tmp_path / "record.jsonl", list[tuple[str, str]]()
    ended: list[Any] = over_of("a", "b", "c")
    line = len(recorded_line(ended[0]) or b"") + 1
    with LineFile(path) as file, SessionRecord(file, lambda *event: told.append(event)) as record:
        record.add(ended[0])
        with room_for(line + line // 2):
            for session in ended[1:]:
                record.add(session)  # a request's end: it raises nothing
            record.write()
            assert path.stat().st_size == line  # no half of one
        assert [name for name, _ in told] == ["record_waits"]
        record.write()
    assert [json.loads(text)["rollout"] for text in path.read_text().splitlines()] == ["a", "b", "c"]
    assert [name for name, _ in told] == ["record_waits", "record_goes_on"]


def test_what_can_not_be_written_to_the_end_is_said(tmp_path: Path) -> None:
    ended: list[Any] = over_of("a", "b")
    with LineFile(tmp_path / "record.jsonl") as file:
        lost, kept = [SessionRecord(file, lambda *event: None, max_kept_bytes=10) for _ in range(2)]
        with room_for(0):
            for session in ended:
                lost.add(session)
            kept.add(ended[0])
            with pytest.raises(HeadwayError, match=r"2 sessions are lost: .*record.jsonl can't be written"):
                lost.close()
            with pytest.raises(HeadwayError, match=r"1 sessions, \d+ bytes, wait for space"):
                kept.write()
