"""Adapters in replicas of their own: killed while an update is applied, restarted, served by name."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from openai import OpenAI
from test_serve import serving

from headway.config.adapter import AdapterConfig
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.models.adapter_files import open_adapter, save_adapter
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.models.lora import Lora, merge
from headway.records.generation import GenerationRequest, GenerationResult, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher
from tests.conformance.reference import forced_logprobs

pytestmark = pytest.mark.real
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<|eos|>' if loop.last and m.role == 'assistant' }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in ``model``, adapters of it in ``poet`` and ``critic``."""
    found = tmp_path_factory.mktemp("adapters")
    model = found / "model"
    initialise_model(model, ["8+3+5=11 hello"], vocabulary_size=300, width=32, layers=2, seed=0, max_positions=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for number, name in enumerate(("poet", "critic"), 1):
        save_adapter(adapter(model, number), found / name, model)
    return found


def adapter(model: Path, number: int) -> Lora:
    """Number 0 is the one that a run begins with."""
    lora = open_adapter(model, load_model(model).config, AdapterConfig(rank=4, alpha=8), seed=7)
    generator = torch.Generator().manual_seed(number)
    for name, parameter in lora.parameters.items():
        if name.endswith("lora_B") and number:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return lora


def merged(model: Path, number: int) -> Decoder:
    found = load_model(model)
    merge(found, adapter(model, number))
    return found


def experiment_on(model: Path, mode: str) -> Experiment:
    sections = {
        "run": {"directory": "unused", "seed": 7},
        "model": {"path": str(model), "adapter": {"rank": 4, "alpha": 8}},
        "tasks": {"train": {"path": "unused"}},
        "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 600},
        "generator": {"devices": ["cpu:0", "cpu:1"], "slots": 8, "update_mode": mode},
    }
    return validate_experiment(sections, "test")


def requests(round_: int, count: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{round_}-{index}",
            prompt_ids=(20, 30, 40 + index // 4),
            priority=round_,
            sampling=SamplingParameters(max_tokens=300 + 20 * index, seed=100 * round_ + index),
        )
        for index in range(count)
    ]


def require_exact(models: list[Decoder], asked: GenerationRequest, result: GenerationResult) -> None:
    """Each span of tokens is its own version's: whoever went on with a request computed all of its KV anew."""
    ids, first = result.response.ids, 0
    assert len(ids) == asked.sampling.max_tokens
    for span in result.response.versions:
        end = first + span.tokens
        own = forced_logprobs(models[span.version], asked.prompt_ids, ids[:end], 1.0)[first:]
        assert (torch.tensor(result.response.logprobs[first:end]) - own).abs().max() < 1e-4
        first = end
    assert first == len(ids)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_killed_while_adapters_are_applied_and_unloaded_lose_nothing(folder: Path, seed: int) -> None:
    """Every request ends once, whole, its tokens those of the versions they claim; the restarted replica has the newest
    adapter before its first request."""
    rng, model = random.Random(seed), folder / "model"
    models = [merged(model, version) for version in range(5)]
    events: list[str] = []

    async def main() -> list[GenerationResult]:
        clock = RealClock()
        experiment = experiment_on(model, "finish")
        pool = GeneratorPool(
            LocalLauncher(clock), experiment, clock, on_event=lambda name, detail, **_: events.append(name)
        )
        await pool.start()
        jobs = [asyncio.create_task(pool.generate(one)) for one in requests(0)]
        with Publisher(f"adapters-{os.getpid()}") as publisher:
            for version in range(1, 5):
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                published = publisher.publish(version, adapter(model, version).weights())
                update = asyncio.create_task(pool.update_weights(msgspec.structs.replace(published, adapter="policy")))
                if version in (2, 4):
                    await asyncio.sleep(rng.uniform(0, 0.01))  # before, while and after it is applied
                    os.kill(rng.choice(pool.pids), signal.SIGKILL)
                await update
                jobs += [asyncio.create_task(pool.generate(one)) for one in requests(version)]
            results = await asyncio.gather(*jobs)
            async with asyncio.timeout(60):
                while events.count("generator_restarted") < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            late = await asyncio.gather(*(pool.generate(one) for one in requests(9, 16)))
            assert {span.version for result in late for span in result.response.versions} == {4}
            assert await pool.applied_version() == 4
            assert pool.routing().open_requests == 0
            await pool.stop()
        return [*results, *late]

    results = asyncio.run(main())
    asked = [one for round_ in range(5) for one in requests(round_)] + requests(9, 16)
    for one, result in zip(asked, results, strict=True):
        require_exact(models, one, result)
    assert any(result.resumes for result in results)
    assert all(len(result.response.versions) == 1 for result in results if not result.resumes)
    assert len({result.response.versions[0].version for result in results}) >= 3


def test_serve_offers_base_and_adapters_by_name(folder: Path) -> None:
    given = [f"--adapter={name}={folder / name}" for name in ("poet", "critic")]
    with serving(folder, *given, "--generator.slots=4") as (process, url):
        client = OpenAI(base_url=url, api_key="any", max_retries=0)
        assert [one.id for one in client.models.list()] == ["headway", "poet", "critic"]
        assert client.models.retrieve("poet").model_dump()["parent"] == "headway"
        said = {}
        for name in ("headway", "poet", "critic"):
            answer = client.completions.create(
                model=name, prompt=[20, 30, 40], max_tokens=24, temperature=0, logprobs=0
            )
            assert answer.model == name
            said[name] = answer.choices[0].logprobs.token_logprobs
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    for name, number in (("headway", 0), ("poet", 1), ("critic", 2)):
        own, ids = merged(folder / "model", number), [20, 30, 40]
        for logprob in said[name]:
            with torch.no_grad():
                row = own(torch.tensor(ids), [len(ids)])[-1].log_softmax(-1)
            ids.append(int(row.argmax()))
            assert abs(float(row.max()) - logprob) < 1e-4
    assert said["poet"] != said["critic"] != said["headway"]
