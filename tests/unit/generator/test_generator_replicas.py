"""The pool's handling of replicas, with scripted workers under the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_replicas import ScriptedLauncher, ScriptedWorker, make_pool, published, request

from headway.records.errors import HeadwayError, RemoteError, StorageFailed, WeightsCorrupt, WorkerDied
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.workers import WorkerSpec


def test_submissions_of_one_pass_are_one_call_and_spread_by_load():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}", prompt=3 + i % 2))) for i in range(8)]
        await clock.sleep(1)
        assert [[name for name, _ in worker.log] for worker in launcher.started] == [["submit"], ["submit"]]
        assert [len(worker.open) for worker in launcher.started] == [4, 4]
        for worker in launcher.started:
            worker.finish_all()
        assert {result.finish_reason for result in await asyncio.gather(*jobs)} == {"stop"}
        await pool.stop()

    run_virtual(main)


def test_a_dead_replicas_requests_go_on_elsewhere_from_their_tokens():
    async def main(clock: Clock):
        pool, events = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()
        await pool.update_weights(published(4))
        first, second = launcher.started
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(4)]
        await clock.sleep(1)
        for request_id in first.open:
            first.say(request_id, 7, 8)
        first.kill()  # what it had sent still counts
        await clock.sleep(0.1)
        assert sorted(one.partial.ids for one in second.open.values()) == [(), (), (7, 8), (7, 8)]
        await pool.update_weights(published(5))  # the dead one gets it when it is back
        second.finish_all()
        results = await asyncio.gather(*jobs)
        assert sorted(result.resumes for result in results) == [0, 0, 1, 1]
        moved = next(result for result in results if result.resumes)
        assert moved.response.ids == (7, 8, 9)
        assert [(span.version, span.tokens) for span in moved.response.versions] == [(4, 2), (5, 1)]
        await clock.sleep(5)
        assert launcher.started[2].log == [("update", 5)]
        assert await pool.applied_version() == 5
        assert events == ["generator_died", "generator_restarted"]
        await pool.stop()

    run_virtual(main)


def test_with_no_replica_left_requests_wait_for_the_restart_and_its_weights():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), replicas=1)
        await pool.start()
        await pool.update_weights(published(2))
        old = asyncio.create_task(pool.generate(request("old")))
        await clock.sleep(0.1)
        launcher.started[0].kill()
        await clock.sleep(0.1)
        new = asyncio.create_task(pool.generate(request("new")))
        gone = asyncio.create_task(pool.generate(request("gone")))
        await clock.sleep(0.1)
        assert await pool.applied_version() == 2  # what the next one starts with
        pool.cancel("gone")
        assert (await gone).finish_reason == "abort"
        await clock.sleep(3)
        worker = launcher.started[1]
        assert worker.log == [("update", 2), ("submit", [(), ()])]
        worker.finish_all()
        assert [(await job).resumes for job in (old, new)] == [1, 0]
        await pool.stop()

    run_virtual(main)


def test_a_version_announced_during_a_restart_is_applied_before_the_first_request():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), replicas=1)
        await pool.start()
        await pool.update_weights(published(1))

        def overwritten(worker: ScriptedWorker) -> None:
            worker.update_s, worker.update_error = 1.0, WeightsCorrupt("overwritten")

        launcher.prepare = overwritten
        launcher.started[0].kill()
        job = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1.5)
        worker = launcher.started[1]
        assert await pool.update_weights(published(2)) == []  # no live replica
        await clock.sleep(0.75)
        worker.update_error = None
        await clock.sleep(3)
        assert worker.log == [("update", 1), ("update", 2), ("submit", [()])]
        assert await pool.applied_version() == 2
        worker.finish_all()
        await job
        await pool.stop()

    run_virtual(main)


@pytest.mark.parametrize(("republished_s", "failed"), [(45.0, 0), (75.0, 1)])
def test_a_restart_waits_for_weights_whose_publisher_died_with_it(republished_s, failed):
    """Trainer and generator die with their machine; the trainer's successor publishes the version again, later."""

    async def main(clock: Clock):
        pool, events = make_pool(clock, launcher := ScriptedLauncher(), replicas=1)
        await pool.start()
        await pool.update_weights(published(1))
        launcher.prepare = lambda worker: setattr(worker, "update_error", WeightsCorrupt("version 1 is gone"))
        launcher.started[0].kill()
        await clock.sleep(republished_s)
        launcher.prepare = lambda worker: None
        launcher.started[-1].update_error = None
        assert await pool.update_weights(published(1)) == []
        await clock.sleep(5)
        assert events == ["generator_died", *["generator_restart_failed"] * failed, "generator_restarted"]
        assert await pool.applied_version() == 1
        await pool.stop()

    run_virtual(main)


