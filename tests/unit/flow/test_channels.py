"""The channels of a workflow's own process."""

from __future__ import annotations

from headway.flow.channels import Channels
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
