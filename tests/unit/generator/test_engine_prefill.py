"""Prompts longer than a step's budget, and prompts that a recompute shares, in the torch engine."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.engine import Session, model_of, request
from tests.conformance.reference import forced_logprobs
from tests.unit.generator.test_engine_torch import make_engine

torch.set_num_threads(1)


@pytest.mark.parametrize("native_kernels", [True, False])
def test_a_long_prompt_is_computed_over_several_steps_while_others_go_on(native_kernels):
    """Each step computes at most the budget, running requests gain a token in each, members share the chunks."""
    engine = make_engine(slots=4, prefill_tokens_per_step=10, native_kernels=native_kernels)
    session = Session(engine)
    session.submit(request("short", max_tokens=30))
    session.step(1)
    prompt = [7 + i % 30 for i in range(45)]
    session.submit(*(request(f"long{i}", prompt, max_tokens=6, seed=i) for i in range(2)))
    steps = 0
    while engine.statistics().running == 1:
        before = engine.statistics()
        session.step(1)
        after = engine.statistics()
        assert after.generated_tokens - before.generated_tokens == after.running
        assert after.prefilled_tokens - before.prefilled_tokens <= 10
        steps += 1
    assert steps == 5
    assert engine.statistics().prefilled_tokens == 2 + 44
    session.run()
    for name in ("short", "long0", "long1"):
        asked, response = session.requests[name], session.results[name].response
        expected = forced_logprobs(model_of(0), asked.prompt_ids, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("disturbance", ["update", "abort", "urgent"])
def test_a_half_computed_prompt_survives_what_happens_meanwhile(disturbance, native_kernels):
    engine = make_engine(slots=2, prefill_tokens_per_step=10, native_kernels=native_kernels)
    session = Session(engine)
    prompt = tuple(7 + i % 30 for i in range(45))
    session.submit(request("long", prompt, max_tokens=6, priority=1))
    session.step(3)
    assert engine.statistics().running == 0
    version = 0
    if disturbance == "update":  # what was computed with the old weights must not be used
        session.update(1, "keep")
        version = 1
    elif disturbance == "abort":  # somebody else takes over where it was, with a prompt that is that beginning
        engine.abort(["long"])
        session.collect()
        session.submit(request("other", prompt[:31], max_tokens=6), request("long2", prompt, max_tokens=6))
    else:  # others need both slots first
        session.submit(*(request(f"u{i}", [i + 1] * 3, max_tokens=4) for i in range(2)))
    session.run()
    for name, result in session.results.items():
        asked, response = session.requests[name], result.response
        if name == "long" and disturbance == "abort":
            assert response.ids == ()
            continue
        expected = forced_logprobs(model_of(version), asked.prompt_ids, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("native_kernels", [True, False])
def test_a_prompt_that_is_the_beginning_of_a_longer_one_gets_its_own_kv(begun, native_kernels):
    """What fits of the longer prompt in this step is just what an admitted request needs: one row of KV for both."""
    long = [7 + i % 30 for i in range(45)]
    fed = 30 if begun else 10  # then 10 tokens of the budget are left, with 20 of the long prompt in place or none
    responses = {}
    for budget in (20, 8192):
        session = Session(make_engine(slots=4, prefill_tokens_per_step=budget, native_kernels=native_kernels))
        first = request("long", long, max_tokens=6, priority=1)
        second = request("beginning", [*long[:fed], 5], max_tokens=6)
        if begun:
            session.submit(first)
            session.step(1)
            session.submit(second)
        else:
            session.submit(second, first)
        session.run()
        responses[budget] = {name: result.response for name, result in session.results.items()}
    for name, response in responses[20].items():
        whole = responses[8192][name]
        assert response.ids == whole.ids, name
        assert torch.allclose(torch.tensor(response.logprobs), torch.tensor(whole.logprobs), atol=1e-4), name
        expected = forced_logprobs(model_of(0), session.requests[name].prompt_ids, response.ids, 1.0)
        assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4), name


@pytest.mark.parametrize("native_kernels", [True, False])
def test_recompute_computes_a_shared_prompt_once(native_kernels):
    prompt = tuple(range(3, 33))
    session = Session(make_engine(slots=5, native_kernels=native_kernels))
    session.submit(*(request(f"m{i}", prompt, max_tokens=20, seed=i) for i in range(4)), request("alone", [4] * 9))
    session.step(5)
    applied = session.update(1, "recompute")
    assert applied.reprefilled_tokens == 29 + 4 * 5 + 8 + 5
    session.run()
    for name, result in session.results.items():
        asked, response = session.requests[name], result.response
        expected = forced_logprobs(model_of(1), asked.prompt_ids, response.ids, 1.0)[5:]
        assert torch.allclose(torch.tensor(response.logprobs)[5:], expected, atol=1e-4), name
