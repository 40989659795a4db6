"""An adapter in the engine of transformers' models: what every engine must do, revisions in flight, errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from scratch_folders import scratch_folder
from tiny_hub import make_hub_model
from torch import Tensor

from headway.config.adapter import AdapterConfig
from headway.generator.engines.hf.engine import HfEngine
from headway.models.adapter_files import save_adapter
from headway.models.adapter_targets import adapted_targets
from headway.models.decoder import Decoder
from headway.models.hf.adapter import HfAdapter
from headway.models.hf.model import load_hf
from headway.models.loading import save_model, weights_of
from headway.models.lora import Lora, merge
from headway.records.errors import ConfigurationError
from headway.records.generation import AppliedWeights, GenerationResult, Probe, UpdateMode
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, assert_logprobs, request
from tests.conformance.reference import forced_logprobs, random_model

torch.set_num_threads(1)
MODES: tuple[UpdateMode, ...] = ("keep", "recompute", "abort", "finish")


# --- a family that Headway has too: its decoder with merged adapters is the reference ---------------------------


@functools.cache
def base() -> Decoder:
    return random_model(100, vocabulary=conformance.VOCABULARY)


@functools.cache
def base_folder() -> Path:
    folder = scratch_folder("hub-adapters") / "base"
    save_model(base(), folder)
    return folder


@functools.cache
def lora_of(version: int, rank: int = 3) -> Lora:
    """The adapter published as ``version``, which changes a lot of what is sampled."""
    lora = Lora(adapted_targets(base().config, AdapterConfig(rank=rank, alpha=2.0 * rank)), seed=version)
    generator = torch.Generator().manual_seed(version)
    for pair in lora.pairs():
        pair.b.data = torch.randn(pair.b.shape, generator=generator) * 0.3
    return lora


@functools.cache
def stored(version: int, rank: int = 3) -> AdapterConfig:
    folder = scratch_folder("hub-adapters") / "adapter"
    save_adapter(lora_of(version, rank), folder, base_folder())
    return AdapterConfig(path=str(folder))


@functools.cache
def adapter_of(version: int, rank: int = 3) -> HfAdapter:
    """The same, as a trainer that runs transformers' module has it."""
    return HfAdapter(load_hf(base_folder(), "float32", "cpu"), base_folder(), stored(version, rank), 0)


@functools.cache
def merged_with(version: int) -> Decoder:
    model = copy.deepcopy(base())
    merge(model, lora_of(version))
    return model


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "model_of", merged_with)


class PolicyEngine(HfEngine):
    """Takes the updates of the conformance suite, which names a version, as updates of its policy's adapter."""

    def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode, *, adopt: bool = False
    ) -> AppliedWeights:
        given = tensors["embedding_weight"].data_ptr()
        number = next(n for n in range(9) if merged_with(n).embedding_weight.data_ptr() == given)
        return self.update_adapter("policy", adapter_of(number).weights(), version, mode)


def make_padded(*, slots: int = 4, max_context_tokens: int = 96, name: str = "policy", **options: Any) -> PolicyEngine:
    model = load_hf(base_folder(), "float32", "cpu")
    adapters = {name: HfAdapter(model, base_folder(), stored(0), 0)}
    return PolicyEngine(model, slots=slots, max_context_tokens=max_context_tokens, adapters=adapters, **options)


def make_equal(**options: Any) -> PolicyEngine:
    engine = make_padded(**options)
    engine._runner.batching = "equal lengths"
    return engine


def make_deterministic(**options: Any) -> PolicyEngine:
    return make_padded(deterministic=True, **options)


MAKERS = (make_padded, make_equal, make_deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "mode"),
    [
        *((make, "keep") for make in MAKERS),
        *((make_padded, "recompute"), (make_equal, "finish"), (make_deterministic, "recompute")),
    ],
)
def test_log_probabilities_over_updates_in_flight_equal_a_replay_of_the_segments(
    make: conformance.MakeEngine, mode: UpdateMode
) -> None:
    conformance.check_updates_in_flight(make, mode, 0)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_an_adapter_meets_what_every_engine_must(make: conformance.MakeEngine) -> None:
    conformance.check_logprobs_at_every_composition(make, 0)
    conformance.check_abort_update_parks_and_resumes(make)
    conformance.check_prefix_is_not_shared_across_versions(make)
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make)
    if make is make_padded:  # of the others without an adapter: test_engine_hub.py
        conformance.check_preemption(make, 0)
        conformance.check_resume_equals_uninterrupted(make, 0)
    for mode in MODES if make is make_padded else MODES[:1]:
        conformance.check_update_changes_what_is_sampled(make, mode)


