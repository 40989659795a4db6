"""The agreement check: healthy models of all families pass it, planted faults are refused with their layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from headway.config.adapter import AdapterConfig
from headway.config.schema import ModelConfig, TrainerConfig
from headway.control.logprob_limits import LIMITS, disagreement, precision_of
from headway.generator.engines.torch import model_runner
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.fake import FakeGenerator
from headway.models.adapter_files import open_adapter
from headway.models.families import BY_NAME
from headway.models.initialise import initialise_model
from headway.models.loading import load_model, weights_of
from headway.models.rope import LinearScaling
from headway.records.errors import ConfigurationError, EnginesDisagree
from headway.records.generation import POLICY_ADAPTER, PathScores, Probe, ProbeScores, probe_ids
from headway.trainer.fake import FakeTrainer
from headway.trainer.learner import Learner
from headway.trainer.ranks import Ranks
from tests.support.simulated_run import experiment_of, simulate

torch.set_num_threads(1)
LAYERS = 4


def model_folder(tmp_path: Path, family: str = "qwen3", **options: Any) -> str:
    texts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    sizes = dict(layers=LAYERS, width=64, intermediate=96, character_level=True, experts=4)
    initialise_model(tmp_path / family, texts, family=family, **(sizes | options))
    return str(tmp_path / family)


def learner_of(folder: str, **options: Any) -> Learner:
    chosen = ModelConfig(path=folder, **{key: options.pop(key) for key in ("adapter",) if key in options})
    return Learner(chosen, TrainerConfig(**options), torch.device("cpu"), Ranks())


def engine_of(folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> TorchEngine:
    return TorchEngine(load_model(folder, dtype), **({"slots": 4, "max_context_tokens": 96} | options))


def probe_of(learner: Learner) -> Probe:
    return Probe(ids=probe_ids(1, learner.model.config.vocabulary_size, 96))


def compared(learner: Learner, engine: TorchEngine) -> tuple[dict[str, float], str]:
    trainer = learner.score(probe_of(learner))
    return disagreement(trainer, engine.score(trainer.probe), trainer.precision)


# --- healthy -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_NAME)
def test_healthy_models_agree_in_every_family_and_dtype(family: str, tmp_path: Path) -> None:
    """All limits hold with room to spare, before and after an update, with the native kernels and without; in every
    form for one family with experts and one without."""
    folder = model_folder(tmp_path, family)
    other = model_folder(tmp_path / "other", family, seed=1)
    exact, narrow = learner_of(folder), learner_of(folder, dtype="bfloat16")
    forms: list[Any] = [
        (exact, torch.float32, {}, "float32"),
        (exact, torch.float32, {"native_kernels": False}, "float32"),
        (exact, torch.float32, {"deterministic": True}, "float32"),
        (exact, torch.float16, {}, "float16"),
        (exact, torch.bfloat16, {}, "bfloat16"),
        (narrow, torch.bfloat16, {}, "bfloat16"),
        (narrow, torch.float32, {}, "bfloat16"),
    ]
    chosen = forms if family in ("qwen3", "qwen3_moe") else [forms[0], forms[1], forms[5]]
    for learner, dtype, options, within in chosen:
        within = precision_of(within, mixture=exact.model.config.mixture is not None)
        engine = engine_of(folder, dtype, **options)
        for path in (folder, other):
            learner.load_weights(path)
            if path == other:
                engine.update_weights(weights_of(load_model(path)), 1, "keep")
            largest, wrong = compared(learner, engine)
            assert wrong == ""
            assert largest.keys() == {"packed", "prefill", "decode"}
            assert max(largest.values()) < 0.5 * LIMITS[within].largest


def test_adapters_agree_as_they_are_trained(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    settings = AdapterConfig(rank=4, alpha=8.0)
    learner = learner_of(folder, adapter=settings)
    assert learner.lora is not None
    for seed, parameter in enumerate(learner.lora.parameters.values()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(seed))
    shape = learner.model.config
    for options in ({}, {"native_kernels": False}, {"deterministic": True}):
        engine = engine_of(folder, adapters={POLICY_ADAPTER: open_adapter(folder, shape, settings)}, **options)
        assert compared(learner, engine)[1]  # the engine's is still new
        engine.update_adapter(POLICY_ADAPTER, learner.weights(), 1, "finish")
        assert compared(learner, engine)[1] == ""


def test_scoring_changes_nothing(tmp_path: Path) -> None:
    """Neither requests in flight nor random numbers, weights or gradients."""
    from tests.conformance import engine as conformance

    folder, texts = model_folder(tmp_path), []
    for scored in (False, True):
        session = conformance.Session(engine_of(folder))
        session.submit(*(conformance.request(f"r{n}", [n + 3] * (n + 2), max_tokens=12) for n in range(3)))
        for _ in range(5):
            session.step()
            if scored:
                session.engine.score(Probe(ids=(1, 2, 3, 4, 5, 6, 7, 8)))  # type: ignore[attr-defined]
        texts.append([(one.response.ids, one.response.logprobs) for _, one in sorted(session.run().items())])
    assert texts[0] == texts[1]
    learner = learner_of(folder)
    learner.model(torch.tensor([1, 2, 3]), [3]).sum().backward()
    before, state = [one.clone() for one in learner.gradients()], torch.get_rng_state()
    learner.score(Probe(ids=(1, 2, 3, 4, 5, 6)))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.gradients(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


# --- planted faults ----------------------------------------------------------------------------------------


def refused(learner: Learner, engine: TorchEngine) -> str:
    _, wrong = compared(learner, engine)
    assert "log-probabilities of a probe differ by up to" in wrong
    return wrong


def test_a_wrong_rope_scaling_is_refused_in_the_first_layer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    model = load_model(folder)
    model.config = dataclasses.replace(model.config, rope_scaling=LinearScaling(factor=4.0))
    engine = TorchEngine(model.float(), slots=4, max_context_tokens=96)
    wrong = refused(learner_of(folder), engine)
    assert wrong.startswith("the engine's prefill and the trainer disagree")
    assert f"Their hidden states diverge in layer 0 of {LAYERS} (model.layers.0)" in wrong


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unscaled_embedding_is_refused_at_the_embedding(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, family)
    engine = engine_of(folder, dtype)
    model = engine._runner.model
    model.embed = lambda ids_n: functional.embedding(ids_n, model.embedding_weight)  # type: ignore[method-assign]
    assert "diverge at the embedding (model.embed_tokens)" in refused(learner_of(folder), engine)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_swapped_experts_are_refused_in_their_layer(family: str, layer: int, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, family)
    engine = engine_of(folder)
    with torch.no_grad():
        for weight in (engine._runner._layers[layer].gate_up_weight, engine._runner._layers[layer].down_weight):
            weight[[0, 1]] = weight[[1, 0]]
    assert f"diverge in layer {layer} of {LAYERS}" in refused(learner_of(folder), engine)


def test_swapped_experts_are_refused_in_bfloat16_too(tmp_path: Path) -> None:
    """Where routers send some tokens elsewhere by rounding alone."""
    folder = model_folder(tmp_path, "qwen3_moe")
    engine = engine_of(folder, torch.bfloat16)
    assert compared(learner_of(folder), engine)[1] == ""
    with torch.no_grad():
        down = engine._runner._layers[2].down_weight
        down[[0, 1, 2, 3]] = down[[3, 2, 1, 0]]
    assert f"diverge in layer 2 of {LAYERS}" in refused(learner_of(folder), engine)


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_layer_that_an_update_misses_is_refused(layer: int, native_kernels: bool, tmp_path: Path) -> None:
    folder, other = model_folder(tmp_path), model_folder(tmp_path / "other", seed=1)
    learner, engine = learner_of(folder), engine_of(folder, native_kernels=native_kernels)
    assert compared(learner, engine)[1] == ""
    learner.load_weights(other)
    published = {name: tensor.clone() for name, tensor in learner.weights().items()}
    name = f"layers.{layer}.down_weight"
    published[name] = dict(engine._runner.model.named_parameters())[name].detach().clone()
    engine.update_weights(published, 1, "keep")
    assert f"diverge in layer {layer} of {LAYERS}" in refused(learner, engine)


def test_a_wrong_head_is_told_from_the_layers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tied=False)
    engine = engine_of(folder)
    assert engine._runner.model.head_weight is not None
    with torch.no_grad():
        engine._runner.model.head_weight.mul_(1.1)
    engine._runner.weights_changed()
    assert "the final norm or the output head differs" in refused(learner_of(folder), engine)


def test_a_fault_of_the_cache_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)
    engine = engine_of(folder, native_kernels=False)
    right = model_runner.paged_attention
    monkeypatch.setattr(
        model_runner, "paged_attention", lambda *args: right(*args[:4], (args[4] - 1).clamp(min=0), *args[5:])
    )
    wrong = refused(learner_of(folder), engine)
    assert wrong.startswith("the engine's decoding on its cache and its prefill disagree")
    assert f"diverge in layer 0 of {LAYERS}" in wrong


def test_a_packed_pass_that_mixes_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(model_folder(tmp_path))
    trainer, engine = learner.score(probe_of(learner)), engine_of(model_folder(tmp_path / "same"))
    right = learner.model.forward_packed
    monkeypatch.setattr(learner.model, "forward_packed", lambda ids_n, lengths: right(ids_n, [sum(lengths)]))
    mixed = learner.score(trainer.probe)
    wrong = disagreement(mixed, engine.score(trainer.probe), "float32").wrong
    assert wrong.startswith("the trainer's packed sequences and one alone disagree")
    assert "diverge in layer 0" in wrong


# --- in a run ----------------------------------------------------------------------------------------------


class ScoringTrainer(FakeTrainer):
    async def score(self) -> ProbeScores:  # type: ignore[override]
        alone = PathScores(logprobs=np.full(3, -1.0))
        return ProbeScores(probe=Probe(ids=(1, 2, 3, 4)), precision="float32", paths={"alone": alone, "packed": alone})


def spoil(trainer: FakeTrainer) -> None:
    trainer.__class__ = ScoringTrainer


def engine_with(monkeypatch: pytest.MonkeyPatch, *logprobs: float) -> list[int]:
    """Versions at which the engine was asked; its ``logprobs`` from each version on."""
    asked: list[int] = []

    async def score(generator: FakeGenerator, probe: Probe) -> list[ProbeScores]:
        asked.append(generator.version)
        path = PathScores(logprobs=np.full(3, logprobs[min(generator.version, len(logprobs) - 1)]))
        return [ProbeScores(probe=probe, precision="float32", paths={"prefill": path})]

    monkeypatch.setattr(FakeGenerator, "score", score)
    return asked


def test_a_run_is_compared_at_its_begin_and_after_its_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine_with(monkeypatch, -1.0)
    outcome = simulate(experiment_of(Path("unused"), run={"steps": 4}), spoil=spoil)
    assert asked == [0, 1]
    events = [line for line in outcome.lines if getattr(line, "event", "") == "agreement"]
    assert [(event.data["version"], event.data["agrees"], event.data["prefill"]) for event in events] == [
        (0, 1, 0.0),
        (1, 1, 0.0),
    ]
    assert "limit in float32: 0.0001" in events[0].detail


def test_replicas_that_do_not_answer_are_asked_after_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine_with(monkeypatch, -1.0)
    score = FakeGenerator.score

    async def dead_at_first(generator: FakeGenerator, probe: Probe) -> list[ProbeScores]:
        found = await score(generator, probe)
        return found if generator.version > 1 else []

    monkeypatch.setattr(FakeGenerator, "score", dead_at_first)
    outcome = simulate(experiment_of(Path("unused"), run={"steps": 4}), spoil=spoil)
    assert asked == [0, 1, 2]
    events = [line for line in outcome.lines if getattr(line, "event", "") == "agreement"]
    assert [(event.data["version"], event.data["replicas"]) for event in events] == [(0, 0), (1, 0), (2, 1)]


def test_without_probes_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine_with(monkeypatch, -2.0)
    experiment = experiment_of(Path("unused"), run={"steps": 2}, generator={"probe_every_updates": 0})
    assert len(simulate(experiment, spoil=spoil).steps) == 2
    assert asked == []


@pytest.mark.parametrize(("logprobs", "version"), [((-2.0,), 0), ((-1.0, -2.0), 1)])
def test_a_run_that_disagrees_is_refused(
    monkeypatch: pytest.MonkeyPatch, logprobs: tuple[float, ...], version: int
) -> None:
    engine_with(monkeypatch, *logprobs)
    with pytest.raises((EnginesDisagree, BaseExceptionGroup)) as caught:
        simulate(experiment_of(Path("unused"), run={"steps": 4}), spoil=spoil)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EnginesDisagree)
    assert f"disagree at version {version}: the engine's prefill and the trainer" in str(error)
    assert error.exit_code == ConfigurationError.exit_code == 2
