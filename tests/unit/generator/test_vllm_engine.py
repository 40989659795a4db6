"""vLLM in this process, over a core of a few lines: what the engine makes of its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm import engine as engine_module
from headway.generator.engines.vllm.adapters import VllmRevision
from headway.generator.engines.vllm.base_engine import VllmRequest
from headway.generator.engines.vllm.core import StepOutput, engine_arguments
from headway.generator.engines.vllm.engine import VllmEngine
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_model
from headway.records.generation import (
    GenerationRequest,
    PartialResponse,
    PublishedWeights,
    SamplingParameters,
    TokenDelta,
    VersionSpan,
)
from headway.records.tokens import EXPERTS, TokenRows
from headway.runtime.devices import parse_device


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


class KeepingCore(RefusingCore):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self.given: list[tuple[int, ...]] = []

    def add(self, ticket: str, prompt_ids: Any, parameters: Any, **options: Any) -> Any:
        self.parameters.append(parameters)
        self.given.append(tuple(prompt_ids))
        return SimpleNamespace(num_preemptions=0)

    def abort(self, tickets: Any) -> None: ...

    def drain(self) -> list[StepOutput]:
        return []

    def step(self) -> list[StepOutput]:
        return []


def test_grammars_are_vllms_own_and_what_it_cannot_return_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))  # type: ignore[arg-type]
    own = SimpleNamespace(StructuredOutputsParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", own)  # type: ignore[arg-type]
    settings = EngineSettings(model_path="", dtype="float32", slots=9, max_context_tokens=64)
    core: Any = KeepingCore()
    engine = VllmEngine(core, settings, 100, cast("Any", object()))
    begun = PartialResponse(ids=(5,), logprobs=(-1.0,), versions=(VersionSpan(version=0, tokens=1),))
    asked: dict[str, tuple[SamplingParameters, PartialResponse]] = {
        "free": (SamplingParameters(), PartialResponse()),
        "grammar": (SamplingParameters(grammar='start: "a"'), PartialResponse()),
        "begun": (SamplingParameters(grammar='start: "a"'), begun),
        "sets": (SamplingParameters(kept_sets=7), PartialResponse()),
    }
    for name, (how, partial) in asked.items():
        engine.submit([GenerationRequest(request_id=name, prompt_ids=(1,), sampling=how, partial=partial)])
    engine.step()
    free, grammar, anew = core.parameters
    assert free.structured_outputs is None
    assert grammar.structured_outputs.grammar == anew.structured_outputs.grammar == 'start: "a"'
    assert core.given == [(1,)] * 3  # vLLM begins every request at the start of its grammar
    voided, refused = engine.take_deltas()[::-1]
    assert (refused.request_id, refused.refused) == ("sets", True)
    assert refused.error.startswith("kept_sets = 7: vLLM doesn't return")
    assert voided == TokenDelta(request_id="begun", void=True)


def test_within_a_grammar_a_request_begins_anew_with_its_rows() -> None:
    entry = VllmRequest(asked_within_a_grammar(rows_known=3), 0)
    entry.ticket, entry.sampled, entry.unsent, entry.logprobs, entry.rows = "t", [7], [7], [-1.0], 9
    core: Any = KeepingCore()
    engine = VllmEngine(core, EngineSettings(model_path="", dtype="float32", slots=9, max_context_tokens=64), 100, None)
    engine._submitted["t"] = engine._open["a"] = entry
    engine._take_back([entry])
    assert list(entry.response) == [5, 7]
    engine._restart_grammar(entry)
    assert (list(entry.response), entry.unsent, entry.logprobs, entry.rows, entry.begun) == ([], [], [], 3, None)


def asked_within_a_grammar(**fields: Any) -> GenerationRequest:
    begun = PartialResponse(ids=(5,), logprobs=(-1.0,), versions=(VersionSpan(version=0, tokens=1),))
    sampling = SamplingParameters(grammar='start: "a"')
    return GenerationRequest(request_id="a", prompt_ids=(1, 2, 3), sampling=sampling, partial=begun, **fields)


def test_within_a_grammar_a_request_stays_on_its_adapter_over_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin anew, and might never end."""
    core: Any = KeepingCore()
    settings = EngineSettings(model_path="", dtype="float32", slots=9, max_context_tokens=64, probe_every_updates=0)
    engine = VllmEngine(core, settings, 100, None)
    within, free = (VllmRequest(asked_within_a_grammar(), 0) for _ in range(2))
    free.sampling = SamplingParameters()
    for ticket, entry in (("within", within), ("free", free)):
        entry.ticket, entry.sampled, entry.request_id = ticket, [7], ticket
        entry.revision = VllmRevision("policy", 0, "policy-0", None)
        engine._submitted[ticket] = engine._open[ticket] = entry
    newest = VllmRevision("policy", 1, "policy-1", None)
    adapters: Any = SimpleNamespace(
        fetch=lambda _: None, crowding=lambda *_: None, add=lambda _: None, updates=1, registered=(), newest=()
    )
    engine._adapters = adapters
    monkeypatch.setattr(engine, "_loaded", lambda *_: newest)
    published = PublishedWeights(version=1, path="", checksum="", size_bytes=0, adapter="policy")
    assert engine.apply(published, "recompute").in_flight == 1
    assert list(engine._submitted.values()) == [within]
    assert engine._waiting == [free]


