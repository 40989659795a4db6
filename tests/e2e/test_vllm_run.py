"""vLLM in a replica's own process: killed in mid-generation, updated in flight, and training a model."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import audited, events_of, require_nothing_left, steps_of, train, write_experiment, write_inputs
from vllm_engines import needs_vllm

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.records.errors import WeightsMismatch
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import replayed_logprobs

pytestmark = needs_vllm
TOKENS = 250
HEADS = {"heads": 3, "kv_heads": 1}  # of 32 dimensions at width 96


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape; version 0 is the first, version 1 the second."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "zero", folder / "one"]
    for seed, path in enumerate(paths):
        initialise_model(path, ["8+3+5=11+5=16 hello"], vocabulary_size=300, width=96, layers=2, seed=seed, **HEADS)
    return paths


async def until(condition: Any, limit_s: float = 120.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the change comes from another process)
            await asyncio.sleep(0.01)


def test_a_replica_killed_in_mid_generation_loses_nothing(models: list[Path]) -> None:
    """It restarts with the newest weights, and the requests go on from their tokens as if nothing had happened."""
    experiment = validate_experiment(
        {
            "run": {"directory": "unused"},
            "model": {"path": str(models[0])},
            "tasks": {"train": {"path": "unused"}},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": TOKENS},
            "generator": {"devices": ["cpu:0"], "slots": 8, "engine": "vllm"},
        },
        "test",
    )
    asked = [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_ids=(20, 30, 40 + index // 4),
            priority=index // 4,
            sampling=SamplingParameters(max_tokens=TOKENS - index, seed=index),
        )
        for index in range(16)
    ]

    async def main() -> None:
        events: list[str] = []
        clock = RealClock()
        pool = GeneratorPool(LocalLauncher(clock), experiment, clock, on_event=lambda name, detail: events.append(name))
        await pool.start()
        undisturbed = await asyncio.gather(*(pool.generate(one) for one in asked))
        jobs = [asyncio.create_task(pool.generate(one)) for one in asked]
        await until(lambda: any(call.partial().ids for call in pool._replicas[0].calls.values()))
        os.kill(pool.pids[0], signal.SIGKILL)
        results = await asyncio.gather(*jobs)
        for got, expected in zip(results, undisturbed, strict=True):
            assert got.response.ids == expected.response.ids
            assert got.finish_reason == "length"
            assert got.response.logprobs == pytest.approx(expected.response.logprobs, abs=1e-3)
        assert any(result.resumes == 1 and result.reprefills == 1 for result in results)
        await until(lambda: "generator_restarted" in events)
        with Publisher(f"vllm-pool-{os.getpid()}") as publisher:
            jobs = [asyncio.create_task(pool.generate(one)) for one in asked]
            await until(lambda: any(call.partial().ids for call in pool._replicas[0].calls.values()))
            (applied,) = await pool.update_weights(publisher.publish(1, weights_of(load_model(models[1]))))
            results = await asyncio.gather(*jobs)
        assert applied.version == 1
        assert applied.in_flight > 0
        loaded = [load_model(path) for path in models]
        for one, result in list(zip(asked, results, strict=True))[::4]:  # token by token: a second each
            expected = replayed_logprobs(
                lambda version: loaded[version], one.prompt_ids, result.response.ids, result.response.versions, 1.0
            )
            assert (torch.tensor(result.response.logprobs) - expected).abs().max() <= 1e-3
        (statistics,) = await pool.statistics()
        assert statistics.generated_tokens >= sum(len(result.response.ids) for result in results)
        await pool.stop()

    asyncio.run(main())


def write_run(folder: Path, **run: Any) -> Path:
    """Inputs and an experiment with vLLM, every update proved."""
    write_inputs(folder)
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    initialise_model(folder / "heads", prompts, layers=1, width=96, intermediate=48, character_level=True, **HEADS)
    return write_experiment(
        folder,
        run={"seed": 7, "directory": str(folder / "run")} | run,
        model={"path": str(folder / "heads")},
        generator={"slots": 16, "engine": "vllm", "probe_every_updates": 1},
        checkpoint={"every_steps": 10},
    )


def test_twenty_steps_with_every_update_proved(tmp_path: Path) -> None:
    command = train(write_run(tmp_path, steps=20), limit_s=400.0)
    assert command.process.returncode == 0, command.output
    assert [step.version for step in steps_of(command.run)] == list(range(1, 21))
    assert not events_of(command.run, "generator_died")
    audited(command.run)
    require_nothing_left(command)


def test_a_mismatch_stops_the_run_and_names_the_module(tmp_path: Path) -> None:
    command = train(write_run(tmp_path, steps=20), fault="stale-head", limit_s=400.0)
    assert command.process.returncode == WeightsMismatch.exit_code == 3, command.output
    assert "does not compute with the published weights of version 1: module lm_head: " in command.output
    assert len(steps_of(command.run)) <= 1
    require_nothing_left(command)
    print(command.output)
