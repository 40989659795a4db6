"""An inbox: bounded in messages and bytes, in order, without a message that its sender gave up."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from headway.flow.peer_state import Inbox


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


async def give(message: Any) -> Any:
    return message


def test_messages_are_accepted_within_both_bounds_and_received_in_order():
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
                waiting = [size for size, done in zip(sizes, there, strict=True) if done][len(received) :]
                assert there == sorted(there, reverse=True)
                assert 1 <= len(waiting) <= most
                assert len(waiting) == 1 or sum(waiting) <= most_bytes
                received.append((inbox.pop() or (-1,))[0])
            assert received == list(range(len(sizes)))

    asyncio.run(main())


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

    asyncio.run(main())


def test_a_message_that_cannot_be_fetched_fails_its_sender_alone():
    async def main() -> None:
        async def fails() -> Any:
            raise ValueError("gone")

        inbox = Inbox(1, 100)
        failing, waiting = asyncio.create_task(inbox.accept(1, fails)), inbox.changed()
        assert isinstance((await asyncio.gather(failing, return_exceptions=True))[0], ValueError)
        await inbox.accept(1, lambda: give(1))
        await waiting
        assert inbox.pop() == (1,)

    asyncio.run(main())
