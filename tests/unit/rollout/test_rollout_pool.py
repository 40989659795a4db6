"""The verifier pool's decisions under a virtual clock, with scripted workers; the fake verifier."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headway.config import schema
from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError, HeadwayError, RemoteError, WorkerDied
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.fake import FakeVerifier
from headway.rollout.verification.client import VerifierPool
from headway.rollout.verification.verdicts import failed_verdict
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.devices import every_core
from headway.runtime.workers import WorkerSpec

TASK = Task(task_id="t", prompt="p", answer="good")


class ScriptedWorker:
    """Scores a response in a tenth of a second; "hang" trips the watchdog, "stuck" never ends, "crash" dies at once,
    "refused" and "refused twice" meet a service that is down."""

    def __init__(self, launcher: ScriptedLauncher, name: str, pid: int) -> None:
        self.launcher, self.name, self.pid = launcher, name, pid
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.calls: list[tuple[str, ...]] = []
        self.stopped = False
        self.working = False

    @property
    def alive(self) -> bool:
        return not self.died.done()

    def kill(self, cause: str = "killed by SIGKILL (-9)") -> None:
        if self.alive:
            self.died.set_result(WorkerDied(self.name, cause))

    async def stop(self, grace_s: float = 5.0) -> None:
        self.stopped = True
        if self.working:  # a stop lets the call end, up to the grace
            await asyncio.wait([self.died], timeout=grace_s)
        self.kill("stopped")

    async def call(self, method: str, task: Task, responses: tuple[str, ...]) -> list[Verdict]:
        assert method == "score"
        assert self.alive
        self.calls.append(responses)
        self.working = True
        work = asyncio.ensure_future(self._score(task, responses))
        await asyncio.wait([work, self.died], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise self.died.result()
        self.working = False
        return work.result()

    async def _score(self, task: Task, responses: tuple[str, ...]) -> list[Verdict]:
        self.launcher.busy += 1
        self.launcher.most_busy = max(self.launcher.most_busy, self.launcher.busy)
        try:
            return [await self._score_one(task, response) for response in responses]
        finally:
            self.launcher.busy -= 1

    async def _score_one(self, task: Task, response: str) -> Verdict:
        if response == "hang":
            await self.launcher.clock.sleep(10.0)
            self.kill("exited with code 1\nlast output:\nTimeout (0:00:10)!")
            await asyncio.Event().wait()
        if response == "stuck":
            await asyncio.Event().wait()
        await self.launcher.clock.sleep(0.1)
        self.launcher.seen[response] += 1
        if response == "crash" or (response == "crash once" and self.launcher.seen[response] == 1):
            self.kill("killed by SIGSEGV (-11)")
            await asyncio.Event().wait()
        if response == "refused" or (response == "refused twice" and self.launcher.seen[response] <= 2):
            return failed_verdict("the verifier raised ConnectionError: refused", infrastructure=True)
        return Verdict(reward=float(response == task.answer), solved=response == task.answer)


class ScriptedLauncher:
    def __init__(self, clock: Clock, failing: Callable[[int], Exception | None] = lambda _: None) -> None:
        self.clock = clock
        self.failing = failing
        self.workers: list[ScriptedWorker] = []
        self.specs: list[WorkerSpec] = []
        self.seen: Counter[str] = Counter()
        self.busy = 0
        self.most_busy = 0

    async def start(self, spec: WorkerSpec) -> Any:
        self.specs.append(spec)
        error = self.failing(len(self.specs))
        await self.clock.sleep(0.2)
        if error is not None:
            raise error
        self.workers.append(ScriptedWorker(self, spec.name, 1000 + len(self.specs)))
        return self.workers[-1]

    @property
    def calls(self) -> list[tuple[str, ...]]:
        return [call for worker in self.workers for call in worker.calls]


def play(main: Callable[[VerifierPool, ScriptedLauncher, Clock], Any], workers: int = 1, **options: Any) -> Any:
    async def with_pool(clock: Clock) -> Any:
        launcher = ScriptedLauncher(clock, options.pop("failing", lambda _: None))
        pool = VerifierPool(launcher, schema.VerifierConfig(workers=workers, timeout_s=10.0), clock, **options)
        await pool.start()
        result = await main(pool, launcher, clock)
        await pool.stop()
        assert all(worker.stopped or not worker.alive for worker in launcher.workers)
        assert not any(state.up for state in pool.worker_states)
        return result

    return run_virtual(with_pool, limit_s=100_000)


def score(*responses: str, **options: Any) -> tuple[list[Verdict], ScriptedLauncher, VerifierPool, float]:
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> Any:
        started = clock.now()
        verdicts = await pool.verify(TASK, responses)
        took_s = clock.now() - started
        assert [v.reward for v in await pool.verify(TASK, ["good"])] == [1.0]  # still usable
        return verdicts, launcher, pool, took_s

    return play(main, **options)


def test_a_group_is_one_call():
    verdicts, launcher, pool, _ = score("good", "bad", "good")
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]
    assert launcher.calls == [("good", "bad", "good"), ("good",)]
    assert pool.restarts == 0


def test_no_responses_need_no_worker():
    verdicts, launcher, _, _ = score()
    assert verdicts == []
    assert launcher.calls == [("good",)]


@pytest.mark.parametrize("guilty", ["hang", "stuck"])
def test_only_the_response_that_hangs_fails(guilty: str):
    verdicts, launcher, pool, took_s = score("good", guilty, "bad")
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0]
    failure = verdicts[1].failure
    assert failure is not None
    assert failure.cause == "timed out after 10 s; job killed"
    assert (failure.boundary, failure.infrastructure) == ("reward", False)
    assert launcher.calls == [("good", guilty, "bad"), ("good",), (guilty,), ("bad",), ("good",)]
    assert pool.restarts == 2
    # the watchdog in the worker needs no more than the limit each time; the parent's own limit is the backstop
    assert took_s < (2 * 10 + 2 if guilty == "hang" else 38 + 16 + 2)
    assert verdicts[1].verify_s >= 10.0


@pytest.mark.parametrize("guilty", ["hang", "stuck"])
def test_a_single_response_that_hangs_is_not_tried_twice(guilty: str):
    verdicts, launcher, _, took_s = score(guilty)
    assert verdicts[0].failure is not None
    assert launcher.calls == [(guilty,), ("good",)]
    assert took_s <= 16.0


def test_two_that_hang_in_one_group():
    verdicts, _, _, _ = score("hang", "good", "hang")
    assert [verdict.failure is None for verdict in verdicts] == [False, True, False]


def test_a_worker_killed_once_costs_nothing():
    verdicts, launcher, pool, _ = score("good", "crash once", "bad")
    assert [verdict.failure for verdict in verdicts] == [None, None, None]
    assert launcher.seen["crash once"] == 3 - 1
    assert pool.restarts == 1


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_response_that_kills_its_worker_is_retried_and_then_fails_as_infrastructure(retries: int):
    verdicts, launcher, _, _ = score("good", "crash", "bad", retries=retries)
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True]
    failure = verdicts[1].failure
    assert failure is not None
    assert failure.infrastructure
    assert failure.boundary == "reward"
    assert "SIGSEGV" in failure.detail
    assert launcher.seen["crash"] == max(retries, 1) + 1  # the group's call, then alone: who did it must be found out
    assert failure.cause == f"the verifier's process died during it; attempts: {launcher.seen['crash']}"


def test_what_infrastructure_failed_is_scored_again_after_a_pause():
    verdicts, launcher, pool, took_s = score("good", "refused twice", "bad")
    assert [verdict.failure for verdict in verdicts] == [None, None, None]
    assert launcher.calls == [("good", "refused twice", "bad"), ("refused twice",), ("refused twice",), ("good",)]
    assert took_s == pytest.approx(5 * 0.1 + 0.5 + 1.0)
    assert pool.restarts == 0


@pytest.mark.parametrize("retries", [0, 2])
def test_what_infrastructure_never_scores_fails_as_infrastructure(retries: int):
    verdicts, launcher, _, _ = score("refused", "good", retries=retries)
    failure = verdicts[0].failure
    assert failure is not None
    assert failure.infrastructure
    assert failure.cause == f"the verifier raised ConnectionError: refused; attempts: {retries + 1}"
    assert launcher.seen["refused"] == retries + 1
    assert verdicts[1].reward == 1.0


def test_a_death_in_between_counts_as_an_attempt():
    verdicts, launcher, _, _ = score("refused twice", "crash once", "good")
    assert [verdict.failure for verdict in verdicts] == [None, None, None]
    assert launcher.seen["refused twice"] == 3


def test_workers_share_the_queue():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        groups = [pool.verify(TASK, ["good", "bad"]) for _ in range(12)]
        started = clock.now()
        await asyncio.gather(*groups)
        assert launcher.most_busy == 3
        assert clock.now() - started == pytest.approx(12 / 3 * 0.2)

    play(main, workers=3)


def test_a_hang_stops_one_worker_only():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        slow = asyncio.create_task(pool.verify(TASK, ["hang"]))
        await asyncio.sleep(0)
        started = clock.now()
        await asyncio.gather(*(pool.verify(TASK, ["good"]) for _ in range(10)))
        assert clock.now() - started < 2.0
        assert not slow.done()
        await slow

    play(main, workers=2)


def test_the_queue_is_bounded_and_reports():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        groups = [asyncio.create_task(pool.verify(TASK, ["good"])) for _ in range(10)]
        await clock.sleep(0.05)
        statistics = pool.statistics()
        assert (statistics.used, statistics.capacity, statistics.putters) == (4, 4, 5)
        assert statistics.oldest_age_s == pytest.approx(0.05)
        await asyncio.gather(*groups)
        assert pool.statistics().used == 0

    play(main, queue_groups=4)


def test_a_caller_that_gives_up_while_queued_costs_no_work():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        first = asyncio.create_task(pool.verify(TASK, ["good"]))
        second = asyncio.create_task(pool.verify(TASK, ["bad"]))
        await clock.sleep(0.05)
        second.cancel()
        await first
        await pool.verify(TASK, ["good"])
        assert launcher.calls == [("good",), ("good",)]

    play(main)


def test_stopping_in_mid_job_answers_everyone_and_kills_the_job():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        waiting = [asyncio.create_task(pool.verify(TASK, ["stuck"])) for _ in range(3)]
        await clock.sleep(0.5)
        started = clock.now()
        await pool.stop()
        assert clock.now() == started
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, HeadwayError)
        with pytest.raises(HeadwayError, match="stopped"):
            await pool.verify(TASK, ["good"])

    play(main, queue_groups=1)


def test_a_verifier_that_cannot_be_resolved_ends_the_start_and_leaves_no_worker():
    async def main(clock: Clock) -> None:
        cause = ConfigurationError("verifier.name = 'x:y': x can't be imported")
        remote = RemoteError("verifier-1", "start", str(cause), "traceback")
        remote.__cause__ = cause
        launcher = ScriptedLauncher(clock, lambda start: remote if start == 2 else None)
        pool = VerifierPool(launcher, schema.VerifierConfig(workers=3), clock)
        with pytest.raises(ConfigurationError, match="x can't be imported"):
            await pool.start()
        assert [worker.stopped for worker in launcher.workers] == [True, True]

    run_virtual(main)


def test_a_worker_that_fails_to_restart_is_tried_again():
    def failing(start: int) -> Exception | None:
        return WorkerDied("verifier-0", "out of memory") if start in (2, 3) else None

    verdicts, _, pool, _ = score("crash once", failing=failing)
    assert verdicts[0].failure is None
    assert pool.restarts == 1


def test_a_worker_that_never_restarts_is_an_error_for_the_caller():
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        for _ in range(2):
            with pytest.raises(HeadwayError, match=r"verifier-0 could not be restarted: .*out of memory"):
                await pool.verify(TASK, ["crash"])

    play(main, failing=lambda start: WorkerDied("verifier-0", "out of memory") if start > 1 else None)


def test_specs_carry_settings_cores_and_log(tmp_path: Any):
    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> list[WorkerSpec]:
        return launcher.specs

    first, second = play(main, workers=2, log_folder=tmp_path)
    assert (first.name, second.name) == ("verifier-0", "verifier-1")
    assert first.device == every_core()
    assert first.log_path == str(tmp_path / "verifier-0.log")
    assert schema.VerifierConfig.model_validate(first.arguments["verifier"]) == schema.VerifierConfig(
        workers=2, timeout_s=10.0
    )


def test_each_verifier_has_its_own_time_limit():
    task = Task(task_id="t", prompt="p", answer="good", verifier="slow")
    named = {"slow": VerifierSettings(name="numeric", timeout_s=50.0)}

    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> Any:
        assert launcher.specs[0].arguments["named"] == {"slow": named["slow"].model_dump()}
        return [(await pool.verify(one, ["stuck"]))[0] for one in (TASK, task)]

    default, slow = play(main, named=named)
    assert default.failure.cause == "timed out after 10 s; job killed"
    assert slow.failure.cause == "timed out after 50 s; job killed"


class TestFakeVerifier:
    def test_scores_after_its_latency(self):
        async def main(clock: Clock) -> None:
            fake = FakeVerifier(lambda task, r: {"reward": float(len(r)), "solved": False}, clock, latency_s=0.5)
            await fake.start()
            verdicts = await fake.verify(TASK, ["a", "bb"])
            assert [(v.reward, v.solved, v.verify_s) for v in verdicts] == [(1.0, False, 0.5), (2.0, False, 0.5)]
            assert clock.now() == 1.0
            assert fake.verified == 2

        run_virtual(main)

    def test_workers_are_what_limits_it(self):
        async def main(clock: Clock) -> None:
            fake = FakeVerifier(lambda *_: 1.0, clock, latency_s=lambda _, r: len(r), workers=2)
            await asyncio.gather(*(fake.verify(TASK, ["abc"]) for _ in range(6)))
            assert clock.now() == 9.0

        run_virtual(main)

    def test_failures_and_stop(self):
        async def main(clock: Clock) -> None:
            fake = FakeVerifier(lambda *_: float("nan"), clock)
            [verdict] = await fake.verify(TASK, ["a"])
            assert verdict.failure is not None
            await fake.stop()
            with pytest.raises(HeadwayError):
                await fake.verify(TASK, ["a"])

        run_virtual(main)


def test_deaths_and_restarts_are_events_with_who_cause_and_cost():
    events: list[tuple[str, dict[str, Any]]] = []

    async def main(pool: VerifierPool, launcher: ScriptedLauncher, clock: Clock) -> None:
        launcher.workers[0].kill("killed by SIGKILL (9)")  # while it has nothing to do
        await clock.sleep(3.0)
        assert [name for name, _ in events] == ["verifier_died"]
        await pool.verify(TASK, ["good", "crash once", "bad"])

    play(main, on_event=lambda name, detail, **fields: events.append((name, fields)))
    assert [name for name, _ in events] == ["verifier_died", "verifier_restarted"] * 2  # and none for the stop
    assert {fields["worker"] for _, fields in events} == {"verifier-0"}
    idle, back, busy, _ = (fields for _, fields in events)
    assert (idle["cause"], idle["found_by"], idle["lost_samples"]) == ("killed by SIGKILL (9)", "exit", 0)
    assert back["lost_s"] == pytest.approx(3.2)
    assert (busy["cause"], busy["lost_samples"]) == ("killed by SIGSEGV (-11)", 3)
