"""What the fake generator takes its time for, against timelines computed by hand."""

from __future__ import annotations

import asyncio

import pytest

from headway.generator.fake import FakeGenerator
from headway.records.generation import GenerationRequest, GenerationResult, PublishedWeights, SamplingParameters
from headway.runtime.clock import Clock, run_virtual


def request(name: str, length: int, prompt: tuple[int, ...] = (5, 6, 7), **fields) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=1000, seed=length, stop_token_ids=(1,))
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)


def fake(clock: Clock, **options) -> FakeGenerator:
    return FakeGenerator(clock, **{"token_s": 1.0, "slots": 4, "length_of": lambda one: one.sampling.seed, **options})


def published(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path="", checksum="", size_bytes=0)


async def timed(clock: Clock, generator: FakeGenerator, one: GenerationRequest) -> tuple[float, GenerationResult]:
    result = await generator.generate(one)
    return clock.now(), result


def test_a_decode_step_reads_the_kv_of_all_that_run():
    """1 s + 0.5 s a request + 0.01 s a KV token. Alone with a prompt of 3, four tokens: 1.53 + 1.54 + 1.55 + 1.56 s.
    Two of them: 2 s + 0.01 s x (6, 8, 10, 12)."""

    async def main(clock: Clock):
        generator = fake(clock, token_s=lambda running: 1.0 + 0.5 * running, kv_token_s=0.01)
        alone, _ = await timed(clock, generator, request("a", 4))
        both = await asyncio.gather(*(timed(clock, generator, request(name, 4)) for name in "bc"))
        return alone, both[0][0] - alone, both[1][0] - alone

    assert run_virtual(main) == pytest.approx((6.18, 8.36, 8.36))


def test_prefills_stop_decoding_and_siblings_share_their_prompt():
    """Half a second a token. b, two tokens of prompt, comes at t = 2 and holds a up for a second; c has a's prompt."""

    async def main(clock: Clock):
        generator = fake(clock, prefill_token_s=0.5)
        a = asyncio.create_task(timed(clock, generator, request("a", 4)))
        await clock.sleep(2.0)
        b = asyncio.create_task(timed(clock, generator, request("b", 4, prompt=(8, 9))))
        c = asyncio.create_task(timed(clock, generator, request("c", 4)))
        ends = [(await task)[0] for task in (a, b, c)]
        (statistics,) = await generator.statistics()
        return ends, statistics.prefilled_tokens

    ends, prefilled = run_virtual(main)
    assert ends == pytest.approx([6.5, 7.0, 7.0])
    assert prefilled == 5


def test_first_token_comes_after_the_prefill():
    async def main(clock: Clock):
        return await fake(clock, prefill_token_s=0.5).generate(request("a", 4))

    assert run_virtual(main).first_token_s == pytest.approx(2.5)


def test_a_full_kv_preempts_the_youngest():
    """20 KV tokens: two prompts of 3 and 7 tokens each fill them at t = 7. The younger waits for the older one's end
    at t = 10, is prefilled again (10 tokens, 1 s) and generates its last 3 tokens."""

    async def main(clock: Clock):
        generator = fake(clock, kv_capacity_tokens=20, prefill_token_s=0.1)
        jobs = (request("a", 10), request("b", 10))
        (old_s, old), (young_s, young) = await asyncio.gather(*(timed(clock, generator, job) for job in jobs))
        (statistics,) = await generator.statistics()
        return old_s, young_s, old.reprefills, young.reprefills, len(young.response.ids), statistics.preemptions

    old_s, young_s, *rest = run_virtual(main)
    assert (old_s, young_s) == pytest.approx((10.3, 14.3))
    assert rest == [0, 1, 10, 1]


def test_versions_of_a_preempted_request():
    async def main(clock: Clock):
        generator = fake(clock, kv_capacity_tokens=20)
        jobs = [asyncio.create_task(generator.generate(request(name, 10))) for name in "ab"]
        await clock.sleep(8.5)
        await generator.update_weights(published(1))
        return [[(span.version, span.tokens) for span in (await job).response.versions] for job in jobs]

    assert run_virtual(main) == [[(0, 8), (1, 2)], [(0, 7), (1, 3)]]


