"""An inbox: bounded in messages and bytes, in order, without a message that its sender gave up."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headway.flow.inbox import Inbox


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_messages_are_admitted_within_both_bounds_and_received_in_order():
    async def main() -> None:
        rng = random.Random(0)
        for _ in range(200):
            most, most_bytes = rng.randint(1, 4), rng.randint(1, 30)
            inbox, sizes = Inbox(most, most_bytes), [rng.randint(0, 20) for _ in range(10)]
            sent = [asyncio.create_task(inbox.accept(size, lambda n=n: give(n))) for n, size in enumerate(sizes)]
            received: list[int] = []
            while len(received) < len(sizes):
                await settle()
                there = [task.done() for task in sent]
                waiting = [
                    size for size, done in zip(sizes[len(received) :], there[len(received) :], strict=True) if done
                ]
                assert there == sorted(there, reverse=True)
                assert len(waiting) <= most
                assert len(waiting) == 1 or sum(waiting) <= most_bytes
                received.append((inbox.pop() or (-1,))[0])
            assert received == list(range(len(sizes)))

    asyncio.run(main())


async def give(message: Any) -> Any:
    return message


def test_a_message_whose_sender_gave_up_leaves_its_place():
    async def main() -> None:
        inbox = Inbox(1, 100)
        first, second, third = (asyncio.create_task(inbox.accept(1, lambda n=n: give(n))) for n in range(3))
        await settle()
        assert first.done()
        assert not second.done()
        second.cancel()
        await settle()
        assert inbox.pop() == (0,)
        await third
        assert inbox.pop() == (2,)
        assert inbox.pop() is None
        waiting = asyncio.create_task(inbox.changed())
        await settle()
        inbox.fail(ValueError("gone"))
        with pytest.raises(ValueError, match="gone"):
            await waiting

    asyncio.run(main())
