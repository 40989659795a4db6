"""The torch engine returns the experts of every token it reads, whatever becomes of its requests."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from headway.generator.engines.torch.engine import TorchEngine
from headway.models.decoder import Decoder
from headway.models.loading import weights_of
from headway.records.generation import GenerationResult, PartialResponse, Probe
from headway.records.tokens import EXPERTS
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, request
from tests.conformance.reference import random_model

torch.set_num_threads(1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def mixture(seed: int = 100, family: str = "qwen3_moe") -> Decoder:
    return random_model(seed, vocabulary=conformance.VOCABULARY, family=family)


def make_engine(model: Decoder, *, slots: int = 4, **options: Any) -> TorchEngine:
    return TorchEngine(copy.deepcopy(model), slots=slots, max_context_tokens=96, return_experts=True, **options)


def experts_of(model: Decoder, ids: list[int]) -> torch.Tensor:
    """[tokens, layers * K] of a plain forward pass, each layer's sorted."""
    for layer in model.layers:
        layer.routed = []
    with torch.no_grad():
        model.forward_packed(torch.tensor(ids), [len(ids)])
    return torch.cat([layer.routed[-1].sort(-1).values for layer in model.layers], -1)


def require_experts(model: Decoder, prompt: list[int], result: GenerationResult, unread: int | None = None) -> None:
    """Every token but the last has its experts in all layers; in the last layer those read as a prompt have none.
    ``unread``: tokens read as a prompt; None: all of the prompt but its last."""
    ids = [*prompt, *result.response.ids]
    expected = experts_of(model, ids)
    per_token = expected.shape[1] // 2
    table = torch.from_numpy(result.response.token_rows[EXPERTS].table(2 * per_token)).long()
    assert len(table) == len(ids) - 1
    first, last = (part.sort(-1).values for part in table.split(per_token, -1))
    assert torch.equal(first, expected[:-1, :per_token])
    prefilled = len(prompt) - 1 if unread is None else unread
    assert (last[:prefilled] == -1).all()
    assert torch.equal(last[prefilled:], expected[prefilled:-1, per_token:])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_those_of_a_plain_forward_pass(family: str, deterministic: bool) -> None:
    """Of requests that share a prompt, or a slot after another, or whose prompt takes several steps."""
    model = mixture(family=family)
    session = Session(make_engine(model, deterministic=deterministic, prefill_tokens_per_step=4))
    for at in range(7):
        prompt = PROMPT[: 3 + 2 * (at % 3)]
        session.submit(request(f"r{at}", prompt, max_tokens=6 + at, seed=at))
        session.step(at % 2)
    for name, result in session.run().items():
        require_experts(model, list(session.requests[name].prompt_ids), result)


def test_a_probe_leaves_no_experts_behind() -> None:
    """Of a prompt that takes several steps, the first of which compute nothing in the last layer."""
    model = mixture()
    session = Session(make_engine(model, prefill_tokens_per_step=4))
    session.engine.score(Probe(ids=tuple(PROMPT * 3)))
    session.submit(request("r", PROMPT * 7, max_tokens=6))
    require_experts(model, PROMPT * 7, session.run()["r"])


def test_experts_of_a_prompt_are_copied_with_its_kv() -> None:
    """To several at once, from a request that computed it a step before."""
    model = mixture()
    session = Session(make_engine(model))
    session.submit(request("first", PROMPT, max_tokens=9))
    session.step()
    session.submit(*(request(f"r{at}", PROMPT, max_tokens=6, seed=at) for at in range(3)))
    prefilled = session.engine.statistics().prefilled_tokens
    for result in session.run().values():
        require_experts(model, PROMPT, result)
    assert session.engine.statistics().prefilled_tokens == prefilled


def test_a_resumed_request_returns_only_what_is_new() -> None:
    """Parked by an update, resumed elsewhere: the rows of both add up, those before are as the old weights routed."""
    old, new = mixture(100), mixture(101)
    session = Session(make_engine(old))
    session.submit(request("r", PROMPT, max_tokens=12))
    session.step(5)
    session.engine.update_weights(weights_of(new), 1, "abort")
    session.collect()
    parked = session.results["r"].response
    assert len(parked.token_rows[EXPERTS]) == len(PROMPT) + len(parked.ids) - 1
    elsewhere = Session(make_engine(new, version=1))
    elsewhere.submit(request("again", PROMPT, max_tokens=12, partial=parked))
    whole = elsewhere.run()["again"].response
    table, before = whole.token_rows[EXPERTS].table(4), parked.token_rows[EXPERTS].table(4)
    assert (table[: len(before)] == before).all()
    assert len(table) == len(PROMPT) + len(whole.ids) - 1
    tail = torch.from_numpy(table[len(before) :]).long()
    expected = experts_of(new, [*PROMPT, *whole.ids])[len(before) : -1]
    assert torch.equal(torch.cat([one.sort(-1).values for one in tail.split(2, -1)], -1), expected)
    # A call that goes on where another ended, of whose tokens the caller has the rows.
    turn = [*PROMPT, *whole.ids, 7, 8]
    elsewhere.submit(request("turn", turn, max_tokens=3, rows_known=len(table)))
    result = elsewhere.run()["turn"].response
    assert len(result.token_rows[EXPERTS]) == len(turn) + len(result.ids) - 1 - len(table)
    # One that came without rows gets them all, as its tokens are read again.
    bare = msgspec.structs.replace(parked, token_rows={})
    elsewhere.submit(request("bare", PROMPT, max_tokens=12, partial=bare))
    result = elsewhere.run()["bare"]
    require_experts(new, PROMPT, result, unread=len(PROMPT) + len(parked.ids) - 1)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_rows_that_were_sent_stay_through_updates_and_preemptions(mode: Any) -> None:
    """As many rows as tokens read, however often they are read again."""
    model = mixture()
    session = Session(make_engine(model, slots=3, kv_capacity_tokens=40))
    for at in range(3):
        session.submit(request(f"r{at}", PROMPT[: 4 + at], max_tokens=14, seed=at))
    for version in (1, 2):
        session.step(4)
        session.engine.update_weights(weights_of(mixture(100 + version)), version, mode)
    for name, result in session.run().items():
        tokens = len(session.requests[name].prompt_ids) + len(result.response.ids)
        rows = result.response.token_rows[EXPERTS]
        assert len(rows) == tokens - 1
        assert (rows.table(4)[:, :2] >= 0).all()
    assert session.engine.statistics().preemptions > 0


def test_a_dense_model_and_an_engine_not_asked_return_none() -> None:
    for model, asked in ((random_model(1, vocabulary=conformance.VOCABULARY), True), (mixture(), False)):
        session = Session(TorchEngine(model, slots=2, max_context_tokens=64, return_experts=asked))
        session.submit(request("r", PROMPT, max_tokens=4))
        response: PartialResponse = session.run()["r"].response
        assert response.token_rows == {}
        assert all(layer.routed is None for layer in model.layers)


def test_a_dense_layer_has_no_place_in_the_rows() -> None:
    config = mixture().config
    kinds = dataclasses.replace(config.mixture, dense_layers=(1,))  # type: ignore[type-var]
    from headway.models.loading import build

    model = build(dataclasses.replace(config, mixture=kinds))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    session = Session(make_engine(model))
    session.submit(request("r", PROMPT, max_tokens=4))
    rows = session.run()["r"].response.token_rows[EXPERTS]
    assert rows.table(2).min() >= 0  # of layer 0 alone, whose prompt tokens are routed as well