def test_recompute_prefills_what_runs_again():
    """Prompt prefilled at 0.3 s; two tokens; paused 1 s; five tokens prefilled again in 0.5 s; two more tokens."""

    async def main(clock: Clock):
        generator = fake(clock, prefill_token_s=0.1, update_mode="recompute", update_s=1.0)
        job = asyncio.create_task(timed(clock, generator, request("a", 4)))
        await clock.sleep(2.3)
        await generator.update_weights(published(1))
        return (await job)[0]

    assert run_virtual(main) == pytest.approx(5.8)


def test_replicas_have_slots_of_their_own_and_take_turns():
    async def main(clock: Clock):
        generator = fake(clock, slots=1, replicas=2)
        jobs = [request(name, 4, prompt=(index,) * 3) for index, name in enumerate("abc")]
        ends = [end for end, _ in await asyncio.gather(*(timed(clock, generator, job) for job in jobs))]
        return ends, [engine.finished for engine in await generator.statistics()]

    ends, finished = run_virtual(main)
    assert ends == pytest.approx([4, 4, 8])
    assert sorted(finished) == [1, 2]


def test_a_later_turn_finds_its_kv_until_an_update():
    """Prompt 10 (1 s), 5 tokens; then prompt 17 of which 2 are new (0.2 s); after an update all 24 are prefilled."""

    async def main(clock: Clock):
        generator = fake(clock, prefill_token_s=0.1)
        first, _ = await timed(clock, generator, request("a/0", 5, prompt=(9,) * 10, session="a"))
        second, _ = await timed(clock, generator, request("a/1", 5, prompt=(9,) * 17, session="a"))
        await generator.update_weights(published(1))
        third, _ = await timed(clock, generator, request("a/2", 5, prompt=(9,) * 24, session="a"))
        return first, second - first, third - second

    assert run_virtual(main) == pytest.approx((6.0, 5.2, 7.4))


def test_kv_of_ended_turns_makes_room():
    """Thirty tokens: what a's first turn left is let go when b needs the room, so a's second turn prefills it all."""

    async def main(clock: Clock):
        generator = fake(clock, prefill_token_s=0.1, kv_capacity_tokens=30)
        await generator.generate(request("a/0", 5, prompt=(9,) * 10, session="a"))
        await generator.generate(request("b", 10, prompt=(8,) * 10))
        began = clock.now()
        end, _ = await timed(clock, generator, request("a/1", 5, prompt=(9,) * 17, session="a"))
        return end - began

    assert run_virtual(main) == pytest.approx(6.7)


def test_counted_responses_are_as_long_and_as_versioned():
    async def main(clock: Clock):
        found = []
        for counted in (False, True):
            generator = fake(clock, counted=counted)
            result = await generator.generate(request("a", 12))
            found.append((tuple(result.response.ids), tuple(result.response.logprobs), result.response.versions))
        return found

    plain, counted = run_virtual(main)
    assert plain == counted


def test_requests_of_a_replica_that_rests_go_on_elsewhere():
    """Two replicas, a request of 6 tokens on each; after 2 s the second rests: its request has 2 tokens, waits for the
    other's slot until t = 6 and generates the other 4. A new one goes to the first as well."""

    async def main(clock: Clock):
        generator = fake(clock, slots=1, replicas=2)
        both = [request(name, 6, prompt=(index,) * 3) for index, name in enumerate("ab")]
        jobs = [asyncio.create_task(timed(clock, generator, one)) for one in both]
        waits = asyncio.create_task(generator.generate(request("waits", 3, prompt=(7,) * 3, priority=1)))
        behind = asyncio.create_task(generator.generate(request("behind", 3, prompt=(8,) * 3, priority=1)))
        await clock.sleep(2.0)
        await generator.idle_replicas({1})
        (end_a, _), (end_b, b) = await asyncio.gather(*jobs)
        assert len((await waits).response.ids) == len((await behind).response.ids) == 3
        await generator.generate(request("c", 2))
        engines = await generator.statistics()
        idle = [engine.idle for engine in engines]
        return end_a, end_b, len(b.response.ids), b.reprefills, idle, engines[1].finished

    assert run_virtual(main) == (pytest.approx(6.0), pytest.approx(10.0), 6, 1, [False, True], 0)
