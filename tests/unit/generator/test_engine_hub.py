"""The engine of transformers' models: what every engine must do, and log-probabilities of architectures that Headway
doesn't have."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from scratch_folders import scratch_folder
from tiny_hub import ONE_A_ROW, PACKED, make_hub_model
from torch import Tensor

from headway.generator.engines.hf.caches import tensors_of
from headway.generator.engines.hf.engine import HfEngine
from headway.generator.engines.select import build_engine
from headway.generator.engines.settings import EngineSettings
from headway.models.hf.model import HfModel, load_hf
from headway.models.layout import hugging_face_entries
from headway.models.loading import copy_weights, save_model, weights_of
from headway.records.errors import ConfigurationError
from headway.records.generation import AppliedWeights, GenerationResult, UpdateMode
from headway.runtime.devices import parse_device
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.engine import Session, request

torch.set_num_threads(1)


# --- what every engine must do, with a family that Headway has too: its decoder is the reference --------------


@functools.cache
def conformance_folder() -> Path:
    folder = scratch_folder("hub") / "conformance"
    save_model(conformance.model_of(0), folder)
    return folder


class ConformingEngine(HfEngine):
    """Takes the weights of the suite's decoders."""

    def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode, *, adopt: bool = False
    ) -> AppliedWeights:
        decoder = copy.deepcopy(conformance.model_of(0))
        copy_weights(decoder, tensors)
        named = {f"module.{one.name}": one.view.reshape(one.shape) for one in hugging_face_entries(decoder)}
        return super().update_weights(named, version, mode, adopt=adopt)


def make_padded(*, slots: int = 4, max_context_tokens: int = 96, **options: Any) -> ConformingEngine:
    model = load_hf(conformance_folder(), "float32", "cpu")
    return ConformingEngine(model, slots=slots, max_context_tokens=max_context_tokens, **options)


def make_equal(**options: Any) -> ConformingEngine:
    engine = make_padded(**options)
    engine._runner.batching = "equal lengths"
    return engine


def make_deterministic(**options: Any) -> ConformingEngine:
    return make_padded(deterministic=True, **options)


def make_small_steps(**options: Any) -> ConformingEngine:
    return make_padded(prefill_tokens_per_step=8, **options)


MAKERS = pytest.mark.parametrize("make", [make_padded, make_equal, make_deterministic])
EXTREMES = pytest.mark.parametrize("make", [make_padded, make_deterministic])  # all rows at once and one at a time


def test_makers_batch_as_they_say() -> None:
    batchings = [make().batching for make in (make_padded, make_equal, make_deterministic)]
    assert batchings == ["padded", "equal lengths", "single rows"]


@pytest.mark.parametrize("make", [make_padded, make_equal, make_deterministic, make_small_steps])
def test_logprobs_equal_teacher_forcing_at_every_composition(make) -> None:
    conformance.check_logprobs_at_every_composition(make, 1)


@MAKERS
def test_tokens_do_not_depend_on_neighbours(make) -> None:
    conformance.check_tokens_do_not_depend_on_neighbours(make, 0)


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        *((make, "keep") for make in (make_padded, make_equal, make_deterministic)),
        *((make, "recompute") for make in (make_padded, make_deterministic)),
    ],
)
def test_updates_in_flight(make, mode) -> None:
    conformance.check_updates_in_flight(make, mode, 0)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_update_changes_what_is_sampled(mode) -> None:
    conformance.check_update_changes_what_is_sampled(make_padded, mode)


@MAKERS
def test_prefix_is_not_shared_across_updates(make) -> None:
    conformance.check_prefix_is_not_shared_across_versions(make)
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make)


@MAKERS
def test_abort_update_parks_and_resumes(make) -> None:
    conformance.check_abort_update_parks_and_resumes(make)


@EXTREMES
def test_resume_equals_uninterrupted(make) -> None:
    conformance.check_resume_equals_uninterrupted(make, 0)


@EXTREMES
def test_requests_end_as_asked(make) -> None:
    conformance.check_abort(make)
    conformance.check_priorities(make)
    conformance.check_one_bad_request_is_its_own_error(make)
    conformance.check_context_limit(make)
    conformance.check_statistics(make)


@EXTREMES
def test_preemption(make) -> None:
    conformance.check_preemption(make, 0)


