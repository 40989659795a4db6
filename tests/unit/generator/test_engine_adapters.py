"""Adapters in the torch engine: the conditions of every engine, several at once, revisions in flight, errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from tiers import pairs
from torch import Tensor

from headway.config.adapter import AdapterConfig
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.adapter_targets import adapted_targets
from headway.models.decoder import Decoder
from headway.models.loading import weights_of
from headway.models.lora import Lora, merge
from headway.records.errors import ConfigurationError
from headway.records.generation import AppliedWeights, UpdateMode
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, assert_logprobs, request
from tests.conformance.reference import forced_logprobs, random_model

torch.set_num_threads(1)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MODES: tuple[UpdateMode, ...] = ("keep", "recompute", "abort", "finish")


@functools.cache
def base_of(family: str) -> Decoder:
    return random_model(100, vocabulary=conformance.VOCABULARY, family=family)


@functools.cache
def adapter_of(number: int, family: str = "qwen3", rank: int = 3) -> Lora:
    """An adapter beside every matrix that changes a lot of what is sampled."""
    config = base_of(family).config
    experts = EXPERTS if config.mixture is not None else ()
    settings = AdapterConfig(rank=rank, alpha=2.0 * rank, target_parameters=experts)
    lora = Lora(adapted_targets(config, settings), seed=number)
    generator = torch.Generator().manual_seed(1000 + number)
    for name, parameter in lora.parameters.items():
        if name.endswith("lora_B"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return lora


@functools.cache
def merged_with(number: int, family: str = "qwen3", rank: int = 3) -> Decoder:
    model = copy.deepcopy(base_of(family))
    merge(model, adapter_of(number, family, rank))
    return model


class PolicyEngine(TorchEngine):
    """Takes the updates of the conformance suite, which names a version, as updates of its policy's adapter."""

    family = "qwen3"

    def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode, *, adopt: bool = False
    ) -> AppliedWeights:
        given = tensors["embedding_weight"].data_ptr()
        number = next(n for n in range(9) if conformance.model_of(n).embedding_weight.data_ptr() == given)
        return self.update_adapter("policy", adapter_of(number, self.family).weights(), version, mode)


FAMILIES = ("qwen3", "llama", "gemma2", "qwen3_moe")


@pytest.fixture
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(conformance, "model_of", lambda version: merged_with(version, request.param))
    monkeypatch.setattr(PolicyEngine, "family", request.param)
    return request.param


def make_policy(*, slots: int = 4, max_context_tokens: int = 96, **options: Any) -> TorchEngine:
    model, adapters = (
        copy.deepcopy(base_of(PolicyEngine.family)),
        {"policy": copy.deepcopy(adapter_of(0, PolicyEngine.family))},
    )
    return PolicyEngine(model, slots=slots, max_context_tokens=max_context_tokens, adapters=adapters, **options)


plain = functools.partial(make_policy, native_kernels=False)
deterministic = functools.partial(make_policy, deterministic=True)
MAKERS = {"native": make_policy, "plain": plain, "deterministic": deterministic}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how", "mode"), pairs(FAMILIES, tuple(MAKERS), ("keep", "recompute", "finish")), indirect=["family"]
)
def test_log_probabilities_over_updates_in_flight_equal_a_replay_of_the_segments(
    family: str, how: str, mode: UpdateMode
) -> None:
    conformance.check_updates_in_flight(MAKERS[how], mode, 0)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *(("qwen3", how) for how in MAKERS),
        *(("llama", "plain"), ("gemma2", "deterministic"), ("gemma2", "native"), ("qwen3_moe", "native")),
    ],
    indirect=["family"],
)
def test_an_adapter_alone_meets_what_every_engine_must(family: str, how: str) -> None:
    make = MAKERS[how]
    conformance.check_logprobs_at_every_composition(make, 0)
    conformance.check_abort_update_parks_and_resumes(make)
    conformance.check_prefix_is_not_shared_across_versions(make)
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make)
    for mode in MODES if family == "qwen3" else MODES[:1]:
        conformance.check_update_changes_what_is_sampled(make, mode)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_preempted_and_resumed_requests_keep_their_adapter(family: str) -> None:
    conformance.check_preemption(make_policy, 0, conformance.Capabilities(kv_block_tokens=BLOCK_TOKENS))
    conformance.check_resume_equals_uninterrupted(make_policy, 0)


RANKS = (1, 2, 3, 4, 8, 16, 5, 7)


