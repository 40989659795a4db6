"""Links between workers: real processes, big payloads, deaths and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_peer import KEY, digest, tensors, workflow
from worker_processes import run

from headway.flow.peers import Hub, new_folder
from headway.flow.segments import PayloadReleased
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.runtime.nodes.handshake import ConnectionRefused, make_key

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

BIG = (1, 25 << 20)  # one tensor of 100 MB


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*")] if folder.exists() else []


def test_calls_go_both_ways_and_carry_remote_tracebacks():
    async def main() -> None:
        async with workflow("a", "b") as (hub, workers, _):
            assert await hub.call("a", "echo", {"x": [1, 2]}) == {"x": [1, 2]}
            assert await workers["a"].call("call_peer", "driver", "echo", 3) == 3
            assert await hub.call("a", "relay", "b", 4) == 4
            assert await workers["b"].call("call_peer", "a", "relay", "b", 5) == 5
            big = tensors(0, *BIG)
            assert await hub.call("a", "digest", big) == digest(big)
            assert digest(await hub.call("a", "relay", "b", big)) == digest(big)
            with pytest.raises(RemoteError, match=r"b\.fail: KeyError: 'no such'") as caught:
                await hub.call("b", "fail", "no such")
            assert "raise KeyError(text)" in caught.value.traceback
            with pytest.raises(RemoteError, match="no public method _hidden"):
                await hub.call("b", "_hidden")
            with pytest.raises(ConfigurationError, match=r"call of b\.echo: arguments\[1\]\['callback'\] = <function"):
                await hub.call("b", "echo", 1, {"x": 2, "callback": lambda: None})

    run(main)