def test_samples_what_the_torch_engine_samples() -> None:
    """The same random numbers: a run may change its engine."""
    from headway.generator.engines.torch.engine import TorchEngine

    results = []
    for engine in (make_padded(), TorchEngine(copy.deepcopy(conformance.model_of(0)), slots=4, max_context_tokens=96)):
        session = Session(engine)
        session.submit(*(request(f"r{i}", [1 + i, 2, 3], max_tokens=20, temperature=0.8) for i in range(3)))
        results.append({name: result.response.ids for name, result in session.run().items()})
    assert results[0] == results[1]


def test_caches_go_with_their_requests() -> None:
    engine = make_padded()
    session = Session(engine)
    weights = sum(one.nbytes for one in engine._tensors())
    session.submit(*(request(f"r{i}", max_tokens=3 + i) for i in range(3)))
    session.step(2)
    assert sum(one.nbytes for one in engine._tensors()) > weights
    session.run()
    assert sum(one.nbytes for one in engine._tensors()) == weights


def test_equal_prompts_are_computed_once() -> None:
    engine = make_padded()
    session = Session(engine)
    session.submit(*(request(f"r{i}", range(2, 22), max_tokens=3, seed=i) for i in range(4)))
    results = session.run()
    assert engine.statistics().prefilled_tokens == 19
    assert len({result.response.ids for result in results.values()}) > 1


@EXTREMES
def test_memory_that_left_and_returned_changes_nothing(make) -> None:
    def sampled(away: bool) -> dict[str, GenerationResult]:
        engine, publisher = make(), Publisher("hub-memory")
        weights = sum(one.nbytes for one in (*engine._model.parameters(), *engine._model.buffers()))
        decoders = [conformance.model_of(version) for version in (0, 1)]
        session = Session(engine)
        session.submit(*(request(f"r{i}", [1 + i, 2, 3], max_tokens=20) for i in range(5)))
        try:
            for number in range(30):
                if away and number in (2, 9, 17):
                    assert engine.memory is not None
                    assert engine.memory.offload().moved_bytes > weights  # caches too
                    assert engine.memory.onload().moved_bytes > weights
                if number == 8:
                    engine.apply(publisher.publish(1, weights_of(decoders[1])), "keep")
                session.step()
            return session.run()
        finally:
            publisher.close()

    assert sampled(True) == sampled(False)


# --- architectures that only transformers has ------------------------------------------------------------------

# Full attention, windows, latent attention, linear attention, a state: the others at night.
QUICK = ("Olmo2", "GptOss", "DeepseekV3", "Qwen3Next", "FalconH1")
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long) for kind in PACKED | ONE_A_ROW]
)


@functools.cache
def folder_of(kind: str) -> Path:
    return Path(make_hub_model(scratch_folder("hub") / kind, kind))


@functools.cache
def hub_model(kind: str, version: int = 0) -> HfModel:
    """The model published as ``version``, which must not be changed."""
    model = load_hf(folder_of(kind), "float32", "cpu")
    if version:
        generator = torch.Generator().manual_seed(version)
        given = {
            name: one + 0.1 * torch.randn(one.shape, generator=generator) for name, one in weights_of(model).items()
        }
        copy_weights(model, given)
    return model


def engine_of(kind: str, **options: Any) -> HfEngine:
    return HfEngine(copy.deepcopy(hub_model(kind)), **{"slots": 4, "max_context_tokens": 64, **options})


def sampled(engine: HfEngine, kind: str, mode: UpdateMode | None) -> list[tuple[list[int], GenerationResult]]:
    """Prompts and results of a group and loners, more than there are slots, some across an update."""
    prompts = [[3, 4, 5, 6, 7]] * 3 + [[8], list(range(9, 29)), [18, 19]]
    session = Session(engine)
    session.submit(*(request(f"r{i}", ids, max_tokens=12 + i, seed=i) for i, ids in enumerate(prompts)))
    session.step(5)
    if mode is not None:
        engine.update_weights(weights_of(hub_model(kind, 1)), 1, mode)
    results = session.run()
    assert any(len(result.response.versions) > 1 for result in results.values()) == (mode is not None)
    return [(prompt, results[f"r{i}"]) for i, prompt in enumerate(prompts)]


