"""The router in its pool: what ends a run, and tokens that are taken back."""

from __future__ import annotations

from typing import Any

import pytest
from router_setting import Setting, playing, published, request, requests

from headway.records.errors import ConfigurationError, HeadwayError, RemoteError, WeightsCorrupt, WeightsMismatch
from headway.records.generation import PartialResponse, TokenDelta, VersionSpan
from headway.runtime.clock import Clock

# --- what no restart mends ------------------------------------------------------------------------------------


async def ended_by(one: Setting, kind: type[Exception]) -> None:
    """Every call raises it, those that are open included."""
    for job in one.jobs:
        with pytest.raises(kind, match="told to"):
            await job
    for call in (one.pool.applied_version, one.pool.statistics, lambda: one.pool.generate(request("z"))):
        with pytest.raises(kind, match="told to"):
            await call()
    await one.pool.stop()


async def mismatched(*_: object) -> None:
    error = WeightsMismatch("it was told to compute something else")
    raise RemoteError("generator-0", "update_weights", str(error), "") from error


def test_a_mismatch_while_a_replica_is_brought_up_ends_the_run():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.workers[0].corrupt = True
        with pytest.raises(WeightsCorrupt):
            await one.pool.update_weights(published(1))
        one.ask(*requests(2, length=90))
        one.workers[0]._update_weights = mismatched
        await clock.sleep(1.5)  # a health check
        await ended_by(one, WeightsMismatch)

    playing(scene)


def test_a_mismatch_in_an_update_ends_the_run():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.ask(*requests(2, length=90))
        worker, right = one.workers[0], one.workers[0]._update_weights

        async def once(*_: object) -> None:
            worker._update_weights = right
            await mismatched()

        worker._update_weights = once
        with pytest.raises(WeightsMismatch):
            await one.pool.update_weights(published(1))
        await ended_by(one, WeightsMismatch)

    playing(scene)


@pytest.mark.parametrize("kind", [WeightsMismatch, ConfigurationError])
def test_a_restart_that_could_not_work_ends_the_run(kind: type[HeadwayError]):
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        starts = 0

        async def refused(spec: Any) -> Any:
            nonlocal starts
            starts += 1
            error = kind("it was told to refuse")
            raise RemoteError(spec.name, "__init__", str(error), "") from error

        one.launcher.start = refused  # type: ignore[method-assign]
        one.ask(*requests(4, length=90))
        await clock.sleep(0.5)
        one.workers[0].kill()
        await clock.sleep(1.0)
        await ended_by(one, kind)
        assert starts == 1

    playing(scene)


def test_a_successor_is_told_that_it_is_one():
    """So that it waits for a server that is away."""

    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        start, told = one.launcher.start, []

        async def watched(spec: Any) -> Any:
            told.append(spec.arguments.get("restarted", False))
            return await start(spec)

        one.launcher.start = watched  # type: ignore[method-assign]
        one.workers[0].kill()
        await clock.sleep(2.0)
        await one.pool.join("cpu:2")
        assert told == [True, False]
        await one.end()

    playing(scene)


# --- tokens that are not to be believed -----------------------------------------------------------------------


def test_void_tokens_are_taken_back():
    """Those the request was asked with stay: they are their caller's."""

    async def scene(clock: Clock):
        one = Setting(clock, replicas=1)
        await one.pool.start()
        before = PartialResponse(ids=(4, 5), logprobs=(-1.0, -2.0), versions=(VersionSpan(version=7, tokens=2),))
        (job,) = one.ask(request("a", 90, partial=before))
        await clock.sleep(2.0)
        (call,) = one.pool._replicas[0].calls.values()
        assert call.tokens > 10
        one.workers[0]._say(TokenDelta(request_id=call.ticket, finish_reason="error", error="not ours", void=True))
        result = await job
        assert (result.finish_reason, result.error, result.response) == ("error", "not ours", before)
        await one.end()

    playing(scene)