def test_a_replica_that_dies_too_often_is_lost_and_the_last_one_ends_the_run():
    async def main(clock: Clock):
        pool, events = make_pool(clock, launcher := ScriptedLauncher(), restart_limit=2)
        await pool.start()
        launcher.refuse = True
        launcher.started[0].kill()
        await clock.sleep(60)
        assert events == ["generator_died", "generator_restart_failed", "generator_restart_failed", "generator_lost"]
        job = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1)
        assert len(launcher.started[1].open) == 1
        launcher.started[1].kill()
        with pytest.raises(WorkerDied, match="gave up after 2 restarts"):
            await job
        for attempt in (pool.generate(request("b")), pool.applied_version(), pool.update_weights(published(1))):
            with pytest.raises(WorkerDied):
                await attempt
        await pool.stop()

    run_virtual(main)


def test_restarts_that_fail_slowly_count_and_time_in_service_forgives():
    async def main(clock: Clock):
        pool, events = make_pool(clock, launcher := ScriptedLauncher(), replicas=1, restart_limit=2)
        await pool.start()
        for _ in range(6):  # rarely enough: never more than two within five minutes of service
            await clock.sleep(200)
            launcher.started[-1].kill()
            await clock.sleep(50)
        assert "generator_lost" not in events
        await clock.sleep(400)
        launcher.refuse, launcher.start_s = True, 400.0
        launcher.started[-1].kill()
        with pytest.raises(WorkerDied, match="gave up after 2 restarts"):
            await pool.generate(request("a"))
        assert events.count("generator_restart_failed") == 2
        await pool.stop()

    run_virtual(main, limit_s=10_000)


@pytest.mark.parametrize("failing", ["launcher", "event", "stream"])
def test_a_replica_whose_keeper_fails_is_lost_and_holds_nothing(failing):
    """Whatever goes wrong in keeping one, its requests end: here or elsewhere."""

    async def main(clock: Clock):
        def on_event(name: str, detail: str, **data: Any) -> None:
            if failing == "event":
                raise StorageFailed("the disk is full")

        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), on_event=on_event)
        await pool.start()
        first, second = launcher.started
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(4)]
        await clock.sleep(1)
        launcher.refuse, launcher.error = True, ValueError("not a worker")
        if failing == "stream":
            first.events.put_nowait(b"not msgpack")
        else:
            first.kill()
        await clock.sleep(1)
        assert not first.alive
        assert len(second.open) == 4
        second.kill()
        with pytest.raises(WorkerDied, match={"event": "the disk is full"}.get(failing, "not a worker")):
            await asyncio.gather(*jobs)
        with pytest.raises(WorkerDied, match="supervisor failed"):
            await pool.generate(request("later"))
        await pool.stop()

    run_virtual(main, limit_s=100)


def test_a_replica_that_answers_nothing_is_killed_and_replaced():
    """Its health checks are answered by another thread: only the calls tell that it is stuck."""

    async def main(clock: Clock):
        details: list[str] = []
        note = {"on_event": lambda name, detail, **data: details.append(detail)}
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), replicas=1, **note)
        await pool.start()
        launcher.started[0].update_s = 1e6
        assert await pool.update_weights(published(3)) == []
        await clock.sleep(5)
        assert [worker.alive for worker in launcher.started] == [False, True]
        assert launcher.started[1].log == [("update", 3)]
        assert "update_weights gave no result in 600 s" in details[0]
        await pool.stop()

    run_virtual(main, limit_s=2_000)


def test_corrupt_weights_surface_and_a_death_during_an_update_does_not():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()
        launcher.started[0].update_error = WeightsCorrupt("checksum")
        with pytest.raises(WeightsCorrupt, match="checksum"):
            await pool.update_weights(published(1))
        assert await pool.applied_version() == 1, "of the one that takes requests"
        launcher.started[0].update_error = None
        launcher.started[0].update_s = 2.0
        update = asyncio.create_task(pool.update_weights(published(2)))
        await clock.sleep(1)
        launcher.started[0].kill()
        assert [applied.version for applied in await update] == [2]
        await clock.sleep(5)
        assert await pool.applied_version() == 2
        assert len(pool.pids) == 2
        await pool.stop()

    run_virtual(main)


def test_cancelling():
    """cancel() returns the tokens so far; a cancelled caller aborts in the engine; an id is free again at once."""

    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), replicas=1)
        await pool.start()
        (worker,) = launcher.started
        job = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1)
        worker.say(next(iter(worker.open)), 5)
        pool.cancel("a")
        result = await job
        assert (result.finish_reason, result.response.ids, result.request_id) == ("abort", (5,), "a")
        job = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1)
        with pytest.raises(ValueError, match="already open"):
            await pool.generate(request("a"))
        job.cancel()
        await asyncio.wait([job])
        again = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1)
        assert [name for name, _ in worker.log] == ["submit", "abort", "submit", "abort", "submit"]
        worker.finish_all()  # the late "abort" of the former request does not meet this one
        assert (await again).finish_reason == "stop"
        early = asyncio.create_task(pool.generate(request("early")))
        await asyncio.sleep(0)
        pool.cancel("early")  # before it was ever submitted
        assert (await early).finish_reason == "abort"
        await pool.stop()

    run_virtual(main)


