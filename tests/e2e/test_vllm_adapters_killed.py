"""A replica, or its server, that is killed in the middle of an adapter's update: nothing is lost, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm_adapters import LORA_OPTIONS, POLICY, SEED, adapter_of, base_folder, merged_model
from vllm_engines import needs_vllm
from vllm_servers import KEY, served

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.generator.engines.vllm.server_client import KEY_VARIABLE
from headway.generator.routing import replica
from headway.records.generation import GenerationRequest, GenerationResult, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import forced_logprobs

pytestmark = [*needs_vllm, pytest.mark.long]
VERSIONS = 3
POINTS = ["loaded", "unloading", "unloaded"]


def experiment_on(device: str, tokens: int) -> Any:
    engine = "vllm-server" if device.startswith("http") else "vllm"
    sections = {
        "run": {"directory": "unused", "seed": SEED},
        "model": {"path": str(base_folder()), "adapter": {"rank": POLICY.rank, "alpha": POLICY.alpha}},
        "tasks": {"train": {"path": "unused"}},
        "queue": {"budget": 1},
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": tokens},
        "generator": {"devices": [device], "slots": 8, "engine": engine, "update_mode": "finish"},
    }
    return validate_experiment(sections, "test")


def requests(round_: int, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{round_}-{index}",
            prompt_ids=(20, 30, index),
            priority=round_,
            sampling=SamplingParameters(max_tokens=tokens - 7 * index, seed=100 * round_ + index),
        )
        for index in range(4)
    ]


def require_exact(asked: GenerationRequest, result: GenerationResult) -> None:
    """Each span of tokens is its own version's: whoever went on with a request computed all of its KV anew."""
    ids, first = result.response.ids, 0
    assert (result.finish_reason, result.error, len(ids)) == ("length", "", asked.sampling.max_tokens)
    for span in result.response.versions:
        end = first + span.tokens
        own = forced_logprobs(merged_model(span.version), asked.prompt_ids, ids[:end], 1.0)[first:]
        assert (torch.tensor(result.response.logprobs[first:end]) - own).abs().max() < 2e-3
        first = end
    assert first == len(ids)


async def until(condition: Any, limit_s: float = 240.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the change comes from another process)
            await asyncio.sleep(0.01)


async def killed_run(experiment: Any, tokens: int, marker: Path, revive: Any) -> None:
    """Three versions in flight, of which the kill strikes one; then a fourth round on the newest."""
    events: list[str] = []
    clock = RealClock()
    pool = GeneratorPool(
        LocalLauncher(clock), experiment, clock, on_event=lambda name, detail, **data: events.append(name)
    )
    await pool.start()
    jobs, asked = [], []
    with Publisher(f"vllm-killed-{os.getpid()}") as publisher:
        for version in range(VERSIONS + 1):
            if version:
                weights = publisher.publish(version, adapter_of(version).weights())
                await pool.update_weights(msgspec.structs.replace(weights, adapter="policy"))
            asked += requests(version, tokens)
            jobs += [asyncio.create_task(pool.generate(one)) for one in requests(version, tokens)]
            await until(lambda: any(call.tokens for call in pool._replicas[0].calls.values()) or marker.exists())
        await until(marker.exists)
        await revive()
        results = await asyncio.gather(*jobs)
        await until(lambda: events.count("generator_restarted") == 1)
        late = requests(VERSIONS + 1, 40)
        after = await asyncio.gather(*(pool.generate(one) for one in late))
        (statistics,) = await pool.statistics()
        await pool.stop()
    for one, result in zip(asked + late, [*results, *after], strict=True):
        require_exact(one, result)
    assert {span.version for result in after for span in result.response.versions} == {VERSIONS}
    assert statistics.running == statistics.waiting == 0
    assert any(result.resumes for result in results)
    print(events, [[(s.version, s.tokens) for s in result.response.versions] for result in results])


@pytest.mark.parametrize("point", POINTS)
def test_a_replica_killed_in_an_update_loses_nothing(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_FACTORY", "faulty_vllm:KilledWithAdapter")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), *_path()]))
    monkeypatch.setenv("KILLED_AT", f"{point}:0:{tmp_path / 'marker'}")

    async def alone() -> None: ...

    asyncio.run(killed_run(experiment_on("cpu:0", 250), 250, tmp_path / "marker", alone))


@pytest.mark.parametrize("point", POINTS)
def test_a_server_killed_in_an_update_loses_nothing(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_FACTORY", "faulty_vllm:KilledWithAdapter")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), *_path()]))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    log = tmp_path / "server.log"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(base_folder(), log, options=LORA_OPTIONS))
        monkeypatch.setenv("KILLED_AT", f"{point}:{first.pid}:{tmp_path / 'marker'}")

        async def again() -> None:
            port = int(first.address.rpartition(":")[2])
            await asyncio.to_thread(stack.enter_context, served(base_folder(), log, port=port, options=LORA_OPTIONS))

        asyncio.run(killed_run(experiment_on(first.address, 250), 250, tmp_path / "marker", again))


def _path() -> list[str]:
    return [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
