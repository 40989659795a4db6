"""Generator replicas in real processes: killed, updated in flight, cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import GenerationRequest, GenerationResult, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import forced_logprobs, replayed_logprobs

pytestmark = pytest.mark.real
TOKENS = (
    1500  # long enough to be in flight still when the other replica, or the parent, of a busy machine gets its turn
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape; version 0 is the first, version 1 the second."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "zero", folder / "one"]
    for seed, path in enumerate(paths):
        initialise_model(
            path, ["8+3+5=11+5=16 hello"], vocabulary_size=300, width=32, layers=2, seed=seed, max_positions=2048
        )
    return paths


def make_pool(models: list[Path], events: list[str], replicas: int = 2, mode: str = "keep", **generator: Any):
    experiment = validate_experiment(
        {
            "run": {"directory": "unused"},
            "model": {"path": str(models[0])},
            "tasks": {"train": {"path": "unused"}},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": TOKENS},
            "generator": {
                "devices": [f"cpu:{index % 2}" for index in range(replicas)],
                "slots": 8,
                "update_mode": mode,
                **generator,
            },
        },
        "test",
    )
    clock = RealClock()
    return GeneratorPool(
        LocalLauncher(clock), experiment, clock, on_event=lambda name, detail, **data: events.append(name)
    )


def requests(count: int = 24) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_ids=(20, 30, 40 + index // 4),
            priority=index // 4,
            sampling=SamplingParameters(max_tokens=TOKENS - index, seed=index),
        )
        for index in range(count)
    ]


async def until(condition: Any, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the change comes from another process)
            await asyncio.sleep(0.01)


def assert_replay(models: list[Path], result: GenerationResult, asked: GenerationRequest) -> None:
    """Log-probabilities are those of the versions the tokens claim."""
    loaded = [load_model(path) for path in models]
    expected = replayed_logprobs(
        lambda version: loaded[version], asked.prompt_ids, result.response.ids, result.response.versions, 1.0
    )
    assert (torch.tensor(result.response.logprobs) - expected).abs().max() < 1e-4


def test_kill_9_in_mid_generation_loses_nothing(models):
    """Every request ends with exactly the tokens of an undisturbed run."""

    async def main() -> None:
        events: list[str] = []
        pool = make_pool(models, events)
        await pool.start()
        undisturbed = await asyncio.gather(*(pool.generate(one) for one in requests()))
        jobs = [asyncio.create_task(pool.generate(one)) for one in requests()]
        victim = pool._replicas[0]  # what has been streamed is not public
        await until(lambda: any(call.partial().ids for call in victim.calls.values()))
        os.kill(pool.pids[0], signal.SIGKILL)
        results = await asyncio.gather(*jobs)
        for got, expected in zip(results, undisturbed, strict=True):
            assert got.response.ids == expected.response.ids
            assert got.finish_reason == "length"
            assert got.response.logprobs == pytest.approx(expected.response.logprobs, abs=1e-4)
        assert any(result.resumes == 1 and result.reprefills == 1 for result in results)
        await until(lambda: "generator_restarted" in events)
        assert len(pool.pids) == 2
        await pool.stop()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.long
def test_kill_9_and_a_third_replica_in_mid_run(models):
    """Every request ends once, with exactly its tokens; the breaker opens and closes; the newcomer works too."""

    async def main() -> None:
        events: list[str] = []
        pool = make_pool(models, events)
        await pool.start()
        with Publisher(f"pool-{os.getpid()}") as publisher:
            await pool.update_weights(publisher.publish(1, weights_of(load_model(models[1]))))
            undisturbed = await asyncio.gather(*(pool.generate(one) for one in requests()))
            jobs = [asyncio.create_task(pool.generate(one)) for one in requests()]
            await until(lambda: all(any(c.partial().ids for c in r.calls.values()) for r in pool._replicas))
            os.kill(pool.pids[0], signal.SIGKILL)
            assert await pool.join("cpu:1") == "generator-2"
            late = [asyncio.create_task(pool.generate(one)) for one in named("late", requests())]
            results = await asyncio.gather(*jobs)
            for got, expected in zip([*results, *await asyncio.gather(*late)], undisturbed * 2, strict=True):
                assert got.response.ids == expected.response.ids
                assert [span.version for span in got.response.versions] == [1]
        assert any(result.resumes == 1 for result in results)
        await until(lambda: "generator_restarted" in events)
        assert [events.count(name) for name in ("breaker_opened", "breaker_closed", "generator_joined")] == [1, 1, 1]
        assert len(pool.pids) == 3
        routing = pool.routing()
        assert (routing.open_requests, routing.used_tokens, routing.waiters, routing.breakers_open) == (0, 0, 0, 0)
        assert routing.breaker_openings == 1
        assert routing.moves > 0
        newcomer = (await pool.statistics())[2]
        assert newcomer.generated_tokens > 0
        await pool.leave("generator-1")
        assert len(pool.pids) == 2
        await pool.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_a_lent_device_is_idle_even_after_a_restart_and_holds_its_requests(models):
    async def main() -> None:
        events: list[str] = []
        pool = make_pool(models, events)
        await pool.start()
        jobs = [asyncio.create_task(pool.generate(one)) for one in requests()]
        await until(lambda: all(any(c.partial().ids for c in r.calls.values()) for r in pool._replicas))
        await pool.pause_replicas([1])
        before = await pool.statistics()
        await asyncio.sleep(0.3)
        own, yielded = await pool.statistics()
        assert own.generated_tokens > before[0].generated_tokens
        assert yielded.generated_tokens == before[1].generated_tokens
        assert yielded.running > 0
        assert yielded.yielded_s - before[1].yielded_s >= 0.3
        assert own.yielded_s == 0
        os.kill(pool.pids[1], signal.SIGKILL)
        await until(lambda: "generator_restarted" in events)
        late = [asyncio.create_task(pool.generate(one)) for one in named("late", requests(16))]
        await until(lambda: bool(pool._replicas[1].calls))
        await asyncio.sleep(0.2)
        assert (await pool.statistics())[1].generated_tokens == yielded.generated_tokens
        await pool.resume_replicas([1])
        for one, result in zip([*requests(), *requests(16)], await asyncio.gather(*jobs, *late), strict=True):
            assert len(result.response.ids) == one.sampling.max_tokens
        assert (await pool.statistics())[1].generated_tokens > yielded.generated_tokens
        await pool.stop()

    asyncio.run(main())


def named(prefix: str, asked: list[GenerationRequest]) -> list[GenerationRequest]:
    return [msgspec.structs.replace(one, request_id=f"{prefix}-{one.request_id}") for one in asked]


@pytest.mark.slow
def test_all_replicas_killed_restart_with_the_newest_weights(models):
    async def main() -> None:
        events: list[str] = []
        pool = make_pool(models, events)
        await pool.start()
        with Publisher(f"pool-{os.getpid()}") as publisher:
            published = publisher.publish(1, weights_of(load_model(models[1])))
            await pool.update_weights(published)
            asked = requests(8)
            jobs = [asyncio.create_task(pool.generate(one)) for one in asked]
            await asyncio.sleep(0.05)
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*jobs)
            assert await pool.applied_version() == 1
        own = load_model(models[1])
        for one, result in zip(asked, results, strict=True):
            assert [span.version for span in result.response.versions] == [1]
            expected = forced_logprobs(own, one.prompt_ids, result.response.ids, 1.0)
            assert (torch.tensor(result.response.logprobs) - expected).abs().max() < 1e-4
        assert events.count("generator_died") == 2
        await pool.stop()

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=pytest.mark.long)])
def test_updates_in_flight(models, mode):
    async def main() -> None:
        pool = make_pool(models, [], mode=mode)
        await pool.start()
        asked = requests(16)
        with Publisher(f"pool-{os.getpid()}") as publisher:
            published = publisher.publish(1, weights_of(load_model(models[1])))
            jobs = [asyncio.create_task(pool.generate(one)) for one in asked]
            await until(lambda: all(any(c.partial().ids for c in r.calls.values()) for r in pool._replicas))
            reports = await pool.update_weights(published)
            assert [report.version for report in reports] == [1, 1]
            assert all(report.in_flight > 0 and report.pause_s > 0 for report in reports)
            results = await asyncio.gather(*jobs)
        parked = [index for index, result in enumerate(results) if result.finish_reason == "abort"]
        assert bool(parked) == (mode == "abort")
        for index in parked:
            assert [span.version for span in results[index].response.versions] == [0]
            again = msgspec.structs.replace(asked[index], partial=results[index].response)
            results[index] = await pool.generate(again)
        assert any(len(result.response.versions) == 2 for result in results)
        for one, result in zip(asked, results, strict=True):
            assert len(result.response.ids) == one.sampling.max_tokens
        if mode == "keep":
            crossed = next(index for index, result in enumerate(results) if len(result.response.versions) == 2)
            assert_replay(models, results[crossed], asked[crossed])
        await pool.stop()

    asyncio.run(main())


def test_corrupt_weights_surface_and_generation_goes_on(models):
    async def main() -> None:
        pool = make_pool(models, [], replicas=1)
        await pool.start()
        with Publisher(f"pool-{os.getpid()}") as publisher:
            published = publisher.publish(1, weights_of(load_model(models[1])))
            with pytest.raises(WeightsCorrupt):
                await pool.update_weights(msgspec.structs.replace(published, checksum="0" * 32))
        assert await pool.applied_version() == 0
        result = await pool.generate(requests(1)[0])
        assert [span.version for span in result.response.versions] == [0]
        await pool.stop()

    asyncio.run(main())


def test_cancelling_frees_the_slot(models):
    async def main() -> None:
        pool = make_pool(models, [], replicas=1, slots=1)
        await pool.start()
        first = asyncio.create_task(pool.generate(requests(1)[0]))
        second = asyncio.create_task(pool.generate(requests(2)[1]))
        await asyncio.sleep(0.02)
        first.cancel()
        assert (await second).finish_reason == "length"
        (statistics,) = await pool.statistics()
        assert statistics.running == statistics.waiting == 0
        assert statistics.generated_tokens < 2 * TOKENS
        await pool.stop()

    asyncio.run(main())


def test_a_missing_model_is_a_configuration_error(models, tmp_path):
    async def main() -> None:
        pool = make_pool([tmp_path / "nowhere"], [], replicas=1)
        with pytest.raises(ConfigurationError, match="nowhere"):
            await pool.start()

    asyncio.run(main())