def test_counters_survive_a_restart_and_stop_fails_the_waiting():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), replicas=1)
        await pool.start()
        job = asyncio.create_task(pool.generate(request("a")))
        await clock.sleep(1)
        assert [one.running for one in await pool.statistics()] == [1]
        launcher.started[0].kill()
        await clock.sleep(0.1)
        assert [(one.running, one.generated_tokens) for one in await pool.statistics()] == [(0, 10)]
        await clock.sleep(5)
        assert [one.generated_tokens for one in await pool.statistics()] == [20]
        await pool.stop()
        with pytest.raises(HeadwayError, match="stopped"):
            await job
        with pytest.raises(HeadwayError, match="stopped"):
            await pool.generate(request("b"))

    run_virtual(main)


def test_a_failed_start_stops_the_others():
    async def main(clock: Clock):
        launcher = ScriptedLauncher()
        pool, _ = make_pool(clock, launcher)
        start = launcher.start

        async def second_fails(spec: WorkerSpec) -> ScriptedWorker:
            launcher.refuse = spec.name == "generator-1"
            return await start(spec) if not launcher.refuse else await _refuse(spec)

        launcher.start = second_fails  # type: ignore[method-assign]
        with pytest.raises(RemoteError):
            await pool.start()
        assert [worker.alive for worker in launcher.started] == []

    async def _refuse(spec: WorkerSpec) -> ScriptedWorker:
        raise RemoteError(spec.name, "start", "no such file", "")

    run_virtual(main)


def test_a_resting_replica_hands_its_requests_over_and_takes_none():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()
        first, second = launcher.started
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(4)]
        await clock.sleep(1)
        for request_id in second.open:
            second.say(request_id, 7, 8)
        await clock.sleep(0.1)
        await pool.idle_replicas([1])
        await clock.sleep(0.1)
        assert not second.open
        assert sorted(one.partial.ids for one in first.open.values()) == [(), (), (7, 8), (7, 8)]
        jobs.append(asyncio.create_task(pool.generate(request("late"))))
        await pool.update_weights(published(3))
        assert [engine.idle for engine in await pool.statistics()] == [False, True]
        assert ("update", 3) in second.log
        assert not second.open
        first.kill()  # the last that served: the idle one takes over
        await clock.sleep(0.1)
        assert len(second.open) == 5
        second.finish_all()
        await asyncio.gather(*jobs)
        await pool.stop()

    run_virtual(main)


def test_a_replica_that_rests_no_more_takes_requests_again():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()
        await pool.idle_replicas([0, 1])  # nobody else: both serve
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(4)]
        await clock.sleep(1)
        assert [len(worker.open) for worker in launcher.started] == [2, 2]
        await pool.idle_replicas([0])
        await clock.sleep(1)
        assert [len(worker.open) for worker in launcher.started] == [0, 4]
        await pool.idle_replicas([])
        jobs.append(asyncio.create_task(pool.generate(request("next"))))
        await clock.sleep(1)
        assert [len(worker.open) for worker in launcher.started] == [1, 4]
        for worker in launcher.started:
            worker.finish_all()
        await asyncio.gather(*jobs)
        await pool.stop()

    run_virtual(main)


def test_a_death_says_who_why_and_how_many_requests_moved_and_the_restart_what_it_took():
    events: list[tuple[str, dict[str, Any]]] = []

    async def main(clock: Clock):
        note = {"on_event": lambda name, detail, **fields: events.append((name, fields))}
        pool, _ = make_pool(clock, launcher := ScriptedLauncher(), **note)
        await pool.start()
        jobs = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(4)]
        await clock.sleep(1)
        launcher.started[0].kill("killed by SIGKILL (9)")
        await clock.sleep(1)
        launcher.started[1].finish_all()
        await asyncio.gather(*jobs)
        await clock.sleep(30)
        await pool.stop()

    run_virtual(main)
    died, back = (fields for name, fields in events if name in ("generator_died", "generator_restarted"))
    assert (died["worker"], back["worker"], back["lost_s"] >= 0) == ("generator-0", "generator-0", True)
    assert (died["cause"], died["found_by"], died["lost_samples"]) == ("killed by SIGKILL (9)", "exit", 2)


def test_answers_since_the_last_good_look_are_void_when_weights_were_damaged():
    async def main(clock: Clock):
        pool, _ = make_pool(clock, launcher := ScriptedLauncher())
        await pool.start()

        async def answered(*names: str) -> None:
            jobs = [asyncio.create_task(pool.generate(request(name))) for name in names]
            await clock.sleep(1)
            for worker in launcher.started:
                worker.finish_all()
            await asyncio.gather(*jobs)

        await answered("a", "b")
        await pool.update_weights(published(1))
        await answered("c", "d")
        launcher.started[0].damage = "w, block 0 of version 1"
        await pool.update_weights(published(2))
        launcher.started[0].damage = ""
        assert pool.take_voided() in (["c"], ["d"]), "of the one replica, since its last update"
        assert pool.take_voided() == []
        await answered("e", "f")
        await pool.update_weights(published(3))
        assert pool.take_voided() == []
        await pool.stop()

    run_virtual(main)
