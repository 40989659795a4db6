"""The torch engine on every family: windows shorter than the sequences, soft caps, two rotary embeddings, mixtures."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch

from headway.generator.engines.torch.engine import TorchEngine
from headway.models.loading import weights_of
from tests.conformance import engine as conformance
from tests.conformance.reference import FAMILIES, forced_logprobs, random_model

torch.set_num_threads(1)


@pytest.fixture(params=[family for family in FAMILIES if family != "qwen3"])  # the conformance suite runs on that one
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    @functools.cache
    def model_of(version: int):
        return random_model(100 + version, vocabulary=conformance.VOCABULARY, family=request.param)

    monkeypatch.setattr(conformance, "model_of", model_of)
    return request.param


def make_engine(*, slots: int = 4, max_context_tokens: int = 96, **options: Any) -> TorchEngine:
    model = copy.deepcopy(conformance.model_of(0))
    return TorchEngine(model, slots=slots, max_context_tokens=max_context_tokens, **options)


def test_logprobs_equal_teacher_forcing(family: str) -> None:
    conformance.check_logprobs_at_every_composition(make_engine, 0)


@pytest.mark.parametrize("family", ["gemma3", "mixtral"], indirect=True)
def test_updates_in_flight(family: str) -> None:
    conformance.check_updates_in_flight(make_engine, "keep", 0)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"], indirect=True)
def test_deterministic_rows_do_not_depend_on_their_neighbours(family: str) -> None:
    """To the bit: where a mixture sends other rows changes nothing."""
    conformance.check_logprobs_at_every_composition(functools.partial(make_engine, deterministic=True), 1)
    seen: list[tuple[float, ...]] = []
    for neighbours in (0, 3):
        session = conformance.Session(make_engine(deterministic=True))
        session.submit(conformance.request("watched", [3, 1, 4, 1, 5, 9, 2, 6, 5], max_tokens=12))
        session.submit(*(conformance.request(f"n{i}", [i + 7] * (i + 1), max_tokens=9) for i in range(neighbours)))
        seen.append(session.run()["watched"].response.logprobs)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_bfloat16_stays_near_float32(family: str) -> None:
    model = random_model(4, vocabulary=conformance.VOCABULARY, family=family)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    session = conformance.Session(TorchEngine(narrow, slots=4, max_context_tokens=64))
    session.submit(conformance.request("r", [2, 3, 4, 1], max_tokens=20))
    ids = session.run()["r"].response.ids
    expected = forced_logprobs(narrow, (2, 3, 4, 1), ids, 1.0)
    got = torch.tensor(session.results["r"].response.logprobs)
    assert (got - expected).abs().mean() < 0.1
    exact = forced_logprobs(model, (2, 3, 4, 1), ids, 1.0)
    assert (got - exact).abs().median() < 0.2
    assert weights_of(narrow).keys() == weights_of(model).keys()


def test_a_wrong_window_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above has teeth: an engine whose rows see one token more fails it."""
    model = random_model(100, vocabulary=conformance.VOCABULARY, family="mistral")
    wider = copy.deepcopy(model)
    for layer in wider.layers:
        layer.kind = dataclasses.replace(layer.kind, scores=dataclasses.replace(layer.kind.scores, window=7))
    monkeypatch.setattr(conformance, "model_of", lambda version: wider)
    session = conformance.Session(make_engine())
    session.submit(conformance.request("r", [1] * 9, max_tokens=10))
    response = session.run()["r"].response
    conformance.assert_logprobs(session.results["r"], forced_logprobs(wider, [1] * 9, response.ids, 1.0))
    with pytest.raises(AssertionError):
        conformance.assert_logprobs(session.results["r"], forced_logprobs(model, [1] * 9, response.ids, 1.0))
