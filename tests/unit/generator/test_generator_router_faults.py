"""The router in its pool: replicas that fail, hang, are slow or behind on versions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from router_setting import Setting, playing, published, request, requests

from headway.records.errors import WeightsCorrupt
from headway.runtime.clock import Clock

# --- breakers and health --------------------------------------------------------------------------------------


def test_a_failing_replica_is_left_alone_but_for_probes_until_it_works():
    async def scene(clock: Clock):
        one = Setting(clock, router={"failures_to_open": 3, "cool_down_s": 2.0, "successes_to_close": 2})
        await one.pool.start()
        bad = one.workers[0]
        bad.fail = "out of memory"
        failed = 0
        for number in range(40):
            (job,) = one.ask(request(f"r{number}", 2))
            failed += (await job).finish_reason == "error"
            if number == 20:
                assert failed == 4  # three, and a probe
                assert "breaker_opened generator-0" in one.events
        assert clock.now() < 20
        bad.fail = ""
        before = failed
        for number in range(40, 90):
            (job,) = one.ask(request(f"r{number}", 2))
            failed += (await job).finish_reason == "error"
        assert failed - before == 0
        assert one.events.count("breaker_closed generator-0") == 1
        assert one.pool.routing().breakers_open == 0
        assert bad.engine.core.finished > 10
        await one.end()

    playing(scene)


def test_while_half_open_there_is_one_probe_at_a_time_whose_first_tokens_decide():
    async def scene(clock: Clock):
        one = Setting(clock, router={"failures_to_open": 1, "cool_down_s": 5.0, "successes_to_close": 1})
        await one.pool.start()
        bad = one.workers[0]
        bad.fail = "broken"
        one.ask(*requests(2, length=90))
        await clock.sleep(1.0)
        assert one.open_requests() == [0, 1]
        bad.fail = ""
        one.ask(*(request(f"s{i}", 90) for i in range(6)))
        await clock.sleep(3.0)
        assert one.open_requests() == [0, 7]  # open: everything goes to the other
        await clock.sleep(1.5)
        one.ask(*(request(f"t{i}", 90) for i in range(6)))
        await clock.sleep(0.05)
        assert one.open_requests() == [1, 12]  # half-open: a single one
        await clock.sleep(0.2)  # it has tokens by now
        one.ask(*(request(f"u{i}", 90) for i in range(6)))
        await clock.sleep(0.1)
        assert one.open_requests() == [7, 12]
        results = await one.end()
        assert [result.finish_reason for result in results].count("error") == 1

    playing(scene)


def test_a_probe_that_is_cancelled_makes_way_for_another():
    async def scene(clock: Clock):
        one = Setting(clock, router={"failures_to_open": 1, "cool_down_s": 2.0, "successes_to_close": 1})
        await one.pool.start()
        bad = one.workers[0]
        bad.fail = "broken"
        await asyncio.gather(*one.ask(request("a", 5)))
        bad.fail = ""
        await clock.sleep(3.0)
        one.ask(request("probe", 90), request("b", 90))
        await clock.sleep(0.05)
        assert one.open_requests() == [1, 1]
        one.pool.cancel("probe")
        await clock.sleep(0.05)
        one.ask(request("next", 90), request("c", 90))
        await clock.sleep(0.05)
        assert one.open_requests() == [1, 2]
        assert (await one.end())[1].finish_reason == "abort"

    playing(scene)


def test_where_all_others_are_gone_requests_wait_for_the_probe():
    async def scene(clock: Clock):
        settings = {"failures_to_open": 1, "cool_down_s": 8.0, "successes_to_close": 1}
        one = Setting(clock, router=settings, start_s=20.0)
        await one.pool.start()
        bad, good = one.workers
        bad.fail = "broken"
        one.ask(*requests(2, length=60))
        await clock.sleep(1.0)
        bad.fail = ""
        good.kill()
        late = one.ask(request("late", 30, priority=5), request("later", 30, priority=6))
        await clock.sleep(1.0)
        routing = one.pool.routing()
        assert (routing.waiters, routing.open_requests) == (3, 3)
        assert routing.oldest_age_s == pytest.approx(2.0)
        assert one.open_requests() == [0]
        await clock.sleep(7.5)
        assert one.open_requests() == [3]  # the oldest was the probe; with its first tokens the others followed
        assert one.seen[-3:] == ["60", "30", "30"]
        await asyncio.gather(*late)
        await one.end()

    playing(scene)


def test_a_lone_replica_fails_its_requests_at_once_instead_of_making_them_wait():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=1, router={"failures_to_open": 2})
        await one.pool.start()
        one.workers[0].fail = "broken"
        results = [await one.ask(request(f"r{i}", 5))[0] for i in range(6)]
        assert [result.finish_reason for result in results] == ["error"] * 6
        assert clock.now() < 1.1
        assert one.events == []
        await one.end()

    playing(scene)


def test_what_a_replica_doesnt_accept_is_tried_on_others_and_then_fails():
    async def scene(clock: Clock):
        one = Setting(clock, replicas=3, router={"failures_to_open": 2})
        await one.pool.start()
        one.workers[0].refuse = 1
        results = await asyncio.gather(*one.ask(*requests(9, length=10)))
        assert [result.finish_reason for result in results] == ["stop"] * 9
        assert one.pool.routing().retries == 3
        for worker in one.workers:
            worker.refuse = 100
        (result,) = await asyncio.gather(*one.ask(request("a")))
        assert (result.finish_reason, "told to refuse" in result.error) == ("error", True)
        assert one.pool.routing().retries == 5
        await one.end()

    playing(scene)


def test_requests_that_no_replica_could_serve_open_no_breaker():
    async def scene(clock: Clock):
        one = Setting(clock, router={"failures_to_open": 1, "cool_down_s": 2.0, "successes_to_close": 1})
        await one.pool.start()
        bad = [msgspec.structs.replace(request(f"bad{i}"), prompt_ids=()) for i in range(8)]
        results = await asyncio.gather(*one.ask(*bad))
        assert {(result.finish_reason, result.error) for result in results} == {("error", "the prompt is empty")}
        assert one.events == []
        one.workers[0].fail = "broken"
        await asyncio.gather(*one.ask(request("a", 5)))
        one.workers[0].fail = ""
        await clock.sleep(3.0)
        (probe,) = one.ask(msgspec.structs.replace(request("probe"), prompt_ids=()))
        await probe
        assert one.pool.routing().breakers_open == 1  # which says nothing of the replica: another is sent
        one.ask(*(request(f"b{i}", 20) for i in range(2)))
        await clock.sleep(0.5)
        assert one.open_requests() == [1, 1]
        assert one.pool.routing().breakers_open == 0
        await one.end()

    playing(scene)


def test_one_that_doesnt_answer_gets_nothing_until_it_does():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        recover = one.workers[0].hang()
        await clock.sleep(5.0)
        assert one.events == ["generator_silent generator-0"]
        one.ask(*requests(4))
        await clock.sleep(1.0)
        assert one.open_requests() == [0, 4]
        recover()
        await clock.sleep(0.1)
        assert one.events[1:] == ["generator_answers generator-0"]
        one.ask(*(request(f"s{i}") for i in range(4)))
        await clock.sleep(0.1)
        assert one.open_requests() == [4, 4]
        await one.end()

    playing(scene)


def test_one_that_hangs_for_ten_minutes_is_killed_and_its_requests_go_on():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.workers[0].slow_down(1e9)
        one.ask(*requests(4))
        await clock.sleep(1.0)
        one.workers[0].hang()
        results = await one.end()
        assert [len(result.response.ids) for result in results] == [20] * 4
        assert sorted(result.resumes for result in results) == [0, 0, 1, 1]
        assert 600 < clock.now() < 610
        died = ["generator_died generator-0", "breaker_opened generator-0"]
        assert one.events[:3] == ["generator_silent generator-0", *died]

    playing(scene, limit_s=2000)


def test_a_slow_replica_gets_less():
    async def scene(clock: Clock):
        one = Setting(clock, slots=4)
        await one.pool.start()
        one.workers[0].slow_down(4.0)

        async def caller(number: int) -> None:
            for turn in range(20):
                await one.pool.generate(request(f"{number}-{turn}", 20, prompt=(number, turn)))

        await asyncio.gather(*(caller(number) for number in range(8)))
        slow, fast = (worker.engine.core.finished for worker in one.workers)
        assert slow + fast == 160
        assert slow < 0.5 * fast
        await one.end()

    playing(scene)


# --- versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heals", [True, False])
def test_a_replica_behind_on_versions_is_drained_said_and_brought_up_or_restarted(heals):
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        one.ask(*requests(2, length=90))
        await clock.sleep(0.1)
        one.workers[0].corrupt = True
        with pytest.raises(WeightsCorrupt):
            await one.pool.update_weights(published(1))
        assert one.events == ["generator_behind generator-0"]
        one.ask(*(request(f"s{i}", 30) for i in range(4)))
        await clock.sleep(0.5)
        assert one.open_requests() == [1, 5]  # it keeps its own
        assert await one.pool.applied_version() == 1, "what takes no requests doesn't hold up admission"
        one.workers[0].corrupt = not heals
        await clock.sleep(2.5)  # a health check; a restart
        said = "caught_up" if heals else "restarted"
        assert f"generator_{said} generator-0" in one.events
        assert ("generator_died generator-0" in one.events) == (not heals)
        assert await one.pool.applied_version() == 1
        one.ask(request("t", 30))
        await clock.sleep(0.1)
        assert one.open_requests()[0] == 1 + heals
        results = await one.end()
        for result in results[2:]:
            assert [span.version for span in result.response.versions] == [1]

    playing(scene)


def test_what_newer_weights_began_never_goes_on_under_older_ones():
    async def scene(clock: Clock):
        one = Setting(clock, router={"health_interval_s": 5.0})
        await one.pool.start()
        one.workers[0].corrupt = True
        with pytest.raises(WeightsCorrupt):
            await one.pool.update_weights(published(1))
        one.ask(*requests(2, length=50))
        await clock.sleep(1.0)
        one.workers[1].kill()
        await clock.sleep(0.5)
        assert one.open_requests() == [0]  # it is up, and has version 0
        assert one.pool.routing().waiters == 2
        results = await one.end()
        assert [result.resumes for result in results] == [1, 1]
        assert [[span.version for span in result.response.versions] for result in results] == [[1], [1]]

    playing(scene)


def test_versions_may_go_back():
    """As when the best model is judged at the end of a run: who has the older version isn't behind."""

    async def scene(clock: Clock):
        one = Setting(clock, router={"health_interval_s": 5.0})
        await one.pool.start()
        await one.pool.update_weights(published(10))
        one.workers[0].corrupt = True
        with pytest.raises(WeightsCorrupt):
            await one.pool.update_weights(published(5))
        assert one.events == ["generator_behind generator-0"]
        one.ask(*requests(4))
        await clock.sleep(0.5)
        assert one.open_requests() == [0, 4]
        results = await one.end()
        assert {span.version for result in results for span in result.response.versions} == {5}

    playing(scene)


