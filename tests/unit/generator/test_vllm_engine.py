"""vLLM in this process, over a core of a few lines: what the engine makes of its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm import engine as engine_module
from headway.generator.engines.vllm.engine import VllmEngine
from headway.records.generation import GenerationRequest, SamplingParameters


class RefusingCore:
    updates = 0
    context_tokens = 64
    own_sampling = True
    running: frozenset[str] = frozenset()
    kv_used_tokens = 0
    kv_capacity_tokens = 1

    def name_version(self, version: int) -> None: ...

    def add(self, *given: Any, **options: Any) -> None:
        raise ValueError("too long")


def test_it_is_idle_from_the_refusal_of_its_last_request_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_parameters", lambda *given: None)
    now = [0.0]
    settings = EngineSettings(model_path="", dtype="float32", slots=2, max_context_tokens=64)
    core: Any = RefusingCore()
    engine = VllmEngine(core, settings, 100, None, now=lambda: now[0])

    def submit(request_id: str) -> None:
        sampling = SamplingParameters(max_tokens=4)
        engine.submit([GenerationRequest(request_id=request_id, prompt_ids=(1,), sampling=sampling)])

    submit("a")
    assert not engine.step()
    assert engine.open_requests == 0
    now[0] = 100.0
    submit("b")
    assert engine.statistics().idle_s == 100.0