@torch.no_grad()
def forced(model: HfModel, ids: Sequence[int]) -> Tensor:
    """The trainer's log-probability of each token given those before it, [N - 1]."""
    row = torch.tensor(ids)
    logits = model.head(model.forward_packed(row, [len(ids)]))[:-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, row[1:, None])[:, 0]


@torch.no_grad()
def replayed(kind: str, prompt: Sequence[int], result: GenerationResult) -> Tensor:
    """Log-probabilities of the response where each token is fed to the version that sampled its successor, on a cache
    that several versions wrote. [N]"""
    versions = [span.version for span in result.response.versions for _ in range(span.tokens)]
    ids, cache, out = [*prompt, *result.response.ids], None, []
    for position, token in enumerate(ids[:-1]):
        module = hub_model(kind, versions[max(0, position - len(prompt) + 1)]).module
        fed = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[position]])}
        output = module(**fed, use_cache=True, past_key_values=cache)
        cache = output.past_key_values
        out.append(torch.log_softmax(output.logits[0, -1].float(), -1)[ids[position + 1]])
    return torch.stack(out[len(prompt) - 1 :])


@EACH
def test_batches_are_as_large_as_the_cache_allows(kind) -> None:
    assert engine_of(kind).batching == "padded"
    assert engine_of(kind, deterministic=True).batching == "single rows"


@EACH
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_logprobs_are_the_trainers(kind, deterministic) -> None:
    for prompt, result in sampled(engine_of(kind, deterministic=deterministic), kind, None):
        expected = forced(hub_model(kind), [*prompt, *result.response.ids])[len(prompt) - 1 :]
        assert_close(result, expected)


@EACH
def test_recompute_uses_the_new_weights_alone(kind) -> None:
    for prompt, result in sampled(engine_of(kind), kind, "recompute"):
        ids, first, parts = [*prompt, *result.response.ids], len(prompt) - 1, []
        for span in result.response.versions:
            parts.append(forced(hub_model(kind, span.version), ids)[first : first + span.tokens])
            first += span.tokens
        assert_close(result, torch.cat(parts))
        assert result.reprefills >= len(parts) - 1


@EACH
def test_keep_continues_on_the_old_cache(kind) -> None:
    for prompt, result in sampled(engine_of(kind), kind, "keep"):
        assert_close(result, replayed(kind, prompt, result))


@EACH
def test_preempted_requests_sample_the_same(kind) -> None:
    free = sampled(engine_of(kind), kind, None)
    engine = engine_of(kind, kv_capacity_tokens=45, max_context_tokens=40)
    tight = sampled(engine, kind, None)
    assert engine.statistics().preemptions > 0
    assert [result.response.ids for _, result in tight] == [result.response.ids for _, result in free]


def test_deterministic_rows_do_not_depend_on_their_neighbours_bit_for_bit() -> None:
    def logprobs(names: str) -> Sequence[float]:
        session = Session(make_deterministic())
        session.submit(*(request(name, range(2, 5 + ord(name) % 7), max_tokens=20) for name in names))
        return session.run()["a"].response.logprobs

    assert logprobs("a") == logprobs("bacd")


def test_output_that_is_not_finite_ends_its_requests_alone() -> None:
    engine = engine_of("Olmo2", slots=2)
    session = Session(engine)
    session.submit(*(request(name, max_tokens=8) for name in "abc"))
    session.step(2)
    good = weights_of(hub_model("Olmo2"))
    engine.update_weights({name: torch.full_like(one, float("nan")) for name, one in good.items()}, 1, "keep")
    session.step()
    engine.update_weights(good, 2, "keep")
    results = session.run()
    assert [results[name].finish_reason for name in "abc"] == ["error", "error", "length"]
    assert len(results["a"].response.ids) == 2
    assert "not finite" in results["a"].error


def test_model_without_a_cache_is_refused(tmp_path) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="takes no cache"):
        HfEngine(load_hf(tmp_path, "float32", "cpu"), slots=2, max_context_tokens=32)


def test_model_of_recurrent_layers_alone_is_refused(tmp_path) -> None:
    folder = make_hub_model(tmp_path, "Qwen3Next", layer_types=["linear_attention"] * 2)
    with pytest.raises(ConfigurationError, match=r"can't begin a cache \(`get_seq_length`.*\)\. Nothing can be"):
        HfEngine(load_hf(folder, "float32", "cpu"), slots=2, max_context_tokens=32)


