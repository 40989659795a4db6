"""The fake generator: time, order, versions and updates as the real pool has them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generator.fake import FakeGenerator
from headway.records.clients import Watch
from headway.records.errors import HeadwayError
from headway.records.generation import (
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    PublishedWeights,
    SamplingParameters,
    VersionSpan,
)
from headway.runtime.clock import Clock, run_virtual


def request(name: str, length: int = 4, *, max_tokens: int = 1000, priority: int = 0, **fields) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=max_tokens, seed=length, stop_token_ids=(1,))
    return GenerationRequest(request_id=name, prompt_ids=(5, 6, 7), sampling=sampling, priority=priority, **fields)


def published(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path="", checksum="", size_bytes=0)


def fake(clock: Clock, **options) -> FakeGenerator:
    return FakeGenerator(clock, **{"token_s": 1.0, "slots": 4, "length_of": lambda one: one.sampling.seed, **options})


def spans(result: GenerationResult) -> list[tuple[int, int]]:
    return [(span.version, span.tokens) for span in result.response.versions]


async def timed(clock: Clock, generator: FakeGenerator, one: GenerationRequest) -> tuple[float, GenerationResult]:
    result = await generator.generate(one)
    return clock.now(), result


def test_slots_priorities_and_times():
    """Two slots: the third and fourth start when a slot is free, by priority."""

    async def main(clock: Clock):
        generator = fake(clock, slots=2)
        await generator.start()
        jobs = [request("a", 4), request("b", 6), request("late", 3, priority=9), request("soon", 5, priority=1)]
        return [end for end, _ in await asyncio.gather(*(timed(clock, generator, job) for job in jobs))]

    assert run_virtual(main) == pytest.approx([4, 6, 9, 9])


def test_prefill_and_latency_by_occupancy():
    """token_s(n): two running take 2 s a token together; once alone, 1 s."""

    async def main(clock: Clock):
        generator = fake(clock, token_s=float, prefill_s=lambda one: 0.0)
        jobs = [request("a", 2), request("b", 5)]
        return [end for end, _ in await asyncio.gather(*(timed(clock, generator, job) for job in jobs))]

    assert run_virtual(main) == pytest.approx([4, 7])

    async def with_prefill(clock: Clock):
        return (await timed(clock, fake(clock, prefill_s=lambda one: 2.5), request("a", 4)))[0]

    assert run_virtual(with_prefill) == pytest.approx(6.5)


def test_versions_per_token_across_updates():
    async def main(clock: Clock):
        generator = fake(clock)
        pending = asyncio.create_task(timed(clock, generator, request("a", 6)))
        await clock.sleep(2.5)
        await generator.update_weights(published(1))
        await clock.sleep(1.0)
        await generator.update_weights(published(5))
        assert await generator.applied_version() == 5
        return await pending

    end, result = run_virtual(main)
    assert end == pytest.approx(6)
    assert spans(result) == [(0, 2), (1, 1), (5, 3)]
    assert (result.finish_reason, result.response.ids[-1], len(result.response.ids)) == ("stop", 1, 6)


def test_recompute_pauses_and_counts():
    async def main(clock: Clock):
        generator = fake(clock, update_mode="recompute", update_s=3.0)
        pending = asyncio.create_task(timed(clock, generator, request("a", 4)))
        await clock.sleep(2.0)
        (applied,) = await generator.update_weights(published(1))
        (statistics,) = await generator.statistics()
        assert (applied.reprefilled_tokens, applied.in_flight, applied.pause_s) == (5, 1, 3.0)
        assert statistics.paused_s == pytest.approx(3)
        return await pending

    end, result = run_virtual(main)
    assert end == pytest.approx(7)
    assert (spans(result), result.reprefills) == ([(0, 2), (1, 2)], 1)


def test_requests_finish_on_the_version_they_began_with():
    async def main(clock: Clock):
        generator = fake(clock, update_mode="finish", update_s=0.0)
        old = asyncio.create_task(timed(clock, generator, request("old", 6)))
        await clock.sleep(2.0)
        (applied,) = await generator.update_weights(published(1))
        assert applied.in_flight == 0
        return await old, await timed(clock, generator, request("new", 2))

    (_, old), (_, new) = run_virtual(main)
    assert (spans(old), spans(new)) == ([(0, 6)], [(1, 2)])


def test_abort_update_parks_and_resumes():
    """Running ones come back with their tokens; waiting and uninterruptible ones go on; a resume loses nothing."""

    async def main(clock: Clock):
        generator = fake(clock, slots=2, update_mode="abort", update_s=1.0)
        jobs = [request("a", 6), request("stays", 6, interruptible=False), request("waits", 2)]
        tasks = [asyncio.create_task(timed(clock, generator, job)) for job in jobs]
        await clock.sleep(3.0)
        await generator.update_weights(published(1))
        _, parked = await tasks[0]
        assert (parked.finish_reason, spans(parked), len(parked.response.ids)) == ("abort", [(0, 3)], 3)
        resumed = await timed(clock, generator, request("a", 6, partial=parked.response))
        return resumed, await tasks[1], await tasks[2]

    (resumed_end, resumed), (stays_end, stays), (waits_end, waits) = run_virtual(main)
    assert (waits_end, spans(waits)) == (pytest.approx(6), [(1, 2)])
    assert (stays_end, spans(stays)) == (pytest.approx(7), [(0, 3), (1, 3)])
    assert (resumed_end, spans(resumed)) == (pytest.approx(9), [(0, 3), (1, 3)])
    assert resumed.response.ids == stays.response.ids  # equal seed, equal tokens, interrupted or not
    assert resumed.reprefills == 1


def test_lengths_above_the_limit_are_truncated():
    async def main(clock: Clock):
        return await fake(clock).generate(request("a", 50, max_tokens=8))

    result = run_virtual(main)
    assert (result.finish_reason, len(result.response.ids)) == ("length", 8)
    assert 1 not in result.response.ids


def test_errors_cancellation_and_stop():
    async def main(clock: Clock):
        generator = fake(clock, slots=1, error_of=lambda one: "boom" if one.request_id == "bad" else "")
        failed = await generator.generate(request("bad", 5))
        assert (failed.finish_reason, failed.error, failed.response.ids) == ("error", "boom", ())
        hog = asyncio.create_task(generator.generate(request("hog", 100)))
        after = asyncio.create_task(timed(clock, generator, request("after", 3)))
        await clock.sleep(10)
        hog.cancel()
        end, _ = await after
        assert end == pytest.approx(13)  # the slot was free at once
        again = asyncio.create_task(generator.generate(request("hog", 100)))
        await clock.sleep(4)
        generator.cancel("hog")
        assert len((await again).response.ids) == 4
        last = asyncio.create_task(generator.generate(request("last", 100)))
        await clock.sleep(1)
        await generator.stop()
        with pytest.raises(HeadwayError):
            await last

    run_virtual(main)


JOBS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=12
)  # arrival, length, priority


@given(jobs=JOBS, updates=st.lists(st.integers(1, 15), max_size=4), slots=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_random_schedules(jobs, updates, slots):
    """Whatever the schedule: every request ends once with its length, versions never go back, busy time is exact,
    and the same schedule gives the same results."""

    async def main(clock: Clock):
        generator = fake(clock, slots=slots)

        async def one(index: int, arrival: int, length: int, priority: int):
            await clock.sleep(arrival)
            return await timed(clock, generator, request(f"r{index}", length, priority=priority))

        async def update():
            for version, pause in enumerate(updates, start=1):
                await clock.sleep(pause + 0.5)
                await generator.update_weights(published(version))

        results, _ = await asyncio.gather(asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs))), update())
        return results, await generator.statistics()

    results, (statistics,) = run_virtual(main)
    for (arrival, length, _), (end, result) in zip(jobs, results, strict=True):
        assert len(result.response.ids) == len(result.response.logprobs) == length
        assert end >= arrival + length - 1e-6
        versions = [span.version for span in result.response.versions]
        assert versions == sorted(set(versions))
        assert sum(span.tokens for span in result.response.versions) == length
    total = sum(length for _, length, _ in jobs)
    assert statistics.generated_tokens == total
    assert total / slots - 1e-6 <= statistics.busy_s <= total + 1e-6
    assert (statistics.running, statistics.waiting, statistics.finished) == (0, 0, len(jobs))
    assert run_virtual(main) == (results, [statistics])


# --- watching and cancelling -------------------------------------------------------------------------------


def test_a_watch_is_told_at_exact_tokens_and_may_cancel():
    """token_s = 1: told at 3, 6 and 9 tokens; cancelled at 6, it comes back with 6 tokens at t = 6."""

    async def main(clock: Clock):
        generator = fake(clock)
        told: list[tuple[float, int]] = []

        def note(so_far: PartialResponse) -> None:
            told.append((clock.now(), len(so_far.ids)))
            if len(so_far.ids) == 6:
                generator.cancel("a")

        watched = asyncio.create_task(generator.generate(request("a", 20), Watch(3, note)))
        beside = asyncio.create_task(timed(clock, generator, request("b", 8)))
        result = await watched
        return told, clock.now(), result, (await beside)[0]

    told, end_s, result, beside_s = run_virtual(main)
    assert told == [(3.0, 3), (6.0, 6)]
    assert end_s == pytest.approx(6.0)
    assert (result.finish_reason, len(result.response.ids)) == ("abort", 6)
    assert beside_s == pytest.approx(8.0)


def test_tokens_so_far_count_the_resumed_ones():
    async def main(clock: Clock):
        generator = fake(clock)
        before = PartialResponse(ids=(9, 9), logprobs=(-1.0, -1.0), versions=(VersionSpan(version=0, tokens=2),))
        job = asyncio.create_task(generator.generate(request("a", 20, partial=before)))
        await clock.sleep(5.0)
        found = generator.tokens_so_far("a"), generator.tokens_so_far("unknown")
        generator.cancel("a")
        await job
        return found

    assert run_virtual(main) == (7, 0)
