"""Log-probabilities of given tokens: by plain forwards, in chunks of any size, beside requests, across updates."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_adapters import adapter_of, base_of, merged_with
from test_engine_hub import make_padded

from headway.generator.engines import prompt_pass
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.decoder import Decoder
from headway.models.loading import weights_of
from headway.records.errors import ConfigurationError
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, request
from tests.conformance.reference import FAMILIES, random_model

IDS = tuple(np.random.default_rng(5).integers(0, conformance.VOCABULARY, 50).tolist())


def engine_of(model: Decoder, **options):
    return TorchEngine(copy.deepcopy(model), slots=3, max_context_tokens=96, **options)


@torch.no_grad()
def all_logprobs(model: Decoder, ids=IDS) -> np.ndarray:
    hidden_nd = model.forward_packed(torch.tensor(ids), [len(ids)])
    return torch.log_softmax(model.head(hidden_nd).float(), -1).numpy()


def logprobs_of(engine, ids=IDS, top=0, adapter="") -> PromptLogprobs:
    """Steps between the chunks, as the service does."""
    prompt = engine.prompt_pass(TokenIds(ids), top, adapter)
    while (logprobs := prompt.advance()) is None:
        engine.step()
    return logprobs


def assert_equal(logprobs: PromptLogprobs, model: Decoder, ids=IDS, top=0):
    expected_lv = all_logprobs(model, ids)[:-1]
    assert np.isnan(logprobs.logprobs[0])
    np.testing.assert_allclose(logprobs.logprobs[1:], expected_lv[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    assert logprobs.top_ids.shape == logprobs.top_logprobs.shape == (len(ids), top)
    if top:
        assert (logprobs.top_ids[0] == -1).all()
        assert np.isnan(logprobs.top_logprobs[0]).all()
        np.testing.assert_allclose(logprobs.top_logprobs[1:], -np.sort(-expected_lv)[:, :top], atol=1e-4)
        chosen = np.take_along_axis(expected_lv, logprobs.top_ids[1:].astype(np.int64), 1)
        np.testing.assert_allclose(chosen, logprobs.top_logprobs[1:], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_one_forward(family):
    model = random_model(7, family=family)
    for options in ({}, {"prefill_tokens_per_step": 7}, {"deterministic": True, "prefill_tokens_per_step": 16}):
        assert_equal(logprobs_of(engine_of(model, **options), top=5), model, top=5)


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(1, 96), chunk=st.integers(1, 100), top=st.integers(0, conformance.VOCABULARY))
def test_chunks_of_any_size_give_the_same(tokens, chunk, top):
    ids, model = (IDS + IDS)[:tokens], conformance.model_of(0)
    assert_equal(logprobs_of(engine_of(model, prefill_tokens_per_step=chunk), ids, top), model, ids, top)


def test_a_chunk_has_few_logits(monkeypatch):
    monkeypatch.setattr(prompt_pass, "_LOGITS", 4 * conformance.VOCABULARY)
    engine = engine_of(conformance.model_of(0))
    prompt, chunks = engine.prompt_pass(TokenIds(IDS), 1), 1
    while (logprobs := prompt.advance()) is None:
        chunks += 1
    assert chunks == -(-len(IDS) // 4)
    assert_equal(logprobs_of(engine, top=1), conformance.model_of(0), top=1)
    assert logprobs.version == 0


@pytest.mark.parametrize("make", [lambda: engine_of(conformance.model_of(0), prefill_tokens_per_step=8), make_padded])
def test_requests_beside_it_are_as_without(make):
    asked = [request(f"r{i}", prompt=IDS[i : i + 9], max_tokens=12, seed=i) for i in range(4)]
    alone, beside = Session(make()), Session(make())
    for session in (alone, beside):
        session.submit(*asked)
    beside.step(2)
    assert_equal(logprobs_of(beside.engine, top=2), conformance.model_of(0), top=2)
    results = [session.run() for session in (alone, beside)]
    assert [results[0][one.request_id].response for one in asked] == [
        results[1][one.request_id].response for one in asked
    ]


@pytest.mark.parametrize("make", [lambda: engine_of(conformance.model_of(0), prefill_tokens_per_step=8), make_padded])
def test_one_version_computes_all_of_them(make):
    engine = make()
    engine._prefill_tokens_per_step = 8
    prompt = engine.prompt_pass(TokenIds(IDS), 3)
    for _ in range(3):
        assert prompt.advance() is None
    engine.update_weights(weights_of(conformance.model_of(1)), 1, "keep")
    while (logprobs := prompt.advance()) is None:
        pass
    assert logprobs.version == 1
    assert_equal(logprobs, conformance.model_of(1), top=3)


def test_by_an_adapter_and_its_newest_revision():
    engine = TorchEngine(
        copy.deepcopy(base_of("qwen3")),
        slots=2,
        max_context_tokens=96,
        adapters={"policy": copy.deepcopy(adapter_of(1)), "other": copy.deepcopy(adapter_of(2))},
        prefill_tokens_per_step=8,
    )
    assert_equal(logprobs_of(engine), merged_with(1))
    assert_equal(logprobs_of(engine, adapter="other"), merged_with(2))
    prompt = engine.prompt_pass(TokenIds(IDS), 0, "other")
    prompt.advance()
    engine.update_adapter("other", adapter_of(3).weights(), 4, "keep")
    while (logprobs := prompt.advance()) is None:
        pass
    assert logprobs.version == 4
    assert_equal(logprobs, merged_with(3))
    with pytest.raises(ConfigurationError, match="nobody"):
        engine.prompt_pass(TokenIds(IDS), 0, "nobody")


def test_a_mixture_keeps_no_experts_of_it():
    model = random_model(7, family="qwen3_moe")
    session = Session(engine_of(model, return_experts=True))
    assert_equal(logprobs_of(session.engine), model)
    session.submit(request("r", prompt=IDS[:9], max_tokens=4))
    assert session.run()["r"].finish_reason == "length"


@pytest.mark.parametrize(
    ("ids", "top", "reason"),
    [
        ((), 0, "prompt: 0 tokens; valid: 1 to 96"),
        ((1,) * 97, 0, "97 tokens; valid: 1 to 96"),
        ((1, 40), 0, r"a token id outside 0\.\.39"),
        ((-1, 4), 0, r"a token id outside 0\.\.39"),
        ((1, 2), 41, "the 41 likeliest tokens of 40; valid: 0 to 40"),
        ((1, 2), -1, "the -1 likeliest"),
    ],
)
def test_what_no_engine_can_compute_is_refused(ids, top, reason):
    with pytest.raises(ConfigurationError, match=reason):
        engine_of(conformance.model_of(0)).prompt_pass(TokenIds(ids), top)