def test_model_whose_states_lie_in_itself_is_refused(tmp_path) -> None:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, lru_width=16)
    config = RecurrentGemmaConfig(vocab_size=40, num_hidden_layers=3, attention_window_size=16, **sizes)
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"RecurrentGemma.*: it(s forward\(\) takes no| can't begin a) cache"):
        HfEngine(load_hf(tmp_path, "float32", "cpu"), slots=2, max_context_tokens=32)


def test_positions_that_depend_on_the_longest_row_are_not_padded(tmp_path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = make_hub_model(tmp_path, "Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    engine = HfEngine(load_hf(folder, "float32", "cpu"), slots=2, max_context_tokens=32)
    assert engine.batching == "equal lengths"


def test_positions_counted_by_rows_are_not_padded(tmp_path, caplog) -> None:
    folder = make_hub_model(tmp_path, "Llama4Text", attn_temperature_tuning=True)
    engine = HfEngine(load_hf(folder, "float32", "cpu"), slots=2, max_context_tokens=32)
    assert engine.batching == "equal lengths"
    assert "rows of different lengths aren't batched: attn_temperature_tuning" in caplog.text


def test_why_rows_are_computed_alone_is_logged(monkeypatch, caplog) -> None:
    def fails(error: Exception) -> None:
        monkeypatch.setattr("headway.generator.engines.hf.runner.join", Mock(side_effect=error))

    fails(ValueError("no rows"))
    assert engine_of("Olmo2").batching == "single rows"
    assert "every row is computed alone: a trial failed (ValueError: no rows)" in caplog.text
    fails(torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        engine_of("Olmo2")


def test_padding_counts_as_held() -> None:
    engine = make_padded(max_context_tokens=40, kv_capacity_tokens=60)
    session = Session(engine)
    session.submit(*(request(f"r{n}", range(1, 1 + n), max_tokens=12) for n in (14, 2, 3, 4, 20)))
    most = 0
    while engine.step():
        held = [one.shape[0] * one.shape[2] for batch in engine._batches for one in tensors_of(batch.cache)]
        most = max(most, *held, engine.statistics().kv_used_tokens)
    assert 40 < most <= 60


def assert_close(result: GenerationResult, expected: Tensor) -> None:
    got = torch.tensor(result.response.logprobs)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= conformance.TOLERANCE


# --- its place among the engines ---------------------------------------------------------------------------------


def build(**fields: Any) -> Any:
    import logging

    context: Any = SimpleNamespace(device=parse_device("cpu:0"), log=logging.getLogger("test"))
    own = {"model_path": str(folder_of("Olmo2")), "dtype": "float32", "slots": 2, "max_context_tokens": 64}
    return build_engine(EngineSettings(**{**own, **fields}), context)


def test_chosen_where_headway_has_no_decoder_or_where_asked() -> None:
    assert isinstance(build(), HfEngine)
    assert isinstance(build(model_path=str(conformance_folder()), implementation="transformers"), HfEngine)
    assert not isinstance(build(model_path=str(conformance_folder())), HfEngine)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engine": "vllm", "adapters": {"policy": object()}}, "generator.engine = 'vllm'"),
        ({"engine": "vllm-server", "adapters": {"policy": object()}}, "generator.engine = 'vllm-server'"),
        ({"quantization": "4bit"}, "model.quantization"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(fields, named) -> None:
    with pytest.raises(ConfigurationError, match=r"model.implementation = 'headway'") as caught:
        build(**fields)
    assert named in str(caught.value)


def test_adapters_of_requests_and_updates_are_refused_by_name() -> None:
    engine = make_padded()
    session = Session(engine)
    session.submit(request("a", adapter="mine"), request("b", adapter="base", max_tokens=2))
    results = session.run()
    assert "'mine'" in results["a"].error
    assert results["b"].finish_reason == "length"
    with pytest.raises(ConfigurationError, match="'mine', which isn't registered; registered: none"):
        engine.update_adapter("mine", {}, 1, "keep")


def test_weights_of_another_model_change_nothing() -> None:
    engine = engine_of("Olmo2")
    before = {name: tensor.clone() for name, tensor in weights_of(engine._model).items()}
    for tensors in ({}, weights_of(hub_model("Phi")), {name: one[:1] for name, one in before.items()}):
        with pytest.raises(ConfigurationError):
            engine.update_weights(tensors, 1, "keep")
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine._model).items())