@pytest.mark.parametrize(
    ("make", "mode"), [*((make_padded, mode) for mode in MODES), (make_equal, "keep"), (make_deterministic, "abort")]
)
def test_base_and_policy_are_sampled_side_by_side(make: Callable[..., PolicyEngine], mode: UpdateMode) -> None:
    """Of one prompt too, and each with versions of its own."""
    session = Session(make())
    session.submit(request("old", max_tokens=20), request("base", max_tokens=20, adapter="base"))
    session.step(5)
    applied = session.engine.update_adapter("policy", adapter_of(3).weights(), 7, mode)
    assert applied.in_flight == (0 if mode == "finish" else 1)
    session.submit(request("new", max_tokens=5, adapter="policy"), request("more", max_tokens=5, adapter="base"))
    results = session.run()
    spans = {name: [(one.version, one.tokens) for one in result.response.versions] for name, result in results.items()}
    crossed = {"abort": [(0, 5)], "finish": [(0, 20)]}.get(mode, [(0, 5), (7, 15)])
    assert spans == {"old": crossed, "base": [(0, 20)], "new": [(7, 5)], "more": [(0, 5)]}
    for name, model in (("base", base()), ("more", base()), ("new", merged_with(3))):
        assert_logprobs(results[name], forced_logprobs(model, (5, 6, 7), results[name].response.ids, 1.0))
    assert session.engine.statistics().version == 7


@pytest.mark.parametrize("mode", MODES)
def test_only_the_newest_revision_and_those_that_requests_hold_stay(mode: UpdateMode) -> None:
    engine = make_padded()
    session, kept = Session(engine), list[int]()
    for version in range(1, 5):
        session.submit(request(f"r{version}", max_tokens=8))
        session.step(3)
        engine.update_adapter("policy", adapter_of(version).weights(), version, mode)
        kept.append(len(engine.adapters))
    assert kept == ([2, 3, 3, 3] if mode == "finish" else [1, 1, 1, 1])
    session.run()
    assert len(engine.adapters) == 1


def test_a_resumed_request_finishes_on_its_revision_while_that_is_registered() -> None:
    engine = make_padded()
    session = Session(engine)
    session.submit(request("holds", max_tokens=40), request("moved", max_tokens=30))
    session.step(6)
    engine.abort(["moved"])
    session.collect()
    partial = session.results.pop("moved").response
    engine.update_adapter("policy", adapter_of(1).weights(), 1, "finish")
    session.submit(request("moved", max_tokens=30, partial=partial))
    alone = Session(make_padded())
    alone.engine.update_adapter("policy", adapter_of(1).weights(), 1, "finish")
    alone.submit(request("moved", max_tokens=30, partial=partial))
    found = [[(span.version, span.tokens) for span in one.run()["moved"].response.versions] for one in (session, alone)]
    assert found == [[(0, 30)], [(0, 6), (1, 24)]]


def test_a_published_adapter_is_applied_and_survives_the_next_fetch(tmp_path: Path) -> None:
    engine = make_padded()
    session = Session(engine)
    with Publisher("hub-adapters", directory=tmp_path) as publisher:
        for version in (1, 2):  # the second into the buffer of the first
            published = publisher.publish(version, adapter_of(version).weights())
            engine.apply(msgspec.structs.replace(published, adapter="policy"), "finish")
            session.submit(request(f"r{version}", max_tokens=20))
            session.step(2)
    for version, result in enumerate(session.run().values(), 1):
        assert [span.version for span in result.response.versions] == [version]
        assert_logprobs(result, forced_logprobs(merged_with(version), (5, 6, 7), result.response.ids, 1.0))
    found = engine.score(Probe(ids=(3, 1, 4, 1, 5, 9))).paths["prefill"].logprobs
    expected = forced_logprobs(merged_with(2), (3,), (1, 4, 1, 5, 9), 1.0)
    assert (torch.as_tensor(found) - expected).abs().max() < 1e-4


