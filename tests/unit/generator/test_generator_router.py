"""The router in its pool: deaths, newcomers, leavers, who takes what, foreign callers, and all of it in any order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_setting import Setting, playing, published, request, requests

from headway.records.counted import tokens_from
from headway.records.errors import ConfigurationError, HeadwayError, WeightsCorrupt, WorkerDied
from headway.records.generation import SamplingParameters
from headway.runtime.clock import Clock

# --- deaths, newcomers, leavers -------------------------------------------------------------------------------


def test_a_death_a_restart_and_a_third_replica_lose_and_double_nothing():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        await one.pool.update_weights(published(3))
        one.ask(*requests(16, length=50))
        await clock.sleep(2.05)
        one.workers[0].kill()
        name = await one.pool.join("cpu:2")  # takes the 1 s in which a worker starts
        one.ask(*(request(f"late{i}", 50) for i in range(4)))
        await clock.sleep(0.5)
        assert one.open_requests() == [2, 16, 2]  # the restarted one was as empty as the newcomer
        results = await one.end()
        assert [len(result.response.ids) for result in results] == [50] * 20
        assert {span.version for result in results for span in result.response.versions} == {3}
        assert sorted(result.resumes for result in results[:16]) == [0] * 8 + [1] * 8
        for result in results:  # a token depends on seed and position alone: what moved has no gap and no repeat
            assert result.response.ids == results[0].response.ids
        assert name == "generator-2"
        assert one.events[:2] == ["generator_died generator-0", "breaker_opened generator-0"]
        assert sorted(one.events[2:]) == [
            "breaker_closed generator-0",
            "generator_joined generator-2 on cpu",
            "generator_restarted generator-0",
        ]
        return one.pool.routing()

    routing = playing(scene)
    assert (routing.routed, routing.moves, routing.breaker_openings, routing.breakers_open) == (28, 8, 1, 0)


def test_a_newcomer_has_the_newest_version_before_its_first_request():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1, slots=2, update_s=2.0)
        await one.pool.start()
        await one.pool.update_weights(published(1))
        joining = asyncio.create_task(one.pool.join("cpu:2"))
        await clock.sleep(2.0)  # it is applying version 1 ...
        one.ask(*requests(4))
        await one.pool.update_weights(published(2))  # ... and another is announced
        assert len(one.workers) == 2
        await joining
        one.ask(request("new", 5))
        await clock.sleep(0.1)
        assert one.workers[1].engine.core.open == 1
        assert one.workers[1].engine.core.version == 2
        assert (await one.jobs[-1]).response.versions[0].version == 2
        assert await one.pool.applied_version() == 2
        await one.end()

    playing(scene)


def test_a_newcomer_that_cant_start_leaves_nothing_behind():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1)
        await one.pool.start()
        await one.pool.update_weights(published(1))
        start = one.launcher.start

        async def corrupt(spec: Any) -> Any:
            worker = await start(spec)
            worker.corrupt = True
            return worker

        one.launcher.start = corrupt
        with pytest.raises(WeightsCorrupt):
            await one.pool.join("cpu:2")
        assert [worker.alive for worker in one.workers] == [True, False]
        assert [state.name for state in one.pool.worker_states] == ["generator-0"]

        async def refuse(spec: Any) -> Any:
            raise ConfigurationError("no such device")

        one.launcher.start = refuse
        with pytest.raises(ConfigurationError):
            await one.pool.join("cuda:7")
        one.ask(request("a", 5))
        assert len(await one.pool.statistics()) == 3  # places keep their meaning
        await one.end()

    playing(scene)


@pytest.mark.parametrize("move", [False, True])
def test_a_leaver_finishes_or_hands_over_and_its_process_ends(move):
    async def scene(clock: Clock):
        one = Setting(clock, slots=16)
        await one.pool.start()
        one.ask(*requests(8, length=50))
        await clock.sleep(2.01)
        leaving = asyncio.create_task(one.pool.leave("generator-0", move=move))
        await clock.sleep(0.1)
        one.ask(request("late", 5))
        await clock.sleep(0.1)
        assert [worker.alive for worker in one.workers] == [not move, True]
        assert one.open_requests() == ([9] if move else [4, 5])
        await leaving
        assert clock.now() < 8.0
        assert [worker.alive for worker in one.workers] == [False, True]
        with pytest.raises(ValueError, match="last live replica"):
            await one.pool.leave("generator-1")
        with pytest.raises(ValueError, match="'generator-0' isn't a live replica; valid: generator-1"):
            await one.pool.leave("generator-0")
        left, stays = await one.pool.statistics()
        assert (left.idle, left.running, stays.idle) == (True, 0, False)
        assert left.generated_tokens > 0
        results = await one.end()
        assert [len(result.response.ids) for result in results] == [50] * 8 + [5]
        assert sum(result.resumes for result in results) == (4 if move else 0)
        assert one.events == ["generator_left generator-0"]

    playing(scene)


def test_a_death_while_draining_is_no_loss_and_no_restart():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.ask(*requests(4, length=50))
        await clock.sleep(1.0)
        leaving = asyncio.create_task(one.pool.leave("generator-0"))
        await clock.sleep(0.1)
        one.workers[0].kill()
        await leaving
        assert sum(result.resumes for result in await one.end()) == 2
        assert len(one.workers) == 2

    playing(scene)


def test_a_leaver_nobody_waits_for_hands_over_at_once():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.ask(*requests(4, length=50))
        await clock.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await one.pool.leave("generator-0")
        await clock.sleep(0.1)
        assert one.open_requests() == [4]
        assert sum(result.resumes for result in await one.end()) == 2
        assert one.events == ["generator_left generator-0"]

    playing(scene)


def test_when_the_last_one_leaves_after_the_others_were_lost_what_waits_fails():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.workers[0].slow_down(5.0)
        first, second = one.ask(*requests(2, length=90))
        await clock.sleep(0.1)
        leaving = asyncio.create_task(one.pool.leave("generator-0"))
        await clock.sleep(0.1)

        async def refuse(spec: Any) -> Any:
            raise HeadwayError("no memory")

        one.launcher.start = refuse
        one.workers[1].kill()
        await clock.sleep(30.0)
        assert one.events[-1].startswith("generator_lost")
        assert one.pool.routing().waiters == 1
        await leaving
        assert (await first).finish_reason == "stop"
        with pytest.raises(WorkerDied, match="no memory"):
            await second
        with pytest.raises(WorkerDied, match="no memory"):
            await one.pool.generate(request("late"))
        await one.pool.stop()

    playing(scene)


@pytest.mark.parametrize("how", ["death", "rest", "refusal"])
def test_a_cancelled_request_ends_whatever_becomes_of_its_replica(how):
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        bad = one.workers[0]
        recover = bad.hang() if how == "refusal" else None
        bad.refuse = int(how == "refusal")
        one.ask(*requests(2, length=50))
        await clock.sleep(0.5)
        recover = recover or bad.hang()
        one.pool.cancel("r0")  # which the replica doesn't hear of
        await clock.sleep(0.1)
        assert not one.jobs[0].done()
        if how == "death":
            bad.kill()
        elif how == "rest":
            await one.pool.idle_replicas({0})
        else:
            recover()
        await clock.sleep(0.1)
        assert one.jobs[0].done()
        recover()
        first, second = await one.end()
        assert (first.finish_reason, second.finish_reason) == ("abort", "stop")
        assert len(first.response.ids) < 10

    playing(scene)


def test_a_request_that_cant_be_sent_fails_alone():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1)
        await one.pool.start()
        wide = msgspec.structs.replace(request("wide"), prompt_ids=(1, 2**70))
        broken = msgspec.structs.replace(request("broken"), sampling=SamplingParameters(stop=("\ud800",)))
        one.ask(request("a"), wide, broken, request("b"))
        results = await one.end()
        assert [result.finish_reason for result in results] == ["stop", "error", "error", "stop"]
        assert "can't be sent" in results[1].error
        assert [result.refused for result in results] == [False, True, True, False]
        assert one.events == []

    playing(scene)


# --- who takes what -------------------------------------------------------------------------------------------


def test_later_turns_go_where_their_session_is_unless_that_costs_more_than_it_saves():
    async def scene(clock: Clock):
        one = Setting(clock, slots=16, router={"prefix_block_tokens": 5})
        await one.pool.start()
        begin = tuple(range(1000, 1010))
        (result,) = await asyncio.gather(*one.ask(request("t1", 5, prompt=begin, session="s")))
        turn = (*begin, *result.response.ids, 1, 2, 3)  # of whose 18 tokens the first 15 are there
        found: list[tuple[list[int], int]] = []
        for asked in (
            request("x", 50, prompt=tuple(range(10))),  # 110 tokens
            request("y", 50, prompt=(1,)),  # 101
            request("t2", 50, prompt=turn, session="s"),  # 118: 9 ahead is less than 15
            request("z", 50, prompt=(2,)),
            request("t3", 50, prompt=turn, session="s"),  # 228 to 202: 26 ahead is more than 18
        ):
            one.ask(asked)
            await clock.sleep(0.01)
            found.append((one.open_requests(), one.pool.routing().spills))
        await one.end()
        return found

    assert playing(scene) == [([1, 0], 0), ([1, 1], 0), ([2, 1], 0), ([2, 2], 0), ([2, 3], 1)]


def test_a_turn_whose_history_was_rewritten_is_worth_what_it_still_shares():
    async def scene(clock: Clock):
        one = Setting(clock, slots=16, router={"prefix_block_tokens": 5})
        await one.pool.start()
        begin = tuple(range(1000, 1010))
        await asyncio.gather(*one.ask(request("t1", 5, prompt=begin, session="s")))
        one.ask(request("x", 50, prompt=tuple(range(8))), request("y", 50, prompt=(1,)))  # 108 and 101 tokens
        await clock.sleep(0.01)
        one.ask(request("t2", 50, prompt=(*begin[:5], 7, 7, 7), session="s"))  # 7 ahead is more than 5
        await clock.sleep(0.01)
        assert one.open_requests() == [1, 2]
        await one.end()

    playing(scene)


def test_a_prompt_is_shared_while_it_saves_more_than_it_costs_and_spills_then():
    """Prompts of 15 tokens, at most 100 of response: the replica that has the prompt may be ahead by 15."""

    async def scene(clock: Clock):
        one = Setting(clock, slots=16)
        await one.pool.start()
        prompt = tuple(range(15))
        for number in range(4):
            one.ask(request(f"r{number}", 50, prompt=prompt))
            await clock.sleep(0.1)
        assert one.open_requests() == [2, 2]
        routing = one.pool.routing()
        await one.end()
        return routing.spills

    assert playing(scene) == 1  # the second: from then on both have it


def test_an_update_voids_what_replicas_hold():
    async def scene(clock: Clock):
        one = Setting(clock, slots=16)
        await one.pool.start()
        prompt = tuple(range(19))
        await asyncio.gather(*one.ask(request("a", 5, prompt=prompt)))
        one.ask(request("load", 90, prompt=(1,)))
        await clock.sleep(0.1)
        assert one.open_requests() == [1, 0]
        await one.pool.update_weights(published(1))
        one.ask(request("b", 90, prompt=prompt))
        await clock.sleep(0.1)
        assert one.open_requests() == [1, 1]
        spills = one.pool.routing().spills
        await one.end()
        return spills

    assert playing(scene) == 0


@pytest.mark.parametrize(("adapters", "spills"), [(("poet",) * 4, 1), (("poet", "poet", "", "critic"), 0)])
def test_a_prompt_is_shared_by_the_requests_of_one_adapter(adapters, spills):
    """The first two leave it on the first replica, one as a prompt, one as a session; the last two begin with it where
    there is less to do."""

    async def scene(clock: Clock):
        one = Setting(clock, slots=16, router={"prefix_block_tokens": 5})
        await one.pool.start()
        prompt = tuple(range(19))
        asked = [
            request(name, 5, prompt=prompt, adapter=mine, session="s")
            for name, mine in zip("abcd", adapters, strict=True)
        ]
        for early in asked[:2]:
            await asyncio.gather(*one.ask(early))
        for number, late in enumerate(asked[2:]):
            one.ask(request(f"load{number}", 90, prompt=(1,)))
            await clock.sleep(0.1)
            one.ask(late)
            await clock.sleep(0.1)
        found = one.pool.routing().spills
        await one.end()
        return found

    assert playing(scene) == spills


def test_lent_ones_are_asked_only_when_the_others_are_full():
    async def scene(clock: Clock):
        one = Setting(clock, slots=2)  # room for two requests of 120 tokens each
        await one.pool.start()
        await one.pool.pause_replicas([1])
        for expected in ([1, 0], [2, 0], [2, 1], [2, 2]):
            one.ask(request(f"r{sum(expected)}", 50, prompt=(sum(expected),)))
            await clock.sleep(0.01)
            assert one.open_requests() == expected
        await one.pool.resume_replicas([1])
        await one.end()

    playing(scene)


def test_held_requests_go_on_oldest_first():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1, slots=1)
        await one.pool.start()
        one.workers[0].kill()
        await clock.sleep(0.1)
        for number, priority in enumerate([5, 1, 3, 1, 9, 0, 7, 2, 8, 4, 3]):
            one.ask(request(f"r{number}", 10 * priority + number % 10, priority=priority))
            await asyncio.sleep(0)
        assert one.pool.routing().waiters == 11
        await one.end()
        return one.seen

    assert playing(scene) == ["5", "11", "13", "27", "32", "30", "49", "50", "76", "88", "94"]


# --- foreign callers ------------------------------------------------------------------------------------------


# --- whatever happens -----------------------------------------------------------------------------------------

EVENTS = ("kill", "refuse", "fail", "mend", "corrupt", "hang", "cancel", "rest", "update", "join", "leave")
TROUBLE = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", *EVENTS)),
        st.integers(0, 3),
        st.floats(0, 2, allow_nan=False),
    ),
    max_size=25,
)


@given(trouble=TROUBLE, length=st.integers(1, 40), mode=st.sampled_from(("keep", "drain")))
@settings(deadline=None, max_examples=60)
def test_every_request_ends_once_with_its_own_tokens(trouble, length, mode):
    """Deaths, refusals, failures, stalls, newcomers, leavers, rests, cancellations and updates that fail, in any order:
    every request ends, with exactly its tokens unless its replica failed it, never under older weights than it had;
    nothing stays outstanding."""

    async def scene(clock: Clock):
        one = Setting(clock, router={"failures_to_open": 2, "successes_to_close": 1}, slots=3, mode=mode)
        await one.pool.start()
        version, asked, kills = 0, 0, 0
        leaving: list[asyncio.Task[None]] = []
        cancelled: set[str] = set()
        for what, number, wait_s in trouble:
            live = [worker for worker in one.workers if worker.alive]
            worker = live[number % len(live)] if live else None
            if what == "ask":
                one.ask(*(request(f"r{asked + i}", length, priority=asked + i) for i in range(3)))
                asked += 3
            elif what == "kill" and worker and kills < 3:
                worker.kill()
                kills += 1
            elif what == "hang" and worker:
                asyncio.get_running_loop().call_later(3.0 * wait_s, worker.hang())
            elif what == "corrupt" and worker and kills < 3:
                worker.corrupt = True  # which kills it at the latest a health check after the next update
                kills += 1
            elif what == "cancel" and asked:
                cancelled.add(f"r{number % asked}")
                one.pool.cancel(f"r{number % asked}")
            elif what == "refuse" and worker:
                worker.refuse = 1
            elif what == "fail" and worker:
                worker.fail = "broken"
            elif what == "mend" and worker:
                worker.fail = ""
            elif what == "rest":
                await one.pool.idle_replicas({number})
            elif what == "update":
                version += 1
                with contextlib.suppress(WeightsCorrupt):
                    await one.pool.update_weights(published(version))
            elif what == "join" and len(one.workers) < 8:
                await one.pool.join(f"cpu:{2 + number}")
            elif what == "leave":
                names = [replica.name for replica in one.pool._replicas if replica.live and not replica.draining]
                if len(names) > 1:
                    leaving.append(
                        asyncio.create_task(one.pool.leave(names[number % len(names)], move=number % 2 == 0))
                    )
            await clock.sleep(wait_s)
        await asyncio.gather(*one.jobs)
        left = await asyncio.gather(*leaving, return_exceptions=True)  # it may have died before it could leave
        assert all(outcome is None or isinstance(outcome, ValueError) for outcome in left)
        results = await one.end()
        versions = range(version + 1)
        for result in results:
            whole = result.finish_reason == "stop"
            assert whole or result.finish_reason == "error" or result.request_id in cancelled
            assert not whole or len(result.response.ids) == length
            assert result.response.ids == tokens_from(length, 0, len(result.response.ids))
            spans = [span.version for span in result.response.versions]
            assert spans == sorted(spans)
            assert set(spans) <= set(versions)
        assert len(results) == asked

    playing(scene, limit_s=100_000)
