"""The router in its pool: foreign callers, what ends a run, and tokens that are taken back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_setting import Setting, playing, published, request, requests

from headway.generator.routing.open_request import OpenRequest
from headway.records.errors import (
    ConfigurationError,
    HeadwayError,
    Overloaded,
    RemoteError,
    WeightsCorrupt,
    WeightsMismatch,
)
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


def test_of_what_begins_anew_no_token_stays():
    """Not those either that it was asked with, though there are as many again."""

    async def scene() -> None:
        before = PartialResponse(ids=(4, 5), logprobs=(-1.0, -2.0), versions=(VersionSpan(version=7, tokens=2),))
        call = OpenRequest(request("a", 90, partial=before), asyncio.get_running_loop().create_future())
        call.absorb(TokenDelta.of("a", [6], [-3.0], version=7), 0.0)
        call.absorb(TokenDelta(request_id="a", void=True), 0.0)
        assert call.partial() == call.resubmission().partial == PartialResponse()
        call.absorb(TokenDelta.of("a", [8, 9], [-1.0, -1.0], version=8), 0.0)
        call.finish("stop")
        assert call.future.result().response.ids == (8, 9)

    asyncio.run(scene())


# --- foreign callers ---


def test_foreign_callers_wait_are_refused_and_free_their_places():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1, slots=1, router={"overcommit": 1.0, "queue_requests": 2, "queue_s": 5.0})
        await one.pool.start()  # room for 120 tokens

        async def foreign(name: str, length: int) -> Any:
            try:
                async with one.pool.limiter.permit(100) as place:
                    result = await one.pool.generate(request(name, length))
                    place.used_tokens = 11 + len(result.response.ids)
            except Overloaded as error:
                return round(clock.now() - 1.0, 3), error.retry_after_s
            return round(clock.now() - 1.0, 3), result.finish_reason

        callers = [asyncio.create_task(foreign(f"f{i}", 30)) for i in range(4)]
        await clock.sleep(0.5)
        routing = one.pool.routing()
        assert (routing.waiters, routing.refusals, routing.open_requests) == (2, 1, 1)
        callers[1].cancel()
        done = await asyncio.gather(*callers, return_exceptions=True)
        assert done[0] == (3.0, "stop")
        assert isinstance(done[1], asyncio.CancelledError)
        assert done[2] == (6.0, "stop")
        assert done[3][0] == 0.0  # at once
        late = [asyncio.create_task(foreign(f"g{i}", 90)) for i in range(2)]
        done = await asyncio.gather(*late)
        assert done[0] == (15.0, "stop")
        assert done[1][0] == pytest.approx(11.0, abs=0.01)  # after queue_s
        assert one.pool.limiter.open_tokens == 0
        assert one.pool.routing().refusals == 2
        assert one.events == ["requests_refused 2 requests wait already; 1 so far"]
        await one.end()

    playing(scene)


def test_stopping_sends_those_who_wait_away():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1, slots=1, router={"overcommit": 1.0})
        await one.pool.start()

        async def foreign() -> None:
            async with one.pool.limiter.permit(100):
                await one.pool.generate(request("a", 90))

        async def second() -> None:
            async with one.pool.limiter.permit(100):
                pass

        jobs = [asyncio.create_task(foreign()), asyncio.create_task(second())]
        await clock.sleep(1.0)
        await one.pool.stop()
        first, waited = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(first, HeadwayError)
        assert isinstance(waited, Overloaded)
        assert one.pool.limiter.waiting == 0

    playing(scene)