def several(family: str = "qwen3", **options: Any) -> TorchEngine:
    adapters = {f"a{n}": copy.deepcopy(adapter_of(n, family, rank)) for n, rank in enumerate(RANKS)}
    options = {"slots": 12, "max_context_tokens": 96, **options}
    return TorchEngine(copy.deepcopy(base_of(family)), adapters=adapters, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("qwen3", "qwen2", "gemma3", "qwen3_moe", "mixtral")),
        *((family, {"native_kernels": False}) for family in ("gemma3", "qwen3_moe")),
        *((family, {"deterministic": True}) for family in ("qwen2", "mixtral")),
    ],
)
def test_rows_of_eight_adapters_equal_each_alone_merged(family: str, options: dict[str, Any]) -> None:
    """Prompts are shared by adapter alone: some are the same under several."""
    session = Session(several(family, **options))
    owners: dict[str, Decoder] = {}
    for number in range(len(RANKS) + 1):
        name = f"a{number}" if number < len(RANKS) else "base"
        owner = base_of(family) if name == "base" else merged_with(number, family, RANKS[number])
        for which, prompt in (("x", (5, 6, 7, 8)), ("y", (5, 6, 7, 8)), ("z", tuple(range(number + 2)))):
            owners[f"{name}{which}"] = owner
            session.submit(request(f"{name}{which}", prompt, max_tokens=6 + number, adapter=name))
        session.step(number % 3)
    for name, result in session.run().items():
        expected = forced_logprobs(owners[name], session.requests[name].prompt_ids, result.response.ids, 1.0)
        assert_logprobs(result, expected)
        other = forced_logprobs(base_of(family), session.requests[name].prompt_ids, result.response.ids, 1.0)
        assert name.startswith("base") or (expected - other).abs().max() > 0.01


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_deterministic_rows_do_not_depend_on_their_neighbours_adapters(family: str) -> None:
    """To the bit, whichever adapters run beside them."""
    for mine in ("a4", "base"):
        seen: list[tuple[float, ...]] = []
        for others in ((), ("a4", "a4"), ("a1", "base"), ("a0", "a5", "base", "a3", "a2")):
            session = Session(several(family, deterministic=True, slots=7))
            session.submit(*(request(f"n{i}", [i + 7] * (i + 1), adapter=one) for i, one in enumerate(others)))
            session.step(len(others) % 3)
            session.submit(request("watched", [3, 1, 4, 1, 5, 9], max_tokens=14, adapter=mine))
            seen.append(session.run()["watched"].response.logprobs)
        assert all(one == seen[0] for one in seen)


def test_bfloat16_rows_stay_near_their_merged_models() -> None:
    engine = TorchEngine(
        copy.deepcopy(base_of("qwen3")).to(torch.bfloat16),
        slots=8,
        max_context_tokens=64,
        adapters={f"a{n}": copy.deepcopy(adapter_of(n)) for n in range(3)},
    )
    session = Session(engine)
    session.submit(*(request(f"r{n}", [2, 3, 4, 1], max_tokens=20, adapter=f"a{n}") for n in range(3)))
    for n, result in enumerate(session.run().values()):
        own, other = (forced_logprobs(merged_with(m), (2, 3, 4, 1), result.response.ids, 1.0) for m in (n, (n + 1) % 3))
        got = torch.tensor(result.response.logprobs)
        assert (got - own).abs().mean() < 0.15 < (got - other).abs().mean()


def test_base_and_policy_have_versions_of_their_own() -> None:
    session = Session(make_policy())
    session.submit(request("old", max_tokens=20), request("base", max_tokens=20, adapter="base"))
    session.step(5)
    session.engine.update_adapter("policy", adapter_of(3).weights(), 7, "keep")
    session.submit(request("new", max_tokens=5, adapter="policy"))
    results = session.run()
    spans = {name: [(one.version, one.tokens) for one in result.response.versions] for name, result in results.items()}
    assert spans == {"old": [(0, 5), (7, 15)], "base": [(0, 20)], "new": [(7, 5)]}
    assert_logprobs(results["base"], forced_logprobs(base_of("qwen3"), (5, 6, 7), results["base"].response.ids, 1.0))
    assert session.engine.statistics().version == 7