def test_vllm_has_a_tokenizer_where_the_folder_has_one(tmp_path: Path) -> None:
    shape, device = initialise_shape(tmp_path / "m"), parse_device("cpu:0")
    settings = EngineSettings(model_path=str(tmp_path / "m"), dtype="float32", slots=2, max_context_tokens=64)
    assert not engine_arguments(settings, shape, device)["skip_tokenizer_init"]
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert engine_arguments(settings, shape, device)["skip_tokenizer_init"]


def initialise_shape(folder: Path) -> DecoderConfig:
    initialise_model(folder, ["1+2="], layers=1, character_level=True)
    return DecoderConfig.from_pretrained(folder)


class MixtureCore(RefusingCore):
    """Samples a token a step, and returns the experts of the tokens that it has read since, as vLLM 0.32 does."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.read: list[int] = []  # tokens, up to which experts were returned
        self.given: list[tuple[str, int, int]] = []  # ticket, tokens, first token whose experts are wanted

    def add(self, ticket: str, prompt_ids: Any, parameters: int, **options: Any) -> Any:
        self.given.append((ticket, len(prompt_ids), parameters))
        return type("Own", (), {"num_preemptions": 0})()

    def step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        for at, (ticket, tokens, first) in enumerate(self.given):
            numbers = np.arange(first, tokens, dtype=np.uint8)
            experts = np.stack([numbers, numbers + 1], -1)[:, None].repeat(self.layers, 1)
            experts[:, 0] = 99  # of a layer without experts
            outputs.append(StepOutput(ticket, [7], [-0.5], 0, None, None, 0, experts))
            self.given[at] = (ticket, tokens + 1, tokens)
        return outputs


def test_experts_that_vllm_returns_become_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the layers that have experts, from the first token on that the caller has none of."""
    initialise_model(tmp_path / "m", ["1+2="], family="qwen3_moe", layers=3, character_level=True)
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mlp_only_layers": [0]}))
    monkeypatch.setattr(engine_module, "_parameters", lambda entry, *given: cast("VllmRequest", entry).rows)
    settings = EngineSettings(
        model_path=str(tmp_path / "m"), dtype="float32", slots=2, max_context_tokens=64, return_experts=True
    )
    core: Any = MixtureCore(3)
    engine = VllmEngine(core, settings, 200, None)
    sampling = SamplingParameters(max_tokens=9)
    for name, known in (("a", 0), ("b", 2)):
        request = GenerationRequest(request_id=name, prompt_ids=(1, 2, 3, 4), sampling=sampling, rows_known=known)
        engine.submit([request])
    deltas: list[TokenDelta] = []
    for _ in range(3):
        engine.step()
        deltas += engine.take_deltas()
    for name, known in (("a", 0), ("b", 2)):
        rows = TokenRows.joined(delta.token_rows[EXPERTS] for delta in deltas if delta.request_id == name)
        assert rows.table(4).tolist() == [[i, i + 1] * 2 for i in range(known, 6)]
