"""Environments that are cancelled, left, exited or unstorable: nothing of them goes on, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_sandboxes import FakeBackend, FakeSandbox
from played import TASK, play
from test_environments import SAID, Counting, Raising, waiting

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.environment import EnvironmentState, PartialRollout
from headway.records.rollout import Failure
from headway.records.sandbox import SandboxError, Snapshot, infrastructure_failure
from headway.records.tokens import decoder, encoder
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.hosting.client import WorkerLease
from headway.rollout.hosting.service import EnvironmentService, Episodes
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox.pool import PoolSettings, SandboxPool

SPEC = SandboxConfig().spec
WHY = Failure(boundary="engine", cause="the group is overdue", infrastructure=True)
MESSAGE = {"role": "assistant", "content": "a"}


def episodes_of(environment: Environment, clock: Any, live: int = 1, snapshots: Path = Path()) -> Any:
    backend = FakeBackend(clock)
    pool = SandboxPool(backend, PoolSettings(live=live, retries=0), clock)
    settings = EnvironmentConfig(name="mine:Mine")
    return Episodes(environment, settings, pool, SandboxConfig(), SPEC, clock, snapshots=snapshots), pool, backend


def test_an_environment_that_hangs_at_the_end_keeps_no_sandbox() -> None:
    class Hanging(Environment):
        stopped = False

        async def begin(self, episode: Episode) -> None:
            await episode.sandbox.write("a", "a")

        async def close(self, episode: Episode) -> None:
            if episode.name == "7-1":
                await asyncio.sleep(1e6)
            if episode.name == "7-2":
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    await asyncio.sleep(1e6)  # nor does it hear that it should end

        async def stop(self) -> None:
            self.stopped = True
            await asyncio.sleep(1e6)

    async def main() -> None:
        clock, environment = VirtualClock(), Hanging()
        episodes, pool, backend = episodes_of(environment, clock, live=3)
        for number in range(3):
            await episodes.begin(f"7-{number}", TASK, 3)
        await episodes.shut_down()
        assert environment.stopped
        await pool.close()
        assert backend.sandboxes == {}
        assert clock.now() < 19

    run_virtual(main())


def test_what_is_done_for_a_rollout_ends_before_its_environment_is_closed() -> None:
    class Slow(Environment):
        def __init__(self) -> None:
            self.log: list[str] = []

        async def reply(self, episode: Episode, answer: Answer) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                self.log.append("reply is over")

        async def close(self, episode: Episode) -> None:
            self.log.append("closed")

    async def main() -> None:
        environment = Slow()
        episodes, _, _ = episodes_of(environment, VirtualClock())
        await episodes.begin("7-1", TASK, 3)
        reply = asyncio.create_task(episodes.reply("7-1", MESSAGE, "", False))  # as a worker has it: nobody cancels it
        await asyncio.sleep(1)
        await episodes.end("7-1")
        assert environment.log == ["reply is over", "closed"]
        assert reply.done()
        assert episodes._working == {}

    run_virtual(main())


def test_a_rollout_that_ends_in_line_for_a_sandbox_leaves_the_line() -> None:
    async def main() -> None:
        clock = VirtualClock()
        episodes, pool, backend = episodes_of(Counting(), clock)
        async with pool.lease(SPEC):
            await episodes.begin("7-1", TASK, 3)
            reply = asyncio.create_task(episodes.reply("7-1", MESSAGE, "", False))
            await asyncio.sleep(1)
            assert pool.statistics().waiters == 1
            await episodes.end("7-1")
            assert pool.statistics().waiters == 0
        await asyncio.wait((reply,))
        assert (backend.made, pool.statistics().used) == (1, 0), "none is made for it"

    run_virtual(main())


def test_waiting_in_line_for_a_sandbox_is_not_the_environments_time() -> None:
    class Slow(Counting):
        async def reply(self, episode: Episode, answer: Answer) -> None:
            await super().reply(episode, answer)
            await asyncio.sleep(float(answer.text))

    async def main() -> None:
        clock = VirtualClock()
        episodes, pool, _ = episodes_of(Slow(), clock)
        await episodes.begin("7-1", TASK, 3)
        async with pool.lease(SPEC):
            reply = asyncio.create_task(episodes.reply("7-1", {"role": "assistant", "content": "100"}, "", False))
            await clock.sleep(2000)
        assert (await reply).failure is None
        failure = (await episodes.reply("7-1", {"role": "assistant", "content": "500"}, "", False)).failure
        assert failure is not None
        assert "environment.timeout_s = 300 s" in failure.cause
        await episodes.end("7-1")

    run_virtual(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError("of a task of its own"), SystemExit(2)])
@pytest.mark.parametrize("where", ["begin", "reply", "score"])
def test_an_environment_that_cancels_or_exits_fails_its_rollout_alone(error: BaseException, where: str) -> None:
    async def main() -> None:
        episodes, _, _ = episodes_of(Raising(cast("Exception", error), where), VirtualClock())
        seen: list[Any] = [await episodes.begin("7-1", TASK, 3)]
        if where != "begin":
            seen.append(await episodes.reply("7-1", MESSAGE, "", False))
        if where == "score":
            seen.append((await episodes.score("7-1")).verdict)
        failure = seen[-1].failure
        assert failure is not None
        assert (failure.boundary, failure.infrastructure) == ("environment", False)
        assert failure.cause.startswith(type(error).__name__)

    run_virtual(main())


def test_a_reply_that_can_not_be_sent_is_told() -> None:
    sent: list[Any] = []

    async def reply() -> Any:
        return lambda: None

    service = EnvironmentService.__new__(EnvironmentService)
    service._clock = VirtualClock()
    service._emit = lambda answered: sent.append(pickle.loads(pickle.dumps(answered)))
    run_virtual(service._answer(3, reply(), 0.0))
    [(number, well, why, _)] = sent
    assert (number, well) == (3, False)
    assert "pickle" in why


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_snapshot_that_nobody_will_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async def snapshot(self: FakeSandbox, name: str) -> Snapshot:
        (tmp_path / f"{name}.tar").write_text("files")
        return Snapshot(path=str(tmp_path / f"{name}.tar"), bytes=5, sha256="")

    async def pause(self: FakeSandbox) -> None:
        if ends == "fails":
            raise SandboxError(infrastructure_failure("no answer"))
        await asyncio.sleep(100)

    monkeypatch.setattr(FakeSandbox, "snapshot", snapshot)
    monkeypatch.setattr(FakeSandbox, "pause", pause)

    async def main() -> None:
        episodes, _, _ = episodes_of(Counting(), VirtualClock(), snapshots=tmp_path)
        await episodes.begin("7-1", TASK, 3)
        await episodes.reply("7-1", MESSAGE, "", False)
        parking = asyncio.create_task(episodes.park("7-1"))
        await asyncio.sleep(1)
        await episodes.end("7-1")
        await asyncio.wait((parking,))

    run_virtual(main())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("heard", [True, False])
def test_of_a_park_that_nobody_heard_of_nothing_is_left_and_what_was_heard_of_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    async def snapshot(self: FakeSandbox, name: str) -> Snapshot:
        (tmp_path / f"{name}.tar").write_text("files")
        return Snapshot(path=str(tmp_path / f"{name}.tar"), bytes=5, sha256="")

    class Seat:
        name = "environment-0"

        def __init__(self, episodes: Episodes) -> None:
            self._episodes = episodes
            self.delay_s = 0.0

        async def ask(self, worker: Any, method: str, *arguments: Any) -> tuple[Any, float]:
            result = await asyncio.shield(asyncio.ensure_future(getattr(self._episodes, method)(*arguments)))
            await asyncio.sleep(self.delay_s)  # its answer is under way
            return result, 0.0

    monkeypatch.setattr(FakeSandbox, "snapshot", snapshot)

    async def main() -> str:
        episodes, _, _ = episodes_of(Counting(), VirtualClock(), snapshots=tmp_path)
        seat = Seat(episodes)
        worker = SimpleNamespace(clock_offset_s=50.0)
        seated = WorkerLease(cast("Any", seat), cast("Any", worker), "7-1", 100.0)
        begun = await seated.begin(TASK, 3)
        assert [(tool.start_s, tool.end_s) for tool in begun.tool_times] == [(50.0, 50.0)], "on the run's clock"
        await seated.reply(MESSAGE, "", False)
        first = cast("EnvironmentState", await seated.park()).snapshot
        assert first is not None
        await seated.unpark()
        seat.delay_s = 5.0
        parking = asyncio.create_task(seated.park())
        await asyncio.sleep(10.0 if heard else 1.0)
        parking.cancel()
        await asyncio.wait((parking,))
        await seated.end()
        return first.path

    first = run_virtual(main())
    left = {file.name for file in tmp_path.iterdir()}
    assert first in left
    assert len(left) == (2 if heard else 1)


def test_a_providers_snapshot_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def snapshot(self: FakeSandbox, name: str) -> Snapshot:
        self._backend.snapshots["e2b:team/one"] = dict(self.files)
        return Snapshot(path="e2b:team/one", bytes=0, sha256="")

    monkeypatch.setattr(FakeSandbox, "snapshot", snapshot)

    async def main() -> None:
        episodes, _, backend = episodes_of(Counting(), VirtualClock(), snapshots=Path("/run/sandboxes"))
        reply = await episodes.begin("7-1", TASK, 3)
        reply = await episodes.reply("7-1", MESSAGE, "", False)
        state = await episodes.park("7-1")
        assert isinstance(state, EnvironmentState)
        await episodes.end("7-1")
        other, _, elsewhere = episodes_of(Counting(), VirtualClock(), snapshots=Path("/run/sandboxes"))
        elsewhere.snapshots = backend.snapshots
        assert await other.restore("7-1", TASK, state, reply.asked, {}) is None
        reply = await other.reply("7-1", MESSAGE, "", False)
        assert reply.failure is None
        verdict = (await other.score("7-1")).verdict
        assert verdict is not None
        assert verdict.detail["file"] == "aa"
        await other.end("7-1")

    run_virtual(main())


@pytest.mark.parametrize("odd", [{1: "a"}, {"a", "b"}, 2**70, "\ud800", b"bytes"])
def test_a_state_that_another_process_would_not_get_back_as_it_is_is_refused(odd: Any) -> None:
    class Odd(Counting):
        async def begin(self, episode: Episode) -> None:
            await super().begin(episode)
            episode.state["odd"] = odd

    failure = play(Odd(), SAID, gate=waiting([])).rollout.failure
    assert failure is not None
    assert (failure.boundary, failure.infrastructure) == ("environment", False)
    assert "episode.state must hold JSON types alone" in failure.cause


def test_a_large_integer_in_the_state_comes_back() -> None:
    class Large(Counting):
        async def begin(self, episode: Episode) -> None:
            await super().begin(episode)
            episode.state["large"] = 2**63 + 1

        async def score(self, episode: Episode) -> Any:
            return {**await super().score(episode), "large": episode.state["large"]}

    parked: list[PartialRollout] = []
    first = play(Large(), SAID, gate=waiting(parked))
    kept = decoder(PartialRollout).decode(encoder().encode(parked[0]))
    second = play(Large(), ["b2", "c"], parked=kept, snapshots=first.backend.snapshots)
    assert second.rollout.verdict["large"] == 2**63 + 1


@pytest.mark.parametrize("odd", ["\udcff", 2**70])
def test_what_can_not_be_stored_fails_its_rollout_and_not_the_run(odd: Any) -> None:
    class Odd(Counting):
        async def score(self, episode: Episode) -> Any:
            return {"reward": 1.0, "odd": odd}

    class OddlyEnded(Counting):
        async def reply(self, episode: Episode, answer: Answer) -> None:
            episode.end(f"said {odd}")

        async def score(self, episode: Episode) -> float:
            return 1.0

    played = play(Odd(turns=1), ["a"])
    assert played.rollout.failure is not None
    assert played.rollout.failure.boundary == "reward"
    assert encoder().encode(played.rollout)
    assert encoder().encode(play(Raising(ValueError(odd)), ["a"]).rollout)
    assert encoder().encode(play(OddlyEnded(), ["a"]).rollout)