@pytest.mark.parametrize("mode", MODES)
def test_only_the_newest_revision_and_those_that_requests_hold_stay(mode: UpdateMode) -> None:
    engine = make_policy()
    session = Session(engine)
    kept: list[int] = []
    for version in range(1, 5):
        session.submit(request(f"r{version}", max_tokens=8))
        session.step(3)
        engine.update_adapter("policy", adapter_of(version).weights(), version, mode)
        kept.append(len(engine.adapters))
    assert kept == ([2, 3, 3, 3] if mode == "finish" else [1, 1, 1, 1])
    session.run()
    assert len(engine.adapters) == 1


def test_a_resumed_request_finishes_on_its_revision_while_that_is_registered() -> None:
    engine = make_policy()
    session = Session(engine)
    session.submit(request("holds", max_tokens=40), request("moved", max_tokens=30))
    session.step(6)
    engine.abort(["moved"])
    session.collect()
    partial = session.results.pop("moved").response
    engine.update_adapter("policy", adapter_of(1).weights(), 1, "finish")
    session.submit(request("moved", max_tokens=30, partial=partial))
    alone = Session(make_policy())
    alone.engine.update_adapter("policy", adapter_of(1).weights(), 1, "finish")
    alone.submit(request("moved", max_tokens=30, partial=partial))
    here, there = session.run()["moved"].response, alone.run()["moved"].response
    assert [(span.version, span.tokens) for span in here.versions] == [(0, 30)]
    assert [(span.version, span.tokens) for span in there.versions] == [(0, 6), (1, 24)]
    parts = [forced_logprobs(merged_with(n), (5, 6, 7), there.ids, 1.0) for n in (0, 1)]
    assert_logprobs(alone.results["moved"], torch.cat([parts[0][:6], parts[1][6:]]))


def test_a_prompt_computed_in_parts_is_computed_anew_for_a_new_revision() -> None:
    prompt = tuple(n % 37 for n in range(60))
    engine = make_policy(prefill_tokens_per_step=25)
    session = Session(engine)
    session.submit(request("long", prompt, max_tokens=6))
    session.step(1)
    engine.update_adapter("policy", adapter_of(2).weights(), 1, "finish")
    result = session.run()["long"]
    assert [span.version for span in result.response.versions] == [1]
    assert_logprobs(result, forced_logprobs(merged_with(2), prompt, result.response.ids, 1.0))


def test_unknown_adapters_and_wrong_updates_are_errors_and_change_nothing() -> None:
    engine = make_policy()
    session = Session(engine)
    session.submit(request("good", max_tokens=12), request("bad", max_tokens=12, adapter="poet"))
    session.step(3)
    wrong_rank = adapter_of(1, rank=5).weights()
    with pytest.raises(ConfigurationError, match=r"lora_A: shape \[5, 32\]"):
        engine.update_adapter("policy", wrong_rank, 1, "keep")
    missing = dict(list(adapter_of(1).weights().items())[1:])
    with pytest.raises(ConfigurationError, match="names"):
        engine.update_adapter("policy", missing, 1, "keep")
    with pytest.raises(ConfigurationError, match="'poet', which isn't registered; registered: policy"):
        engine.update_adapter("poet", adapter_of(1).weights(), 1, "keep")
    with pytest.raises(ConfigurationError, match="adapters are registered"):
        TorchEngine.update_weights(engine, weights_of(base_of("qwen3")), 1, "keep")
    results = session.run()
    assert results["bad"].refused
    assert results["bad"].error == "there is no adapter 'poet'; registered: policy"
    assert [span.version for span in results["good"].response.versions] == [0]
    assert_logprobs(results["good"], forced_logprobs(merged_with(0), (5, 6, 7), results["good"].response.ids, 1.0))
    whole = TorchEngine(copy.deepcopy(base_of("qwen3")), slots=2, max_context_tokens=32)
    with pytest.raises(ConfigurationError, match="'finish' is for adapters"):
        whole.update_weights(weights_of(base_of("qwen3")), 1, "finish")


def test_published_adapters_are_applied(tmp_path) -> None:
    engine = make_policy()
    session = Session(engine)
    with Publisher("adapters", directory=tmp_path) as publisher:
        for version in (1, 2):  # the second into the buffer of the first
            tensors = adapter_of(version).weights()
            published = msgspec.structs.replace(publisher.publish(version, tensors), adapter="policy")
            engine.apply(published, "finish")
            session.submit(request(f"r{version}", max_tokens=20))
            session.step(2)
    for version, result in enumerate(session.run().values(), 1):
        assert [span.version for span in result.response.versions] == [version]
        assert_logprobs(result, forced_logprobs(merged_with(version), (5, 6, 7), result.response.ids, 1.0))