def test_what_waits_goes_on_as_soon_as_a_late_update_is_through():
    async def scene(clock: Clock):
        one = Setting(clock, router={"update_grace_s": 2.0, "health_interval_s": 5.0}, start_s=100.0)
        await one.pool.start()
        recover = one.workers[0].hang()
        update = asyncio.create_task(one.pool.update_weights(published(1)))
        await clock.sleep(3.0)
        one.workers[1].kill()
        one.ask(*requests(2))
        await clock.sleep(0.1)
        assert one.pool.routing().waiters == 2
        recover()
        await clock.sleep(0.1)
        assert one.open_requests() == [2]
        await update
        await one.end()

    playing(scene)


def test_a_successor_that_dies_before_it_answers_closes_no_breaker():
    async def scene(clock: Clock):
        one = Setting(clock)
        await one.pool.start()
        start, born = one.launcher.start, 0

        async def stillborn(spec: Any) -> Any:
            nonlocal born
            born += 1
            worker = await start(spec)
            if born == 1:
                worker.kill("it died young")
            return worker

        one.launcher.start = stillborn  # type: ignore[method-assign]
        one.workers[0].kill()
        await clock.sleep(5.0)
        assert [event.partition(" ")[0] for event in one.events] == [
            "generator_died",
            "breaker_opened",
            "generator_restart_failed",
            "breaker_closed",
            "generator_restarted",
        ]
        await one.end()

    playing(scene)


