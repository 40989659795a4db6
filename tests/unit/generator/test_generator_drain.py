"""Updates that wait until nothing is in flight: the pool over fake replicas, and its stand-in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from router_setting import Setting, playing, published, request, requests
from simulated_run import experiment_of, simulate

from headway.generator.fake import FakeGenerator
from headway.records.errors import WorkerDied
from headway.records.training import PartReport, TrainBatch
from headway.runtime.clock import Clock
from headway.trainer.fake import FakeTrainer


def spans(results) -> list[list[tuple[int, int]]]:
    return [[(span.version, span.tokens) for span in result.response.versions] for result in results]


def test_what_runs_finishes_and_the_rest_begins_under_the_new_weights():
    """Four of six fit into the slots: the two that wait, and one that comes meanwhile, begin after the update."""

    async def scene(clock: Clock):
        one = Setting(clock, slots=2, mode="drain", update_s=1.0)
        await one.pool.start()
        started_s = clock.now()
        one.ask(*(request(f"r{i}", 20 + 10 * i, priority=i) for i in range(6)))
        await clock.sleep(1.0)
        update = asyncio.create_task(one.pool.update_weights(published(1)))
        await clock.sleep(0.2)
        one.ask(request("late", 10, priority=9))
        await clock.sleep(0.2)
        assert one.pool.routing().waiters == 3
        reports = await update
        drained_s = clock.now() - started_s
        assert await one.pool.applied_version() == 1
        return drained_s, [report.in_flight for report in reports], spans(await one.end())

    drained_s, in_flight, found = playing(scene)
    assert drained_s == pytest.approx(5.0 + 1.0, abs=0.2)  # the longest of those that ran: 50 tokens; then the pause
    assert in_flight == [0, 0]
    assert found == [[(0, 20)], [(0, 30)], [(0, 40)], [(0, 50)], [(1, 60)], [(1, 70)], [(1, 10)]]


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        ("kill", [[(0, 5), (1, 85)], [(0, 5), (1, 15)]]),
        ("cancel", [[(0, 6)], [(0, 20)]]),
        ("abandon", [[(0, 20)]]),
    ],
)
def test_a_request_that_leaves_its_replica_holds_no_update_up(trouble: str, expected: list[list[tuple[int, int]]]):
    """Its replica dies (it goes on after the update from the tokens it has), it is cancelled, its caller is gone."""

    async def scene(clock: Clock):
        one = Setting(clock, mode="drain")
        await one.pool.start()
        long = one.ask(request("long", 90))[0]
        one.ask(request("short", 20))
        await clock.sleep(0.5)
        update = asyncio.create_task(one.pool.update_weights(published(1)))
        await clock.sleep(0.1)
        if trouble == "kill":
            for worker in list(one.workers):
                worker.kill()
        elif trouble == "cancel":
            one.pool.cancel("long")
        else:
            long.cancel()
            one.jobs.remove(long)
        await clock.sleep(3.0)
        assert update.done()
        return spans(await one.end())

    assert playing(scene) == expected


def test_an_update_given_up_while_it_waits_lets_requests_go_on():
    async def scene(clock: Clock):
        one = Setting(clock, mode="drain")
        await one.pool.start()
        one.ask(*requests(3))
        await clock.sleep(0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await one.pool.update_weights(published(1))
        one.ask(request("next", 10))
        await clock.sleep(0.2)
        assert sum(one.open_requests()) == 4
        return spans(await one.end())

    assert playing(scene) == [[(0, 20)]] * 3 + [[(0, 10)]]


def test_the_stand_in_drains_as_the_pool_does():
    """Two slots; the third request waits for the update at t = 4, the end of the longer of those that run."""

    async def scene(clock: Clock):
        generator = FakeGenerator(
            clock, token_s=1.0, slots=2, length_of=lambda one: one.sampling.seed, update_mode="drain", update_s=1.0
        )
        await generator.start()

        async def timed(one):
            result = await generator.generate(one)
            return clock.now(), result

        jobs = [asyncio.create_task(timed(request(name, length))) for name, length in (("a", 2), ("b", 4), ("c", 3))]
        await clock.sleep(1.0)
        update = asyncio.create_task(generator.update_weights(published(1)))
        await clock.sleep(0.5)
        jobs.append(asyncio.create_task(timed(request("late", 1))))
        (applied,) = await update
        assert (clock.now(), applied.in_flight) == (5.0, 0)
        ended = await asyncio.gather(*jobs)
        return [end for end, _ in ended], spans(result for _, result in ended)

    assert playing(scene) == ([2.0, 4.0, 8.0, 6.0], [[(0, 2)], [(0, 4)], [(1, 3)], [(1, 1)]])


def test_what_was_preempted_in_the_stand_in_still_finishes_first():
    async def scene(clock: Clock):
        generator = FakeGenerator(
            clock,
            token_s=1.0,
            slots=4,
            kv_capacity_tokens=40,
            length_of=lambda one: one.sampling.seed,
            update_mode="drain",
        )
        await generator.start()
        jobs = [asyncio.create_task(generator.generate(request(name, 12))) for name in ("a", "b")]
        await clock.sleep(10.0)
        assert sum(one.preemptions for one in await generator.statistics()) == 1
        await generator.update_weights(published(1))
        return spans(await asyncio.gather(*jobs))

    assert playing(scene) == [[(0, 12)], [(0, 12)]]


@pytest.mark.parametrize("parts", [None, 1])
@pytest.mark.parametrize("shared", [False, True])
def test_a_trainer_that_dies_while_the_devices_are_its_own_holds_no_update_up(shared: bool, parts: int | None):
    """What is in flight stands still while the trainer computes on its devices, and an update waits for it."""

    def spoil(trainer: FakeTrainer) -> None:
        whole = trainer.forward_backward

        async def dies(part: TrainBatch) -> PartReport:
            if part.step < 3:
                return await whole(part)
            trainer.forward_backward = whole  # type: ignore[method-assign]
            await trainer._clock.sleep(0.05)
            trainer.version = -1  # what it held is gone
            raise WorkerDied("trainer-0", "killed")

        trainer.forward_backward = dies  # type: ignore[method-assign]

    experiment = experiment_of(
        Path("unused"),
        run={"steps": 6},
        rollout={"group_size": 4, "max_response_tokens": 200},
        queue={"groups_per_step": 2, "budget": 2, "groups_per_part": parts, "filter_zero_variance": False},
        generator={"slots": 8, "update_mode": "drain"},
    )
    outcome = simulate(experiment, spoil=spoil, shared=shared)
    assert [step.version for step in outcome.steps] == list(range(1, 7))
    assert outcome.event("trainer_restored").data["replayed"] == 3
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.steps[-1].time_s < 20  # no rollout had to run into its time limit first
    found = [sample.rollout.versions for batch in outcome.trainer.batches for sample in batch.samples]
    assert {len(versions) for versions in found} == {1}  # none crossed an update
