"""The owner's end of a sandbox's socket, with somebody hostile at the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headway.records.sandbox import Command, SandboxError, SandboxSpec
from headway.sandbox.guest import wire
from headway.sandbox.leftovers import SandboxRecord
from headway.sandbox.local import sandbox
from headway.sandbox.local.sandbox import LocalSandbox

RECORD = SandboxRecord(id="sb-1", run="", owner_pid=os.getpid(), owner_started=0, ttl_s=1.0, created_s=0.0)


class FakeZygote:
    """Ends what it is asked to, at once."""

    alive = True

    def __init__(self) -> None:
        self.box: LocalSandbox | None = None
        self.asked: list[str] = []

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self.asked.append(message["do"])
        assert self.box is not None
        self.box.on_ended(-9, 0)


@contextlib.asynccontextmanager
async def talking() -> AsyncIterator[tuple[LocalSandbox, FakeZygote, asyncio.StreamReader, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    zygote = FakeZygote()
    zygote.box = box = LocalSandbox(RECORD, SandboxSpec(), zygote, None, 5.0)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    writer.write(wire.frame({"ready": True}))
    await box.open(ours, 5.0)
    yield box, zygote, reader, writer
    writer.close()
    await box.terminate()


async def request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head, body = wire.lengths(await reader.readexactly(wire.LENGTHS.size))
    told = wire.head_from(await reader.readexactly(head))
    await reader.readexactly(body)
    return told


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 8,
        wire.LENGTHS.pack(9, 0) + b"not JSON!",
        wire.LENGTHS.pack(2, 0) + b"[]",
        wire.frame({"no": "id"}),
        wire.frame({"id": "one"}),
        wire.frame({"id": [1]}),
        wire.frame({"id": 1, "more": True}, b"x" * 100),  # more than was requested
        wire.frame({"id": 1}),  # an answer without what was asked for
        wire.frame({"id": 1, "exit_code": "x", "stdout_bytes": {}}),
        wire.frame({"id": 1}, b'[{"name": 3}]'),
        wire.frame({"id": 1}, b"[" * 100_000),
        wire.frame({"id": 1}, b"not JSON"),
        wire.frame({"id": 1}, b'[{"name": "\xff"}]'),
    ],
)
@pytest.mark.parametrize("asked", ["exec", "list"])
def test_whatever_it_says_the_owner_gets_an_error_and_the_sandbox_ends(said: bytes, asked: str):
    async def main():
        async with talking() as (box, zygote, reader, writer):
            calling = asyncio.create_task(box.exec(Command(argv=["true"])) if asked == "exec" else box.list("/"))
            await request(reader)
            writer.write(said)
            with pytest.raises(SandboxError) as raised:
                await asyncio.wait_for(calling, 5)
            assert (raised.value.failure.cause, raised.value.failure.reward_valid) == ("infrastructure", False)
            assert zygote.asked[:1] == ["terminate"]
            assert box.ended

    asyncio.run(main())


def test_answers_that_nobody_waits_for_are_passed_over():
    async def main():
        async with talking() as (box, _, reader, writer):
            writer.write(wire.frame({"id": 77, "error": 1, "what": "x"}) + wire.frame({"ready": True}))
            calling = asyncio.create_task(box.renew(60.0))
            assert (await request(reader))["do"] == "renew"
            writer.write(wire.frame({"id": 1}))
            await calling

    asyncio.run(main())


def test_one_that_dies_in_the_middle_of_a_long_request_says_so():
    async def main():
        async with talking() as (box, zygote, _, writer):
            calling = asyncio.create_task(box.write("big", bytes(64 << 20)))
            await asyncio.sleep(0.1)
            assert not calling.done(), "nobody reads it"
            box.on_ended(None, 0)  # with the zygote
            writer.transport.abort()
            with pytest.raises(SandboxError, match="has died") as raised:
                await asyncio.wait_for(calling, 5)
            assert raised.value.failure.cause == "infrastructure"
            assert zygote.asked == []

    asyncio.run(main())


def test_one_that_doesnt_end_is_told_as_long_as_somebody_could_end_it(monkeypatch: pytest.MonkeyPatch):
    class Deaf(FakeZygote):
        def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
            self.asked.append(message["do"])

    async def main():
        zygote = Deaf()
        box = LocalSandbox(RECORD, SandboxSpec(), zygote, None, 5.0)
        with pytest.raises(SandboxError, match="doesn't end") as raised:
            await box.terminate()
        assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", True)
        box.on_ended(-9, 0)
        await box.terminate()
        assert zygote.asked == ["terminate"]
        zygote.alive = False
        await LocalSandbox(RECORD, SandboxSpec(), zygote, None, 5.0).terminate()

    monkeypatch.setattr(sandbox, "ENDING_S", 0.05)
    asyncio.run(main())


def test_no_answer_is_what_is_told_though_it_doesnt_end_either(monkeypatch: pytest.MonkeyPatch):
    async def main():
        async with talking() as (box, zygote, _, _):
            box._grace_s = 0.05
            zygote.box = LocalSandbox(RECORD, SandboxSpec(), zygote, None, 5.0)  # another: this one doesn't end
            with pytest.raises(SandboxError, match="no answer to renew"):
                await box.renew(60.0)
            box.on_ended(-9, 0)

    monkeypatch.setattr(sandbox, "ENDING_S", 0.05)
    asyncio.run(main())


def test_why_it_couldnt_be_made_is_heard_though_its_end_is_told_first():
    async def main():
        ours, theirs = socket.socketpair()
        zygote = FakeZygote()
        zygote.box = box = LocalSandbox(RECORD, SandboxSpec(), zygote, None, 5.0)
        opening = asyncio.create_task(box.open(ours, 5.0))
        with theirs:
            theirs.sendall(wire.frame({"failed": "snapshot", "error": 74, "what": "snapshot: not a snapshot"}))
        box.on_ended(wire.EXIT_SETUP, 0)
        with pytest.raises(SandboxError) as raised:
            await opening
        assert raised.value.failure.cause == "environment"
        await box.terminate()

    asyncio.run(main())
