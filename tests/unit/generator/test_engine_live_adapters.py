"""Adapters that come and go while the torch engine samples, and what a tenant's samples ask of it."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_engine_adapters import adapter_of, base_of, merged_with
from test_prompt_logprobs import all_logprobs

from headway.generator.engines.torch.engine import TorchEngine
from headway.records.generation import GenerationRequest
from headway.records.tokens import TokenIds
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, assert_logprobs, request
from tests.conformance.reference import forced_logprobs

PROMPT = (5, 6, 7, 8)


def engine_of(**options: Any) -> TorchEngine:
    return TorchEngine(copy.deepcopy(base_of("qwen3")), slots=8, max_context_tokens=96, **options)


@pytest.mark.parametrize("options", [{}, {"native_kernels": False}, {"deterministic": True}])
def test_adapters_come_and_go_between_steps_of_others(options: dict[str, Any]) -> None:
    engine = engine_of(**options)
    session = Session(engine)
    session.submit(request("base", PROMPT, max_tokens=20, adapter="base"))
    session.step(2)
    for number, rank in enumerate((3, 8, 1)):
        engine.add_adapter(f"a{number}", copy.deepcopy(adapter_of(number, rank=rank)))
        session.submit(request(f"r{number}", PROMPT, max_tokens=9, adapter=f"a{number}"))
        session.step(2)
    assert session.run()["r0"].finish_reason == "length"
    session.submit(request("alone", PROMPT, max_tokens=9, adapter="a0"))
    session.run()
    for number in range(3):
        engine.remove_adapter(f"a{number}")
    assert len(engine.adapters) == 0
    session.submit(request("gone", PROMPT, max_tokens=2, adapter="a0"))
    session.submit(request("later", PROMPT, max_tokens=9, adapter="base"))
    results = session.run()
    assert (results["gone"].finish_reason, results["gone"].refused) == ("error", True)
    for name, number in (("base", -1), ("later", -1), ("r0", 0), ("r1", 1), ("r2", 2), ("alone", 0)):
        owner = base_of("qwen3") if number < 0 else merged_with(number, "qwen3", (3, 8, 1)[number])
        assert_logprobs(results[name], forced_logprobs(owner, PROMPT, results[name].response.ids, 1.0))


def test_a_revision_of_another_rank_continues_running_requests_on_their_kv() -> None:
    engine = engine_of()
    session = Session(engine)
    engine.add_adapter("a", copy.deepcopy(adapter_of(0)))
    session.submit(request("r", PROMPT, max_tokens=12, adapter="a"), request("other", PROMPT, max_tokens=12))
    session.step(6)
    engine.add_adapter("a", copy.deepcopy(adapter_of(1, rank=8)))
    result = session.run()["r"]
    first = forced_logprobs(merged_with(0), PROMPT, result.response.ids, 1.0)
    newest = forced_logprobs(merged_with(1, "qwen3", 8), PROMPT, result.response.ids, 1.0)
    logprobs = torch.tensor(list(result.response.logprobs))
    assert (logprobs[:6] - first[:6]).abs().max() < 1e-4
    assert (logprobs[6:] - newest[6:]).abs().mean() < (logprobs[6:] - first[6:]).abs().mean()
    assert len(engine.adapters) == 1


@pytest.mark.parametrize("options", [{}, {"native_kernels": False}])
def test_untempered_log_probabilities_are_those_of_the_plain_softmax(options: dict[str, Any]) -> None:
    session = Session(engine_of(**options))
    cases = {"hot": {"temperature": 1.7}, "kept": {"temperature": 0.5, "top_p": 0.8, "top_k": 9}, "greedy":
             {"temperature": 0.0}, "plain": {}}  # fmt: skip
    for name, how in cases.items():
        asked = request(name, PROMPT, max_tokens=12)
        sampling = msgspec.structs.replace(asked.sampling, untempered=True, **how)
        session.submit(msgspec.structs.replace(asked, sampling=sampling))
    tempered: GenerationRequest = request("tempered", PROMPT, max_tokens=12, temperature=1.7, seed=sum(map(ord, "hot")))
    session.submit(tempered)
    results = session.run()
    for name in cases:
        assert_logprobs(results[name], forced_logprobs(base_of("qwen3"), PROMPT, results[name].response.ids, 1.0))
    assert results["tempered"].response.ids == results["hot"].response.ids
    assert_logprobs(results["tempered"], forced_logprobs(base_of("qwen3"), PROMPT, results["hot"].response.ids, 1.7))


def test_log_probabilities_of_given_ids_in_each_ones_place() -> None:
    ids = tuple(np.random.default_rng(7).integers(0, conformance.VOCABULARY, 40).tolist())
    targets_lt = np.random.default_rng(8).integers(0, conformance.VOCABULARY, (40, 3))
    targets_lt[4, 1] = targets_lt[0] = -1
    prompt = engine_of(prefill_tokens_per_step=7).prompt_pass(TokenIds(ids))
    prompt.targets_lt = targets_lt
    while (logprobs := prompt.advance()) is None:
        pass
    expected_lv = all_logprobs(base_of("qwen3"), ids)[:-1]
    expected_lt = np.take_along_axis(expected_lv, np.maximum(targets_lt[1:], 0), 1)
    expected_lt[targets_lt[1:] < 0] = np.nan
    assert np.isnan(logprobs.target_logprobs[0]).all()
    np.testing.assert_allclose(logprobs.target_logprobs[1:], expected_lt, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_the_bits_of_a_tenant_are_those_that_it_has_alone(options: dict[str, Any]) -> None:
    def sampled(numbers: range) -> dict[str, tuple[list[int], list[float]]]:
        session = Session(engine_of(**options))
        for number in numbers:
            session.engine.add_adapter(f"a{number}", copy.deepcopy(adapter_of(number, rank=1 << number % 7)))
            session.submit(request(f"r{number}", PROMPT, max_tokens=24, adapter=f"a{number}"))
        results = session.run()
        return {name: (list(result.response.ids), list(result.response.logprobs)) for name, result in results.items()}

    together = sampled(range(8))
    for number in range(8):
        assert together[f"r{number}"] == sampled(range(number, number + 1))[f"r{number}"]
