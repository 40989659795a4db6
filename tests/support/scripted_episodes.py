"""Rollouts in real sandboxes, played by a script instead of a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.rollout import Failure, Verdict
from headway.records.sandbox import MIB
from headway.records.task import Task
from headway.rollout.hosting.service import Episodes, load_environment
from headway.runtime.clock import RealClock
from headway.sandbox.backends import backend_of
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.pool import SandboxPool, pool_settings

SMALL = {"memory_bytes": 96 * MIB, "disk_bytes": 24 * MIB, "processes": 48}
Turn = str | list[tuple[str, dict[str, Any]]]  # what the policy says, or the tools it calls


def message(turn: Turn) -> dict[str, Any]:
    if isinstance(turn, str):
        return {"role": "assistant", "content": turn}
    calls = [
        {
            "id": f"call-{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(turn)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class Played(msgspec.Struct, kw_only=True):
    """What became of a rollout."""

    verdict: Verdict | None = None
    failure: Failure | None = None
    told: list[str] = []  # what the environment said, a text for each message
    over: str = ""

    @property
    def reward(self) -> float:
        """Of a valid one."""
        assert self.failure is None, self.failure
        assert self.verdict is not None
        assert self.verdict.failure is None, self.verdict.failure
        return self.verdict.reward

    @property
    def outcomes(self) -> dict[str, int]:
        assert self.verdict is not None
        return self.verdict.detail["outcomes"]

    @property
    def lost(self) -> Failure:
        """Why there is no reward."""
        failure = self.failure or (self.verdict.failure if self.verdict else None)
        assert failure is not None, self.verdict
        return failure


class OwnEpisodes(Episodes):
    """With a pool of their own, which ends with them."""

    def __init__(self, settings: EnvironmentConfig, sandbox: SandboxConfig, snapshots: Path | None) -> None:
        self._backend = backend_of(sandbox, snapshots=snapshots)
        clock = RealClock()
        self._boxes = SandboxPool(self._backend, pool_settings(sandbox), clock)
        environment, spec = load_environment(settings), sandbox.spec
        super().__init__(environment, settings, self._boxes, sandbox, spec, clock, snapshots=snapshots or Path())

    async def shut_down(self) -> None:
        await super().shut_down()
        await self._boxes.close()
        await self._backend.close()


def episodes(name: str, parameters: dict[str, Any], snapshots: Path | None = None, **settings: Any) -> OwnEpisodes:
    environment = EnvironmentConfig.model_validate({"name": name, "parameters": parameters, **settings})
    sandbox = SandboxConfig.model_validate({"limits": SMALL})
    return OwnEpisodes(environment, sandbox, snapshots)


def play(
    name: str,
    metadata: dict[str, Any],
    turns: Sequence[Turn],
    parameters: dict[str, Any] | None = None,
    *,
    before_score: Callable[[LocalBackend], Any] | None = None,
    **settings: Any,
) -> Played:
    """One rollout whose policy says ``turns``, to its score. ``before_score`` may harm the sandboxes."""

    async def main() -> Played:
        playing = episodes(name, parameters or {}, **settings)
        played = Played()
        try:
            task = Task(task_id="0", prompt="solve it", metadata=metadata)
            reply = await playing.begin("one", task, 0)
            for turn in turns:
                if reply.asked is None:
                    break
                reply = await playing.reply("one", message(turn), "", False)
                played.told += [str(said["content"]) for said in (reply.asked.messages if reply.asked else ())]
            played.failure, played.over = reply.failure, reply.over
            if played.failure is None:
                if before_score is not None:
                    assert isinstance(playing._backend, LocalBackend)
                    await before_score(playing._backend)
                played.verdict = (await playing.score("one")).verdict
            return played
        finally:
            await playing.end("one")
            await playing.shut_down()

    async def limited() -> Played:
        async with asyncio.timeout(100):
            return await main()

    return asyncio.run(limited())


async def end_sandboxes(backend: LocalBackend) -> None:
    await asyncio.gather(*(box.terminate() for box in list(backend._sandboxes.values())))


async def run_out_of_memory(backend: LocalBackend) -> None:
    """As where the kernel ends even a sandbox's first process, because its files hold all the memory there is."""
    for box in backend._sandboxes.values():
        box._end(-9, 1, None)


async def kill_sandboxes_soon(backend: LocalBackend) -> None:
    """In the middle of what is run in them."""

    async def kill() -> None:
        while not backend._sandboxes:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert backend._maker is not None
        assert backend._maker._process is not None
        backend._maker._process.kill()

    _KILLING.add(asyncio.create_task(kill()))


_KILLING: set[asyncio.Task[None]] = set()


def need_limits() -> None:
    """Skip where no sandbox's memory can be limited as a whole."""

    async def able() -> bool:
        async with LocalBackend() as backend:
            return (await backend.capabilities()).fit_for_untrusted

    if not asyncio.run(able()):
        pytest.skip("no control groups to be made here")