def test_one_that_takes_too_long_over_an_update_is_behind_too():
    async def scene(clock: Clock):
        one = Setting(clock, router={"update_grace_s": 10.0})
        await one.pool.start()
        recover = one.workers[0].hang()
        update = asyncio.create_task(one.pool.update_weights(published(1)))
        await clock.sleep(5.0)
        one.ask(*requests(2))
        await clock.sleep(1.0)
        assert one.pool._replicas[0].calls  # not yet: it may be about to have it
        await clock.sleep(5.5)
        assert one.events == ["generator_behind generator-0"]
        one.ask(*(request(f"s{i}") for i in range(4)))
        await clock.sleep(0.1)
        assert len(one.pool._replicas[0].calls) == 1
        recover()
        assert [applied.version for applied in await update] == [1, 1]
        assert one.events[1:] == ["generator_caught_up generator-0"]
        await one.end()

    playing(scene)


def test_a_slow_replica_holds_up_no_update_and_skips_to_the_newest_version():
    """It serves while it lags by no more than half the budget, then leaves admission's minimum and takes nothing."""

    async def scene(clock: Clock):
        one = Setting(clock, queue={"budget": 4})
        await one.pool.start()
        await one.pool.update_weights(published(1))
        applied, update = list[int](), one.workers[0]._update_weights
        one.workers[0]._update_weights = lambda weights, mode: applied.append(weights.version) or update(weights, mode)
        recover = one.workers[0].hang()
        began_s = clock.now()
        assert [r.version for r in await one.pool.update_weights(published(2), leave_slow=True)] == [2]
        assert clock.now() - began_s < 2.0
        assert await one.pool.applied_version() == 1, "it may have been sampled from"
        one.ask(*(request(f"a{i}") for i in range(4)))
        await clock.sleep(0.1)
        assert len(one.pool._replicas[0].calls) == 2
        for version in (3, 4):
            await one.pool.update_weights(published(version), leave_slow=True)
        assert await one.pool.applied_version() == 4
        one.ask(*(request(f"b{i}") for i in range(4)))
        await clock.sleep(0.1)
        assert len(one.pool._replicas[0].calls) == 2
        assert "generator_behind generator-0" in one.events
        recover()
        await clock.sleep(1.0)
        assert one.pool._replicas[0].version == 4
        assert applied == [2, 4], "3 is passed over"
        await one.end()

    playing(scene)


def test_what_was_admitted_by_a_newer_version_is_never_sampled_by_one_that_lags():
    async def scene(clock: Clock):
        one = Setting(clock, queue={"budget": 4})
        await one.pool.start()
        await one.pool.update_weights(published(1))
        recover = one.workers[0].hang()
        await one.pool.update_weights(published(2), leave_slow=True)
        one.ask(*(msgspec.structs.replace(request(f"n{i}"), oldest_version=2) for i in range(4)))
        await clock.sleep(0.1)
        assert [len(replica.calls) for replica in one.pool._replicas] == [0, 4]
        recover()
        await one.end()

    playing(scene)