def test_memory_that_left_and_returned_changes_nothing() -> None:
    def sampled(away: bool) -> dict[str, GenerationResult]:
        engine = make_padded()
        session = Session(engine)
        session.submit(*(request(f"r{i}", [1 + i, 2, 3], max_tokens=20) for i in range(5)))
        for number in range(24):
            if away and number in (2, 9, 17):
                revisions = sum(one.nbytes for one in engine.adapters.tensors())
                assert engine.memory is not None
                assert engine.memory.offload().moved_bytes > sum(p.nbytes for p in base().parameters()) + revisions
                engine.memory.onload()
            if number == 8:
                engine.update_adapter("policy", adapter_of(1).weights(), 1, "finish")
            session.step()
        return session.run()

    assert sampled(True) == sampled(False)


def test_unknown_adapters_and_wrong_updates_are_errors_and_change_nothing() -> None:
    engine = make_padded()
    session = Session(engine)
    session.submit(request("good", max_tokens=12), request("bad", max_tokens=12, adapter="poet"))
    session.step(3)
    with pytest.raises(ConfigurationError, match=r"lora_A.*: shape \[5, 32\] does not fit"):
        engine.update_adapter("policy", adapter_of(1, rank=5).weights(), 1, "keep")
    with pytest.raises(ConfigurationError, match="names"):
        engine.update_adapter("policy", dict(list(adapter_of(1).weights().items())[1:]), 1, "keep")
    with pytest.raises(ConfigurationError, match="'poet', which isn't registered; registered: policy"):
        engine.update_adapter("poet", adapter_of(1).weights(), 1, "keep")
    with pytest.raises(ConfigurationError, match="adapters are registered beside them"):
        HfEngine.update_weights(engine, weights_of(engine._model), 1, "keep")
    results = session.run()
    assert results["bad"].error == "there is no adapter 'poet'; registered: policy"
    assert [span.version for span in results["good"].response.versions] == [0]
    assert_logprobs(results["good"], forced_logprobs(merged_with(0), (5, 6, 7), results["good"].response.ids, 1.0))
    with pytest.raises(ConfigurationError, match="adapters a, b beside a model that runs in transformers: valid: one"):
        HfEngine(engine._model, slots=2, max_context_tokens=32, adapters=dict.fromkeys("ab", adapter_of(0)))


def test_an_adapter_of_another_name_leaves_the_model_to_those_who_ask_for_none() -> None:
    session = Session(make_padded(name="poet"))
    session.submit(request("plain", max_tokens=9), request("poem", max_tokens=9, adapter="poet"))
    results = session.run()
    for name, model in (("plain", base()), ("poem", merged_with(0))):
        assert_logprobs(results[name], forced_logprobs(model, (5, 6, 7), results[name].response.ids, 1.0))


# --- architectures that only transformers has -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Olmo2", "GptOss", "FalconH1"])
def test_logprobs_are_the_trainers(tmp_path: Path, kind: str) -> None:
    """The trainer's own module and matrices, packed, against the engine's caches and revisions."""
    folder = make_hub_model(tmp_path / "m", kind)
    named = {"targets": ("q_proj", "in_proj")} if kind == "FalconH1" else {}  # PEFT refuses Mamba's out_proj
    settings = AdapterConfig(rank=2, alpha=4.0, **named)
    trained, served = (load_hf(folder, "float32", "cpu") for _ in range(2))
    mine, its = (HfAdapter(model, folder, settings, 0) for model in (trained, served))
    engine = HfEngine(served, slots=4, max_context_tokens=64, adapters={"policy": its})
    generator = torch.Generator().manual_seed(1)
    for name, parameter in mine.parameters.items():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    session = Session(engine)
    session.submit(request("before", [4, 5], max_tokens=20))
    session.step(4)
    engine.update_adapter("policy", mine.weights(), 1, "finish")
    prompts = {"a": [3, 4, 5, 6], "b": [8], "c": list(range(9, 29)), "base": [3, 4, 5, 6]}
    for name, prompt in prompts.items():
        session.submit(request(name, prompt, max_tokens=12, adapter="base" if name == "base" else ""))
    results = session.run()
    for name, prompt in {"before": [4, 5], **prompts}.items():
        model = mine.base_model() if name in ("base", "before") else trained
        ids = torch.tensor([*prompt, *results[name].response.ids])
        with torch.no_grad():
            logits = model(ids, [len(ids)])[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, ids[len(prompt) :, None])[:, 0]
        got = torch.tensor(results[name].response.logprobs)
        assert (got - expected).abs().max() < conformance.TOLERANCE, name
