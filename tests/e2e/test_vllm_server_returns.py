"""A `vllm serve` that dies under a run's pool and is started again: it is waited for, and its requests go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import needs_vllm
from vllm_servers import KEY, model_folder, served

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.generator.engines.vllm.server_client import KEY_VARIABLE
from headway.models.loading import load_model, weights_of
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.weights.shared_memory import Publisher

pytestmark = needs_vllm


async def until(condition: Any, limit_s: float = 400.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (the change comes from another process)
            await asyncio.sleep(0.01)


def test_a_server_that_dies_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder, log = model_folder(tied=True), tmp_path / "server.log"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(folder, log))
        experiment = validate_experiment(
            {
                "run": {"directory": "unused"},
                "model": {"path": str(folder)},
                "tasks": {"train": {"path": "unused"}},
                "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 80},
                "generator": {"devices": [first.address], "slots": 8, "engine": "vllm-server"},
            },
            "test",
        )

        async def main() -> None:
            events: list[tuple[str, str]] = []
            clock = RealClock()
            pool = GeneratorPool(
                LocalLauncher(clock), experiment, clock, on_event=lambda *event, **data: events.append(event)
            )
            await pool.start()
            publisher = stack.enter_context(Publisher(f"vllm-returns-{os.getpid()}"))
            await pool.update_weights(publisher.publish(1, weights_of(load_model(folder))))
            asked = [
                GenerationRequest(
                    request_id=f"r{index}", prompt_ids=(5, 6, index), sampling=SamplingParameters(max_tokens=80)
                )
                for index in range(8)
            ]
            jobs = [asyncio.create_task(pool.generate(one)) for one in asked]
            await until(lambda: any(call.tokens for call in pool._replicas[0].calls.values()))
            first.kill()
            await until(lambda: any(name == "generator_died" for name, _ in events))
            port = int(first.address.rpartition(":")[2])
            await asyncio.to_thread(stack.enter_context, served(folder, log, port=port))
            results = await asyncio.gather(*jobs)
            assert [(one.finish_reason, len(one.response.ids)) for one in results] == [("length", 80)] * 8
            assert {span.version for one in results for span in one.response.versions} == {1}
            assert any(one.resumes for one in results)
            names = [name for name, _ in events]
            assert "generator_restart_failed" not in names, events  # it waited, and failed no restart
            await until(lambda: "generator_restarted" in [name for name, _ in events])
            await pool.stop()

        asyncio.run(main())
