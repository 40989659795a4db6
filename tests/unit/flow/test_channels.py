"""The channels of a workflow's own process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.flow.channel import Channel
from headway.flow.channels import Channels
from headway.flow.process import set_current_process
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.stalls.waits import Waits


def test_closed_channels_are_forgotten_though_no_step_ends():
    async def main(clock: Clock) -> int:
        channels = Channels(clock, Waits(clock.now))
        for number in range(1, 1001):
            channels.make("samples", 8, 1000, None, [])
            channels.close_channel(number, "samples")
        return len(channels._states)

    assert run_virtual(main) <= 101


class ScriptedItems:
    """A process whose channel has these items, and is closed."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    async def get(self, number: int, name: str, weight: float | None) -> list[int]:
        return [self.items.pop(0)] if self.items else []

    def chunk_size(self, name: str) -> float:
        return 2


@pytest.mark.parametrize(
    ("arriving", "chunks"),
    [
        ([0, 1, 2, 3], [[0, 1], [2, 3]]),
        ([1, 0, 3, 2], [[0, 1], [2, 3]]),
        ([0, 1, 0, 1, 2, 3], [[0, 1], [2, 3]]),  # a call that was made again put its items again
        ([0, 2, 2, 1, 2, 0, 3], [[0, 1], [2, 3]]),
        ([0, 1, 3, 1, 3, 5], [[0, 1], [3, 5]]),  # 2 and 4 never came
    ],
)
def test_items_in_order_come_once(arriving: list[int], chunks: list[list[int]]):
    async def main() -> list[Any]:
        return [chunk async for chunk in Channel("items", 1).chunks(order=lambda number: number)]

    set_current_process(ScriptedItems(arriving))  # pyright: ignore[reportArgumentType]
    try:
        assert asyncio.run(main()) == chunks
    finally:
        set_current_process(None)
